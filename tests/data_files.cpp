// Readers of CIFAR, text and images: what they hold, one sentence for what is wrong, and files cut and changed anywhere.
#include "halftone/core/version.h"
#include "halftone/data/cifar.h"
#include "halftone/data/csv.h"
#include "halftone/data/image.h"
#include "halftone/data/loader.h"
#include "halftone/data/text.h"
#include "halftone/io/crc.h"
#include "halftone/io/png.h"
#include "halftone/ops/ops.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/damage.h"

using namespace halftone;
using namespace halftone::data;
using Numbers = std::vector<int64_t>;

namespace {

bool has_png() { return std::string(build_info()).find("PNG") != std::string::npos; }

// `n` CIFAR records whose pixels count on.
std::string records(int n, const std::string& labels) {
  std::string bytes;
  for (int i = 0; i < n; ++i) {
    bytes += labels;
    for (int p = 0; p < 3072; ++p) bytes += static_cast<char>(i + p % 251);
  }
  return bytes;
}

int64_t pixels_of(const std::string& path) { return read_image(path).numel(); }

}  // namespace

TEST_CASE("CIFAR-10 and CIFAR-100") {
  const Temporary t;
  for (int i = 1; i <= 5; ++i) write_bytes(t / text::cat("data_batch_", i, ".bin"), records(2, std::string(1, static_cast<char>(i))));
  write_bytes(t / "test_batch.bin", records(3, "\7"));
  const TensorDataset train = cifar10(t.folder);
  CHECK(train.x.shape() == Shape{10, 3, 32, 32});
  CHECK(train.x.dtype() == DType::u8);
  CHECK(train.target.to_vector<int64_t>() == Numbers{1, 1, 2, 2, 3, 3, 4, 4, 5, 5});
  CHECK(train.x[3][1][0][5].item<int>() == 1 + (1024 + 5) % 251);
  CHECK(cifar10(t.folder, {.train = false}).size() == 3);

  write_bytes(t / "train.bin", records(2, {5, 99}));
  write_bytes(t / "test.bin", records(1, {19, 3}));
  CHECK(cifar100(t.folder).target.to_vector<int64_t>() == Numbers{99, 99});
  CHECK(cifar100(t.folder, {.train = false, .fine = false}).target.to_vector<int64_t>() == Numbers{19});

  const auto error = [&](bool train_set = false) { return error_of([&] { cifar10(t.folder, {.train = train_set}); }, t.folder); };
  write_bytes(t / "test_batch.bin", records(1, "\7") + "x");
  CHECK(error() == "test_batch.bin: expected records of 3073 bytes, got 3074 bytes; it is truncated, or not CIFAR-10 in its binary version");
  write_bytes(t / "test_batch.bin", "");
  CHECK(error().find("test_batch.bin: expected records of 3073 bytes, got 0 bytes") == 0);
  write_bytes(t / "test_batch.bin", records(2, "\xa"));
  CHECK(error() == "test_batch.bin: expected labels of 0 to 9, got 10 for image 0");
  std::filesystem::remove(t / "data_batch_4.bin");
  CHECK(error(true).find(": has no data_batch_4.bin; CIFAR-10 is at https://www.cs.toronto.edu/~kriz/cifar.html") != std::string::npos);
  CHECK(error_of([&] { cifar10(t / "no"); }, t.folder).find("no: there is no such folder; CIFAR-10 is at") == 0);
}

TEST_CASE("characters as numbers and back") {
  const std::string text = "b\xc3\xa4" "ab\xe2\x82\xac\xf0\x9f\x98\x80\n";  // b, a umlaut, a, b, euro, a face, a new line
  const CharVocabulary vocabulary(text);
  CHECK(vocabulary.size() == 6);
  const Tensor numbers = vocabulary.encode(text);
  CHECK(numbers.to_vector<int64_t>() == Numbers{2, 3, 1, 2, 4, 5, 0});
  CHECK(vocabulary.decode(numbers) == text);
  CHECK(vocabulary.decode(numbers.to(DType::i32).view({7, 1})) == text);
  CHECK(error_of([&] { vocabulary.encode("ax"); }) == "encode: the character 'x' is not in the vocabulary");
  CHECK(error_of([&] { vocabulary.decode(tensor<int64_t>({6})); }) == "decode: expected numbers in [0, 6), got 6");
  CHECK(error_of([&] { vocabulary.decode(ones({1})); }) == "decode: expected integers, got [1] (f32)");
  CHECK(error_of([] { CharVocabulary(""); }) == "CharVocabulary: the text is empty");
  // A stray byte, overlong forms, a surrogate, beyond the last character, an end too early.
  for (const char* bad : {"a\x80", "a\xc1\xbf", "a\xe0\x9f\xbf", "a\xed\xa0\x80", "a\xf4\x90\x80\x80", "a\xe2\x82", "a\xc3("})
    CHECK(error_of([&] { CharVocabulary v(bad); }) == "CharVocabulary: is not text in UTF-8; the first fault is at byte 1");
  const Temporary t;
  write_bytes(t / "text", text);
  CHECK(read_text(t / "text") == text);
  write_bytes(t / "text", "\xff");
  CHECK(error_of([&] { read_text(t / "text"); }, t.folder) == "text: is not text in UTF-8; the first fault is at byte 0");
}

