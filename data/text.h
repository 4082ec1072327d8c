#pragma once
// Text as numbers: a vocabulary of characters, and windows of a text for models that predict the next one.
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "halftone/data/dataset.h"

namespace halftone::data {

// The file's text, plain or compressed (.gz). Throws Error when it is missing or not UTF-8.
HT_API std::string read_text(const std::string& path);

// The characters (Unicode code points) that occur in a text, numbered from 0 in the order of their code points.
class HT_API CharVocabulary {
 public:
  // Throws Error when the text is empty or not UTF-8.
  explicit CharVocabulary(std::string_view text);
  int64_t size() const { return static_cast<int64_t>(characters_.size()); }
  // [characters] (i64). Throws Error, naming the character, where one is not in the vocabulary.
  Tensor encode(std::string_view text) const;
  // The text of integers in [0, size()), of any shape, row-major.
  std::string decode(const Tensor& numbers) const;

 private:
  std::vector<char32_t> characters_;
  std::map<char32_t, int64_t> numbers_;
};

// All windows of `length` tokens, the next one beginning `stride` later; target is each window one token on.
class HT_API TextWindows {
 public:
  // tokens [n] (i64), n > length.
  TextWindows(Tensor tokens, Size length, Size stride = 1);
  int64_t size() const { return (tokens_.size(0) - length_ - 1) / stride_ + 1; }
  Batch get(std::span<const int64_t> indices) const;  // x and target [indices, length] (i64)

 private:
  Tensor tokens_;
  int64_t length_, stride_;
};

}  // namespace halftone::data
