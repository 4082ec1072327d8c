// Looking at a step: checks after every operator, statistics of gradients, precisions compared.
#include "halftone/amp/inspect.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <iomanip>
#include <limits>
#include <ostream>
#include <set>

#include "halftone/amp/autocast.h"
#include "halftone/amp/trace.h"
#include "halftone/autograd/autograd.h"
#include "halftone/core/backend.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/random.h"
#include "halftone/ops/reduce.h"
#include "halftone/ops/unary.h"

namespace halftone::amp {
namespace {

bool floating(const Tensor& t) { return t.defined() && is_floating(t.dtype()); }

// Which values that are not finite a tensor holds.
enum Oddity : unsigned { none = 0, minus_inf = 1, plus_inf = 2, not_a_number = 4 };
unsigned oddities(const Tensor& t) {
  if (!floating(t) || all_finite(t)) return none;
  NoGrad off;
  LayerScope kernels_only(0);
  auto any = [](const Tensor& which) { return which.to(DType::i64).sum().item<int64_t>() > 0; };
  constexpr double inf = std::numeric_limits<double>::infinity();
  Tensor x = t.detach();
  return (any(eq(x, -inf)) ? minus_inf : none) | (any(eq(x, inf)) ? plus_inf : none) | (any(isnan(x)) ? not_a_number : none);
}

// Where the program asks for it by a number.
bool writes_infinity(const Call& c) {
  if (c.op == &op::fill) return true;
  if (c.op != &op::where) return false;
  auto numbers = c.as<WhereAttrs>();
  return std::isinf(numbers.a.to<double>()) || std::isinf(numbers.b.to<double>());
}

// The calls of a step, looked at one by one.
class Looking final : public Watcher {
 public:
  void before(const Call& c) override {
    read_ = none;
    if (found) return;
    for (size_t i = 0; i < c.in.size(); ++i) {
      const Tensor& t = c.in[i];
      unsigned odd = oddities(t);
      read_ |= odd;
      if (odd == none || own_.contains(t.storage()) || (c.op->writes && c.op->writes(c, i))) continue;
      // Whatever the step computes is looked at, so this came from outside.
      if (odd == minus_inf && !t.requires_grad()) own_.insert(t.storage());
      else return note(c, t.meta(), static_cast<int>(i));
    }
  }
  void after(const Call& c, const Tensors& out) override {
    for (auto& t : out) look(c, t);
    for (size_t i = 0; c.op->writes && i < c.in.size(); ++i) if (c.op->writes(c, i)) look(c, c.in[i]);
    ++calls_;
  }
  std::optional<Overflow> found;

 private:
  void look(const Call& c, const Tensor& t) {
    if (found) return;
    unsigned odd = oddities(t), allowed = read_ | (writes_infinity(c) ? minus_inf | plus_inf : none);
    if (odd & ~allowed) note(c, t.meta(), -1);
    else if (odd) own_.insert(t.storage());
  }
  void note(const Call& c, const Meta& m, int argument) {
    const ThreadState& s = thread_state();
    found = Overflow{.op = c.op->name, .module = s.within ? s.within->object : nullptr, .module_name = "?", .in_backward = in_backward(),
                     .result = m, .call = calls_, .argument = argument, .given = {}, .parameters = {}};
  }

  unsigned read_ = none;                     // by the call that runs
  std::set<std::shared_ptr<Storage>> own_;   // tensors whose infinities are the program's own
  int64_t calls_ = 0;
};

// Puts a step's traces away: gradients, buffers, random numbers.
class Undo {
 public:
  Undo(const std::vector<Tensor>& parameters, const std::vector<Tensor>& buffers) : parameters_(parameters), buffers_(buffers) {
    NoGrad off;
    for (auto& p : parameters) {
      Tensor g = p.grad();
      grads_.push_back(g.defined() ? g.clone() : Tensor());
      stamps_.push_back(grad_stamp(p));
    }
    for (auto& b : buffers) values_.push_back(b.clone());
    std::vector<Device> devices{Device::cpu()};
    for (auto& p : parameters)
      if (std::find(devices.begin(), devices.end(), p.device()) == devices.end()) devices.push_back(p.device());
    for (auto& d : devices) numbers_.push_back(draw_key(d, 0));
  }
  // As it was when this was made, without gradients.
  void rewind() {
    NoGrad off;
    for (auto& p : parameters_) p.zero_grad();
    for (size_t i = 0; i < buffers_.size(); ++i) buffers_[i].copy_(values_[i]);
    thread_state().generator = std::make_shared<Generator>(numbers_);
  }
  ~Undo() {
    rewind();
    thread_state().generator = generator_;
    for (size_t i = 0; i < parameters_.size(); ++i)
      if (grads_[i].defined()) {
        parameters_[i].set_grad(grads_[i]);
        set_grad_stamp(parameters_[i], stamps_[i]);
      }
  }
  Undo(const Undo&) = delete;

