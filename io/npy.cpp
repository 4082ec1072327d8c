// The header of .npy is the text of a Python dict: a tokenizer reads it, and every size is held against the file's before memory is
// taken. Of a zip archive the central directory counts; its entries must lie one behind the other.
#include "halftone/io/npy.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <unordered_set>

#include "halftone/core/printable.h"
#include "halftone/io/crc.h"
#include "halftone/io/file.h"

namespace halftone::io {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr std::string_view magic{"\x93NUMPY", 6};

// Little-endian integers in and out of bytes.
template <class T>
T integer_at(std::string_view bytes, size_t at) {
  T v;
  std::memcpy(&v, bytes.data() + at, sizeof v);
  return v;
}
template <class T>
void put(std::string& to, T v) {
  to.append(reinterpret_cast<const char*>(&v), sizeof v);
}

struct Header {
  DType dtype = DType::f32;
  bool swapped = false, fortran = false;
  Shape shape;
};

DType dtype_of_code(const std::string& who, std::string_view code) {
  constexpr std::pair<std::string_view, DType> known[] = {{"f2", DType::f16}, {"f4", DType::f32}, {"f8", DType::f64}, {"i4", DType::i32},
                                                          {"i8", DType::i64}, {"u1", DType::u8},  {"b1", DType::b8}};
  for (const auto& [name, dtype] : known)
    if (name == code) return dtype;
  HT_CHECK(!code.starts_with('O'), who, ": holds Python objects, which are never read: they would run code");
  throw Error(text::cat(who, ": is of NumPy's dtype '", text::printable(code, 16), "', which Halftone does not have; convert it with astype"));
}

// {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }
class HeaderReader {
 public:
  HeaderReader(std::string_view text, const std::string& who) : text_(text), who_(who) {}
  Header read() {
    Header h;
    std::unordered_set<std::string_view> keys;
    expect('{');
    while (!take('}')) {
      const std::string_view key = string("a name");
      check(keys.insert(key).second, "each name once");
      expect(':');
      if (key == "descr")
        dtype(h);
      else if (key == "fortran_order")
        h.fortran = boolean();
      else if (key == "shape")
        shape(h.shape);
      else
        check(false, "descr, fortran_order and shape");
      if (!take(',')) {
        expect('}');
        break;
      }
    }
    skip();
    check(at_ == text_.size(), "nothing behind the }");
    check(keys.size() == 3, "descr, fortran_order and shape");
    return h;
  }

 private:
  void check(bool good, const char* expected) const {
    HT_CHECK(good, who_, ": expected ", expected, " in its header, at character ", at_);
  }
  void skip() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n' || text_[at_] == '\t')) ++at_;
  }
  bool take(char c) {
    skip();
    const bool there = at_ < text_.size() && text_[at_] == c;
    at_ += there;
    return there;
  }
  void expect(char c) {
    const char wanted[] = {'\'', c, '\'', 0};
    check(take(c), wanted);
  }
  std::string_view string(const char* what) {
    skip();
    check(at_ < text_.size() && (text_[at_] == '\'' || text_[at_] == '"'), what);
    const char quote = text_[at_++];
    const size_t end = text_.find(quote, at_);
    check(end != std::string_view::npos, "the end of a text");
    const std::string_view s = text_.substr(at_, end - at_);
    check(s.find('\\') == std::string_view::npos, "no backslash");
    at_ = end + 1;
    return s;
  }
  bool boolean() {
    skip();
    for (const std::string_view word : {"True", "False"})
      if (text_.substr(at_).starts_with(word)) {
        at_ += word.size();
        return word == "True";
      }
    check(false, "True or False");
    return false;
  }
  void dtype(Header& h) {
    skip();
    HT_CHECK(at_ >= text_.size() || text_[at_] != '[', who_, ": holds records of named fields, which Halftone does not have");
    std::string_view code = string("a dtype");
    const char order = code.empty() ? ' ' : code[0];
    if (order == '<' || order == '>' || order == '|' || order == '=') code.remove_prefix(1);
    h.dtype = dtype_of_code(who_, code);
    h.swapped = order == '>' && size_of(h.dtype) > 1;
  }
  void shape(Shape& s) {
    expect('(');
    bool comma = true;  // (3) is a number, (3,) a tuple
    while (!take(')')) {
      check(comma, "',' or ')'");
      skip();
      int64_t d = 0;
      const size_t begin = at_;
      for (; at_ < text_.size() && text_[at_] >= '0' && text_[at_] <= '9'; ++at_)
        check(!__builtin_mul_overflow(d, 10, &d) && !__builtin_add_overflow(d, text_[at_] - '0', &d), "sizes of 63 bits");
      check(at_ > begin, "a size");
      HT_CHECK(s.rank() < max_rank, who_, ": has more than ", max_rank, " dimensions");
      s.push_back(d);
      comma = take(',');
    }
    check(s.rank() != 1 || comma, "',' behind the only size");
  }

