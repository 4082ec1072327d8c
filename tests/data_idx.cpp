// IDX and MNIST's four files: what they hold, and one exact sentence for everything that may be wrong with them.
#include "halftone/data/idx.h"

#include <cstdlib>
#include <cstring>

#include "halftone/core/backend.h"
#include "halftone/core/random.h"
#include "halftone/core/version.h"
#include "halftone/data/mnist.h"
#include "halftone/io/crc.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/damage.h"

namespace {

using namespace halftone;

const std::string subset = std::string(HALFTONE_SOURCE_DIR) + "/data/fashion-mnist-subset";
bool has_zlib() { return std::string(build_info()).find("ZLIB") != std::string::npos; }

std::string header(uint8_t type, const std::vector<uint32_t>& sizes) {
  std::string s{'\0', '\0', static_cast<char>(type), static_cast<char>(sizes.size())};
  for (uint32_t d : sizes)
    for (int shift = 24; shift >= 0; shift -= 8) s += static_cast<char>(d >> shift);
  return s;
}

// What reading a file of these bytes says.
struct Reading {
  Temporary t;
  std::string operator()(const std::string& bytes) {
    write_bytes(t / "f", bytes);
    return error_of([&] { data::read_idx(t / "f"); }, t.folder);
  }
  Tensor read(const std::string& bytes) {
    write_bytes(t / "f", bytes);
    return data::read_idx(t / "f");
  }
};

constexpr const char* cure =
    "; for Fashion-MNIST install Debian's package dataset-fashion-mnist and use /usr/share/datasets/fashion-mnist, or "
    "put "
    "the four .gz files of https://github.com/zalandoresearch/fashion-mnist into a folder";

}  // namespace

TEST_CASE("elements and sizes of each dtype") {
  Reading reading;
  const Tensor u8 = reading.read(header(0x08, {2, 3}) + "abcdef");
  CHECK(u8.shape() == Shape{2, 3});
  CHECK(u8.to_vector<int>() == std::vector<int>{97, 98, 99, 100, 101, 102});
  CHECK(reading.read(header(0x0c, {2}) + std::string("\0\0\1\2\xff\xff\xff\xfe", 8)).to_vector<int>() ==
        std::vector<int>{258, -2});
  const Tensor f32 = reading.read(header(0x0d, {1}) + std::string("\x3f\xc0\0\0", 4));
  CHECK(f32.dtype() == DType::f32);
  CHECK(f32.item<float>() == 1.5f);
  CHECK(reading.read(header(0x0e, {1}) + std::string("\xc0\x04\0\0\0\0\0\0", 8)).item<double>() == -2.5);
  CHECK(reading.read(header(0x08, {0, 7})).shape() == Shape{0, 7});
}

TEST_CASE("what is no IDX file, or not a whole one, is one sentence") {
  Reading reading;
  const std::string whole = header(0x08, {2, 3}) + "abcdef";
  for (size_t size = 0; size < whole.size(); ++size) {
    INFO("cut at " << size);
    const std::string n = std::to_string(size);
    CHECK(reading(whole.substr(0, size)) ==
          (size < 4    ? "f: not an IDX file: it has " + n + " bytes, and the header alone has more"
           : size < 12 ? "f: ends within its header"
                       : "f: expected 6 bytes of elements for [2, 3] (u8), got " + std::to_string(size - 12) +
                             "; the file is truncated"));
  }
  CHECK(reading(whole + "g") == "f: expected 6 bytes of elements for [2, 3] (u8), and there are more");
  CHECK(reading("\x89PNG") == "f: not an IDX file: it begins with 89 50, expected 00 00");
  CHECK(reading(header(0x07, {1}) + "a") == "f: not an IDX file: there is no type 07");
  CHECK(reading(header(0x0b, {1}) + "ab") == "f: holds signed integers of 16 bits, for which Halftone has no dtype");
  CHECK(reading(header(0x08, {})) == "f: not an IDX file: expected 1 to 8 dimensions, got 0");
  CHECK(reading(header(0x08, std::vector<uint32_t>(9, 1)) + "a") ==
        "f: not an IDX file: expected 1 to 8 dimensions, got 9");
  CHECK(reading(header(0x08, {~0u, ~0u, ~0u})) ==
        "f: its sizes [4294967295, 4294967295, 4294967295] do not fit 64 bits");
  CHECK(reading(header(0x08, {0, ~0u, ~0u, ~0u})).find("do not fit 64 bits") != std::string::npos);
  CHECK(error_of([&] { data::read_idx(reading.t / "no"); }, reading.t.folder) == "no: there is no such file");
  CHECK(error_of([&] { data::read_idx(reading.t.folder); }) == reading.t.folder + ": not a file, but a folder");
  CHECK(error_of([&] { data::read_idx("/dev/zero"); }) == "/dev/zero: not a file that can be read");
}

