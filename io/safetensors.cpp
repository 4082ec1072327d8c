// Reading and writing safetensors. Nothing in the header is believed before it is compared with the file's size; every
// product and difference of sizes is checked.
#include "halftone/io/safetensors.h"

#include <algorithm>
#include <bit>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "halftone/io/file.h"

namespace halftone::io {
namespace {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

constexpr int64_t length_bytes = 8, longest_header = 100'000'000;
constexpr size_t longest_name = 4096;
constexpr std::string_view metadata_key = "__metadata__";

constexpr std::string_view format_name(DType t) {
  constexpr std::string_view names[num_dtypes] = {"F16", "BF16", "F32", "F64", "I32", "I64", "U8", "BOOL"};
  return names[static_cast<int>(t)];
}

// A string of the file as an error shows it: on one line, and not too long.
std::string shown(std::string_view s) {
  constexpr size_t longest = 60;
  std::string r = nlohmann::json(s.substr(0, longest)).dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  r.front() = r.back() = '\'';
  return s.size() > longest ? r + "..." : r;
}

struct Entry {
  std::string name;
  DType dtype;
  Shape shape;
  int64_t begin, end;  // bytes, counted from the end of the header
};
struct Header {
  std::vector<Entry> entries;  // as in the text
  Metadata metadata;
};

// Takes the header's text apart as the tokenizer goes through it, so that a name that occurs twice is seen, and text
// of any depth costs nothing: what has no place in a header ends the reading.
class HeaderReader : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit HeaderReader(const std::string& path) : path_(path) {}
  Header take() { return std::move(header_); }

  bool start_object(std::size_t) override {
    if (in_ == In::nothing)
      in_ = In::top;
    else if (in_ == In::top && key_ == metadata_key)
      in_ = In::metadata;
    else if (in_ == In::top)
      begin_entry();
    else
      misplaced("an object");
    return true;
  }
  bool end_object() override {
    if (in_ == In::entry) end_entry();
    in_ = in_ == In::top ? In::nothing : In::top;
    return true;
  }
  bool start_array(std::size_t) override {
    if (in_ == In::entry && key_ == "shape")
      in_ = In::shape;
    else if (in_ == In::entry && key_ == "data_offsets")
      in_ = In::offsets;
    else
      misplaced("a list");
    return true;
  }
  bool end_array() override {
    in_ = In::entry;
    return true;
  }
  bool key(std::string& k) override {
    key_ = k;
    if (in_ == In::entry) {
      const bool known = k == "dtype" || k == "shape" || k == "data_offsets";
      HT_CHECK(known, tensor(), " has a field ", shown(k), "; expected dtype, shape and data_offsets");
      HT_CHECK(fields_.insert(k).second, tensor(), " has its ", k, " twice");
      return true;
    }
    HT_CHECK(k.size() <= longest_name && k.find('\0') == std::string::npos, path_, ": the name ", shown(k),
             " is longer than 4096 bytes, or has a zero byte");
    HT_CHECK((in_ == In::top ? names_ : metadata_names_).insert(k).second, path_, ": the name ", shown(k),
             " occurs twice");
    return true;
  }
  bool string(std::string& s) override {
    if (in_ == In::metadata)
      header_.metadata.emplace_back(key_, s);
    else if (in_ == In::entry && key_ == "dtype")
      dtype_ = s;
    else
      misplaced("a string");
    return true;
  }
  bool number_unsigned(uint64_t n) override {
    if (in_ != In::shape && in_ != In::offsets) misplaced("a number");
    HT_CHECK(std::in_range<int64_t>(n), tensor(), " has a size or offset ", n, ", which no file reaches");
    (in_ == In::shape ? shape_ : offsets_).push_back(static_cast<int64_t>(n));
    return true;
  }
  bool number_integer(int64_t n) override { return misplaced(text::cat("the number ", n)); }
  bool number_float(double, const std::string& s) override { return misplaced("the number " + s); }
  bool null() override { return misplaced("null"); }
  bool boolean(bool b) override { return misplaced(text::cat(b)); }
  bool binary(nlohmann::json::binary_t&) override { return misplaced("binary data"); }
  bool parse_error(std::size_t position, const std::string&, const nlohmann::json::exception&) override {
    throw Error(text::cat(path_, ": its header is not JSON in UTF-8; the first fault is at byte ",
                          length_bytes + static_cast<int64_t>(position) - 1));
  }

 private:
  enum class In : uint8_t { nothing, top, metadata, entry, shape, offsets };