  std::string_view text_;
  const std::string& who_;
  size_t at_ = 0;
};

// The bytes of elements; zeros count last, lest one hides that the other sizes are beyond all measure.
int64_t bytes_of(const std::string& who, const Header& h) {
  auto bytes = static_cast<int64_t>(size_of(h.dtype));
  bool empty = false, fits = true;
  for (const int64_t d : h.shape) {
    empty = empty || d == 0;
    if (d != 0) fits = fits && !__builtin_mul_overflow(bytes, d, &bytes);
  }
  HT_CHECK(fits, who, ": has shape ", h.shape, ", whose size does not fit 64 bits");
  return empty ? 0 : bytes;
}

// The array in bytes [begin, end) of a file, and what their CRC-32 is.
Tensor read_array(const InputFile& file, int64_t begin, int64_t end, const std::string& who, uint32_t* check = nullptr) {
  constexpr int64_t longest_header = 65535;
  const int64_t size = end - begin;
  std::string head(static_cast<size_t>(std::min<int64_t>(size, 12)), '\0');
  file.read(head.data(), static_cast<int64_t>(head.size()), begin);
  HT_CHECK(head.starts_with(magic) && head.size() >= 10, who, ": not an .npy file");
  const int version = static_cast<uint8_t>(head[6]);
  HT_CHECK(version >= 1 && version <= 3 && head[7] == 0, who, ": is of the format's version ", version, ".",
           static_cast<int>(static_cast<uint8_t>(head[7])), "; expected 1.0, 2.0 or 3.0");
  const int64_t fixed = version == 1 ? 10 : 12;
  HT_CHECK(size >= fixed, who, ": ends within its header");
  const int64_t length = version == 1 ? int64_t{integer_at<uint16_t>(head, 8)} : int64_t{integer_at<uint32_t>(head, 8)};
  HT_CHECK(length <= size - fixed, who, ": expected a header of ", length, " bytes, the file has ", size - fixed, " there");
  HT_CHECK(length <= longest_header, who, ": its header of ", length, " bytes is longer than ", longest_header);
  head.resize(static_cast<size_t>(fixed + length));
  file.read(head.data(), fixed + length, begin);
  const Header h = HeaderReader(std::string_view(head).substr(static_cast<size_t>(fixed)), who).read();
  const int64_t bytes = bytes_of(who, h), found = size - fixed - length;
  HT_CHECK(bytes == found, who, ": expected ", bytes, " bytes of elements for ", h.shape, " (", h.dtype, "), got ", found);

  Shape stored = h.shape;
  if (h.fortran) std::reverse(&stored[0], &stored[0] + stored.rank());
  Tensor t = Tensor::empty(Meta(stored, h.dtype, Device::cpu()));
  auto* elements = static_cast<uint8_t*>(t.raw_data());
  file.read(elements, bytes, begin + fixed + length);
  if (check) *check = crc32(elements, static_cast<size_t>(bytes), crc32(head.data(), head.size()));
  const size_t width = size_of(h.dtype);
  if (h.swapped)
    for (uint8_t* e = elements; e < elements + bytes; e += width) std::reverse(e, e + width);
  HT_CHECK(h.dtype != DType::b8 || std::all_of(elements, elements + bytes, [](uint8_t b) { return b <= 1; }), who,
           ": is of dtype bool and has a byte that is neither 0 nor 1");
  if (!h.fortran || h.shape.rank() < 2) return t;
  Shape order = h.shape;
  for (size_t i = 0; i < order.size(); ++i) order[i] = static_cast<int64_t>(order.size() - 1 - i);
  return t.permute(order).contiguous();
}

// What goes before the elements, padded so that they begin at a multiple of 64.
std::string header_of(const std::string& who, const Tensor& t) {
  HT_CHECK(t.defined(), who, ": cannot save: the tensor is undefined");
  constexpr std::string_view codes[num_dtypes] = {"<f2", "", "<f4", "<f8", "<i4", "<i8", "|u1", "|b1"};
  HT_CHECK(t.dtype() != DType::bf16, who, ": cannot save: NumPy has no bf16; save x.to(DType::f32)");
  std::string shape;
  for (const int64_t d : t.shape()) shape += text::cat(shape.empty() ? "" : ", ", d);
  if (t.rank() == 1) shape += ",";
  std::string text = text::cat("{'descr': '", codes[static_cast<int>(t.dtype())], "', 'fortran_order': False, 'shape': (", shape, "), }");
  constexpr size_t fixed = 10, alignment = 64;
  text.resize((fixed + text.size() + 1 + alignment - 1) / alignment * alignment - fixed, ' ');
  text.back() = '\n';
  std::string head(magic);
  put<uint8_t>(head, 1);
  put<uint8_t>(head, 0);
  put(head, static_cast<uint16_t>(text.size()));
  return head + text;
}

