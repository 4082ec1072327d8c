// Who may include whom: the tree's #include lines, read as text, are held against the arrows below.
// A third-party header has one place of its own, and `#if` has next to none.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "halftone/tests/catch.h"

namespace {

namespace fs = std::filesystem;
using Strings = std::vector<std::string>;

const fs::path root = HALFTONE_SOURCE_DIR;

// A folder may include itself and, transitively, the folders named here.
const std::map<std::string, Strings> arrows = {
    {"core", {}},
    {"ops", {"core"}},
    {"nn", {"ops"}},
    {"autograd", {"ops"}},
    {"optim", {"autograd"}},
    {"amp", {"optim"}},
    {"data", {"ops"}},
    {"io", {"amp"}},
    {"distributed", {"nn", "optim"}},  // optimizers whose states are shared out
    {"train", {"amp", "nn", "io"}},
    {"cuda", {"core", "ops", "distributed"}},
};
const std::set<std::string> programs = {"tests", "benchmarks", "examples"};  // include anything

// Who may include a header that is neither ours nor the standard library's; first match holds.
struct Place {
  const char* header;
  const char* files;
};
const std::vector<Place> places = {
    {"(unsupported/)?Eigen/.*", R"(ops/.*\.cpp)"},
    {"oneapi/dnnl/.*", R"(ops/.*\.cpp)"},
    {"(cuda|cublas|cudnn|nccl|curand|nvrtc)[^/]*|(cuda|cub|thrust|nvtx3|cooperative_groups|nv)/.*|"
     "cooperative_groups.h|vector_types.h|math_constants.h",
     R"(cuda/.*|(tests|benchmarks|examples)/.*\.cuh?)"},
    {"cupti\\.h", R"((tests|benchmarks)/.*_cupti\.cpp)"},
    {"nlohmann/.*", R"(io/.*\.cpp)"},
    {"zlib.h", R"((data|io)/.*\.cpp)"},
    {"png\\.h", R"(data/.*\.cpp)"},
    {"mpi.h", R"(distributed/.*(\.cpp|_mpi\.h))"},
    {"CLI/.*", R"(examples/run\.cpp|benchmarks/.*\.cpp)"},
    {"catch2/.*", R"(tests/catch\.h)"},
    {"math\\.h", R"(core/hd\.h)"},
    {"cxxabi\\.h", R"(core/error\.cpp)"},
    {"(x86|imm)intrin.h|cpuid.h|arm_neon.h", R"(ops/.*\.cpp)"},
    {"(pthread|sched)\\.h", R"(core/parallel\.cpp|(?!core/).*\.cpp)"},  // the standard library knows nothing of fork or of a process's processors
    {"sys/mman\\.h", R"(core/storage\.cpp|(?!core/).*\.cpp)"},  // nor of pages
    {"(unistd|fcntl|dlfcn|execinfo|sched|pthread|signal|termios|dirent|poll|spawn|malloc)\\.h|sys/[a-z]+\\.h",
     R"((?!core/).*\.cpp)"},
};

// The only files that ask the preprocessor: host or device, or which version of a third party.
const std::regex conditional_files(R"(core/hd\.h|tests/catch\.h|.*_version\.h)");

std::string folder_of(const std::string& path) {
  const auto slash = path.find('/');
  return slash == std::string::npos ? "" : path.substr(0, slash);
}

bool may_include(const std::string& from, const std::string& to) {
  if (from == to || programs.contains(from)) return true;
  const auto found = arrows.find(from);
  return found != arrows.end() &&
         std::any_of(found->second.begin(), found->second.end(),
                     [&](const std::string& below) { return may_include(below, to); });
}

std::string check_own(const std::string& file, const std::string& header) {
  if (header == "config.h") return file == "core/version.cpp" ? "" : "only core/version.cpp may";
  if (!fs::is_regular_file(root / header)) return "there is no such file";
  const std::string from = folder_of(file), to = folder_of(header);
  if (from.empty()) return arrows.contains(to) && to != "cuda" ? "" : "halftone.h is for users";
  return may_include(from, to) ? "" : "no arrow leads from " + from + " to " + to;
}

std::string check_foreign(const std::string& file, const std::string& header) {
  static const std::regex standard("[a-z_0-9]+");
  if (std::regex_match(header, standard)) return "";
  for (const auto& [headers, files] : places)
    if (std::regex_match(header, std::regex(headers)))
      return std::regex_match(file, std::regex(files)) ? "" : "this file is not its place";
  return "no file may, by tests/layering.cpp";
}

// What is wrong with a file, one sentence a line that is wrong.
Strings faults(const std::string& file, std::istream& text) {
  static const std::regex include(R"(\s*#\s*include\s*([<"])([^>"]+)[>"].*)");
  static const std::regex condition(R"(\s*#\s*(if|ifdef|ifndef|elif)\b.*)");
  Strings found;
  std::string line;
  for (int number = 1; std::getline(text, line); ++number) {
    const std::string at = file + ":" + std::to_string(number) + ": ";
    std::smatch match;
    if (std::regex_match(line, match, include)) {
      const std::string header = match[2];
      std::string fault;
      if (header.starts_with("halftone/")) {
        fault = check_own(file, header.substr(9));
      } else if (match[1] == "\"") {
        fault = "our own headers are spelled \"halftone/...\", others <...>";
      } else {
        fault = check_foreign(file, header);
      }
      if (!fault.empty()) found.push_back(at + "includes " + header + ": " + fault);
    } else if (std::regex_match(line, condition) && !std::regex_match(file, conditional_files) &&
               !(folder_of(file) == "cuda" && line.find("__CUDA_ARCH__") != std::string::npos)) {
      found.push_back(at + "#if has no place here");
    }
  }
  return found;
}

