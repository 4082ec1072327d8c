#pragma once
// Rearrangements that copy: padding, mirror images, rotations, repetitions and triangles.
#include <vector>

#include "halftone/core/hd.h"
#include "halftone/core/op.h"

namespace halftone {

namespace op {
extern HT_API OpDef pad, pad_grad, flip, roll, tril, triu;
}

enum class PadMode : uint8_t {
  constant,   // one value all around
  reflect,    // mirrored at the edge elements, which are not repeated: fewer new elements than there are old ones
  replicate,  // the edge elements repeated
};
struct PadOptions { PadMode mode = PadMode::constant; double value = 0; };
// x with elements added around it: {before, after} of the last dimension, then of the one before it, and so on. Negative
// numbers take elements away.
HT_API Tensor pad(const Tensor& x, const std::vector<int64_t>& pads, PadOptions o = {});
// The order of elements reversed along dims.
HT_API Tensor flip(const Tensor& x, const Shape& dims);
// Element i of a dimension goes to i + shift, around its end; one shift for each of dims.
HT_API Tensor roll(const Tensor& x, const Shape& shifts, const Shape& dims);
// x so many times along each dimension; repeats may have more dimensions than x, in front.
HT_API Tensor repeat(const Tensor& x, const Shape& repeats);
// Of each matrix of the last two dimensions, the elements on and below (above) the given diagonal; 0 elsewhere.
HT_API Tensor tril(const Tensor& x, int64_t diagonal = 0);
HT_API Tensor triu(const Tensor& x, int64_t diagonal = 0);

// How pad is parametrised inside, by dimension from the front.
struct PadAttrs {
  int64_t before[max_rank] = {}, after[max_rank] = {};
  double value = 0;
  PadMode mode = PadMode::constant;
};

namespace detail {

// One dimension of a padded tensor: n elements, some before and after them.
struct PadDim {
  int64_t n, before, after;
  // Where element i of the padded dimension comes from; -1: from nowhere.
  HT_HD int64_t source(PadMode mode, int64_t i) const {
    const int64_t j = i - before;
    if (j >= 0 && j < n) return j;
    if (mode == PadMode::constant) return -1;
    if (mode == PadMode::replicate) return j < 0 ? 0 : n - 1;
    return j < 0 ? -j : 2 * (n - 1) - j;
  }
  HT_HD bool left(int64_t j) const { return j >= 1 && j <= before; }
  HT_HD bool right(int64_t j) const { return j <= n - 2 && j >= n - 1 - after; }
  // How many padded elements come from element j, and the k-th of them.
  HT_HD int64_t images(PadMode mode, int64_t j) const {
    if (mode == PadMode::reflect) return 1 + left(j) + right(j);
    if (mode == PadMode::replicate) return 1 + (j == 0 ? before : 0) + (j == n - 1 ? after : 0);
    return 1;
  }
  HT_HD int64_t image(PadMode mode, int64_t j, int64_t k) const {
    if (mode == PadMode::replicate) return j == 0 ? k : before + j + k;
    if (k == 0) return before + j;
    return k == 1 && left(j) ? before - j : before + 2 * (n - 1) - j;
  }
};

// A tensor of `rank` dimensions and its padded form, which has these strides.
struct PadPlan {
  int rank = 0;
  PadMode mode = PadMode::constant;
  PadDim dim[max_rank];
  int64_t stride[max_rank];

  // The sum of what element e (row-major) of the tensor became in the padded one.
  template <class C, class T> HT_HD C sum_of_images(const T* padded, int64_t e) const {
    int64_t j[max_rank], k[max_rank];
    for (int d = rank - 1; d >= 0; --d) {
      j[d] = e % dim[d].n;
      e /= dim[d].n;
      k[d] = 0;
    }
    C total = 0;
    for (int d = 0; d >= 0;) {
      int64_t at = 0;
      for (d = 0; d < rank; ++d) at += dim[d].image(mode, j[d], k[d]) * stride[d];
      total += static_cast<C>(padded[at]);
      for (d = rank - 1; d >= 0 && ++k[d] == dim[d].images(mode, j[d]); --d) k[d] = 0;
    }
    return total;
  }
};
HT_API PadPlan pad_plan(const PadAttrs& a, const Meta& padded);

}  // namespace detail
}  // namespace halftone
