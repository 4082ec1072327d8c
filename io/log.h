#pragma once
// Metrics in files: records of named values, as JSON lines, as CSV, or as one JSON file.
// A record is on its way to the disk when write() returns: nothing is held back in a buffer.
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "halftone/core/shape.h"
#include "halftone/io/file.h"

namespace halftone::io {

class Value;
// Names and values, in order: {{"epoch", 3}, {"loss", 0.25}, {"device", "cpu"}}.
using Fields = std::vector<std::pair<std::string, Value>>;

// What a record may hold.
class Value {
 public:
  using List = std::vector<Value>;
  Value() = default;  // null
  Value(bool v) : v_(v) {}
  template <Integer T>
  Value(T v) : v_(Size(v).value) {}
  template <std::floating_point T>
  Value(T v) : v_(static_cast<double>(v)) {}
  Value(const char* v) : v_(std::string(v)) {}
  Value(std::string v) : v_(std::move(v)) {}
  Value(Fields v) : v_(std::move(v)) {}
  template <class T>
  Value(const std::vector<T>& v) : v_(List(v.begin(), v.end())) {}

  const auto& variant() const { return v_; }

 private:
  std::variant<std::monostate, bool, int64_t, double, std::string, List, Fields> v_;
};

// As JSON on one line. Numbers keep every bit; NaN and infinities, which JSON does not have, become null.
HT_API std::string to_json(const Value& value);
// Replaces the file by one object, a line for each of its fields.
HT_API void write_json(const std::string& path, const Fields& fields);

struct LogOptions {
  bool append = false;
};  // go on with an existing file instead of emptying it

// One JSON object a line. Throws FileError when the file cannot be written, a full disk included.
class HT_API JsonLog {
 public:
  explicit JsonLog(const std::string& path, LogOptions options = {});
  void write(const Fields& record);

 private:
  OpenFile file_;
};

// One line a record, with the names of the first as the head. A later record must have the same names, and so must the
// head of a file that is appended to; else Error. Text is quoted where it must be (RFC 4180); NaN is nan.
class HT_API CsvLog {
 public:
  explicit CsvLog(const std::string& path, LogOptions options = {});
  void write(const Fields& record);

 private:
  OpenFile file_;
  std::string head_;  // empty before the first record
};

}  // namespace halftone::io