TEST_CASE("windows of a text") {
  const TextWindows windows(arange(10), 3, 2);
  CHECK(windows.size() == 4);
  const Batch batch = windows.get(Numbers{3, 0});
  CHECK(batch.x.to_vector<int64_t>() == Numbers{6, 7, 8, 0, 1, 2});
  CHECK(batch.target.to_vector<int64_t>() == Numbers{7, 8, 9, 1, 2, 3});
  CHECK(TextWindows(arange(4), 3).size() == 1);
  CHECK(error_of([&] { windows.get(Numbers{4}); }) == "TextWindows: index 4 is out of range for 4 examples");
  CHECK(error_of([] { TextWindows(arange(3), 3); }) == "TextWindows: expected more tokens than a window's 3, got 3");
  CHECK(error_of([] { TextWindows(ones({3}), 1); }) == "TextWindows: expected tokens [n] (i64), got [3] (f32)");
  CHECK(error_of([] { TextWindows(arange(3), 1, 0); }) == "TextWindows: expected length and stride above 0, got 1 and 0");
}

TEST_CASE("tables of numbers and of texts") {
  const Temporary t;
  const auto read = [&](const std::string& text, const CsvOptions& o = {}) {
    write_bytes(t / "f", text);
    return read_csv(t / "f", o);
  };
  const Table iris = read("\xef\xbb\xbflength,width,\"the, \"\"species\"\"\"\r\n5.1, 3.5 ,setosa\r\n\r\n+7,-3.2e0,\"versi\ncolor\"\r\n4.9,3,setosa",
                          {.classes = {"the, \"species\""}});
  CHECK(iris.names == std::vector<std::string>{"length", "width", "the, \"species\""});
  CHECK(iris.values.shape() == Shape{3, 3});
  CHECK(iris.values.dtype() == DType::f64);
  CHECK(iris.columns({"width", "length"}).to_vector<double>() == std::vector<double>{3.5, 5.1, -3.2, 7, 3, 4.9});
  CHECK(iris.column("the, \"species\"").to_vector<int64_t>() == Numbers{0, 1, 0});
  CHECK(iris.classes.at("the, \"species\"") == std::vector<std::string>{"setosa", "versi\ncolor"});
  CHECK(read("1;2\n3;4\n", {.separator = ';', .header = false}).column("1").to_vector<int64_t>() == Numbers{2, 4});
  CHECK(read("a,b\n,2\n3, \n", {.missing = -1}).values.to_vector<int64_t>() == Numbers{-1, 2, 3, -1});
  CHECK(read("a,b\n").values.shape() == Shape{0, 2});
  CHECK(read("a,b\n1,\n", {.missing = 0}).values.shape() == Shape{1, 2});

  const auto error = [&](const std::string& text, const CsvOptions& o = {}) { return error_of([&] { read(text, o); }, t.folder); };
  CHECK(error("") == "f: is empty");
  CHECK(error("\n\r\n") == "f: is empty");
  CHECK(error("a,b\n1,2\n\n3\n") == "f: line 4: expected 2 fields, as in the first line, got 1");
  CHECK(error("a,b\n\"1\n\",2\n1,x\n", {.classes = {"a"}}) == "f: line 4, column 'b': expected a number, got 'x'; .classes names columns of texts");
  CHECK(error("a\n1\n \n") == "f: line 3, column 'a': expected a number, got ' '; .missing gives such fields a value");
  CHECK(error("a\n1e999\n") == "f: line 2, column 'a': expected a number, got '1e999'; .classes names columns of texts");
  CHECK(error("a\n+-1\n").find("expected a number, got '+-1'") != std::string::npos);
  CHECK(error("a\n\"x\ny\"\n") == "f: line 2, column 'a': expected a number, got 'x?y'; .classes names columns of texts");
  CHECK(error("a,b\n1,\"2\n") == "f: line 2: a quotation mark is not closed");
  CHECK(error("a,b\n\"1\"2,3\n") == "f: line 2: expected ',' behind a quotation mark that closes");
  CHECK(error("a,a\n") == "f: two columns are named 'a'");
  CHECK(error("a\n", {.classes = {"b"}}) == "f: has no column 'b', which .classes names");
  CHECK(error("a\n", {.separator = '"'}) == "read_csv: a separator cannot be a quotation mark or a line break");
  CHECK(error_of([&] { iris.column("x"); }) == "Table: there is no column 'x'");
  CHECK(error_of([&] { read_csv(t / "no"); }, t.folder) == "no: there is no such file");
  const auto fields = [](const std::string& path) { return read_csv(path, {.classes = {"b"}}).values.numel(); };
  try_damage("a,b\n\"1\",2\n3,\"x\"\n", fields);
}