Strings faults(const std::string& file, const std::string& text) {
  std::istringstream stream(text);
  return faults(file, stream);
}

bool is_source(const fs::path& path) {
  static const std::set<std::string> kinds = {".h", ".cpp", ".cu", ".cuh"};
  return kinds.contains(path.extension().string());
}

// Every source of the tree, relative to its root, but for programs that are not ours: those of
// other frameworks and the outside project.
Strings sources() {
  Strings files = {"halftone.h"};
  Strings folders(programs.begin(), programs.end());
  for (const auto& [folder, below] : arrows) folders.push_back(folder);
  for (const std::string& folder : folders) {
    if (!fs::exists(root / folder)) continue;
    for (const auto& entry : fs::recursive_directory_iterator(root / folder)) {
      const std::string file = fs::relative(entry.path(), root).generic_string();
      if (file.starts_with("benchmarks/peers/") || file.starts_with("tests/package/")) continue;
      if (is_source(entry.path())) files.push_back(file);
    }
  }
  return files;
}

}  // namespace

TEST_CASE("the tree keeps to its layers") {
  for (const std::string& file : sources()) {
    std::ifstream text(root / file);
    REQUIRE(text);
    for (const std::string& fault : faults(file, text)) FAIL_CHECK(fault);
  }
}

TEST_CASE("includes that break the layers are found") {
  const auto wrong = [](const char* file, const char* line) { return !faults(file, line).empty(); };
  const std::string header = "#include \"halftone/core/version.h\"";
  CHECK_FALSE(wrong("core/tensor.h", header.c_str()));
  CHECK_FALSE(wrong("amp/scaler.cpp", header.c_str()));
  CHECK_FALSE(wrong("examples/01.cpp", "#include <halftone/halftone.h>"));
  CHECK_FALSE(wrong("core/tensor.h", "#include <vector>"));
  CHECK(wrong("core/tensor.h", "#include \"halftone/tests/catch.h\""));
  CHECK(wrong("core/tensor.h", "#include \"halftone/core/nowhere.h\""));
  CHECK(wrong("core/tensor.h", "#include \"halftone/config.h\""));
  CHECK(wrong("core/tensor.h", "#include \"version.h\""));
  CHECK(wrong("core/tensor.h", "#include \"../core/version.h\""));
}