TEST_CASE("sizes that the file cannot hold take no memory") {
  Reading reading;
  reset_peak_memory(Device::cpu());
  const int64_t before = memory_stats(Device::cpu()).peak;
  CHECK(
      reading(header(0x08, {1u << 31, 1u << 31}) + "abc") ==
      "f: expected 4611686018427387904 bytes of elements for [2147483648, 2147483648] (u8), which a file of this size "
      "cannot hold; it is truncated or damaged");
  CHECK(memory_stats(Device::cpu()).peak == before);
}

TEST_CASE("the subset that comes with Halftone") {
  if (!has_zlib()) HT_SKIP("no zlib in this build");
  for (const bool train : {true, false}) {
    const auto set = data::mnist(subset, {.train = train});
    const int64_t n = train ? 6000 : 1000;
    CHECK(set.x.shape() == Shape{n, 1, 28, 28});
    CHECK(set.x.dtype() == DType::f32);
    CHECK(set.target.shape() == Shape{n});
    CHECK(set.target.dtype() == DType::i64);
    CHECK(set.x.max().item() == 1);
    CHECK(set.x.mean().item() == Approx(0.286).margin(0.01));
    std::vector<int64_t> of_class(10);
    for (const auto label : set.target.to_vector<int64_t>()) ++of_class[static_cast<size_t>(label)];
    CHECK(of_class == std::vector<int64_t>(10, n / 10));
  }
  const auto scaled = data::mnist(subset, {.train = false, .mean = 0.286, .std = 0.353});
  CHECK(scaled.x.mean().item() == Approx(0).margin(0.05));
  CHECK(scaled.x.select(0, 0).max().item<float>() <= static_cast<float>((1 - 0.286) / 0.353));
}

TEST_CASE("a compressed file cut at any byte, or damaged, is one sentence") {
  if (!has_zlib()) HT_SKIP("no zlib in this build");
  Reading reading;
  const std::string whole = bytes_of(subset + "/t10k-labels-idx1-ubyte.gz");
  CHECK(reading(whole).empty());
  const std::string early = "f: its compressed data end too early; the file is truncated";
  for (size_t size = 2; size < whole.size(); ++size) {
    INFO("cut at " << size);
    REQUIRE(reading(whole.substr(0, size)) == early);
  }
  CHECK(reading(whole.substr(0, 1)) == "f: not an IDX file: it has 1 bytes, and the header alone has more");
  CHECK(reading(whole + "x").find("its compressed data") != std::string::npos);
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string damaged = whole;
    damaged[at] = static_cast<char>(damaged[at] ^ (1 << at % 8));
    const std::string error = reading(damaged);
    INFO("byte " << at << ": " << error);
    // The header's time and system, and the bits after the last code, mean nothing.
    REQUIRE((error.empty() ? at < 10 || at == whole.size() - 9 : error.starts_with("f: ")));
  }
}

TEST_CASE("without zlib, a compressed file says so") {
  if (has_zlib()) HT_SKIP("this build has zlib");
  Reading reading;
  CHECK(reading(bytes_of(subset + "/t10k-labels-idx1-ubyte.gz")) ==
        "f: is compressed, and this build has no zlib; configure with -DHALFTONE_ZLIB=ON, or run gunzip on it");
}

TEST_CASE("several compressed parts are one file, and a claim beyond what they can hold takes no memory") {
  if (!has_zlib()) HT_SKIP("no zlib in this build");
  Reading reading;
  const std::string whole = bytes_of(subset + "/t10k-labels-idx1-ubyte.gz");
  CHECK(reading(whole + whole) == "f: expected 1000 bytes of elements for [1000] (u8), and there are more");
  // A .gz of 31 bytes whose only block holds, as it is, the header [2^31]; then come the checksum and the size.
  const std::string content = header(0x08, {1u << 31});
  std::string gz("\x1f\x8b\x08\0\0\0\0\0\0\xff\x01\x08\0\xf7\xff", 15);
  gz += content + std::string("\217\302\110\131\010\000\000\000", 8);
  reset_peak_memory(Device::cpu());
  const int64_t before = memory_stats(Device::cpu()).peak;
  CHECK(reading(gz) ==
        "f: expected 2147483648 bytes of elements for [2147483648] (u8), which a file of this size cannot "
        "hold; it is truncated or damaged");
  CHECK(memory_stats(Device::cpu()).peak == before);
}