 private:
  std::vector<Tensor> parameters_, buffers_, grads_, values_;
  std::vector<GradStamp> stamps_;
  std::vector<Tensor> numbers_;
  std::shared_ptr<Generator> generator_ = thread_state().generator;  // draws nothing meanwhile
};

std::vector<double> gathered(const std::vector<Tensor>& parameters, double scale) {
  std::vector<double> all;
  for (auto& p : parameters)
    if (Tensor g = p.grad(); g.defined()) for (double v : g.to_vector<double>()) all.push_back(v / scale);
  return all;
}

struct TF32 {
  bool saved = tf32_allowed();
  explicit TF32(bool on) { allow_tf32(on); }
  ~TF32() { allow_tf32(saved); }
};

std::string percent(double share) { return text::cat(std::round(share * 1000) / 10, " %"); }

}  // namespace

bool all_finite(const Tensor& t) {
  NoGrad off;
  LayerScope kernels_only(0);
  return t.numel() == 0 || isfinite(t.detach()).to(DType::i64).sum().item<int64_t>() == t.numel();
}

std::ostream& operator<<(std::ostream& os, const Overflow& o) {
  os << o.op << (o.in_backward ? ", in backward," : "");
  if (o.argument < 0) os << " gave the first result that is not finite: ";
  else os << " was the first to read what was not finite before the step, as argument " << o.argument << ": ";
  os << str(o.result) << ", in module '" << o.module_name << "', operator " << o.call << " of the step";
  if (!o.given.empty()) {
    os << "; not finite before it:";
    for (auto& name : o.given) os << ' ' << name;
  }
  if (!o.parameters.empty()) {
    os << "; gradients that are not finite:";
    for (auto& p : o.parameters) os << ' ' << p;
  }
  return os << '\n';
}

std::vector<std::string> not_finite(const std::vector<std::pair<std::string, Tensor>>& parameters,
                                    const std::vector<std::pair<std::string, Tensor>>& buffers) {
  std::vector<std::string> names;
  for (auto& [name, p] : parameters) if (oddities(p) != none) names.push_back(name);
  for (auto& [name, b] : buffers) if (oddities(b) > minus_inf) names.push_back(name);
  return names;
}

std::optional<Overflow> find_overflow(const std::function<void()>& step) {
  HT_CHECK(step, "find_overflow: the step is an empty function");
  Looking looking;
  {
    Watching on(looking);
    step();
  }
  return looking.found;
}

std::vector<GradientStats> gradient_stats(const std::vector<std::pair<std::string, Tensor>>& named, double scale, double at) {
  HT_CHECK(scale > 0 && at > 0 && std::isfinite(scale) && std::isfinite(at),
           "gradient_stats: expected finite scales above 0, got ", scale, " and ", at);
  std::vector<GradientStats> all;
  for (auto& [name, p] : named) {
    GradientStats& s = all.emplace_back();
    s.name = name;
    Tensor g = p.grad();
    if (!g.defined()) continue;
    s.defined = true;
    double zeros = 0, vanishing = 0, subnormal = 0;
    for (double v : g.to_vector<double>()) {
      double size = std::abs(v) / scale;
      if (!std::isfinite(v)) ++s.not_finite;
      else if (v == 0) ++zeros;
      else {
        s.largest = std::max(s.largest, size);
        s.smallest = s.smallest == 0 ? size : std::min(s.smallest, size);
        if (size * at <= 0x1p-25) ++vanishing;  // half of f16's smallest, which rounds to 0
        else if (size * at < 0x1p-14) ++subnormal;
      }
    }
    auto n = static_cast<double>(std::max<int64_t>(g.numel(), 1));
    s.zeros = zeros / n;
    s.vanishing = vanishing / n;
    s.subnormal = subnormal / n;
  }
  return all;
}
std::vector<GradientStats> gradient_stats(const std::vector<std::pair<std::string, Tensor>>& named, const GradScaler& scaler) {
  double scale = scaler.get_scale();
  bool scaled = false;
  for (auto& [name, p] : named) {
    if (!p.grad().defined() || !grad_stamp(p).scaler) continue;
    HT_CHECK(grad_stamp(p).age() == 0, "gradient_stats: the gradient of '", name, "' carries a scale that has changed since; look before update()");
    scaled = true;
  }
  return gradient_stats(named, scaled ? scale : 1, scale);
}

std::ostream& operator<<(std::ostream& os, const std::vector<GradientStats>& all) {
  size_t width = 9;
  for (auto& s : all) width = std::max(width, s.name.size());
  auto cell = [&](const std::string& v) { os << std::right << std::setw(12) << v; };
  os << std::left << std::setw(static_cast<int>(width)) << "parameter";
  for (auto* title : {"largest", "smallest", "zero", "vanishing", "subnormal", "not finite"}) cell(title);
  os << '\n';
  for (auto& s : all) {
    os << std::left << std::setw(static_cast<int>(width)) << s.name;
    if (!s.defined) {
      os << "  no gradient\n";
      continue;
    }
    cell(text::cat(s.largest));
    cell(text::cat(s.smallest));
    cell(percent(s.zeros));
    cell(percent(s.vanishing));
    cell(percent(s.subnormal));
    cell(std::to_string(s.not_finite));
    os << '\n';
  }
  return os;
}

std::ostream& operator<<(std::ostream& os, const Advice& a) {
  os << std::left << std::setw(10) << "precision" << std::right << std::setw(12) << "ms" << std::setw(12) << "peak MiB" << std::setw(18) << "gradient error" << '\n';
  for (auto& r : a.rows)
    os << std::left << std::setw(10) << r.precision << std::right << std::setw(12) << text::cat(std::round(r.ms * 1000) / 1000) << std::setw(12)
       << text::cat(std::round(static_cast<double>(r.peak_bytes) / 1048576 * 10) / 10) << std::setw(18)
       << (r.finite ? text::cat(std::round(r.gradient_error * 1e6) / 1e6) : "not finite") << '\n';
  return os << "recommended: " << a.recommended << ", because " << a.reason << '\n';
}

Advice advise(const std::vector<Tensor>& parameters, const std::vector<Tensor>& buffers, const std::function<Tensor()>& loss, double scale) {
  HT_CHECK(!parameters.empty(), "advise: there are no parameters");
  HT_CHECK(loss, "advise: the loss is an empty function");
  HT_CHECK(scale > 0 && std::isfinite(scale), "advise: expected a finite scale above 0, got ", scale);
  check_may_sync("advise");
  Device device = parameters[0].device();
  bool cuda = device.type == DeviceType::cuda;
  struct Kind { const char* name; std::optional<DType> dtype; bool tf32; };
  std::vector<Kind> kinds{{"fp32", {}, false}};
  if (cuda) kinds.push_back({"tf32", {}, true});
  kinds.insert(kinds.end(), {{"bf16", DType::bf16, false}, {"fp16", DType::f16, false}});

  Undo undo(parameters, buffers);
  Advice a;
  std::vector<std::vector<double>> times(kinds.size());
  std::vector<double> reference;
  constexpr int rounds = 7;
  for (int round = 0; round <= rounds; ++round)  // the first one warms up
    for (size_t k = 0; k < kinds.size(); ++k) {
      undo.rewind();
      TF32 tf32(kinds[k].tf32);
      bool scaled = kinds[k].dtype == DType::f16;
      backend(device.type).synchronize(device.index);
      reset_peak_memory(device);
      int64_t before = memory_stats(device).allocated;
      auto start = std::chrono::steady_clock::now();
      Tensor value;
      {
        Autocast region({.dtype = kinds[k].dtype, .enabled = kinds[k].dtype.has_value()});
        value = loss();
      }
      (scaled ? value * scale : value).backward();
      backend(device.type).synchronize(device.index);
      double ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count();
      if (round > 0) {
        times[k].push_back(ms);
        continue;
      }
      auto g = gathered(parameters, scaled ? scale : 1);
      if (k == 0) reference = g;
      HT_CHECK(g.size() == reference.size(), "advise: in ", kinds[k].name, " other parameters have gradients than in fp32");
      double difference = 0, size = 0;
      for (size_t i = 0; i < g.size(); ++i) {
        difference += (g[i] - reference[i]) * (g[i] - reference[i]);
        size += reference[i] * reference[i];
      }
      a.rows.push_back({.precision = kinds[k].name, .ms = 0, .peak_bytes = memory_stats(device).peak - before,
                        .gradient_error = size > 0 ? std::sqrt(difference / size) : std::sqrt(difference), .finite = std::isfinite(difference)});
    }
  for (size_t k = 0; k < kinds.size(); ++k) {
    std::sort(times[k].begin(), times[k].end());
    a.rows[k].ms = times[k][times[k].size() / 2];
  }

  // The fastest one whose gradients are sound; among those within 10 % of it, the most exact.
  constexpr double sound = 0.05, close = 1.1;
  double fastest = a.rows[0].ms;
  for (auto& r : a.rows) if (r.finite && r.gradient_error <= sound) fastest = std::min(fastest, r.ms);
  const Advice::Row* best = nullptr;
  for (auto& r : a.rows)
    if (r.finite && r.gradient_error <= sound && r.ms <= fastest * close && (!best || r.gradient_error < best->gradient_error)) best = &r;
  if (!best) best = &a.rows[0];
  a.recommended = best->precision;
  double gain = a.rows[0].ms / best->ms;
  if (best == &a.rows[0]) a.reason = "nothing sound is more than 10 % faster than fp32 here";
  else
    a.reason = text::cat("it takes ", std::round(a.rows[0].ms / best->ms * 100) / 100, " times less time than fp32 with gradients that differ by ",
                         percent(best->gradient_error), gain < 1 ? ", though it is not faster" : "");
  return a;
}

}  // namespace halftone::amp
