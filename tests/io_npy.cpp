// NumPy's files: what NumPy wrote, round trips, one sentence for each fault, and files cut and changed anywhere.
#include "halftone/io/npy.h"

#include <cstring>

#include "halftone/core/storage.h"
#include "halftone/io/crc.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/damage.h"

using namespace halftone;

namespace {

const std::string golden = std::string(HALFTONE_SOURCE_DIR) + "/tests/golden/arrays.npz";

bool same(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.dtype() == b.dtype() &&
         (a.numel() == 0 ||
          std::memcmp(a.contiguous().raw_data(), b.contiguous().raw_data(), static_cast<size_t>(a.numel()) * size_of(a.dtype())) == 0);
}
std::string npy(const std::string& header, const std::string& elements = {}, const std::string& version = {1, 0}) {
  std::string s = "\x93NUMPY" + version;
  s += static_cast<char>(header.size() & 255);
  s += static_cast<char>(header.size() >> 8);
  if (version[0] > 1) s += std::string(2, '\0');
  return s + header + elements;
}
struct Reading {
  Temporary t;
  Tensor read(const std::string& bytes) const {
    write_bytes(t / "f", bytes);
    return io::load_npy(t / "f");
  }
  std::string operator()(const std::string& bytes) const { return error_of([&] { read(bytes); }, t.folder); }
};
int64_t bytes_of(const Tensor& t) { return t.numel() * static_cast<int64_t>(size_of(t.dtype())); }

}  // namespace

TEST_CASE("what NumPy wrote is read") {
  const StateDict arrays = io::load_npz(golden);
  CHECK(arrays.size() == 11);
  const Tensor count = arange(6), quarters = count.to(DType::f32) / 4;
  CHECK(same(arrays.at("f16"), quarters.to(DType::f16).view({2, 3})));
  CHECK(same(arrays.at("f32"), quarters.view({2, 3})));
  CHECK(same(arrays.at("f64"), quarters.to(DType::f64).view({3, 2, 1})));
  CHECK(same(arrays.at("i32"), (count - 3).to(DType::i32)));
  CHECK(same(arrays.at("i64"), (count - 3).view({1, 6})));
  CHECK(same(arrays.at("u8"), count.to(DType::u8)));
  CHECK(same(arrays.at("b8"), tensor({false, true, false, true, false, true})));
  CHECK(same(arrays.at("scalar"), tensor(2.5)));
  CHECK(same(arrays.at("none"), zeros({0, 3})));
  CHECK(same(arrays.at("big"), count.to(DType::f32)));
  CHECK(same(arrays.at("fortran"), count.to(DType::i32).view({2, 3})));
}

TEST_CASE("every dtype and rank goes round, from views and with history") {
  const Temporary t;
  StateDict state;
  state.add("a", randn({3, 4}).transpose(0, 1));
  state.add("fc.weight", randn({2, 2}, {.requires_grad = true}));
  state.add("half", randn({5}).to(DType::f16));
  state.add("wide", randn({2, 1, 3, 1, 2}).to(DType::f64));
  state.add("whole", tensor<int64_t>({-1, 2}));
  state.add("small", tensor<int32_t>({7}));
  state.add("bytes", tensor<uint8_t>({0, 255}));
  state.add("mask", tensor({true, false}));
  state.add("one", tensor(1.f));
  state.add("none", zeros({2, 0}));
  io::save_npz(t / "all", state);
  const StateDict back = io::load_npz(t / "all");
  REQUIRE(back.size() == state.size());
  for (auto a = state.begin(), b = back.begin(); a != state.end(); ++a, ++b) {
    INFO(a->first);
    CHECK(a->first == b->first);
    CHECK(same(a->second.detach(), b->second));
    io::save_npy(t / "one", a->second);
    CHECK(same(a->second.detach(), io::load_npy(t / "one")));
  }
  io::save_npz(t / "again", state);
  CHECK(bytes_of(t / "all") == bytes_of(t / "again"));
  io::save_npz(t / "empty", {});
  CHECK(io::load_npz(t / "empty").size() == 0);
}

TEST_CASE("the bytes are NumPy's") {
  const Temporary t;
  io::save_npy(t / "f", tensor<int32_t>({1, -2, 3}));
  std::string header = "{'descr': '<i4', 'fortran_order': False, 'shape': (3,), }";
  header.resize(117, ' ');
  CHECK(bytes_of(t / "f") == npy(header + "\n", std::string("\1\0\0\0\xfe\xff\xff\xff\3\0\0\0", 12)));
  io::save_npy(t / "f", zeros({2, 3}));
  CHECK(bytes_of(t / "f").find("'shape': (2, 3), }") != std::string::npos);
  io::save_npy(t / "f", zeros({}));
  CHECK(bytes_of(t / "f").find("'shape': (), }") != std::string::npos);
}

