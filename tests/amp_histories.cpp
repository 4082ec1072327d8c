// The scaler against a small model of it that shares no code: every short word of calls, and long random histories of
// several optimizers. The model keeps what amp.md says a scaler is: numbers, and for each optimizer how far its iteration is.
#include <cmath>
#include <cstdlib>
#include <random>

#include "halftone/halftone.h"
#include "halftone/tests/catch.h"

using namespace halftone;

namespace {

bool full() { return std::getenv("HALFTONE_FULL") != nullptr; }

struct Settings { double init = 8, growth = 2, backoff = .5, least = 1, most = 64; int64_t interval = 2, hysteresis = 1; };

// One parameter of one element, updated by p -= g.
struct ModelOptimizer {
  double p = 0, g = 0;
  bool has_grad = false, scaled = false, stale = false;  // stale: some of it has a scale that is gone
  enum { ready, unscaled, stepped } stage = ready;
  bool checked = false, overflow = false;
};
struct Model {
  Settings s;
  double scale = s.init;
  int64_t streak = 0, skipped = 0, patience = s.hysteresis;
  bool made = false;
  std::vector<ModelOptimizer> o;
  Model(const Settings& settings, size_t n) : s(settings), o(n) {}

  bool backward(size_t k, double g) {
    auto& x = o[k];
    if (x.has_grad && !x.scaled) return false;
    x.stale &= x.has_grad;
    x.g = (x.has_grad ? x.g : 0) + g * scale;
    x.has_grad = x.scaled = true;
    return true;
  }
  bool plain_backward(size_t k, double g) {
    auto& x = o[k];
    if (x.has_grad && x.scaled) return false;
    x.g = (x.has_grad ? x.g : 0) + g;
    x.has_grad = true;
    x.scaled = x.stale = false;
    return true;
  }
  bool unscale(size_t k) {
    auto& x = o[k];
    if (!made || x.stage != ModelOptimizer::ready) return false;
    if (!x.has_grad) return true;
    if (!x.scaled || x.stale) return false;
    x.checked = true;
    x.overflow |= !std::isfinite(x.g);
    x.g /= scale;
    x.scaled = false;
    x.stage = ModelOptimizer::unscaled;
    return true;
  }
  bool step(size_t k) {
    auto& x = o[k];
    if (!made || x.stage == ModelOptimizer::stepped) return false;
    bool unscaled = x.stage == ModelOptimizer::unscaled;
    if (x.has_grad && (unscaled ? x.scaled : !x.scaled || x.stale)) return false;
    x.stage = ModelOptimizer::stepped;
    if (!x.has_grad) return true;
    x.checked = true;
    if (!unscaled) x.overflow |= !std::isfinite(x.g);
    if (!x.overflow) x.p -= unscaled ? x.g : x.g / scale;
    return true;
  }
  bool replace(double by) {
    int64_t before = streak;
    if (!update()) return false;
    streak = before;
    scale = by;
    for (auto& x : o) x.stale = true;
    return true;
  }
  bool update() {
    if (!made) return false;
    bool any = false, overflow = false;
    for (auto& x : o) {
      any |= x.checked;
      overflow |= x.checked && x.overflow;
      x.checked = x.overflow = false;
      x.stage = ModelOptimizer::ready;
    }
    if (!any) return true;
    for (auto& x : o) x.stale = true;
    if (overflow) {
      ++skipped;
      streak = streak < 0 ? streak - 1 : -1;
      patience = std::max<int64_t>(patience - 1, 0);
      if (patience == 0) scale = std::max(scale * s.backoff, s.least);
    } else if (streak = std::max<int64_t>(streak, 0) + 1; streak == s.interval) {
      if (scale * s.growth <= s.most) scale *= s.growth;
      streak = 0;
      patience = s.hysteresis;
    }
    return true;
  }
};

struct Real {
  amp::GradScaler scaler;
  std::vector<Tensor> p;
  std::vector<optim::SGD> opt;
  Real(const Settings& s, size_t n)
      : scaler({.init_scale = s.init, .growth_factor = s.growth, .backoff_factor = s.backoff, .growth_interval = s.interval, .min_scale = s.least,
                .max_scale = s.most, .hysteresis = s.hysteresis}) {
    for (size_t k = 0; k < n; ++k) {
      p.push_back(zeros({}, {.requires_grad = true}));
      opt.emplace_back(std::vector{p[k]}, optim::SGDOptions{.lr = 1});
    }
  }
};

template <class F> bool accepted(F f) {
  try {
    f();
    return true;
  } catch (const Error&) {
    return false;
  }
}

bool same(double a, double b) { return a == b || (std::isnan(a) && std::isnan(b)); }

// Whether the library is where the model is.
bool agree(Real& r, const Model& m) {
  bool good = r.scaler.get_scale() == m.scale && r.scaler.skipped_steps() == m.skipped && r.scaler.state_dict().at("streak").item<int64_t>() == m.streak &&
              r.scaler.state_dict().at("patience").item<int64_t>() == m.patience;
  for (size_t k = 0; k < m.o.size(); ++k) {
    Tensor g = r.p[k].grad();
    good = good && same(r.p[k].item(), m.o[k].p) && g.defined() == m.o[k].has_grad && (!g.defined() || same(g.item(), m.o[k].g));
  }
  return good;
}

}  // namespace