size_t bytes_of(const Tensor& t) { return static_cast<size_t>(t.numel()) * size_of(t.dtype()); }

// ---- zip (PKWARE's APPNOTE 6.3.3)

constexpr uint32_t local_mark = 0x04034b50, central_mark = 0x02014b50, end_mark = 0x06054b50;
constexpr int64_t local_size = 30, central_size = 46, end_size = 22, largest = 0xffffffff;
constexpr uint16_t utf8_names = 1 << 11, first_date = 1 << 5 | 1;  // 1 January 1980, so that equal tensors give equal files

struct Entry {
  std::string name;
  uint32_t check;
  int64_t local, begin, end;  // bytes of the file: its local header; its content
};

// Where the central directory is, and how many entries it has.
struct Directory { int64_t begin, end, entries; };
Directory find_directory(const InputFile& file) {
  const std::string& path = file.path();
  constexpr int64_t longest_comment = 65535;
  const int64_t tail = std::min(file.size(), end_size + longest_comment);
  std::string bytes(static_cast<size_t>(tail), '\0');
  file.read(bytes.data(), tail, file.size() - tail);
  for (int64_t at = tail - end_size; at >= 0; --at) {
    const auto p = static_cast<size_t>(at);
    if (integer_at<uint32_t>(bytes, p) != end_mark || integer_at<uint16_t>(bytes, p + 20) != tail - at - end_size) continue;
    const int64_t entries = integer_at<uint16_t>(bytes, p + 10), size = integer_at<uint32_t>(bytes, p + 12),
                  begin = integer_at<uint32_t>(bytes, p + 16), here = file.size() - tail + at;
    HT_CHECK(entries != 0xffff && begin != largest, path, ": is a zip archive of 4 GiB or more; save such arrays as safetensors");
    HT_CHECK(integer_at<uint32_t>(bytes, p + 4) == 0 && integer_at<uint16_t>(bytes, p + 8) == entries, path,
             ": is one part of a divided zip archive");
    HT_CHECK(size <= here && begin == here - size, path, ": its central directory is not where it should be; it is damaged");
    return {begin, here, entries};
  }
  throw Error(text::cat(path, ": not an .npz file: a zip archive's end is missing; it may be truncated"));
}

Entry read_entry(const InputFile& file, std::string_view directory, size_t& at, int64_t directory_begin) {
  const std::string& path = file.path();
  const auto need = [&](size_t n) { HT_CHECK(n <= directory.size() - at, path, ": its central directory ends too early; it is damaged"); };
  need(static_cast<size_t>(central_size));
  HT_CHECK(integer_at<uint32_t>(directory, at) == central_mark, path, ": its central directory is damaged");
  const auto flags = integer_at<uint16_t>(directory, at + 8), method = integer_at<uint16_t>(directory, at + 10);
  const size_t name = integer_at<uint16_t>(directory, at + 28), extra = integer_at<uint16_t>(directory, at + 30),
               comment = integer_at<uint16_t>(directory, at + 32);
  const int64_t packed = integer_at<uint32_t>(directory, at + 20), size = integer_at<uint32_t>(directory, at + 24);
  Entry e{{}, integer_at<uint32_t>(directory, at + 16), integer_at<uint32_t>(directory, at + 42), 0, 0};
  at += static_cast<size_t>(central_size);
  need(name + extra + comment);
  e.name = directory.substr(at, name);
  at += name + extra + comment;

  const std::string who = text::cat(path, ": ", text::printable(e.name));
  HT_CHECK(e.name.find('\0') == std::string::npos, path, ": a name has a zero byte");
  HT_CHECK((flags & 1) == 0, who, ": is encrypted");
  HT_CHECK(method == 0, who, ": is compressed; np.savez writes arrays that can be read, np.savez_compressed does not");
  HT_CHECK(packed == size && size != largest && e.local != largest, who, ": is an entry of 4 GiB or more; save such arrays as safetensors");
  HT_CHECK(local_size <= directory_begin - e.local, who, ": lies outside the file; it is damaged");
  std::array<char, local_size> local{};
  file.read(local.data(), local_size, e.local);
  const std::string_view bytes(local.data(), local.size());
  HT_CHECK(integer_at<uint32_t>(bytes, 0) == local_mark, who, ": its entry is damaged");
  e.begin = e.local + local_size + integer_at<uint16_t>(bytes, 26) + integer_at<uint16_t>(bytes, 28);
  HT_CHECK(e.begin <= directory_begin && size <= directory_begin - e.begin, who, ": lies outside the file; it is damaged");
  e.end = e.begin + size;
  return e;
}