TEST_CASE("PGM and PPM") {
  const Temporary t;
  const auto read = [&](const std::string& bytes) {
    write_bytes(t / "f", bytes);
    return read_image(t / "f");
  };
  const Tensor gray = read("P5\n# made by hand\n2 # wide\n3\t255\n" "abcdef");
  CHECK(gray.shape() == Shape{1, 3, 2});
  CHECK(gray.to_vector<int>() == std::vector<int>{97, 98, 99, 100, 101, 102});
  const Tensor color = read("P6 2 1 255 abcdef");
  CHECK(color.shape() == Shape{3, 1, 2});
  CHECK(color.to_vector<int>() == std::vector<int>{97, 100, 98, 101, 99, 102});
  CHECK(read(std::string("P5 3 1 4 \0\1\4", 12)).to_vector<int>() == std::vector<int>{0, 64, 255});
  CHECK(read(std::string("P5 2 1 65535 \xff\xff\x80\x80", 17)).to_vector<int>() == std::vector<int>{255, 128});
  for (const Tensor& image : {gray, color}) {
    write_pnm(t / "g", image);
    CHECK(read_image(t / "g").to_vector<int>() == image.to_vector<int>());
  }
  const auto error = [&](const std::string& bytes) { return error_of([&] { read(bytes); }, t.folder); };
  CHECK(error("P6 2 1 255 abcde") == "f: expected 6 bytes of pixels for 1 x 2 with 3 channels, got 5");
  CHECK(error("P5 2 1 255 abc") == "f: expected 2 bytes of pixels for 1 x 2 with 1 channel, got 3");
  CHECK(error("P5 2000000 1 255 a") == "f: its width is beyond 1000000");
  CHECK(error("P5 1 1 99999 a") == "f: its largest value is beyond 65535");
  CHECK(error("P5 0 1 255 ") == "f: expected a width above 0 in its header");
  CHECK(error("P5 2 x 255 ") == "f: expected a height above 0 in its header");
  CHECK(error("P5 2 1 255") == "f: ends within its header");
  CHECK(error("P5 1 1 4 a") == "f: has a sample of 97, above its largest value 4");
  CHECK(error("P3 1 1 1 1 1 1") == "f: not an image; expected PNG, PGM (P5) or PPM (P6)");
  CHECK(error_of([&] { write_pnm(t / "g", ones({1, 2, 2})); }) == "write_pnm: expected an image [1 or 3, h, w] (u8), got [1, 2, 2] (f32)");
  try_damage("P6\n# c\n2 1\n255\nabcdef", pixels_of);
}