TEST_CASE("headers as others write them") {
  const Reading reading;
  CHECK(reading.read(npy("{\"shape\":(2,),\"descr\":'|u1','fortran_order':False}", "ab")).to_vector<int>() == std::vector<int>{97, 98});
  CHECK(reading.read(npy("{'descr': '=f4', 'fortran_order': True, 'shape': (), }\n", std::string(4, '\0'), {2, 0})).item() == 0);
  CHECK(reading.read(npy("{'descr': 'b1', 'fortran_order': False, 'shape': (1, 1,)}", "\1", {3, 0})).shape() == Shape{1, 1});
}

TEST_CASE("each fault of an array has its sentence") {
  const Reading error;
  const auto dict = [](const char* descr, const char* shape) {
    return npy(text::cat("{'descr': ", descr, ", 'fortran_order': False, 'shape': ", shape, ", }"));
  };
  CHECK(error("") == "f: not an .npy file");
  CHECK(error("PK\3\4 and so on") == "f: not an .npy file");
  CHECK(error(npy("{}", "", {4, 0})) == "f: is of the format's version 4.0; expected 1.0, 2.0 or 3.0");
  CHECK(error(npy("{}").substr(0, 11)) == "f: expected a header of 2 bytes, the file has 1 there");
  CHECK(error(std::string("\x93NUMPY\2\0\xff\xff\xff\xff", 12)) == "f: expected a header of 4294967295 bytes, the file has 0 there");
  CHECK(error(std::string("\x93NUMPY\2\0\xff\xff\1\0", 12) + std::string(131071, ' ')) == "f: its header of 131071 bytes is longer than 65535");
  CHECK(error(dict("'|O'", "(1,)")) == "f: holds Python objects, which are never read: they would run code");
  CHECK(error(dict("'<c8'", "(1,)")) == "f: is of NumPy's dtype 'c8', which Halftone does not have; convert it with astype");
  CHECK(error(dict("[('a', '<f4')]", "(1,)")) == "f: holds records of named fields, which Halftone does not have");
  CHECK(error(dict("'<f4'", "(2, 3)")) == "f: expected 24 bytes of elements for [2, 3] (f32), got 0");
  CHECK(error(dict("'<f4'", "(0, 4611686018427387904, 4611686018427387904)")) ==
        "f: has shape [0, 4611686018427387904, 4611686018427387904], whose size does not fit 64 bits");
  CHECK(error(dict("'<f4'", "(9223372036854775808,)")) == "f: expected sizes of 63 bits in its header, at character 69");
  CHECK(error(dict("'<f4'", "(1, 1, 1, 1, 1, 1, 1, 1, 1)")) == "f: has more than 8 dimensions");
  CHECK(error(dict("'<f4'", "(3)")) == "f: expected ',' behind the only size in its header, at character 53");
  CHECK(error(dict("'<f4'", "(-1,)")) == "f: expected a size in its header, at character 51");
  CHECK(error(dict("'<f4'", "(1 2)")) == "f: expected ',' or ')' in its header, at character 53");
  CHECK(error(dict("'<f4", "(1,)")).find("f: is of NumPy's dtype 'f4, ") == 0);
  CHECK(error(dict("'<\nf4\x7f'", "(1,)")) == "f: is of NumPy's dtype '?f4?', which Halftone does not have; convert it with astype");
  CHECK(error(npy("{'descr': '<f4', 'fortran_order': False}")) == "f: expected descr, fortran_order and shape in its header, at character 40");
  CHECK(error(npy("{'descr': '<f4', 'descr': '<f4'}")) == "f: expected each name once in its header, at character 24");
  CHECK(error(npy("{'other': 1}")) == "f: expected descr, fortran_order and shape in its header, at character 9");
  CHECK(error(npy("{'fortran_order': 1}")) == "f: expected True or False in its header, at character 18");
  CHECK(error(npy("{'fortran_order': True} x")) == "f: expected nothing behind the } in its header, at character 24");
  CHECK(error(npy("{'fortran_order': True")) == "f: expected '}' in its header, at character 22");
  CHECK(error(npy("['descr']")) == "f: expected '{' in its header, at character 0");
  CHECK(error(npy("{'a\\'b': 1}")) == "f: expected no backslash in its header, at character 2");
  CHECK(error(npy("{'descr': '|b1', 'fortran_order': False, 'shape': (1,)}", "\2")) == "f: is of dtype bool and has a byte that is neither 0 nor 1");
  CHECK(error_of([&] { io::save_npy(error.t / "f", randn({2}).to(DType::bf16)); }, error.t.folder) ==
        "f: cannot save: NumPy has no bf16; save x.to(DType::f32)");
  CHECK(error_of([&] { io::save_npy(error.t / "f", Tensor()); }, error.t.folder) == "f: cannot save: the tensor is undefined");
}

