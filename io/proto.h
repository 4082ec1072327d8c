#pragma once
// Protocol Buffers' wire format (protobuf.dev/programming-guides/encoding), as far as it is written here. Not part of the public
// interface.
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace halftone::io {

// A message: its fields one after the other. Nested messages are bytes().
class Message {
 public:
  const std::string& text() const { return text_; }
  operator std::string_view() const { return text_; }

  Message& integer(int field, int64_t v) {
    key(field, 0);
    varint(static_cast<uint64_t>(v));
    return *this;
  }
  Message& number(int field, double v) { return fixed(field, 1, v); }
  Message& number(int field, float v) { return fixed(field, 5, v); }
  Message& bytes(int field, std::string_view v) {
    key(field, 2);
    varint(v.size());
    text_ += v;
    return *this;
  }
  // Repeated numbers in one field.
  template <class Range>
  Message& packed_doubles(int field, const Range& values) {
    std::string all;
    for (const double v : values) all.append(reinterpret_cast<const char*>(&v), sizeof v);
    return bytes(field, all);
  }
  template <class Range>
  Message& packed_integers(int field, const Range& values) {
    Message all;
    for (const int64_t v : values) all.varint(static_cast<uint64_t>(v));
    return bytes(field, all);
  }

 private:
  void key(int field, int type) { varint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(type)); }
  void varint(uint64_t v) {
    for (; v >= 0x80; v >>= 7) text_ += static_cast<char>(v | 0x80);
    text_ += static_cast<char>(v);
  }
  template <class T>
  Message& fixed(int field, int type, T v) {
    key(field, type);
    text_.append(reinterpret_cast<const char*>(&v), sizeof v);
    return *this;
  }
  std::string text_;
};

}  // namespace halftone::io