TEST_CASE("PNG") {
  if (!has_png()) HT_SKIP("built without libpng");
  const Temporary t;
  for (const int channels : {1, 3}) {
    const Tensor image = randint(0, 256, {channels, 5, 7}).to(DType::u8);
    io::save_png(t / "f", image);
    CHECK(read_image(t / "f").shape() == image.shape());
    CHECK(read_image(t / "f").to_vector<int>() == image.to_vector<int>());
  }
  // Transparent pixels lie on white.
  io::save_png(t / "f", tensor<uint8_t>({100, 100, 255, 0}).view({2, 1, 2}));
  CHECK(read_image(t / "f").to_vector<int>() == std::vector<int>{100, 255});
  // More than one stored block.
  const Tensor large = randint(0, 256, {3, 200, 150}).to(DType::u8);
  io::save_png(t / "f", large);
  CHECK(read_image(t / "f").to_vector<int>() == large.to_vector<int>());

  io::save_png(t / "f", arange(12).to(DType::u8).view({3, 2, 2}));
  const std::string whole = bytes_of(t / "f");
  std::string huge = whole;
  huge[18] = huge[22] = '\x10';  // that many rows, each as long
  const auto check = io::crc32(huge.data() + 12, 17);
  for (int i = 0; i < 4; ++i) huge[static_cast<size_t>(29 + i)] = static_cast<char>(check >> (24 - 8 * i));
  write_bytes(t / "f", huge);
  CHECK(error_of([&] { read_image(t / "f"); }, t.folder) ==
        "f: claims 4098 x 4098 pixels, which a file of this size cannot hold; it is truncated or damaged");
  write_bytes(t / "f", whole.substr(0, 50));
  CHECK(error_of([&] { read_image(t / "f"); }, t.folder).find("f: cannot be read as PNG: ") == 0);
  try_damage(whole, pixels_of, {.ratio = 128});
}

TEST_CASE("folders of images, one for each class") {
  const Temporary t;
  for (const char* folder : {"cats/more", "dogs", "empty"}) std::filesystem::create_directories(t / folder);
  const auto image = [](int64_t channels) { return randint(0, 256, {channels, 4, 6}).to(DType::u8); };
  const Tensor a = image(3), b = image(3), gray = image(1);
  write_pnm(t / "cats/2.ppm", a);
  write_pnm(t / "cats/more/1.PPM", b);
  write_pnm(t / "dogs/1.pgm", gray);
  write_bytes(t / "dogs/notes.txt", "");
  const ImageFolder set(t.folder);
  CHECK(set.classes() == std::vector<std::string>{"cats", "dogs"});
  CHECK(set.size() == 3);
  const Batch batch = set.get(Numbers{2, 0});
  CHECK(batch.target.to_vector<int64_t>() == Numbers{1, 0});
  CHECK(batch.x.shape() == Shape{2, 3, 4, 6});
  CHECK(batch.x[1].to_vector<int>() == a.to_vector<int>());
  for (int64_t c = 0; c < 3; ++c) CHECK(batch.x[0][c].to_vector<int>() == gray.to_vector<int>());
  const Tensor luma = ImageFolder(t.folder, {.channels = 1}).get(Numbers{0}).x;
  const auto weigh = [&](int64_t y, int64_t x) { return .299 * a[0][y][x].item() + .587 * a[1][y][x].item() + .114 * a[2][y][x].item(); };
  CHECK(luma[0][0][1][2].item() == Approx(weigh(1, 2)).margin(.51));
  const Tensor small = ImageFolder(t.folder, {.size = Size2{2, 3}}).get(Numbers{0, 1, 2}).x;
  CHECK(small.shape() == Shape{3, 3, 2, 3});
  CHECK(small[0][0][0][0].item() == Approx((a[0][0][0].item() + a[0][0][1].item() + a[0][1][0].item() + a[0][1][1].item()) / 4).margin(.51));

  write_pnm(t / "cats/2.ppm", ones({3, 2, 2}).to(DType::u8));
  CHECK(error_of([&] { set.get(Numbers{0, 1}); }, t.folder) ==
        "cats/more/1.PPM: expected an image of [3, 2, 2] like the others of the batch, got [3, 4, 6]; ImageFolder's .size makes all equal");
  CHECK(error_of([&] { ImageFolder(t / "empty"); }, t.folder) ==
        "empty: expected a subfolder for each class, with .png, .ppm or .pgm images in it");
  CHECK(error_of([&] { ImageFolder(t / "no"); }, t.folder) == "no: there is no such folder");
  CHECK(error_of([&] { ImageFolder(t.folder, {.channels = 2}); }) == "ImageFolder: expected 1 or 3 channels, got 2");
  // A worker that meets a broken file says so where its batch is asked for.
  write_bytes(t / "dogs/1.pgm", "P5");
  DataLoader loader(ImageFolder(t.folder, {.size = Size2(4)}), {.workers = 1});
  int64_t batches = 0;
  CHECK(error_of([&] { for ([[maybe_unused]] auto& item : loader) ++batches; }, t.folder) == "dogs/1.pgm: expected a width above 0 in its header");
  CHECK(batches == 2);
}
