// safetensors: round trips, the format's every rule broken once, a file cut at every byte, and random damage.
#include "halftone/io/safetensors.h"

#include <cstdlib>
#include <cstring>

#include "halftone/core/backend.h"
#include "halftone/core/random.h"
#include "halftone/io/file.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/damage.h"
#include "halftone/tests/faults.h"

namespace {

using namespace halftone;

std::string with_length(const std::string& header, uint64_t length) {
  std::string s(8, '\0');
  std::memcpy(s.data(), &length, 8);
  return s + header;
}
std::string file_of(const std::string& header, size_t elements = 0) {
  return with_length(header, header.size()) + std::string(elements, '\1');
}

bool same(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         (a.numel() == 0 ||
          std::memcmp(a.raw_data(), b.raw_data(), static_cast<size_t>(a.numel()) * size_of(a.dtype())) == 0);
}

StateDict model() {
  StateDict s;
  s.add("fc.weight", randn({3, 5}));
  s.add("fc.bias", randn({5}).to(DType::f16));
  s.add("half", randn({2, 2}).to(DType::bf16));
  s.add("step", tensor<int64_t>({-1}));
  s.add("wide", randn({2}).to(DType::f64));
  s.add("mask", tensor({true, false, true}));
  s.add("bytes", tensor<uint8_t>({1, 2, 255}));
  s.add("small", tensor<int32_t>({-7}));
  s.add("scalar", tensor(2.5f));
  s.add("none", zeros({0, 4}));
  return s;
}

// What loading a file of these bytes says.
struct Loading {
  Temporary t;
  std::string operator()(const std::string& bytes) {
    write_bytes(t / "f", bytes);
    return error_of([&] { io::load(t / "f"); }, t.folder);
  }
};

}  // namespace

TEST_CASE("a state comes back as it was: every dtype, every rank, the order") {
  const Temporary t;
  manual_seed(1);
  const StateDict state = model();
  io::save(t / "f", state, {.metadata = {{"format", "pt"}, {"note", "\"quoted\" \n ü"}}});
  const StateDict back = io::load(t / "f");
  REQUIRE(back.size() == state.size());
  for (auto a = state.begin(), b = back.begin(); a != state.end(); ++a, ++b) {
    INFO(a->first);
    CHECK(a->first == b->first);
    CHECK(same(a->second, b->second));
  }
  CHECK(io::load_metadata(t / "f") == io::Metadata{{"format", "pt"}, {"note", "\"quoted\" \n ü"}});
  CHECK(t.list() == "f ");
}

TEST_CASE("the bytes are the format's") {
  const Temporary t;
  StateDict s;
  s.add("b", tensor<uint8_t>({7}));
  s.add("w", tensor({1.f, -2.f}));
  io::save(t / "f", s);
  std::string header =
      R"({"b":{"dtype":"U8","shape":[1],"data_offsets":[8,9]},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  header.resize((header.size() + 7) / 8 * 8, ' ');
  CHECK(bytes_of(t / "f") == file_of(header) + std::string("\0\0\x80\x3f\0\0\0\xc0\7", 9));
}

TEST_CASE("views, tied tensors and tensors with history are written as they look") {
  const Temporary t;
  Tensor w = randn({4, 6}, {.requires_grad = true});
  StateDict s;
  s.add("a", w);
  s.add("tied", w);
  s.add("transposed", w.transpose(0, 1));
  s.add("row", w.select(0, 2));
  s.add("wide", randn({1, 3}).expand({2, 3}));
  io::save(t / "f", s);
  const StateDict back = io::load(t / "f");
  for (const auto& [name, tensor] : s) CHECK(same(tensor.detach().contiguous(), back.at(name)));
  CHECK_FALSE(back.at("a").requires_grad());
}

TEST_CASE("an empty state is a file, too") {
  const Temporary t;
  io::save(t / "f", {});
  CHECK(bytes_of(t / "f") == file_of("{}      "));
  CHECK(io::load(t / "f").size() == 0);
}

TEST_CASE("saving over the file that was loaded") {
  const Temporary t;
  StateDict s;
  s.add("w", tensor({1.f, 2.f}));
  io::save(t / "f", s);
  io::save(t / "f", io::load(t / "f"));
  CHECK(io::load(t / "f").at("w").to_vector<float>() == std::vector<float>{1, 2});
}