TEST_CASE("the arrows are the architecture's") {
  const auto reach = [](const std::string& from) {
    std::string all;
    for (const auto& [to, below] : arrows)
      if (to != from && may_include(from, to)) all += to + " ";
    return all;
  };
  CHECK(reach("core").empty());
  CHECK(reach("ops") == "core ");
  CHECK(reach("nn") == "core ops ");
  CHECK(reach("autograd") == "core ops ");
  CHECK(reach("optim") == "autograd core ops ");
  CHECK(reach("amp") == "autograd core ops optim ");
  CHECK(reach("data") == "core ops ");
  CHECK(reach("io") == "amp autograd core ops optim ");
  CHECK(reach("distributed") == "autograd core nn ops optim ");
  CHECK(reach("train") == "amp autograd core io nn ops optim ");
  for (const auto& [from, below] : arrows) CHECK(may_include(from, "cuda") == (from == "cuda"));
}

TEST_CASE("each third-party header has its place") {
  const auto wrong = [](const std::string& file, const std::string& header) {
    return !faults(file, "  #  include <" + header + ">  // why").empty();
  };
  CHECK_FALSE(wrong("ops/matmul.cpp", "Eigen/Core"));
  CHECK(wrong("ops/matmul.h", "Eigen/Core"));
  CHECK(wrong("nn/linear.cpp", "Eigen/Core"));
  CHECK(wrong("core/pool.cpp", "oneapi/dnnl/dnnl.hpp"));
  CHECK_FALSE(wrong("cuda/conv.cpp", "cudnn.h"));
  CHECK(wrong("ops/conv.cpp", "cudnn.h"));
  CHECK(wrong("tests/conv.cpp", "cuda_runtime.h"));
  CHECK_FALSE(wrong("tests/cuda_conv.cu", "cuda_runtime.h"));
  CHECK_FALSE(wrong("io/json.cpp", "nlohmann/json.hpp"));
  CHECK(wrong("io/json.h", "nlohmann/json.hpp"));
  CHECK(wrong("nn/module.cpp", "zlib.h"));
  CHECK_FALSE(wrong("io/files.cpp", "unistd.h"));
  CHECK_FALSE(wrong("io/files.cpp", "sys/stat.h"));
  CHECK(wrong("core/files.cpp", "unistd.h"));
  CHECK(wrong("ops/matmul.cpp", "boost/any.hpp"));
}

TEST_CASE("#if is refused") {
  CHECK(faults("ops/conv.cpp", "#if HALFTONE_HAS_CUDA").size() == 1);
  CHECK(faults("ops/conv.cpp", "int x;\n # ifdef A\n#elif B\n#endif").size() == 2);
  CHECK(faults("ops/conv.cpp", "#if __CUDA_ARCH__ >= 900").size() == 1);
  CHECK(faults("cuda/conv.cu", "#if __CUDA_ARCH__ >= 900").empty());
  CHECK(faults("core/hd.h", "#ifdef __CUDACC__").empty());
  CHECK(faults("cuda/cudnn_version.h", "#if CUDNN_MAJOR < 9").empty());
}

// cuda/runtime.h says why.
TEST_CASE("every kernel begins by waiting for those before it") {
  const std::regex kernel(R"(__global__[^;{]*\{\s*(\w*))");
  int kernels = 0;
  for (const std::string& file : sources()) {
    if (!file.starts_with("cuda/") || !(file.ends_with(".cu") || file.ends_with(".cuh"))) continue;
    std::ifstream stream(root / file);
    std::stringstream text;
    text << stream.rdbuf();
    const std::string all = text.str();
    for (std::sregex_iterator k(all.begin(), all.end(), kernel), end; k != end; ++k, ++kernels) {
      INFO(file << ": " << k->str().substr(0, 120));
      CHECK((*k)[1] == "wait_for_previous");
    }
  }
  CHECK(kernels > 80);
}
