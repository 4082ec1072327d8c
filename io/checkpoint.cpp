// Checkpoints as safetensors files: parts are prefixes of names, and the metadata say what the file is.
#include "halftone/io/checkpoint.h"

#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cmath>

#include "halftone/core/random.h"
#include "halftone/io/crc.h"
#include "halftone/io/file.h"
#include "halftone/io/safetensors.h"

namespace halftone::io {
namespace {

constexpr std::string_view prefix = "step-", suffix = ".safetensors", temporary = ".tmp.";
// Keys of the metadata.
constexpr const char *version_key = "halftone_checkpoint", *step_key = "step", *metric_key = "metric", *parts_key = "parts",
                     *check_key = "crc32c";
constexpr std::string_view version = "1", generator_part = "rng";

template <class T>
std::string number(T v) {
  std::array<char, 32> text;
  return {text.data(), std::to_chars(text.data(), text.data() + text.size(), v).ptr};
}
// The whole text as a number.
template <class T>
std::optional<T> parse(std::string_view text) {
  T v{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), v);
  if (error != std::errc() || end != text.data() + text.size()) return {};
  return v;
}

// The step of "step-<n>.safetensors".
std::optional<int64_t> step_of(std::string_view name) {
  if (!name.starts_with(prefix) || !name.ends_with(suffix) || name.size() <= prefix.size() + suffix.size()) return {};
  name = name.substr(prefix.size(), name.size() - prefix.size() - suffix.size());
  const auto step = parse<int64_t>(name);
  return step && number(*step) == name ? step : std::nullopt;  // "step-007" is someone else's
}

// Whether a file is what a killed save left: "step-<n>.safetensors.tmp.<process>.<number>", of a process that is no more. One of
// our own number is as well: this runs when no save does.
bool left_behind(std::string_view name) {
  const size_t at = name.find(temporary);
  if (at == std::string_view::npos || !step_of(name.substr(0, at))) return false;
  name.remove_prefix(at + temporary.size());
  const auto process = parse<int>(name.substr(0, name.find('.')));
  return process && *process > 0 && (*process == ::getpid() || (::kill(*process, 0) < 0 && errno == ESRCH));
}

// How weights alone are loaded.
std::string as_weights(const std::string& file) { return text::cat("weights are loaded by net.load_state_dict(io::load(\"", file, "\"))"); }

std::vector<std::string> list(const std::string& folder) {
  std::vector<std::string> names;
  if (file_ops().list(folder.c_str(), names) >= 0 || errno == ENOENT) return names;
  if (errno != ENOTDIR) throw FileError(folder, "list", errno);
  const size_t slash = folder.rfind('/');
  const auto step = step_of(std::string_view(folder).substr(slash + 1));
  const std::string in = slash == std::string::npos ? "." : folder.substr(0, slash);
  throw Error(text::cat(folder, ": is a file, and a Checkpoint takes a folder of steps; ",
                        step ? text::cat("call load(", *step, ") of a Checkpoint(\"", in, "\")") : as_weights(folder)));
}
void remove(const std::string& path) {
  if (file_ops().remove(path.c_str()) < 0 && errno != ENOENT) throw FileError(path, "remove", errno);
}

const std::string* find(const Metadata& metadata, std::string_view key) {
  for (const auto& [name, value] : metadata)
    if (name == key) return &value;
  return nullptr;
}

// Of all that the file says but the checksum itself: a changed letter of a name is noticed like a changed weight.
std::string checksum(const Metadata& metadata, const StateDict& host) {
  uint32_t c = 0;
  const auto take = [&c](std::string_view text) {
    c = crc32c(text.data(), text.size(), c);
    c = crc32c("", 1, c);  // the end of a text
  };
  for (const auto& [key, value] : metadata) {
    if (key == check_key) continue;
    take(key);
    take(value);
  }
  for (const auto& [name, t] : host) {
    take(name);
    take(str(t.meta()));
    c = crc32c(t.raw_data(), static_cast<size_t>(t.numel()) * size_of(t.dtype()), c);
  }
  return number(c);
}

Tensor whole_number(int64_t v) {
  Tensor t = Tensor::empty(Meta({}, DType::i64, Device::cpu()));
  *t.data<int64_t>() = v;
  return t;
}

// The generator, on the CPU and wherever the run has tensors.
StateDict generator_state(const std::vector<Device>& where) {
  StateDict s;
  s.add("seed", whole_number(static_cast<int64_t>(generator().seed())));
  for (const Device d : where) s.add(str(d), generator().state(d));
  return s;
}
// States of devices that this process does not have are left out.
void load_generator(const StateDict& s) {
  generator().seed(static_cast<uint64_t>(s.at("seed").item<int64_t>()));
  for (const auto& [name, state] : s) {
    if (name == "seed") continue;
    const Device d = device(name);
    HT_CHECK(state.shape() == Shape{2} && state.dtype() == DType::i64, "expected the state of a generator [2] (i64), got ", state.meta());
    if (d == Device::cpu() || d.index < static_cast<int>(devices(d.type).size())) generator().state(d).copy_(state);
  }
}

std::string joined(const std::vector<std::string>& names) {
  std::string all;
  for (const auto& n : names) all += (all.empty() ? "" : ",") + n;
  return all;
}
std::vector<std::string> split(std::string_view names) {
  std::vector<std::string> all;
  while (!names.empty()) {
    const size_t end = std::min(names.find(','), names.size());
    all.emplace_back(names.substr(0, end));
    names.remove_prefix(std::min(end + 1, names.size()));
  }
  return all;
}
bool contains(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

Checkpoint::Checkpoint(std::string folder, CheckpointOptions options) : folder_(std::move(folder)), options_(options) {
  HT_CHECK(!folder_.empty(), "Checkpoint: expected a folder, got an empty name; \".\" is the current one");
  HT_CHECK(options_.keep >= 0, "Checkpoint: expected keep of 0 (all) or more, got ", options_.keep);
  while (folder_.size() > 1 && folder_.back() == '/') folder_.pop_back();
}

Checkpoint& Checkpoint::add_part(Part part) {
  HT_CHECK(!part.name.empty() && part.name.find_first_of(".,") == std::string::npos && part.name != generator_part,
           "Checkpoint: expected a part's name without '.' and ',', and not 'rng', got '", part.name, "'");
  for (const Part& p : parts_) HT_CHECK(p.name != part.name, "Checkpoint: there is a part '", part.name, "' already");
  parts_.push_back(std::move(part));
  return *this;
}

std::string Checkpoint::path(int64_t step) const { return text::cat(folder_, "/", prefix, step, suffix); }

std::vector<int64_t> Checkpoint::steps() const {
  std::vector<int64_t> all;
  for (const auto& name : list(folder_))
    if (const auto step = step_of(name)) all.push_back(*step);
  std::sort(all.begin(), all.end());
  return all;
}

void Checkpoint::save(int64_t step, SaveStepOptions options) {
  HT_CHECK(step >= 0, "Checkpoint: expected a step of 0 or more, got ", step);
  HT_CHECK(!parts_.empty(), "Checkpoint: nothing to save; add() the model and what trains it");
  StateDict host;
  std::vector<std::string> names;
  std::vector<Device> where{Device::cpu()};
  const auto take = [&](const std::string& name, const StateDict& state) {
    StateDict copies;
    for (const auto& [key, t] : state) {
      if (std::find(where.begin(), where.end(), t.device()) == where.end()) where.push_back(t.device());
      copies.add(key, to_host(t, "Checkpoint"));
    }
    host.add(name, copies);
    names.push_back(name);
  };
  for (const Part& p : parts_) take(p.name, p.state());
  take(std::string(generator_part), generator_state(where));

  Metadata metadata{{version_key, std::string(version)}, {step_key, number(step)}};
  if (options.metric) metadata.emplace_back(metric_key, number(*options.metric));
  metadata.emplace_back(parts_key, joined(names));
  metadata.emplace_back(check_key, checksum(metadata, host));
  make_folders(folder_);
  io::save(path(step), host, {.metadata = std::move(metadata)});
  tidy();
}

void Checkpoint::tidy() const {
  for (const auto& name : list(folder_))
    if (left_behind(name)) remove(folder_ + "/" + name);
  const std::vector<int64_t> all = steps();
  if (options_.keep == 0 || all.size() <= static_cast<size_t>(options_.keep)) return;
  const auto kept = best(all);
  for (size_t i = 0; i < all.size() - static_cast<size_t>(options_.keep); ++i)
    if (all[i] != kept) remove(path(all[i]));
}

std::optional<int64_t> Checkpoint::best(const std::vector<int64_t>& steps) const {
  std::optional<int64_t> found;
  if (options_.best == Best::none) return found;
  double least = INFINITY;
  for (const int64_t step : steps) {
    const Metadata metadata = load_metadata(path(step));
    const std::string* text = find(metadata, metric_key);
    const double metric = text ? parse<double>(*text).value_or(NAN) : NAN;
    const double cost = options_.best == Best::lowest ? metric : -metric;
    if (std::isnan(cost) || (found && cost >= least)) continue;
    found = step;
    least = cost;
  }
  return found;
}

std::optional<int64_t> Checkpoint::resume(LoadOptions options) {
  const std::vector<int64_t> all = steps();
  if (all.empty()) return {};
  load(all.back(), options);
  return all.back();
}

std::optional<int64_t> Checkpoint::resume_best(LoadOptions options) {
  HT_CHECK(options_.best != Best::none, "Checkpoint: to know the best, say .best = Best::lowest or Best::highest");
  const auto found = best(steps());
  if (found) load(*found, options);
  return found;
}

void Checkpoint::load(int64_t step, LoadOptions options) {
  HT_CHECK(!parts_.empty(), "Checkpoint: nothing to load into; add() the model and what trains it");
  const std::string file = path(step);
  const Metadata metadata = load_metadata(file);
  const std::string *made = find(metadata, version_key), *check = find(metadata, check_key), *parts = find(metadata, parts_key);
  HT_CHECK(made && check && parts, file, ": not a checkpoint, but tensors alone, as io::save writes them; ", as_weights(file));
  HT_CHECK(*made == version, file, ": is a checkpoint of version ", *made, ", this library reads version ", version);
  const StateDict state = io::load(file);
  HT_CHECK(checksum(metadata, state) == *check, file, ": is damaged: its checksum is another; remove it to resume from the one before");

  const std::vector<std::string> held = split(*parts);
  std::vector<std::string> expected, missing, unexpected;
  for (const Part& p : parts_) {
    expected.push_back(p.name);
    if (!contains(held, p.name)) missing.push_back(p.name);
  }
  for (const auto& name : held)
    if (name != generator_part && !contains(expected, name)) unexpected.push_back(name);
  HT_CHECK(!options.strict || (missing.empty() && unexpected.empty()), file, ": its parts are others; missing: ",
           missing.empty() ? "none" : joined(missing), "; unexpected: ", unexpected.empty() ? "none" : joined(unexpected),
           "; {.strict = false} loads what both have");
  const auto give = [&](std::string_view name, const std::function<void(const StateDict&)>& to) {
    if (!contains(held, name)) return;
    try {
      to(state.part(name));
    } catch (const Error& e) {
      throw Error(text::cat(file, ": ", name, ": ", e.what()));
    }
  };
  for (const Part& p : parts_) give(p.name, p.load);
  give(generator_part, load_generator);
}

}  // namespace halftone::io