std::vector<Entry> read_entries(const InputFile& file) {
  const std::string& path = file.path();
  const Directory where = find_directory(file);
  std::string directory(static_cast<size_t>(where.end - where.begin), '\0');
  file.read(directory.data(), where.end - where.begin, where.begin);
  std::vector<Entry> entries;
  std::unordered_set<std::string> names;
  size_t at = 0;
  for (int64_t i = 0; i < where.entries; ++i) {
    entries.push_back(read_entry(file, directory, at, where.begin));
    HT_CHECK(names.insert(entries.back().name).second, path, ": the name ", text::printable(entries.back().name), " occurs twice");
  }
  HT_CHECK(at == directory.size(), path, ": its central directory is damaged");
  // Entries over the same bytes would ask for more memory than the file's size.
  std::vector<std::pair<int64_t, int64_t>> order;
  for (const Entry& e : entries) order.emplace_back(e.local, e.end);
  std::sort(order.begin(), order.end());
  for (size_t i = 1; i < order.size(); ++i) HT_CHECK(order[i].first >= order[i - 1].second, path, ": its entries overlap");
  return entries;
}

}  // namespace

Tensor load_npy(const std::string& path) {
  const InputFile file(path);
  return read_array(file, 0, file.size(), path);
}

void save_npy(const std::string& path, const Tensor& tensor) {
  const std::string head = header_of(path, tensor);
  const Tensor host = to_host(tensor.detach(), "save_npy");
  AtomicFile file(path);
  file.write(head);
  file.write(host.raw_data(), bytes_of(host));
  file.commit();
}

StateDict load_npz(const std::string& path) {
  const InputFile file(path);
  StateDict tensors;
  for (const Entry& e : read_entries(file)) {
    const std::string who = text::cat(path, ": ", text::printable(e.name));
    constexpr std::string_view suffix = ".npy";
    HT_CHECK(e.name.ends_with(suffix), who, ": expected arrays, whose names end with .npy");
    uint32_t check = 0;
    Tensor t = read_array(file, e.begin, e.end, who, &check);
    HT_CHECK(check == e.check, who, ": is damaged: its checksum is another");
    tensors.add(e.name.substr(0, e.name.size() - suffix.size()), std::move(t));
  }
  return tensors;
}

void save_npz(const std::string& path, const StateDict& tensors) {
  std::unordered_set<std::string_view> names;
  for (const auto& [name, t] : tensors) {
    HT_CHECK(!name.empty() && name.size() < 4096 && name.find('\0') == std::string::npos, path,
             ": cannot save: expected a name of 1 to 4095 bytes, none of them zero");
    HT_CHECK(names.insert(name).second, path, ": cannot save: the name ", name, " occurs twice");
  }
  AtomicFile file(path);
  std::string directory;
  int64_t at = 0;
  for (const auto& [name, t] : tensors) {
    const std::string head = header_of(text::cat(path, ": ", name), t), file_name = name + ".npy";
    const Tensor host = to_host(t.detach(), "save_npz");
    const auto size = checked_add(static_cast<int64_t>(head.size()), static_cast<int64_t>(bytes_of(host)));
    HT_CHECK(size < largest - at && names.size() < 0xffff, path, ": cannot save: an archive of 4 GiB or of 65535 arrays; save them as safetensors");
    std::string fields;  // that the local header and the directory share
    put<uint16_t>(fields, 20);  // the version of zip it takes
    put(fields, utf8_names);
    put<uint16_t>(fields, 0);  // stored
    put<uint16_t>(fields, 0);  // midnight
    put(fields, first_date);
    put(fields, crc32(host.raw_data(), bytes_of(host), crc32(head.data(), head.size())));
    put(fields, static_cast<uint32_t>(size));
    put(fields, static_cast<uint32_t>(size));
    put(fields, static_cast<uint16_t>(file_name.size()));
    put<uint16_t>(fields, 0);  // no extra field
    std::string local;
    put(local, local_mark);
    local += fields + file_name + head;
    file.write(local);
    file.write(host.raw_data(), bytes_of(host));
    put(directory, central_mark);
    put<uint16_t>(directory, 20);
    directory += fields;
    for (int zero = 0; zero < 10; ++zero) put<uint8_t>(directory, 0);  // comment, disk, attributes
    put(directory, static_cast<uint32_t>(at));
    directory += file_name;
    at += local_size + static_cast<int64_t>(file_name.size()) + size;
  }
  file.write(directory);
  std::string end;
  put(end, end_mark);
  put<uint32_t>(end, 0);
  for (int both = 0; both < 2; ++both) put(end, static_cast<uint16_t>(tensors.size()));
  put(end, static_cast<uint32_t>(directory.size()));
  put(end, static_cast<uint32_t>(at));
  put<uint16_t>(end, 0);
  file.write(end);
  file.commit();
}

}  // namespace halftone::io
