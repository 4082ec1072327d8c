#pragma once
// Tables of numbers in text, as spreadsheets and pandas write them (RFC 4180): fields between separators, in quotation marks where they hold
// a separator, a mark (doubled) or a line break.
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "halftone/core/tensor.h"

namespace halftone::data {

struct CsvOptions {
  char separator = ',';
  bool header = true;                        // the first line has the columns' names; else they are "0", "1", ...
  std::vector<std::string> classes = {};     // columns of texts, each of which becomes its number among the column's, in alphabetical order
  std::optional<double> missing = {};        // what an empty field of numbers counts as; it is an error unless given
};

//   auto table = data::read_csv("iris.csv", {.classes = {"species"}});
//   data::TensorDataset set(table.columns({"length", "width"}).to(DType::f32), table.column("species").to(DType::i64));
struct HT_API Table {
  Tensor values;  // [rows, columns] (f64)
  std::vector<std::string> names;
  std::map<std::string, std::vector<std::string>> classes;  // the texts behind the numbers, by column
  // [rows], and [rows, names]. Throw Error when there is no such column.
  Tensor column(const std::string& name) const;
  Tensor columns(const std::vector<std::string>& names) const;
};

// The table in a file, plain or compressed (.gz). Throws Error, naming file, line and column, where a field is no number, or a line has other
// fields than the first.
HT_API Table read_csv(const std::string& path, const CsvOptions& options = {});

}  // namespace halftone::data
