#pragma once
// CIFAR-10 and CIFAR-100 (Krizhevsky, "Learning multiple layers of features from tiny images", 2009) in their binary version.
#include "halftone/data/dataset.h"

namespace halftone::data {

struct CifarOptions {
  bool train = true;  // the training set; false: the test set
  bool fine = true;   // of CIFAR-100: labels of 100 classes; false: of the 20 classes that hold them
};

// Images x [n, 3, 32, 32] (u8, red, green and blue planes) and labels target [n] (i64). CIFAR-10 from data_batch_1.bin to _5.bin
// or test_batch.bin of a folder, CIFAR-100 from train.bin or test.bin; each may be compressed, with ".gz" after its name. Normalize
// makes pixels floats. Throws Error, naming the file, when one is missing or not what it should be.
HT_API TensorDataset cifar10(const std::string& folder, const CifarOptions& options = {});
HT_API TensorDataset cifar100(const std::string& folder, const CifarOptions& options = {});

}  // namespace halftone::data
