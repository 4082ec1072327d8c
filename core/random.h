#pragma once
// Random numbers: Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011). Element i of
// a draw is a pure function of (seed, offset, i), so every backend gives the same values and any layout may be parallel.
#include <cstdint>
#include <memory>
#include <vector>

#include "halftone/core/hd.h"
#include "halftone/core/tensor.h"

namespace halftone {

struct Philox4 { uint32_t v[4]; };

HT_HD inline Philox4 philox(uint64_t seed, uint64_t counter, uint64_t stream = 0) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32);
  uint32_t c2 = static_cast<uint32_t>(stream), c3 = static_cast<uint32_t>(stream >> 32);
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = uint64_t{0xD2511F53u} * c0, p1 = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(p1 >> 32) ^ c1 ^ k0;
    c1 = static_cast<uint32_t>(p1);
    c2 = static_cast<uint32_t>(p0 >> 32) ^ c3 ^ k1;
    c3 = static_cast<uint32_t>(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
// [0, 1) with 24 bits: the same float on every device, never 1.
HT_HD inline float uniform01(uint32_t bits) { return static_cast<float>(bits >> 8) * 0x1p-24f; }

// A stream of random numbers: {seed, offset} kept on each device that draws from it, as an i64 tensor of two elements.
// Drawing n numbers advances that device's offset by ceil(n / 4). Threads may draw from one generator, and seed it: a draw
// takes numbers of its own, in the order in which draws come (on a GPU, those of one stream). What must be the same on every
// run, or be computed again by a checkpoint, takes a generator of the thread: ThreadState::generator.
class HT_API Generator {
 public:
  explicit Generator(uint64_t seed);
  // Goes on from copies of these states, of one device each.
  explicit Generator(const std::vector<Tensor>& states);
  ~Generator();
  void seed(uint64_t seed);
  uint64_t seed() const;
  Tensor state(Device device);

 private:
  struct States;
  std::unique_ptr<States> states_;
};
// This thread's generator.
HT_API Generator& generator();
// Seeds it, on every device.
HT_API void manual_seed(uint64_t seed);

}  // namespace halftone