TEST_CASE("a state that is no file is refused, and the old file stays") {
  const Temporary t;
  const auto refusal = [&](const char* name, const Tensor& tensor, const io::SaveOptions& o = {}) {
    StateDict s;
    s.add("x", tensor);
    s.add(name, tensor);
    return error_of([&] { io::save(t / "f", s, o); }, t.folder);
  };
  write_bytes(t / "f", "old");
  const Tensor x = zeros({2});
  CHECK(refusal("x", x) == "f: cannot save: the name 'x' occurs twice");
  CHECK(refusal("__metadata__", x) == "f: cannot save: the name '__metadata__' occurs twice");
  CHECK(refusal("\xff", x) == "f: cannot save: '\\ufffd' is not UTF-8");
  CHECK(refusal("y", {}) == "f: cannot save: the tensor 'x' is undefined");
  CHECK(refusal("y", x, {.metadata = {{"a", ""}, {"a", ""}}}) == "f: cannot save: the metadata name 'a' occurs twice");
  CHECK(error_of([&] { io::save(t / "no/f", {}); }, t.folder) == "no/f: cannot create: No such file or directory");
  CHECK(bytes_of(t / "f") == "old");
  CHECK(t.list() == "f ");
}

TEST_CASE("a disk that fills up while saving keeps the old file") {
  const Temporary t;
  const StateDict state = model();
  io::save(t / "f", state);
  const std::string old = bytes_of(t / "f");
  for (size_t room = 0; room < old.size(); ++room) {
    Faults disk;
    disk.room = static_cast<int64_t>(room);
    const io::UseFileOps use(disk);
    const std::string error = error_of([&] { io::save(t / "f", state); }, t.folder);
    REQUIRE(error == "f: cannot write: No space left on device");
    REQUIRE(bytes_of(t / "f") == old);
    REQUIRE(t.list() == "f ");
  }
}

TEST_CASE("a file cut at any byte is one sentence") {
  Loading loading;
  io::save(loading.t / "whole", model());
  const std::string whole = bytes_of(loading.t / "whole");
  uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);
  for (size_t size = 0; size < whole.size(); ++size) {
    const std::string error = loading(whole.substr(0, size));
    INFO("cut at " << size << ": " << error);
    const std::string expected =
        size < 8 ? "f: not a safetensors file: it has " + std::to_string(size) +
                       " bytes, and the length of the header alone takes 8"
        : size < 8 + header
            ? "f: expected a header of " + std::to_string(header) + " bytes, the file has " + std::to_string(size - 8) +
                  " after the header's length; it is truncated, or not a safetensors file"
            : "f: its tensors take " + std::to_string(whole.size() - 8 - header) + " bytes, the file has " +
                  std::to_string(size - 8 - header) + " after its header";
    REQUIRE(error == expected);
  }
  CHECK(loading(whole + "x").find("its tensors take") != std::string::npos);
}

