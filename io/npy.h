#pragma once
// NumPy's files: one array (.npy), and several under names (.npz, a zip archive). Python objects are refused: reading one would run
// code. A file is data of a stranger: nothing is allocated that the file is not large enough for.
#include <string>

#include "halftone/core/state_dict.h"

namespace halftone::io {

// The array, on the CPU: float16, float32, float64, int32, int64, uint8 and bool, of either byte order, row-major or Fortran's. Throws
// Error, naming the file and what is wrong, unless it is exactly as its header says (versions 1 to 3 of the format).
HT_API Tensor load_npy(const std::string& path);
// Writes a tensor of any device and layout, row-major; the file is replaced as one step. NumPy has no bfloat16: convert to f32.
HT_API void save_npy(const std::string& path, const Tensor& tensor);

// The arrays of an archive under their names, in its order, as np.savez writes it: stored, not compressed, below 4 GiB.
HT_API StateDict load_npz(const std::string& path);
HT_API void save_npz(const std::string& path, const StateDict& tensors);

}  // namespace halftone::io
