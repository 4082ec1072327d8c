// UTF-8, and windows by a gather, wherever the tokens are.
#include "halftone/data/text.h"

#include <set>

#include "halftone/core/thread_state.h"
#include "halftone/data/source.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/index.h"

namespace halftone::data {
namespace {

// The code point at `at`, which moves behind it; 0xffffffff where there is none (RFC 3629: no overlong forms, no surrogates).
constexpr char32_t invalid = 0xffffffff;
char32_t next_character(std::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(at);
  const size_t length = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : first < 0xf5 ? 4 : 0;
  if (length == 0 || length > text.size() - at) return invalid;
  char32_t c = length == 1 ? first : first & (0x7fu >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(at + i) & 0xc0) != 0x80) return invalid;
    c = c << 6 | (byte(at + i) & 0x3fu);
  }
  constexpr char32_t least[] = {0, 0, 0x80, 0x800, 0x10000};
  if (c < least[length] || c > 0x10ffff || (c >= 0xd800 && c < 0xe000)) return invalid;
  at += length;
  return c;
}

// All characters; `who` is what an error begins with.
std::vector<char32_t> characters(std::string_view text, std::string_view who) {
  std::vector<char32_t> all;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = next_character(text, at);
    HT_CHECK(c != invalid, who, ": is not text in UTF-8; the first fault is at byte ", at);
    all.push_back(c);
  }
  return all;
}

void append(std::string& text, char32_t c) {
  const auto tail = [&](int shift) { text += static_cast<char>(0x80 | (c >> shift & 0x3f)); };
  if (c < 0x80) {
    text += static_cast<char>(c);
    return;
  }
  const int length = c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
  text += static_cast<char>((0xf00 >> length & 0xff) | c >> (6 * (length - 1)));
  for (int shift = 6 * (length - 2); shift >= 0; shift -= 6) tail(shift);
}

}  // namespace

std::string read_text(const std::string& path) {
  std::string text = read_all(*open_source(path));
  characters(text, path);
  return text;
}

CharVocabulary::CharVocabulary(std::string_view text) {
  const auto all = characters(text, "CharVocabulary");
  HT_CHECK(!all.empty(), "CharVocabulary: the text is empty");
  const std::set<char32_t> different(all.begin(), all.end());
  for (const char32_t c : different) {
    numbers_.emplace(c, size());
    characters_.push_back(c);
  }
}

Tensor CharVocabulary::encode(std::string_view text) const {
  const auto all = characters(text, "encode");
  Tensor t = Tensor::empty(Meta({static_cast<int64_t>(all.size())}, DType::i64, Device::cpu()));
  for (size_t i = 0; i < all.size(); ++i) {
    const auto found = numbers_.find(all[i]);
    std::string name;
    append(name, all[i]);
    HT_CHECK(found != numbers_.end(), "encode: the character '", name, "' is not in the vocabulary");
    t.data<int64_t>()[i] = found->second;
  }
  return t;
}

std::string CharVocabulary::decode(const Tensor& numbers) const {
  HT_CHECK(!is_floating(numbers.dtype()), "decode: expected integers, got ", numbers.meta());
  std::string text;
  for (const int64_t n : numbers.to_vector<int64_t>()) {
    HT_CHECK(n >= 0 && n < size(), "decode: expected numbers in [0, ", size(), "), got ", n);
    append(text, characters_[static_cast<size_t>(n)]);
  }
  return text;
}

TextWindows::TextWindows(Tensor tokens, Size length, Size stride) : tokens_(std::move(tokens)), length_(length), stride_(stride) {
  HT_CHECK(tokens_.defined() && tokens_.rank() == 1 && tokens_.dtype() == DType::i64, "TextWindows: expected tokens [n] (i64), got ",
           tokens_.defined() ? str(tokens_.meta()) : "an undefined tensor");
  HT_CHECK(length > 0 && stride > 0, "TextWindows: expected length and stride above 0, got ", length.value, " and ", stride.value);
  HT_CHECK(tokens_.size(0) > length, "TextWindows: expected more tokens than a window's ", length.value, ", got ", tokens_.size(0));
}

Batch TextWindows::get(std::span<const int64_t> indices) const {
  check_indices("TextWindows", indices, size());
  const NoGrad off;
  std::vector<int64_t> places;
  for (const int64_t i : indices)
    for (int64_t k = 0; k < length_; ++k) places.push_back(i * stride_ + k);
  const Tensor index = tensor(places).to(tokens_.device());
  const Shape shape{indices.size(), length_};
  return {index_select(tokens_, 0, index).view(shape), index_select(tokens_.slice(0, 1, {}), 0, index).view(shape)};
}

}  // namespace halftone::data
