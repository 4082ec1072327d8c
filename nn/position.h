#pragma once
// What tells positions in a sequence apart. Nothing here has state or a greatest length.
#include "halftone/nn/module.h"

namespace halftone::nn {

// sin and cos of positions 0, 1, ... over base^(2i / width), computed in f64 and kept for the next call.
class HT_API PositionTable {
 public:
  PositionTable(const char* name, Size width, double base);
  struct Rows { Tensor sin, cos; };  // [n, width / 2]
  Rows rows(int64_t begin, int64_t n, DType dtype, Device device);
  int64_t width() const { return width_; }

 private:
  int64_t width_;
  double base_;
  Rows all_;
};

struct PositionalEncodingOptions {
  double base = 10000;
  bool batch_first = false;  // x is [n, t, width], not [t, n, width]
};
// x plus sin and cos of its position over base^(2i / width), in turns (Vaswani et al., "Attention is all you need", 2017).
class HT_API PositionalEncoding : public Module {
 public:
  explicit PositionalEncoding(Size width, PositionalEncodingOptions o = {})
      : table_("PositionalEncoding", width, o.base), batch_first_(o.batch_first) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override;

 private:
  PositionTable table_;
  bool batch_first_;
};

struct RotaryEmbeddingOptions {
  double base = 10000;
  bool interleaved = false;  // pairs are elements 2i and 2i + 1, not i and i + width / 2
};
// Pairs of elements of x [..., t, width], queries or keys of attention, turned by the angle (position + offset) over
// base^(2i / width) (Su et al., "RoFormer", 2021). Products of turned vectors depend on the distance of their positions.
class HT_API RotaryEmbedding : public Module {
 public:
  explicit RotaryEmbedding(Size width, RotaryEmbeddingOptions o = {})
      : table_("RotaryEmbedding", width, o.base), interleaved_(o.interleaved) {}
  HT_FIELDS()
  Tensor forward(const Tensor& x) override { return forward(x, 0); }
  Tensor forward(const Tensor& x, int64_t offset);
  using Module::operator();
  Tensor operator()(const Tensor& x, int64_t offset) { return forward(x, offset); }

 private:
  PositionTable table_;
  bool interleaved_;
};

}  // namespace halftone::nn
