// Event files: byte for byte what TensorBoard's own writer makes of the same values; and what a file holds is on the disk.
#include "halftone/io/tensorboard.h"

#include <cmath>
#include <cstring>

#include "halftone/io/crc.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/faults.h"
#include "halftone/tests/temporary.h"

using namespace halftone;

namespace {

// The messages of an event file, whose checks must be right.
std::vector<std::string> records(const std::string& bytes) {
  const auto read = [&](size_t at, size_t n) {
    uint64_t v = 0;
    std::memcpy(&v, bytes.data() + at, n);
    return v;
  };
  const auto check = [&](size_t at, size_t n) {
    const uint32_t c = io::crc32c(bytes.data() + at, n);
    return static_cast<uint32_t>((c >> 15 | c << 17) + 0xa282ead8u);
  };
  std::vector<std::string> all;
  for (size_t at = 0; at < bytes.size();) {
    const size_t length = read(at, 8);
    REQUIRE(read(at + 8, 4) == check(at, 8));
    REQUIRE(bytes.size() - at >= length + 16);
    REQUIRE(read(at + 12 + length, 4) == check(at + 12, length));
    all.push_back(bytes.substr(at + 12, length));
    at += length + 16;
  }
  return all;
}
io::TensorBoardOptions fixed_clock() {
  return {.clock = [] { return 1000.5; }};
}

}  // namespace

TEST_CASE("an event file is TensorBoard's own, byte for byte") {
  const Temporary t;
  std::string path;
  {
    io::TensorBoard board(t / "runs/one", fixed_clock());
    path = board.path();
    board.scalar("loss", .1, 3);
    board.text("notes", "**fine** \xc3\xa4", 300);
    board.histogram("weights", arange(31).to(DType::f64) / 2 + 1, 4);
    board.image("digit", (arange(6) * 51).to(DType::u8).view({1, 2, 3}), 5);
  }
  CHECK(path.find("/runs/one/events.out.tfevents.1000.") != std::string::npos);
  const std::string golden = bytes_of(std::string(HALFTONE_SOURCE_DIR) + "/tests/golden/events");
  CHECK(records(golden).size() == 5);
  CHECK(records(bytes_of(path)) == records(golden));
  CHECK(bytes_of(path) == golden);
}

TEST_CASE("what was written is there when the call returns, and two boards do not meet") {
  const Temporary t;
  io::TensorBoard a(t.folder), b(t.folder, {.suffix = ".b"});
  CHECK(a.path() != b.path());
  CHECK(b.path().ends_with(".b"));
  for (int64_t step = 0; step < 3; ++step) {
    a.scalar("loss", tensor(1.f), step);
    CHECK(records(bytes_of(a.path())).size() == static_cast<size_t>(step) + 2);
  }
  CHECK(records(bytes_of(b.path())).size() == 1);
}

TEST_CASE("histograms of one value, of none, of huge ones, and with NaN") {
  const Temporary t;
  io::TensorBoard board(t.folder, fixed_clock());
  const auto last = [&] { return records(bytes_of(board.path())).back(); };
  const auto packed = [](std::initializer_list<double> values) {
    std::string s;
    for (const double v : values) s.append(reinterpret_cast<const char*>(&v), 8);
    return s;
  };
  board.histogram("h", tensor({2.f, NAN, 2.f, INFINITY}), 1);
  CHECK(last().find(std::string("\x32\x08") + packed({2}) + "\x3a\x08" + packed({2})) != std::string::npos);  // limits, counts
  board.histogram("h", zeros({0}), 1);
  CHECK(last().find(std::string("\x32\0\x3a\0", 4)) != std::string::npos);
  board.histogram("h", tensor({-1.7e308, 1.7e308, 0.}), 1);
  std::string counts;
  for (int i = 0; i < 30; ++i) counts += packed({i == 0 || i == 15 || i == 29 ? 1. : 0.});
  CHECK(last().find(counts) != std::string::npos);
}

TEST_CASE("images of floats, in colour; what is no image is refused") {
  const Temporary t;
  io::TensorBoard board(t.folder, fixed_clock());
  board.image("a", (arange(12) * 20).to(DType::u8).view({3, 2, 2}), 1);
  board.image("a", (arange(12) * 20).to(DType::f32).view({3, 2, 2}) / 255, 1);
  const auto all = records(bytes_of(board.path()));
  CHECK(all[1] == all[2]);
  board.image("a", tensor({-1.f, 2.f, NAN}).view({1, 1, 3}), 1);
  CHECK(records(bytes_of(board.path())).back().find(std::string("\0\0\xff\0", 4)) != std::string::npos);  // a line without a filter
  CHECK(error_of([&] { board.image("a", ones({2, 2}), 1); }) == "encode_png: expected an image [1 to 4, h, w] (u8), got [2, 2] (u8)");
  CHECK(error_of([&] { board.image("a", arange(4).view({1, 2, 2}), 1); }) ==
        "TensorBoard: expected an image of u8 or floats, got [1, 2, 2] (i64)");
  CHECK_FALSE(error_of([&] { board.scalar("a", ones({2}), 1); }).empty());
}

TEST_CASE("a full disk is an error, and later records are whole again") {
  const Temporary t;
  Faults faults;
  const io::UseFileOps use(faults);
  io::TensorBoard board(t.folder, fixed_clock());
  faults.fail_at = static_cast<int>(faults.calls.size());
  CHECK(error_of([&] { board.scalar("a", 1, 1); }).find(": cannot write: No space left on device") != std::string::npos);
  board.scalar("a", 1, 2);
  CHECK(records(bytes_of(board.path())).size() == 2);
}