TEST_CASE("each rule of the format, broken") {
  Loading loading;
  const auto entry = [](const std::string& rest) { return R"({"w":{)" + rest + "}}"; };
  const auto tensor = [&](const char* dtype, const char* shape, const char* offsets) {
    return entry(text::cat(R"("dtype":")", dtype, R"(","shape":)", shape, R"(,"data_offsets":)", offsets));
  };
  CHECK(loading(file_of(tensor("F32", "[2]", "[0,8]"), 8)).empty());
  CHECK(loading(file_of(tensor("F32", "[]", "[0,4]"), 4)).empty());
  CHECK(loading(file_of(tensor("F32", "[2]", "[0,8]") + " \n", 8)).empty());
  CHECK(loading(file_of(tensor("F32", "[0,9]", "[0,0]"))).empty());

  SECTION("the header's length") {
    for (uint64_t length : {~uint64_t{0}, ~uint64_t{0} - 7, uint64_t{1} << 63, uint64_t{3}})
      CHECK(loading(with_length("{}", length)) == text::cat("f: expected a header of ", length,
                                                            " bytes, the file has 2 after the header's length; it is "
                                                            "truncated, or not a safetensors file"));
  }
  SECTION("the header's text") {
    CHECK(loading(file_of("")) == "f: not a safetensors file: its header does not begin with '{'");
    CHECK(loading(file_of(" {}")) == "f: not a safetensors file: its header does not begin with '{'");
    CHECK(loading(file_of("{]")) == "f: its header is not JSON in UTF-8; the first fault is at byte 9");
    CHECK(loading(file_of("{} x")).find("is not JSON") != std::string::npos);
    CHECK(loading(file_of("{\"\xff\":1}")).find("is not JSON") != std::string::npos);
    CHECK(loading(file_of(std::string("{}\0{}", 5))) == "f: its header has a zero byte");
    CHECK(loading(file_of(R"({"\u0000":{}})")) ==
          "f: the name '\\u0000' is longer than 4096 bytes, or has a zero byte");
    CHECK(loading(file_of(R"({"w":5})")) == "f: its header has a number under 'w', which has no place there");
    CHECK(loading(file_of(R"({"w":[]})")) == "f: its header has a list under 'w', which has no place there");
    CHECK(loading(file_of("{\"w\":" + std::string(100000, '['))).find("a list under 'w'") != std::string::npos);
    CHECK(loading(file_of("{\"" + std::string(5000, 'n') + "\":{}}")).find("is longer than 4096 bytes") !=
          std::string::npos);
  }
  SECTION("an entry's fields") {
    CHECK(loading(file_of(entry(""))) == "f: tensor 'w' has no dtype");
    CHECK(loading(file_of(entry(R"("dtype":"F32","data_offsets":[0,0])"))) == "f: tensor 'w' has no shape");
    CHECK(loading(file_of(entry(R"("x":1)"))) ==
          "f: tensor 'w' has a field 'x'; expected dtype, shape and data_offsets");
    CHECK(loading(file_of(entry(R"("dtype":"F32","dtype":"F32")"))) == "f: tensor 'w' has its dtype twice");
    CHECK(loading(file_of(entry(R"("dtype":{})"))) ==
          "f: its header has an object under 'dtype' of tensor 'w', which has no place there");
    CHECK(loading(file_of(entry(R"("dtype":null)"))) ==
          "f: its header has null under 'dtype' of tensor 'w', which has no place there");
    CHECK(loading(file_of(tensor("F8_E4M3", "[1]", "[0,1]"), 1)) ==
          "f: tensor 'w' is of dtype 'F8_E4M3', which Halftone does not have");
  }
  SECTION("sizes and offsets") {
    CHECK(loading(file_of(tensor("F32", "[-1,4]", "[0,0]"))) ==
          "f: its header has the number -1 under 'shape' of tensor 'w', which has no place there");
    CHECK(loading(file_of(tensor("F32", "[1.5]", "[0,0]"))) ==
          "f: its header has the number 1.5 under 'shape' of tensor 'w', which has no place there");
    CHECK(loading(file_of(tensor("F32", "[18446744073709551615]", "[0,0]"))) ==
          "f: tensor 'w' has a size or offset 18446744073709551615, which no file reaches");
    CHECK(loading(file_of(tensor("F32", "[1,1,1,1,1,1,1,1,1]", "[0,4]"), 4)) ==
          "f: tensor 'w' has 9 dimensions; a tensor has at most 8");
    CHECK(loading(file_of(tensor("F32", "[4294967296,4294967296]", "[0,0]"))) ==
          "f: tensor 'w' has shape [4294967296, 4294967296], whose size does not fit 64 bits");
    CHECK(loading(file_of(tensor("F32", "[0,4294967296,4294967296]", "[0,0]"))).find("does not fit") !=
          std::string::npos);
    CHECK(loading(file_of(tensor("F32", "[32,8]", "[0,65536]"), 65536)) ==
          "f: tensor 'w' of shape [32, 8] (f32) takes 1024 bytes, and its data_offsets span 65536");
    CHECK(loading(file_of(tensor("F32", "[2]", "[8,0]"), 8)) ==
          "f: tensor 'w' has data_offsets that are not [begin, end]");
    CHECK(loading(file_of(tensor("F32", "[2]", "[0]"), 8)) ==
          "f: tensor 'w' has data_offsets that are not [begin, end]");
    CHECK(loading(file_of(tensor("F32", "[2]", "[0,8,8]"), 8)) ==
          "f: tensor 'w' has data_offsets that are not [begin, end]");
    CHECK(loading(file_of(tensor("F32", "[2]", "[4,12]"), 12)) ==
          "f: tensor 'w' begins at byte 4 of the elements, where the tensors before it end at 0");
    CHECK(loading(file_of(tensor("F32", "[1099511627776]", "[0,4398046511104]"), 8)) ==
          "f: its tensors take 4398046511104 bytes, the file has 8 after its header");
    CHECK(loading(file_of(tensor("BOOL", "[2]", "[0,2]")) + "\1\2") ==
          "f: tensor 'w' is of dtype BOOL and has a byte that is neither 0 nor 1");
  }
  SECTION("several tensors") {
    const auto two = [](const char* a, const char* b, const char* at) {
      return text::cat("{\"", a, R"(":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},")", b,
                       R"(":{"dtype":"U8","shape":[4],"data_offsets":)", at, "}}");
    };
    CHECK(loading(file_of(two("a", "b", "[4,8]"), 8)).empty());
    CHECK(loading(file_of(two("a", "a", "[4,8]"), 8)) == "f: the name 'a' occurs twice");
    CHECK(loading(file_of(two("a", "\\u0061", "[4,8]"), 8)) == "f: the name 'a' occurs twice");
    CHECK(loading(file_of(two("a", "b", "[0,4]"), 8)) ==
          "f: tensor 'b' begins at byte 0 of the elements, where the tensors before it end at 4");
    CHECK(loading(file_of(two("a", "b", "[5,9]"), 9)).find("'b' begins at byte 5") != std::string::npos);
  }
  SECTION("metadata") {
    CHECK(loading(file_of(R"({"__metadata__":{"a":"b"}})")).empty());
    CHECK(loading(file_of(R"({"__metadata__":{"a":1}})")) ==
          "f: its header has a number under 'a', which has no place there");
    CHECK(loading(file_of(R"({"__metadata__":{"a":"","a":""}})")) == "f: the name 'a' occurs twice");
    CHECK(loading(file_of(R"({"__metadata__":{},"__metadata__":{}})")) == "f: the name '__metadata__' occurs twice");
  }
}