  std::string tensor() const { return text::cat(path_, ": tensor ", shown(name_)); }
  bool misplaced(const std::string& what) const {
    throw Error(text::cat(path_, ": its header has ", what, key_.empty() ? "" : " under " + shown(key_),
                          in_ >= In::entry ? " of tensor " + shown(name_) : "", ", which has no place there"));
  }
  void begin_entry() {
    in_ = In::entry;
    name_ = key_;
    fields_.clear();
    shape_.clear();
    offsets_.clear();
  }
  void end_entry() {
    for (const char* field : {"dtype", "shape", "data_offsets"})
      HT_CHECK(fields_.contains(field), tensor(), " has no ", field);
    HT_CHECK(offsets_.size() == 2 && offsets_[0] <= offsets_[1], tensor(),
             " has data_offsets that are not [begin, end]");
    HT_CHECK(shape_.size() <= max_rank, tensor(), " has ", shape_.size(), " dimensions; a tensor has at most 8");
    int dtype = 0;
    while (dtype < num_dtypes && format_name(static_cast<DType>(dtype)) != dtype_) ++dtype;
    HT_CHECK(dtype < num_dtypes, tensor(), " is of dtype ", shown(dtype_), ", which Halftone does not have");
    Entry e{name_, static_cast<DType>(dtype), Shape(shape_), offsets_[0], offsets_[1]};
    const int64_t expected = bytes_of(e), found = e.end - e.begin;
    HT_CHECK(expected == found, tensor(), " of shape ", e.shape, " (", e.dtype, ") takes ", expected,
             " bytes, and its data_offsets span ", found);
    header_.entries.push_back(std::move(e));
  }
  // The size of a tensor. Zeros count last, lest one hides that the other sizes are beyond all measure.
  int64_t bytes_of(const Entry& e) const {
    auto bytes = static_cast<int64_t>(size_of(e.dtype));
    bool empty = false, fits = true;
    for (int64_t d : e.shape) {
      if (d == 0)
        empty = true;
      else
        fits = fits && !__builtin_mul_overflow(bytes, d, &bytes);
    }
    HT_CHECK(fits, tensor(), " has shape ", e.shape, ", whose size does not fit 64 bits");
    return empty ? 0 : bytes;
  }