TEST_CASE("every short word of scaler calls is accepted or refused as the model says") {
  const std::string letters = "SBUCPDL";  // scale, backward, unscale_, clip, step, update, save and load
  int longest = full() ? 6 : 5;
  std::vector<std::string> wrong;
  int64_t words = 0;
  std::string word;
  std::function<void()> longer = [&] {
    if (!word.empty()) {
      ++words;
      Settings s;
      Real r(s, 1);
      Model m(s, 1);
      Tensor loss;
      bool good = true, stale = false;  // scale or parameter have been written since the loss
      for (char c : word) {
        bool expected = true, got = true;
        auto& x = m.o[0];
        switch (c) {
          case 'S':
            m.made = true;
            loss = r.scaler.scale(r.p[0] * 2);
            stale = false;
            break;
          case 'B':
            if (!loss.defined()) break;
            expected = !stale && m.backward(0, 2);
            got = accepted([&] { loss.backward(); });
            loss = {};
            break;
          case 'U':
            expected = m.unscale(0);
            got = accepted([&] { r.scaler.unscale_(r.opt[0]); });
            break;
          case 'C':
            expected = !(x.has_grad && x.scaled);
            got = accepted([&] { optim::clip_grad_norm_({r.p[0]}, 1e9); });
            break;
          case 'P':
            expected = m.step(0);
            stale |= expected && x.has_grad;
            got = accepted([&] { r.scaler.step(r.opt[0]); });
            break;
          case 'D':
            stale |= m.o[0].checked;
            expected = m.update();
            got = accepted([&] { r.scaler.update(); });
            break;
          default:
            m.made = true;
            got = accepted([&] { r.scaler.load_state_dict(r.scaler.state_dict().clone()); });
        }
        good = good && got == expected;
      }
      if (!good || !agree(r, m)) wrong.push_back(word);
    }
    if (static_cast<int>(word.size()) == longest) return;
    for (char c : letters) {
      word.push_back(c);
      longer();
      word.pop_back();
    }
  };
  longer();
  CHECK(words == (full() ? 137256 : 19607));
  INFO((wrong.empty() ? "" : wrong[0]) << " and " << wrong.size() << " in all");
  CHECK(wrong.empty());
}

TEST_CASE("random histories of a scaler with several optimizers are the model's") {
  std::mt19937_64 random(2024);
  auto one_of = [&](uint64_t n) { return random() % n; };
  int64_t histories = full() ? 1000000 : 4000, wrong = 0;
  for (int64_t h = 0; h < histories && wrong < 3; ++h) {
    Settings s{.interval = 1 + static_cast<int64_t>(one_of(3)), .hysteresis = 1 + static_cast<int64_t>(one_of(3))};
    size_t n = 1 + one_of(3);
    Real r(s, n);
    Model m(s, n);
    std::string said;
    for (int call = 0; call < 24; ++call) {
      size_t k = one_of(n);
      bool expected = true, got = true;
      uint64_t what = one_of(12);
      said += text::cat(what, ":", k, " ");
      if (what < 4) {
        double g = one_of(6) == 0 ? (one_of(2) ? INFINITY : NAN) : one_of(2) ? 1 : -2;
        said += text::cat("(", g, ") ");
        m.made = true;
        expected = m.backward(k, g);
        got = accepted([&] { r.scaler.scale(r.p[k] * g).backward(); });
      } else if (what == 4) {
        r.opt[k].zero_grad();
        m.o[k].has_grad = false;
      } else if (what == 5) {
        expected = m.unscale(k);
        got = accepted([&] { r.scaler.unscale_(r.opt[k]); });
      } else if (what < 8) {
        expected = m.step(k);
        got = accepted([&] { r.scaler.step(r.opt[k]); });
      } else if (what == 8) {
        expected = m.update();
        got = accepted([&] { r.scaler.update(); });
      } else if (what == 9) {
        double g = one_of(2) ? 1 : -2;
        expected = m.plain_backward(k, g);
        got = accepted([&] { (r.p[k] * g).backward(); });
      } else if (what == 10) {
        double scale = one_of(2) ? 2 : 16;
        expected = m.replace(scale);
        got = accepted([&] { r.scaler.update(scale); });
      } else if (m.made) {
        r.scaler.load_state_dict(r.scaler.state_dict().clone());
      }
      if (got == expected && agree(r, m)) continue;
      ++wrong;
      UNSCOPED_INFO("history " << h << ", call " << call << ": " << said << (got ? "accepted" : "refused"));
      break;
    }
  }
  CHECK(wrong == 0);
}