TEST_CASE("each fault of an archive has its sentence") {
  const Temporary t;
  StateDict state;
  state.add("a", tensor<uint8_t>({1}));
  state.add("b", tensor<uint8_t>({2}));
  io::save_npz(t / "f", state);
  const std::string whole = bytes_of(t / "f");
  const size_t directory = whole.find("PK\1\2"), second = whole.find("PK\1\2", directory + 1), end = whole.find("PK\5\6");
  const auto error = [&](std::initializer_list<std::pair<size_t, int>> changes, const std::string& behind = {}) {
    std::string bytes = whole;
    for (const auto& [at, value] : changes) bytes[at] = static_cast<char>(value);
    write_bytes(t / "f", bytes + behind);
    return error_of([&] { io::load_npz(t / "f"); }, t.folder);
  };
  CHECK(error({}) == "");
  CHECK(error({}, "x") == "f: not an .npz file: a zip archive's end is missing; it may be truncated");
  CHECK(error({{directory + 10, 8}}) == "f: a.npy: is compressed; np.savez writes arrays that can be read, np.savez_compressed does not");
  CHECK(error({{directory + 8, 1}}) == "f: a.npy: is encrypted");
  CHECK(error({{second + 46, 'a'}}) == "f: the name a.npy occurs twice");
  CHECK(error({{directory + 47, '/'}}) == "f: a/npy: expected arrays, whose names end with .npy");
  CHECK(error({{directory + 16, whole[directory + 16] ^ 1}}) == "f: a.npy: is damaged: its checksum is another");
  CHECK(error({{second + 42, 0}}) == "f: its entries overlap");
  CHECK(error({{second + 45, 1}}) == "f: b.npy: lies outside the file; it is damaged");
  CHECK(error({{second + 42, whole[second + 42] + 1}}) == "f: b.npy: its entry is damaged");
  CHECK(error({{second + 20, 1}}) == "f: b.npy: is an entry of 4 GiB or more; save such arrays as safetensors");
  CHECK(error({{second, 'X'}}) == "f: its central directory is damaged");
  CHECK(error({{end + 8, 3}, {end + 10, 3}}) == "f: its central directory ends too early; it is damaged");
  CHECK(error({{end + 8, 1}, {end + 10, 1}}) == "f: its central directory is damaged");
  CHECK(error({{end + 8, 1}}) == "f: is one part of a divided zip archive");
  CHECK(error({{end + 12, 1}}) == "f: its central directory is not where it should be; it is damaged");
  state.add("a", tensor(1.f));
  CHECK(error_of([&] { io::save_npz(t / "g", state); }, t.folder) == "g: cannot save: the name a occurs twice");
  StateDict nameless;
  nameless.add("", tensor(1.f));
  CHECK(error_of([&] { io::save_npz(t / "g", nameless); }, t.folder) ==
        "g: cannot save: expected a name of 1 to 4095 bytes, none of them zero");
  StateDict brain;
  brain.add("w", ones({1}).to(DType::bf16));
  CHECK(error_of([&] { io::save_npz(t / "g", brain); }, t.folder) == "g: w: cannot save: NumPy has no bf16; save x.to(DType::f32)");
  CHECK_FALSE(std::filesystem::exists(t / "g"));
}

TEST_CASE("files that are cut or changed anywhere") {
  const Temporary t;
  io::save_npy(t / "one", arange(5).to(DType::f32));
  try_damage(bytes_of(t / "one"), [](const std::string& path) { return bytes_of(io::load_npy(path)); });
  StateDict state;
  state.add("a", arange(3).to(DType::u8));
  state.add("b", arange(2));
  io::save_npz(t / "two", state);
  try_damage(bytes_of(t / "two"), [](const std::string& path) {
    int64_t bytes = 0;
    for (const auto& [name, tensor] : io::load_npz(path)) bytes += bytes_of(tensor);
    return bytes;
  });
}
