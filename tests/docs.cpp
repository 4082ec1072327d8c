// Tables in docs/ that are printed from the registry are what the registry says, and what docs/ quote stands in the files they name.
// HALFTONE_WRITE_DOCS=1 writes both anew.
#include <cstdlib>
#include <fstream>
#include <map>
#include <sstream>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

using namespace halftone;

namespace {

const char* policy_name(Cast c) {
  switch (c) {
    case Cast::keep: return "keep";
    case Cast::lower: return "lower";
    case Cast::full: return "full";
    case Cast::widest: return "widest";
    case Cast::total: return "total";
    case Cast::banned: return "banned";
    default: return "unset";
  }
}

// By name.
std::vector<const OpDef*> sorted_operators() {
  std::vector<const OpDef*> all;
  for (const OpDef* op : registry()) all.push_back(op);
  std::sort(all.begin(), all.end(), [](auto* a, auto* b) { return std::string_view(a->name) < b->name; });
  return all;
}

std::string policies() {
  std::map<std::string, std::string> names;
  for (const OpDef* op : sorted_operators()) {
    auto& list = names[policy_name(op->cast)];
    list += (list.empty() ? "`" : " `") + std::string(op->name) + "`";
  }
  std::string text = "| policy | operators |\n| --- | --- |\n";
  for (auto& policy : {"lower", "full", "widest", "total", "banned", "keep"})
    if (names.contains(policy)) text += text::cat("| `", policy, "` | ", names[policy], " |\n");
  return text;
}

std::string dtype_names(DTypes set) {
  std::string all;
  for (DType t : {DType::f16, DType::bf16, DType::f32, DType::f64, DType::i32, DType::i64, DType::u8, DType::b8})
    if (contains(set, t)) all += (all.empty() ? "" : " ") + std::string(name(t));
  return all;
}

std::string operators() {
  std::string text = "| operator | what it gives | dtypes | derivatives | autocast | view | in place |\n| --- | --- | --- | --- | --- | --- | --- |\n";
  for (const OpDef* op : sorted_operators()) {
    std::string order = !op->backward ? "none" : op->order == OpDef::any_order ? "any order" : std::to_string(op->order);
    text += text::cat("| `", op->name, "` | ", op->doc, " | ", dtype_names(op->dtypes[0]), " | ", order, " | ", policy_name(op->cast), " | ",
                      op->view ? "yes" : "", " | ", op->writes ? "yes" : "", " |\n");
  }
  return text;
}

std::string read(const std::string& path) {
  std::ifstream in(std::string(HALFTONE_SOURCE_DIR) + "/" + path, std::ios::binary);
  INFO(path);
  REQUIRE(in);
  return {std::istreambuf_iterator<char>(in), {}};
}

// docs/`file` with `text` in the place of what lies at [from, to) is docs/`file`; when asked to, writes it.
void check_part(const std::string& file, std::string whole, size_t from, size_t to, const std::string& text, const char* behind) {
  if (whole.substr(from, to - from) == text) return;
  whole.replace(from, to - from, text);
  if (std::getenv("HALFTONE_WRITE_DOCS")) {
    std::ofstream(std::string(HALFTONE_SOURCE_DIR) + "/docs/" + file, std::ios::binary) << whole;
    return;
  }
  FAIL_CHECK("docs/" << file << " is behind " << behind << "; HALFTONE_WRITE_DOCS=1 tests/docs writes:\n" << text);
}

void check_table(const std::string& file, const std::string& table, const std::string& printed) {
  const std::string text = read("docs/" + file), begin = "<!-- " + table + ": begin -->\n";
  const size_t from = text.find(begin), to = text.find("<!-- " + table + ": end -->");
  REQUIRE(from != std::string::npos);
  REQUIRE(to != std::string::npos);
  check_part(file, text, from + begin.size(), to, printed, "the registry");
}

// The lines of a file from the one that holds `from` to the one that holds `to`; without `to`, to the end of the block that it opens,
// if it opens one. Less their common indentation, as C++.
std::string quoted(const std::string& file, const std::string& from, const std::string& to) {
  std::istringstream lines(read(file));
  std::string text = "```cpp\n", line;
  const auto indentation = [&] { return line.find_first_not_of(' '); };
  while (std::getline(lines, line) && line.find(from) == std::string::npos) {}
  INFO("'" << from << "' in " << file);
  REQUIRE(lines);
  const size_t margin = indentation();
  const bool block = line.ends_with("{") || line.ends_with("(");
  for (bool first = true;; first = false) {
    text += (line.empty() ? "" : line.substr(margin)) + "\n";
    const bool last = !to.empty() ? line.find(to) != std::string::npos : first ? !block : indentation() == margin;
    if (last) return text + "```\n";
    REQUIRE(std::getline(lines, line));
  }
}

}  // namespace

TEST_CASE("docs/amp.md lists the policy of every operator") { check_table("amp.md", "policies", policies()); }
TEST_CASE("docs/operators.md lists every operator") { check_table("operators.md", "operators", operators()); }

// <!-- quote FILE | FIRST LINE | LAST LINE --> before what is quoted, <!-- end --> after it.
TEST_CASE("docs/programs.md quotes the examples") {
  const std::string begin = "<!-- quote ", end = "<!-- end -->";
  int quotes = 0;
  for (size_t at = 0;; ++quotes) {
    const std::string text = read("docs/programs.md");  // as the quote before left it
    at = text.find(begin, at);
    if (at == std::string::npos) break;
    const size_t closed = text.find(" -->\n", at), from = closed + 5, to = text.find(end, from);
    REQUIRE(to != std::string::npos);
    std::istringstream parts(text.substr(at + begin.size(), closed - at - begin.size()));
    std::vector<std::string> names;
    for (std::string part; std::getline(parts, part, '|');) {
      const size_t first = part.find_first_not_of(' ');
      names.push_back(part.substr(first, part.find_last_not_of(' ') - first + 1));
    }
    REQUIRE(names.size() >= 2);
    check_part("programs.md", text, from, to, quoted(names[0], names[1], names.size() > 2 ? names[2] : ""), names[0].c_str());
    at = from;
  }
  CHECK(quotes > 20);
}
