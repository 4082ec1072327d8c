#pragma once
// MNIST, Fashion-MNIST and whatever else comes in their four files.
#include "halftone/data/dataset.h"

namespace halftone::data {

struct MnistOptions {
  bool train = true;  // the training set; false: the test set
  double mean = 0,
         std = 1;  // pixels become (pixel - mean) / std. MNIST has 0.1307, 0.3081; Fashion-MNIST 0.2860, 0.3530
};

// Images x [n, 1, 28, 28] (f32), pixels in [0, 1] before mean and std, and labels target [n] (i64), 0 to 9, from the
// files train-images-idx3-ubyte and train-labels-idx1-ubyte of a folder (t10k-... for the test set), with or without
// ".gz". Throws Error, naming the file, when one is missing (and says where to get it) or not what it should be.
HT_API TensorDataset mnist(const std::string& folder, const MnistOptions& options = {});

}  // namespace halftone::data
