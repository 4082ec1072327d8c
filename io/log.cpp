// Metrics as text. Each record is one write, so that a reader sees whole lines.
#include "halftone/io/log.h"

#include <cmath>
#include <nlohmann/json.hpp>

namespace halftone::io {
namespace {

std::string quoted(const std::string& s) {
  return nlohmann::json(s).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

struct JsonText {
  std::string operator()(std::monostate) const { return "null"; }
  std::string operator()(bool v) const { return text::cat(v); }
  std::string operator()(int64_t v) const { return text::cat(v); }
  std::string operator()(double v) const { return nlohmann::json(v).dump(); }
  std::string operator()(const std::string& v) const { return quoted(v); }
  std::string operator()(const Value::List& v) const {
    std::string s;
    for (const Value& element : v) s += (s.empty() ? "" : ", ") + to_json(element);
    return "[" + s + "]";
  }
  std::string operator()(const Fields& v) const {
    std::string s;
    for (const auto& [name, value] : v) s += (s.empty() ? "" : ", ") + quoted(name) + ": " + to_json(value);
    return "{" + s + "}";
  }
};

std::string csv_cell(const std::string& s) {
  if (s.find_first_of(",\"\r\n") == std::string::npos) return s;
  std::string r = "\"";
  for (char c : s) r += c == '"' ? std::string("\"\"") : std::string(1, c);
  return r + "\"";
}
std::string csv_cell(const Value& value) {
  if (std::holds_alternative<std::monostate>(value.variant())) return "";
  if (auto* s = std::get_if<std::string>(&value.variant())) return csv_cell(*s);
  if (auto* d = std::get_if<double>(&value.variant()); d && !std::isfinite(*d))
    return std::isnan(*d) ? "nan" : *d > 0 ? "inf" : "-inf";
  return csv_cell(to_json(value));
}

FileOps::Open how(const LogOptions& options) {
  return options.append ? FileOps::Open::append : FileOps::Open::truncate;
}

// A process that was killed may have left half a line; what follows must not join it.
void end_last_line(const OpenFile& file) {
  const FileStatus status = file.status();
  if (status.kind != FileStatus::Kind::file || status.size == 0) return;
  char last = 0;
  InputFile(file.path()).read(&last, 1, status.size - 1);
  if (last != '\n') file.write("\n");
}

}  // namespace

std::string to_json(const Value& value) { return std::visit(JsonText{}, value.variant()); }

void write_json(const std::string& path, const Fields& fields) {
  std::string s;
  for (const auto& [name, value] : fields) s += (s.empty() ? "  " : ",\n  ") + quoted(name) + ": " + to_json(value);
  replace_file(path, s.empty() ? "{}\n" : "{\n" + s + "\n}\n");
}

JsonLog::JsonLog(const std::string& path, LogOptions options) : file_(path, how(options)) { end_last_line(file_); }
void JsonLog::write(const Fields& record) { file_.write(to_json(record) + "\n"); }

CsvLog::CsvLog(const std::string& path, LogOptions options) : file_(path, how(options)) {
  end_last_line(file_);
  const FileStatus status = file_.status();
  if (status.kind == FileStatus::Kind::file && status.size > 0) {
    head_ = read_file(path);
    head_.resize(head_.find('\n'));
  }
}
void CsvLog::write(const Fields& record) {
  std::string head, line;
  for (const auto& [name, value] : record) {
    const char* before = &name == &record.front().first ? "" : ",";
    head += before + csv_cell(name);
    line += before + csv_cell(value);
  }
  line += "\n";
  if (head_.empty())
    line = head + "\n" + line;
  else
    HT_CHECK(head == head_, file_.path(), ": its columns are ", head_, ", the record has ", head);
  file_.write(line);
  head_ = head;
}

}  // namespace halftone::io