TEST_CASE("a small file that is cut or changed anywhere, plain and compressed") {
  const auto bytes = [](const std::string& path) {
    const Tensor t = data::read_idx(path);
    return t.numel() * static_cast<int64_t>(size_of(t.dtype()));
  };
  const std::string plain = header(0x0d, {1, 2}) + std::string("\x3f\xc0\0\0\xc0\x04\0\0", 8);
  try_damage(plain, bytes);
  if (!has_zlib()) HT_SKIP("no zlib in this build");
  const auto number = [](uint32_t v, int width) {
    std::string s;
    for (int i = 0; i < width; ++i) s += static_cast<char>(v >> (8 * i));
    return s;
  };
  const auto size = static_cast<uint32_t>(plain.size());
  const std::string stored = std::string("\x1f\x8b\x08\0\0\0\0\0\0\xff\x01", 11) + number(size, 2) + number(~size, 2) + plain +
                             number(io::crc32(plain.data(), plain.size()), 4) + number(size, 4);
  const Temporary t;
  write_bytes(t / "f", stored);
  CHECK(bytes(t / "f") == 8);
  try_damage(stored, bytes, {.ratio = 1032, .slack = 1 << 17});
}

TEST_CASE("a folder without data says where to get it") {
  const Temporary t;
  const auto error = [&](const std::string& folder, bool train = true) {
    return error_of([&] { data::mnist(folder, {.train = train}); }, t.folder);
  };
  CHECK(error(t / "none") == std::string("none: there is no such folder") + cure);
  CHECK(error(t.folder) == t.folder + ": has no train-images-idx3-ubyte and no train-images-idx3-ubyte.gz" + cure);
  write_bytes(t / "t10k-images-idx3-ubyte", "");
  CHECK(error(t.folder, false) == t.folder + ": has no t10k-labels-idx1-ubyte and no t10k-labels-idx1-ubyte.gz" + cure);
}

TEST_CASE("files that do not belong together are refused") {
  const Temporary t;
  const std::string images = t / "train-images-idx3-ubyte", labels = t / "train-labels-idx1-ubyte";
  const auto error = [&] { return error_of([&] { data::mnist(t.folder); }, t.folder); };
  const auto pictures = [](uint32_t n, uint32_t side) {
    return header(8, {n, side, side}) + std::string(n * side * side, '\xff');
  };
  write_bytes(images, pictures(2, 28));
  write_bytes(labels, header(8, {2}) + std::string("\0\x9", 2));
  CHECK(error().empty());
  CHECK(data::mnist(t.folder).target.to_vector<int>() == std::vector<int>{0, 9});
  write_bytes(labels, header(8, {3}) + std::string(3, '\1'));
  CHECK(error() == "train-labels-idx1-ubyte: expected 2 labels, as many as there are images, got 3");
  write_bytes(labels, header(8, {2}) + "\1\xa");
  CHECK(error() == "train-labels-idx1-ubyte: expected labels of 0 to 9, got 10 for image 1");
  write_bytes(labels, header(8, {2, 1}) + "\1\1");
  CHECK(error() == "train-labels-idx1-ubyte: expected labels [n] (u8), got [2, 1] (u8)");
  write_bytes(images, pictures(2, 27));
  CHECK(error() == "train-images-idx3-ubyte: expected images [n, 28, 28] (u8), got [2, 27, 27] (u8)");
  write_bytes(images, pictures(0, 28));
  CHECK(error() == "train-images-idx3-ubyte: holds no images");
  CHECK(error_of([&] { data::mnist(t.folder, {.std = 0}); }) == "mnist: expected std above 0, got 0");
}

TEST_CASE("random bytes after a good header never do harm") {
  Reading reading;
  const int64_t rounds = std::getenv("HALFTONE_FULL") ? 100000 : 3000;
  for (int64_t round = 0; round < rounds; ++round) {
    const Philox4 r = philox(21, static_cast<uint64_t>(round));
    std::string bytes =
        header(static_cast<uint8_t>(8 + r.v[0] % 8), {r.v[1] % 5, r.v[2] % 4}) + std::string(r.v[3] % 40, 'x');
    const Philox4 q = philox(22, static_cast<uint64_t>(round));
    bytes[q.v[0] % bytes.size()] = static_cast<char>(q.v[1]);
    if (q.v[2] % 8 == 0) bytes.replace(0, 2, "\x1f\x8b");
    const std::string error = reading(bytes);
    INFO("round " << round << ": " << error);
    REQUIRE((error.empty() || error.starts_with("f: ")));
  }
}
