#pragma once
// Tensors in files: the safetensors format, which PyTorch and others read and write. A file is 8 bytes of header
// length (little-endian), a JSON header of names, dtypes, shapes and places, and the elements, row-major.
// A file is data of a stranger: load() checks all of the header before it allocates anything, and gives all or nothing.
#include "halftone/core/state_dict.h"

namespace halftone::io {

// Names and texts of the header that mean nothing to the format, such as {"format", "pt"}.
using Metadata = std::vector<std::pair<std::string, std::string>>;
struct SaveOptions {
  Metadata metadata = {};
};

// Writes the tensors under their names, from any device and of any layout; a tensor that several names share is
// written under each. The file is replaced as one step. Throws Error when a name occurs twice or is not UTF-8, and
// FileError when the file cannot be written.
HT_API void save(const std::string& path, const StateDict& state, const SaveOptions& options = {});

// The tensors in the file, on the CPU, in the header's order. Throws Error, naming the file and what is wrong with it,
// unless the file is exactly as the format says: names once, sizes that match, elements without gaps or overlaps.
HT_API StateDict load(const std::string& path);
HT_API Metadata load_metadata(const std::string& path);

}  // namespace halftone::io