  const std::string& path_;
  Header header_;
  In in_ = In::nothing;
  std::string key_, name_, dtype_;  // name_: the tensor's
  std::vector<int64_t> shape_, offsets_;
  std::unordered_set<std::string> names_, metadata_names_, fields_;
};

// The tensors' bytes must cover [0, size) without a gap or an overlap: so a small file cannot ask for much memory, and
// nothing can hide in a file.
void check_tiles(const std::string& path, const Header& header, int64_t size) {
  std::vector<const Entry*> order;
  for (const Entry& e : header.entries) order.push_back(&e);
  std::sort(order.begin(), order.end(),
            [](auto* a, auto* b) { return std::pair(a->begin, a->end) < std::pair(b->begin, b->end); });
  int64_t covered = 0;
  for (const Entry* e : order) {
    HT_CHECK(e->begin == covered, path, ": tensor ", shown(e->name), " begins at byte ", e->begin,
             " of the elements, where the tensors before it end at ", covered);
    covered = e->end;
  }
  HT_CHECK(covered == size, path, ": its tensors take ", covered, " bytes, the file has ", size, " after its header");
}

Header read_header(const InputFile& file, int64_t& elements) {
  const std::string& path = file.path();
  HT_CHECK(file.size() >= length_bytes, path, ": not a safetensors file: it has ", file.size(),
           " bytes, and the length of the header alone takes 8");
  uint64_t length = 0;
  file.read(&length, length_bytes, 0);
  const int64_t room = file.size() - length_bytes;
  HT_CHECK(length <= static_cast<uint64_t>(room), path, ": expected a header of ", length, " bytes, the file has ",
           room, " after the header's length; it is truncated, or not a safetensors file");
  HT_CHECK(length <= static_cast<uint64_t>(longest_header), path, ": its header of ", length,
           " bytes is longer than the format's limit, 100000000");
  std::string json(static_cast<size_t>(length), '\0');
  file.read(json.data(), static_cast<int64_t>(length), length_bytes);
  HT_CHECK(json.starts_with('{'), path, ": not a safetensors file: its header does not begin with '{'");
  // The tokenizer takes a zero byte for the end of the text, and anything could follow it.
  HT_CHECK(json.find('\0') == std::string::npos, path, ": its header has a zero byte");
  HeaderReader reader(path);
  nlohmann::json::sax_parse(json, &reader);
  elements = room - static_cast<int64_t>(length);
  Header header = reader.take();
  check_tiles(path, header, elements);
  return header;
}

// What a StateDict becomes: the header's text, and the tensors in the order of their bytes.
struct Layout {
  std::string header;
  std::vector<const StateDict::Entry*> order;
};

std::string quoted(const std::string& path, std::string_view s) {
  try {
    return nlohmann::json(s).dump();
  } catch (const nlohmann::json::exception&) {
    throw Error(text::cat(path, ": cannot save: ", shown(s), " is not UTF-8"));
  }
}

// Wide elements come first, so that each tensor is aligned for its dtype; the header keeps the state's order.
Layout plan(const std::string& path, const StateDict& state, const Metadata& metadata) {
  Layout plan;
  std::unordered_set<std::string_view> names{metadata_key};
  for (const auto& entry : state) {
    HT_CHECK(entry.second.defined(), path, ": cannot save: the tensor ", shown(entry.first), " is undefined");
    HT_CHECK(names.insert(entry.first).second, path, ": cannot save: the name ", shown(entry.first), " occurs twice");
    HT_CHECK(entry.first.size() <= longest_name && entry.first.find('\0') == std::string::npos, path,
             ": cannot save: the name ", shown(entry.first), " is longer than 4096 bytes, or has a zero byte");
    plan.order.push_back(&entry);
  }
  std::stable_sort(plan.order.begin(), plan.order.end(),
                   [](auto* a, auto* b) { return size_of(a->second.dtype()) > size_of(b->second.dtype()); });
  std::unordered_map<const StateDict::Entry*, int64_t> begins;
  int64_t at = 0;
  for (auto* entry : plan.order) {
    begins[entry] = at;
    const Tensor& t = entry->second;
    at = checked_add(at, checked_mul(t.numel(), static_cast<int64_t>(size_of(t.dtype()))));
  }

  std::string& text = plan.header;
  std::unordered_set<std::string_view> keys;
  for (const auto& [key, value] : metadata) {
    HT_CHECK(keys.insert(key).second, path, ": cannot save: the metadata name ", shown(key), " occurs twice");
    text += (keys.size() == 1 ? "\"__metadata__\":{" : ",") + quoted(path, key) + ":" + quoted(path, value);
  }
  if (!metadata.empty()) text += "}";
  for (const auto& entry : state) {
    const auto& [name, t] = entry;
    std::string shape;
    for (int64_t d : t.shape()) shape += (shape.empty() ? "" : ",") + std::to_string(d);
    const int64_t begin = begins.at(&entry), bytes = t.numel() * static_cast<int64_t>(size_of(t.dtype()));
    text += text::cat(text.empty() ? "" : ",", quoted(path, name), ":{\"dtype\":\"", format_name(t.dtype()),
                      "\",\"shape\":[", shape, "],\"data_offsets\":[", begin, ",", begin + bytes, "]}");
  }
  text = "{" + text + "}";
  text.resize((text.size() + 7) / 8 * 8, ' ');
  HT_CHECK(text.size() <= static_cast<size_t>(longest_header), path, ": cannot save: a header of ", text.size(),
           " bytes is longer than the format's limit, 100000000");
  return plan;
}

}  // namespace

void save(const std::string& path, const StateDict& state, const SaveOptions& options) {
  const Layout layout = plan(path, state, options.metadata);
  AtomicFile file(path);
  const uint64_t length = layout.header.size();
  file.write(&length, sizeof length);
  file.write(layout.header);
  for (auto* entry : layout.order) {
    const Tensor host = to_host(entry->second, "save");
    file.write(host.raw_data(), static_cast<size_t>(host.numel()) * size_of(host.dtype()));
  }
  file.commit();
}

StateDict load(const std::string& path) {
  const InputFile file(path);
  int64_t elements = 0;
  const Header header = read_header(file, elements);
  StateDict state;
  for (const Entry& e : header.entries) {
    Tensor t = Tensor::empty(Meta(e.shape, e.dtype, Device::cpu()));
    auto* bytes = static_cast<uint8_t*>(t.raw_data());
    file.read(bytes, e.end - e.begin, file.size() - elements + e.begin);
    HT_CHECK(e.dtype != DType::b8 || std::all_of(bytes, bytes + (e.end - e.begin), [](uint8_t b) { return b <= 1; }),
             path, ": tensor ", shown(e.name), " is of dtype BOOL and has a byte that is neither 0 nor 1");
    state.add(e.name, std::move(t));
  }
  return state;
}

Metadata load_metadata(const std::string& path) {
  const InputFile file(path);
  int64_t elements = 0;
  return read_header(file, elements).metadata;
}

}  // namespace halftone::io
