// Tables in docs/ that are printed from the registry are what the registry says. HALFTONE_WRITE_DOCS=1 writes them anew.
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

// The text between the markers of a table is `printed`; when asked to, writes it there.
void check_table(const std::string& file, const std::string& table, const std::string& printed) {
  std::string path = std::string(HALFTONE_SOURCE_DIR) + "/docs/" + file;
  std::ifstream in(path, std::ios::binary);
  REQUIRE(in);
  std::string text((std::istreambuf_iterator<char>(in)), {});
  std::string begin = "<!-- " + table + ": begin -->\n", end = "<!-- " + table + ": end -->";
  size_t from = text.find(begin), to = text.find(end);
  REQUIRE(from != std::string::npos);
  REQUIRE(to != std::string::npos);
  from += begin.size();
  if (std::getenv("HALFTONE_WRITE_DOCS")) {
    text.replace(from, to - from, printed);
    std::ofstream(path, std::ios::binary) << text;
    return;
  }
  INFO("docs/" << file << " is behind the registry; HALFTONE_WRITE_DOCS=1 tests/docs writes it");
  CHECK(text.substr(from, to - from) == printed);
}

}  // namespace

TEST_CASE("docs/amp.md lists the policy of every operator") { check_table("amp.md", "policies", policies()); }
TEST_CASE("docs/operators.md lists every operator") { check_table("operators.md", "operators", operators()); }