TEST_CASE("a file that shrinks while it is read is one sentence") {
  struct Shrinks : io::FileOps {
    int64_t read(int fd, void* to, size_t bytes, int64_t offset) override {
      return offset < 200 ? FileOps::read(fd, to, bytes, offset) : 0;
    }
  };
  const Temporary t;
  io::save(t / "f", model());
  Shrinks shrinks;
  const io::UseFileOps use(shrinks);
  CHECK(error_of([&] { io::load(t / "f"); }, t.folder).find("while it was read; expected") != std::string::npos);
}

// Every outcome but a valid state or one Error is a failure; so is memory beyond what the file holds.
TEST_CASE("random damage never does harm") {
  Loading loading;
  manual_seed(3);
  io::save(loading.t / "whole", model(), {.metadata = {{"format", "pt"}}});
  const std::string whole = bytes_of(loading.t / "whole");
  uint64_t header = 0;
  std::memcpy(&header, whole.data(), 8);
  const std::string pieces[] = {"\"",
                                "{",
                                "}",
                                "[",
                                "]",
                                ",",
                                ":",
                                "0",
                                "9999999999",
                                "-",
                                "18446744073709551615",
                                "\\u0000",
                                "\"dtype\"",
                                "null",
                                "true",
                                "1e9",
                                std::string(1, '\0'),
                                "\xff",
                                "\"__metadata__\":{"};
  const int64_t rounds = std::getenv("HALFTONE_FULL") ? 200000 : 4000;
  int64_t loaded = 0;
  reset_peak_memory(Device::cpu());
  const int64_t before = memory_stats(Device::cpu()).peak;
  for (int64_t round = 0; round < rounds; ++round) {
    std::string bytes = whole;
    const Philox4 r = philox(11, static_cast<uint64_t>(round));
    for (uint32_t k = 0; k <= r.v[0] % 3; ++k) {
      const Philox4 q = philox(12, static_cast<uint64_t>(round), k);
      const size_t at = q.v[0] % 4 ? 8 + q.v[1] % header : q.v[1] % bytes.size();
      const std::string& piece = pieces[q.v[2] % std::size(pieces)];
      if (at >= bytes.size()) continue;
      switch (q.v[3] % 5) {
        case 0:
          bytes[at] = static_cast<char>(q.v[2] >> 8);
          break;
        case 1:
          bytes.erase(at, 1 + (q.v[2] >> 8) % 20);
          break;
        case 2:
          bytes.insert(at, piece);
          break;
        case 3:
          bytes.replace(at, std::min(piece.size(), bytes.size() - at), piece);
          break;
        default:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << (q.v[2] % 8)));
          break;
      }
    }
    // Half of the damaged headers have the right length again, so that what follows is reached.
    if (r.v[1] % 2 && bytes.size() > 8 + (whole.size() - 8 - header)) {
      const uint64_t length = bytes.size() - 8 - (whole.size() - 8 - header);
      std::memcpy(bytes.data(), &length, 8);
    }
    write_bytes(loading.t / "f", bytes);
    INFO("round " << round);
    const std::string error = error_of(
        [&] {
          StateDict s = io::load(loading.t / "f");
          for (const auto& [name, tensor] : s) static_cast<void>(tensor.to_vector<double>());
          ++loaded;
        },
        loading.t.folder);
    REQUIRE((error.empty() || error.starts_with("f: ")));
    REQUIRE(error.find('\n') == std::string::npos);
    REQUIRE(error.size() < 400);
  }
  CHECK(loaded > 0);
  CHECK(memory_stats(Device::cpu()).peak - before <= 2 * static_cast<int64_t>(whole.size()));
}

TEST_CASE("a small file that is cut or changed anywhere") {
  const Temporary t;
  StateDict small;
  small.add("w", tensor({1.f, -2.f}));
  small.add("mask", tensor({true, false}));
  io::save(t / "f", small, {.metadata = {{"format", "pt"}}});
  try_damage(bytes_of(t / "f"), [](const std::string& path) {
    int64_t bytes = 0;
    for (const auto& [name, tensor] : io::load(path)) bytes += tensor.numel() * static_cast<int64_t>(size_of(tensor.dtype()));
    io::load_metadata(path);
    return bytes;
  });
}
