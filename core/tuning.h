#pragma once
// Choosing among kernels by timing them. A GPU library offers many for one matrix product or convolution; without tuning its
// first choice runs, of those that give the same bits every time. tune() finds out which is fastest here.
#include <functional>
#include <optional>
#include <string>

#include "halftone/core/api.h"

namespace halftone {

// Runs `work`, a training step for example, and times the candidates for each product and convolution in it that has not
// been timed before: its results are right, its own time says nothing. From then on this process runs the fastest, which may
// round otherwise than the first choice did: tune before a step is captured. With a file, choices are read from it first and
// all are written to it after, so that later processes run, and round, alike without timing. A choice counts for one
// problem, model of GPU and version of a library. Throws when the file is damaged or cannot be written, and under capture or
// ForbidSync.
HT_API void tune(const std::function<void()>& work, const std::string& file = {});

// ---- for backends
HT_API bool tuning();  // whether this thread is inside tune()
// The name of what was chosen for a problem. Both are one line.
HT_API std::optional<std::string> tuned_choice(const std::string& problem);
HT_API void set_tuned_choice(const std::string& problem, const std::string& choice);

}  // namespace halftone
