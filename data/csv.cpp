// Records field by field. Memory follows the text: a number is made only of a field that is there.
#include "halftone/data/csv.h"

#include <algorithm>
#include <charconv>
#include <set>

#include "halftone/core/printable.h"
#include "halftone/data/source.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/index.h"
#include "halftone/ops/shape.h"

namespace halftone::data {
namespace {

using Fields = std::vector<std::string>;

class Records {
 public:
  Records(std::string text, const std::string& path, char separator) : text_(std::move(text)), path_(path), separator_(separator) {
    if (text_.starts_with("\xef\xbb\xbf")) at_ = 3;  // what some programs begin UTF-8 with
  }
  // The next line that is not empty; false at the end.
  bool next(Fields& fields) {
    while (at_ < text_.size() && end_of_line()) skip_end();
    line_ = lines_ + 1;
    fields.clear();
    if (at_ >= text_.size()) return false;
    for (;;) {
      fields.push_back(text_[at_] == '"' ? quoted() : plain());
      if (at_ >= text_.size() || end_of_line()) break;
      ++at_;  // the separator
      if (at_ < text_.size() && !end_of_line()) continue;
      fields.emplace_back();
      break;
    }
    if (at_ < text_.size()) skip_end();
    return true;
  }
  int64_t line() const { return line_; }  // of the record's beginning, from 1

 private:
  bool end_of_line() const { return text_[at_] == '\n' || (text_[at_] == '\r' && at_ + 1 < text_.size() && text_[at_ + 1] == '\n'); }
  void skip_end() {
    at_ += text_[at_] == '\r' ? 2 : 1;
    ++lines_;
  }
  std::string plain() {
    const size_t begin = at_;
    while (at_ < text_.size() && text_[at_] != separator_ && !end_of_line()) ++at_;
    return text_.substr(begin, at_ - begin);
  }
  std::string quoted() {
    std::string field;
    for (;;) {
      const size_t end = text_.find('"', at_ + 1);
      HT_CHECK(end != std::string::npos, path_, ": line ", line_, ": a quotation mark is not closed");
      lines_ += std::count(text_.begin() + static_cast<std::ptrdiff_t>(at_), text_.begin() + static_cast<std::ptrdiff_t>(end), '\n');
      field.append(text_, at_ + 1, end - at_ - 1);
      at_ = end + 1;
      if (at_ >= text_.size() || text_[at_] != '"') break;
      field += '"';
    }
    HT_CHECK(at_ >= text_.size() || text_[at_] == separator_ || end_of_line(), path_, ": line ", line_, ": expected '", separator_,
             "' behind a quotation mark that closes");
    return field;
  }

  std::string text_;
  const std::string& path_;
  char separator_;
  size_t at_ = 0;
  int64_t line_ = 0, lines_ = 0;  // where the record began; line ends so far
};

std::optional<double> number(std::string_view field) {
  const size_t begin = field.find_first_not_of(" \t"), end = field.find_last_not_of(" \t");
  if (begin == std::string_view::npos) return {};
  field = field.substr(begin, end - begin + 1);
  if (field.size() > 1 && field[0] == '+' && field[1] != '-') field.remove_prefix(1);
  double v = 0;
  const auto [rest, error] = std::from_chars(field.data(), field.data() + field.size(), v);
  if (error != std::errc() || rest != field.data() + field.size()) return {};
  return v;
}
bool blank(const std::string& field) { return field.find_first_not_of(" \t") == std::string::npos; }

// What an error shows of a field.
std::string shown(const std::string& field) { return text::printable(field, 40); }

size_t place(const Fields& names, const std::string& name) {
  const auto found = std::find(names.begin(), names.end(), name);
  HT_CHECK(found != names.end(), "Table: there is no column '", name, "'");
  return static_cast<size_t>(found - names.begin());
}

}  // namespace

Tensor Table::column(const std::string& name) const { return values.select(1, static_cast<int64_t>(place(names, name))); }
Tensor Table::columns(const std::vector<std::string>& wanted) const {
  std::vector<int64_t> places;
  for (const auto& name : wanted) places.push_back(static_cast<int64_t>(place(names, name)));
  return index_select(values, 1, tensor(places));
}

Table read_csv(const std::string& path, const CsvOptions& o) {
  HT_CHECK(o.separator != '"' && o.separator != '\n' && o.separator != '\r', "read_csv: a separator cannot be a quotation mark or a line break");
  Records records(read_all(*open_source(path)), path, o.separator);
  Table table;
  Fields fields;
  HT_CHECK(records.next(fields), path, ": is empty");
  for (size_t i = 0; i < fields.size(); ++i) table.names.push_back(o.header ? fields[i] : std::to_string(i));
  std::set<std::string> known;
  for (const auto& name : table.names) HT_CHECK(known.insert(name).second, path, ": two columns are named '", shown(name), "'");
  std::vector<bool> text(fields.size());
  for (const auto& name : o.classes) {
    HT_CHECK(known.contains(name), path, ": has no column '", name, "', which .classes names");
    text[place(table.names, name)] = true;
  }

  std::vector<double> values;
  std::vector<Fields> texts(fields.size());  // of columns of texts, row by row
  int64_t rows = 0;
  for (bool more = !o.header || records.next(fields); more; more = records.next(fields)) {
    HT_CHECK(fields.size() == table.names.size(), path, ": line ", records.line(), ": expected ", table.names.size(),
             " fields, as in the first line, got ", fields.size());
    for (size_t i = 0; i < fields.size(); ++i) {
      std::optional<double> v = text[i] ? 0.0 : o.missing && blank(fields[i]) ? o.missing : number(fields[i]);
      HT_CHECK(v, path, ": line ", records.line(), ", column '", shown(table.names[i]), "': expected a number, got '", shown(fields[i]),
               blank(fields[i]) ? "'; .missing gives such fields a value" : "'; .classes names columns of texts");
      values.push_back(*v);
      if (text[i]) texts[i].push_back(std::move(fields[i]));
    }
    ++rows;
  }
  const size_t width = table.names.size();
  for (size_t i = 0; i < width; ++i) {
    if (!text[i]) continue;
    const std::set<std::string> distinct(texts[i].begin(), texts[i].end());
    Fields& all = table.classes[table.names[i]];
    all.assign(distinct.begin(), distinct.end());
    for (size_t row = 0; row < texts[i].size(); ++row)
      values[row * width + i] = static_cast<double>(std::lower_bound(all.begin(), all.end(), texts[i][row]) - all.begin());
  }
  table.values = tensor(values).view({rows, width});
  return table;
}

}  // namespace halftone::data
