// A model as a table: a run with every module watched, then one row a module.
#include <algorithm>
#include <cstdio>
#include <map>
#include <optional>
#include <set>

#include "halftone/core/thread_state.h"
#include "halftone/nn/module.h"

namespace halftone::nn {

// While it lives, modules of the tree are in eval mode and their calls on this thread report what they return.
class Watch {
 public:
  explicit Watch(const std::vector<Fields::NamedModule>& modules) : outer_(now) {
    for (auto& [name, m] : modules) {
      modes_.emplace_back(m, m->training_);
      m->training_ = false;
      m->watched_ = true;
    }
    now = this;
  }
  ~Watch() {
    now = outer_;
    for (auto [m, training] : modes_) {
      m->training_ = training;
      m->watched_ = false;
    }
  }
  Watch(const Watch&) = delete;

  std::map<const Module*, std::vector<Meta>> outputs;
  static thread_local Watch* now;

 private:
  NoGrad off_;
  Watch* outer_;
  std::vector<std::pair<Module*, bool>> modes_;
};
thread_local Watch* Watch::now = nullptr;

Tensor Module::watched_forward(const Tensor& x) {
  Tensor y = forward(x);
  if (Watch::now && y.defined()) Watch::now->outputs[this].push_back(y.meta());
  return y;
}

namespace {

using Row = std::vector<std::string>;

std::string thousands(int64_t n) {
  std::string s = std::to_string(n);
  for (auto at = static_cast<int64_t>(s.size()) - 3; at > 0; at -= 3) s.insert(static_cast<size_t>(at), 1, ',');
  return s;
}

std::string bytes_text(int64_t n) {
  if (n < 1024) return std::to_string(n) + " B";
  double v = static_cast<double>(n) / 1024;
  const char* unit = "KiB";
  for (const char* next : {"MiB", "GiB", "TiB"}) {
    if (v < 1024) break;
    v /= 1024;
    unit = next;
  }
  char text[32];
  std::snprintf(text, sizeof text, "%.1f %s", v, unit);
  return text;
}

// The class's own name, without its namespaces.
std::string short_name(const Module& m) {
  std::string name = text::demangle(typeid(m).name());
  size_t end = name.find('<');
  size_t colons = name.rfind("::", end);
  return colons == name.npos ? name : name.substr(colons + 2);
}

int64_t bytes_of(const Meta& m) { return m.shape.numel() * static_cast<int64_t>(size_of(m.dtype)); }

// Columns as wide as their widest cell; the last `right` are flush right.
std::string table(const std::vector<Row>& rows, size_t right) {
  std::vector<size_t> width(rows[0].size());
  for (auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) width[i] = std::max(width[i], row[i].size());
  std::string text;
  for (auto& row : rows) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      std::string gap(width[i] - row[i].size(), ' ');
      line += (i ? "  " : "") + (i + right < row.size() ? row[i] + gap : gap + row[i]);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + '\n';
  }
  return text;
}

struct Amount { int64_t count = 0, bytes = 0; };

std::string total(std::string_view what, const Amount& a, std::string_view note = "") {
  return text::cat(what, " ", thousands(a.count), note, ", ", bytes_text(a.bytes), "\n");
}

std::string report(const Fields& fields, const Watch& watch) {
  std::map<const Module*, Amount> own;  // of a module itself, not of what it holds; a tied tensor counts once
  Amount parameters, buffers, outputs;
  int64_t trained = 0;
  std::set<const Body*> seen;
  for (auto& f : fields.tensors) {
    if (!seen.insert(f.tensor->body().get()).second) continue;
    int64_t count = f.tensor->numel(), bytes = bytes_of(f.tensor->meta());
    Amount& all = f.role == Role::parameter ? parameters : buffers;
    all.count += count;
    all.bytes += bytes;
    own[f.owner].bytes += bytes;
    if (f.role == Role::parameter) own[f.owner].count += count;
    if (f.tensor->requires_grad()) trained += f.tensor->numel();
  }
  std::vector<Row> rows = {{"layer", "type", "output", "parameters", "bytes"}};
  for (size_t i = 0; i < fields.modules.size(); ++i) {
    auto& [name, m] = fields.modules[i];
    auto ran = watch.outputs.find(m);
    std::string shape = ran == watch.outputs.end() ? "-" : str(ran->second[0].shape);
    rows.push_back({name.empty() ? "(model)" : name, short_name(*m), shape, thousands(own[m].count),
                    bytes_text(own[m].bytes)});
    bool last = i + 1 == fields.modules.size();
    bool leaf = last || !(name.empty() || fields.modules[i + 1].name.starts_with(name + "."));
    if (ran == watch.outputs.end() || !leaf) continue;
    for (auto& meta : ran->second) {
      outputs.count += meta.shape.numel();
      outputs.bytes += bytes_of(meta);
    }
  }
  return table(rows, 2) + total("parameters", parameters, " (" + thousands(trained) + " trained)") +
         total("buffers", buffers) + total("outputs of layers", outputs);
}

}  // namespace

std::string Module::summary(const Shape& input) {
  TensorOptions o;
  for (auto& p : parameters())
    if (is_floating(p.dtype())) {
      o = p.options();
      break;
    }
  return summary([&] { (*this)(zeros(input, o)); });
}

std::string Module::summary(const std::function<void()>& run) {
  Fields fields(*this);
  Watch watch(fields.modules);
  run();
  return report(fields, watch);
}

}  // namespace halftone::nn
