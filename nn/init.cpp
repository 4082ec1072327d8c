// Initial weights. What the device cannot draw directly is drawn in f64 on the CPU and copied there.
#include "halftone/nn/init.h"

#include <cmath>
#include <numbers>
#include <tuple>

#include "halftone/core/parallel.h"
#include "halftone/core/thread_state.h"
#include "halftone/ops/binary.h"
#include "halftone/ops/copy.h"
#include "halftone/ops/matmul.h"
#include "halftone/ops/random.h"
#include "halftone/ops/reduce.h"

namespace halftone::nn::init {
namespace {

struct Fans { double in, out; };
Fans fans(std::string_view who, const Tensor& x) {
  HT_CHECK(x.rank() >= 2, who, ": expected a weight [out, in, ...], got ", x.meta());
  double window = 1;
  for (size_t i = 2; i < x.shape().size(); ++i) window *= static_cast<double>(x.shape()[i]);
  return {static_cast<double>(x.shape()[1]) * window, static_cast<double>(x.shape()[0]) * window};
}

// Of a layer with nothing to draw (a fan of 0), anything finite will do.
double spread(double gain, double fan) { return fan > 0 ? gain / std::sqrt(fan) : 0; }
// A uniform draw of this standard deviation reaches sqrt(3) times as far.
Tensor uniform_of(const Tensor& x, double std) {
  double bound = std::sqrt(3.0) * std;
  return init::uniform_(x, -bound, bound);
}

double kaiming(std::string_view who, const Tensor& x, const KaimingOptions& o) {
  Fans f = fans(who, x);
  return spread(gain(o.nonlinearity, o.slope), o.mode == Fan::in ? f.in : f.out);
}
double xavier(std::string_view who, const Tensor& x, double gain) {
  Fans f = fans(who, x);
  return spread(gain, (f.in + f.out) / 2);
}

double normal_cdf(double z) { return 0.5 * std::erfc(-z / std::numbers::sqrt2); }
// The z in [low, high] below which a standard normal falls with probability p: Newton's steps, halving where one leaves
// the bracket.
double normal_quantile(double p, double low, double high) {
  double z = (low + high) / 2;
  for (int i = 0; i < 100; ++i) {
    double excess = normal_cdf(z) - p;
    (excess > 0 ? high : low) = z;
    double next = z - excess * std::sqrt(2 * std::numbers::pi) * std::exp(z * z / 2);
    if (!(next > low && next < high)) next = (low + high) / 2;
    if (std::fabs(next - z) <= 1e-12 * (1 + std::fabs(z))) return next;
    z = next;
  }
  return z;
}

}  // namespace

Tensor constant_(const Tensor& x, double value) {
  NoGrad off;
  Tensor(x).fill_(value);
  return x;
}
Tensor zeros_(const Tensor& x) { return constant_(x, 0); }
Tensor ones_(const Tensor& x) { return constant_(x, 1); }
Tensor uniform_(const Tensor& x, double low, double high) {
  HT_CHECK(low <= high, "uniform_: expected low <= high, got ", low, " and ", high);
  NoGrad off;
  return low == high ? constant_(x, low) : halftone::uniform_(x, low, high);
}
Tensor normal_(const Tensor& x, double mean, double std) {
  NoGrad off;
  return halftone::normal_(x, mean, std);
}

Tensor truncated_normal_(const Tensor& x, TruncatedNormalOptions o) {
  HT_CHECK(o.std > 0 && o.low < o.high, "truncated_normal_: expected std > 0 and low < high, got std ", o.std, ", low ",
           o.low, ", high ", o.high);
  constexpr double far = 38;  // the cdf is 0 or 1 in f64 beyond
  double low = (o.low - o.mean) / o.std, high = (o.high - o.mean) / o.std;
  HT_CHECK(low < far && high > -far, "truncated_normal_: [", o.low, ", ", o.high, "] has no probability under mean ",
           o.mean, ", std ", o.std);
  // Left of the mean the cdf keeps its digits, so an interval right of it is mirrored.
  double side = low > 0 ? -1 : 1;
  if (side < 0) std::tie(low, high) = std::pair(-high, -low);
  low = std::max(low, -far);
  high = std::min(high, far);
  double from = normal_cdf(low), to = normal_cdf(high);

  NoGrad off;
  Tensor draws = halftone::uniform_(empty(x.shape(), {.dtype = DType::f64}), 0, 1);
  double* v = draws.data<double>();
  parallel_for(draws.numel(), 1 << 10, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double z = side * normal_quantile(from + v[i] * (to - from), low, high);
      v[i] = std::min(std::max(o.mean + o.std * z, o.low), o.high);
    }
  });
  Tensor(x).copy_(draws);
  return x;
}

double gain(Nonlinearity f, double slope) {
  switch (f) {
    case Nonlinearity::linear:
    case Nonlinearity::sigmoid: return 1;
    case Nonlinearity::tanh: return 5.0 / 3;
    case Nonlinearity::relu: return std::numbers::sqrt2;
    case Nonlinearity::leaky_relu: return std::sqrt(2 / (1 + slope * slope));
    case Nonlinearity::selu: return 0.75;
  }
  throw Error("gain: no such nonlinearity");
}

Tensor xavier_uniform_(const Tensor& x, double gain) { return uniform_of(x, xavier("xavier_uniform_", x, gain)); }
Tensor xavier_normal_(const Tensor& x, double gain) { return init::normal_(x, 0, xavier("xavier_normal_", x, gain)); }
Tensor kaiming_uniform_(const Tensor& x, KaimingOptions o) { return uniform_of(x, kaiming("kaiming_uniform_", x, o)); }
Tensor kaiming_normal_(const Tensor& x, KaimingOptions o) {
  return init::normal_(x, 0, kaiming("kaiming_normal_", x, o));
}

Tensor orthogonal_(const Tensor& x, double gain) {
  HT_CHECK(x.rank() >= 2, "orthogonal_: expected rank 2 or more, got ", x.meta());
  int64_t rows = x.size(0), columns = rows == 0 ? 0 : x.numel() / rows;
  bool wide = rows <= columns;
  NoGrad off;
  // Gram and Schmidt over the rows of a normal matrix, each projected twice: once loses digits.
  Tensor q = halftone::normal_(empty({std::min(rows, columns), std::max(rows, columns)}, {.dtype = DType::f64}));
  for (int64_t i = 0; i < q.size(0); ++i) {
    Tensor v = q.select(0, i);
    for (int pass = 0; pass < 2 && i > 0; ++pass) {
      Tensor above = q.slice(0, 0, i);
      v.add_(matmul(matmul(above, v), above), -1);
    }
    v.mul_(1 / std::sqrt((v * v).sum().item()));
  }
  Tensor(x).copy_(((wide ? q : q.t()) * gain).reshape(x.shape()));
  return x;
}

Tensor dirac_(const Tensor& x, Size groups) {
  HT_CHECK(x.rank() >= 3 && x.rank() <= 5, "dirac_: expected the weight of a convolution, [out, in, k...], got ", x.meta());
  HT_CHECK(groups > 0 && x.size(0) % groups == 0, "dirac_: ", x.size(0), " outputs do not divide into ", groups, " groups");
  NoGrad off;
  Tensor w = zeros(x.shape(), {.dtype = DType::f64});
  int64_t each = x.size(0) / groups;
  for (int64_t o = 0; o < x.size(0); ++o) {
    if (o % each >= x.size(1)) continue;
    Tensor kernel = w.select(0, o).select(0, o % each);
    while (kernel.rank() > 0) kernel = kernel.select(0, kernel.size(0) / 2);
    kernel.fill_(1);
  }
  Tensor(x).copy_(w);
  return x;
}

}  // namespace halftone::nn::init
