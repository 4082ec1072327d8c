// oneDNN under the products and convolutions of the CPU. It computes on the calling thread alone: work is cut by size into blocks,
// images and channels, and our threads share those. So one pool of threads runs at a time, results do not depend on their
// number, and a forked child finds no pool that it lost.
#include <oneapi/dnnl/dnnl.hpp>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>

#include "halftone/core/packed.h"
#include "halftone/core/storage.h"
#include "halftone/ops/all.h"
#include "halftone/ops/conv.h"
#include "halftone/ops/gemm.h"
#include "halftone/ops/iterate.h"
#include "halftone/ops/unary.h"

// oneDNN's threads, where it was built with OpenMP's.
extern "C" {
__attribute__((weak)) int omp_get_max_threads();
__attribute__((weak)) void omp_set_num_threads(int);
}

namespace halftone {

void register_onednn();

namespace {

using dnnl::memory;

// While it lives, oneDNN starts no threads from this one. What the program set for its own loops comes back.
class Alone {
 public:
  Alone() : threads_(omp_get_max_threads ? omp_get_max_threads() : 1) { set(1); }
  ~Alone() { set(threads_); }
  Alone(const Alone&) = delete;
  Alone& operator=(const Alone&) = delete;

 private:
  void set(int n) const { if (threads_ != 1) omp_set_num_threads(n); }
  int threads_;
};

const dnnl::engine& engine() {
  static const auto& e = *new dnnl::engine(dnnl::engine::kind::cpu, 0);  // outlives static tensors of a program
  return e;
}

memory::data_type type_of(DType t) {
  return t == DType::bf16 ? memory::data_type::bf16 : t == DType::f16 ? memory::data_type::f16 : memory::data_type::f32;
}

// Version 3 has no operation descriptors: a primitive is described at once. Its scratch memory is ours, for one is run by one
// thread at a time only where it shares none.
dnnl::primitive_attr attributes() {
  dnnl::primitive_attr a;
  a.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  return a;
}
template <class P, class... A> typename P::primitive_desc describe(const A&... a) {
  if constexpr (requires { typename P::desc; }) return {typename P::desc(a...), attributes(), engine()};
  else return {engine(), a..., attributes()};
}
template <class P, class... A> typename P::primitive_desc describe_gradient(const dnnl::convolution_forward::primitive_desc& forward, const A&... a) {
  if constexpr (requires { typename P::desc; }) return {typename P::desc(a...), attributes(), engine(), forward};
  else return {engine(), a..., forward, attributes()};
}

struct Memory {
  int argument;
  const memory::desc* layout;
  const void* data;
};

// A primitive with its scratch memory's size.
struct Primitive {
  dnnl::primitive primitive;
  memory::desc scratch;

  template <class P> static Primitive of(const typename P::primitive_desc& d) { return {P(d), d.scratchpad_desc()}; }
  void run(std::initializer_list<Memory> operands) const {
    thread_local dnnl::stream stream(engine());
    std::unordered_map<int, memory> all;
    for (auto& m : operands) all.emplace(m.argument, memory(*m.layout, engine(), const_cast<void*>(m.data)));
    auto room = Storage::allocate(static_cast<int64_t>(scratch.get_size()), Device::cpu());
    all.emplace(DNNL_ARG_SCRATCHPAD, memory(scratch, engine(), room->data()));
    primitive.execute(stream, all);
  }
};

// What a thread has made, by what it is for: so many, then it starts afresh. oneDNN itself keeps the code.
template <class V> class Cache {
 public:
  template <class Make> const V& get(const std::vector<int64_t>& key, Make make) {
    if (auto found = made_.find(key); found != made_.end()) return found->second;
    if (made_.size() >= most_) made_.clear();
    return made_.emplace(key, make()).first->second;
  }

 private:
  static constexpr size_t most_ = 512;
  std::map<std::vector<int64_t>, V> made_;
};

// ---- products

void multiply(MatrixView<float> a, MatrixView<float> b, float* y, int64_t pitch, int64_t m, int64_t n, int64_t k) {
  Alone alone;
  dnnl_status_t status = dnnl_sgemm('N', 'N', m, n, k, 1, a.data, a.row_stride, b.data, b.row_stride, 0, y, pitch);
  HT_CHECK(status == dnnl_success, "matmul: oneDNN failed with status ", static_cast<int>(status));
}

struct Product {
  memory::desc a, b, y;
  Primitive primitive;
  Product(memory::data_type type, const memory::dims& a_strides, const memory::dims& b_strides, int64_t pitch, int64_t m, int64_t n, int64_t k)
      : a({m, k}, type, a_strides), b({k, n}, type, b_strides), y({m, n}, memory::data_type::f32, memory::dims{pitch, 1}),
        primitive(Primitive::of<dnnl::matmul>(describe<dnnl::matmul>(a, b, y))) {}
};

template <class T> void multiply(MatrixView<T> a, MatrixView<T> b, float* y, int64_t pitch, int64_t m, int64_t n, int64_t k) {
  thread_local Cache<Product> products;
  Alone alone;
  const Product& p = products.get({m, n, k, a.row_stride, a.column_stride, b.row_stride, b.column_stride, pitch}, [&] {
    return Product(type_of(dtype_of<T>), {a.row_stride, a.column_stride}, {b.row_stride, b.column_stride}, pitch, m, n, k);
  });
  p.primitive.run({{DNNL_ARG_SRC, &p.a, a.data}, {DNNL_ARG_WEIGHTS, &p.b, b.data}, {DNNL_ARG_DST, &p.y, y}});
}

// Whether this processor multiplies the type: the reference code that stands in elsewhere is no gain.
bool multiplies(DType t) {
  Alone alone;
  try {
    memory::desc a({64, 64}, type_of(t), memory::dims{64, 1}), y({64, 64}, memory::data_type::f32, memory::dims{64, 1});
    return std::string_view(describe<dnnl::matmul>(a, a, y).impl_info_str()).find("ref") == std::string_view::npos;
  } catch (const dnnl::error&) {
    return false;
  }
}

// ---- convolutions

// An operand where it lies, and as the primitive wants it: one layout when nothing moves.
struct Operand {
  int argument = 0;
  memory::desc here, wanted;
  std::optional<Primitive> move = {};

  Operand(int arg, const memory::desc& from, const memory::desc& to, bool is_result) : argument(arg), here(from), wanted(to) {
    if (here == wanted) return;
    const memory::desc &source = is_result ? wanted : here, &target = is_result ? here : wanted;
    move = Primitive::of<dnnl::reorder>(dnnl::reorder::primitive_desc(engine(), source, engine(), target, attributes()));
  }
  std::shared_ptr<Storage> room() const { return Storage::allocate(move ? static_cast<int64_t>(wanted.get_size()) : 0, Device::cpu()); }
  // The data as wanted, in `room` where that is another layout.
  const void* moved_in(const void* data, const Storage& room) const {
    if (!move) return data;
    move->run({{DNNL_ARG_FROM, &here, data}, {DNNL_ARG_TO, &wanted, room.data()}});
    return room.data();
  }
  void moved_out(const Storage& room, void* to) const {
    if (move) move->run({{DNNL_ARG_FROM, &wanted, room.data()}, {DNNL_ARG_TO, &here, to}});
  }
};

enum class Side { output, input, weight };  // what is computed

// Two operands and the result, of images x [n, c, ...], weights w [o, c, ...] and images y [n, o, ...].
struct Convolution {
  Operand a, b, y;
  Primitive primitive;
};

// What a primitive is made for: a part of the convolution, on tensors of these strides.
struct Part {
  Side side;
  DType dtype;
  ConvGeometry q;  // n, c and o are the part's; one group
  size_t dims;
  Strides x, w, y;

  std::vector<int64_t> key(bool given_layout) const {
    std::vector<int64_t> k{static_cast<int64_t>(side), static_cast<int64_t>(dtype), static_cast<int64_t>(dims), given_layout, q.n, q.c, q.o};
    for (auto* spatial : {q.in, q.out, q.kernel, q.stride, q.dilation, q.before, q.after}) k.insert(k.end(), spatial, spatial + 3);
    for (auto* strides : {&x, &w, &y}) k.insert(k.end(), strides->begin(), strides->end());
    return k;
  }
};

// With weights in the layout given, if one is.
Convolution describe(const Part& p, const memory::desc* weights) {
  auto last = [&](const int64_t* from, int64_t less = 0) {
    memory::dims all(from + 3 - p.dims, from + 3);
    for (auto& d : all) d -= less;
    return all;
  };
  memory::dims stride = last(p.q.stride), dilation = last(p.q.dilation, 1), before = last(p.q.before), after = last(p.q.after);
  auto shape = [&](int64_t first, int64_t second, const int64_t* spatial) {
    memory::dims all{first, second}, rest = last(spatial);
    all.insert(all.end(), rest.begin(), rest.end());
    return all;
  };
  memory::dims xs = shape(p.q.n, p.q.c, p.q.in), ws = shape(p.q.o, p.q.c, p.q.kernel), ys = shape(p.q.n, p.q.o, p.q.out);
  memory::data_type narrow = type_of(p.dtype), wide = memory::data_type::f32;
  auto here = [&](const memory::dims& extents, const Strides& strides, bool is_result) {
    return memory::desc(extents, is_result ? wide : narrow, memory::dims(strides.begin(), strides.end()));
  };
  memory::desc x = here(xs, p.x, p.side == Side::input), w = here(ws, p.w, p.side == Side::weight), y = here(ys, p.y, p.side == Side::output);
  auto any = [](const memory::dims& extents, memory::data_type type) { return memory::desc(extents, type, memory::format_tag::any); };
  memory::desc w_in = weights ? *weights : any(ws, narrow);
  constexpr auto direct = dnnl::algorithm::convolution_direct;
  auto forward = [&](const memory::desc& wd, memory::data_type result) {
    return describe<dnnl::convolution_forward>(dnnl::prop_kind::forward_training, direct, any(xs, narrow), wd, any(ys, result), stride, dilation, before, after);
  };
  if (p.side == Side::output) {
    auto d = forward(w_in, wide);
    return {{DNNL_ARG_SRC, x, d.src_desc(), false}, {DNNL_ARG_WEIGHTS, w, d.weights_desc(), false}, {DNNL_ARG_DST, y, d.dst_desc(), true},
            Primitive::of<dnnl::convolution_forward>(d)};
  }
  auto hint = forward(any(ws, narrow), narrow);
  if (p.side == Side::input) {
    auto d = describe_gradient<dnnl::convolution_backward_data>(hint, direct, any(xs, wide), w_in, any(ys, narrow), stride, dilation, before, after);
    return {{DNNL_ARG_DIFF_DST, y, d.diff_dst_desc(), false}, {DNNL_ARG_WEIGHTS, w, d.weights_desc(), false}, {DNNL_ARG_DIFF_SRC, x, d.diff_src_desc(), true},
            Primitive::of<dnnl::convolution_backward_data>(d)};
  }
  auto d = describe_gradient<dnnl::convolution_backward_weights>(hint, direct, any(xs, narrow), any(ws, wide), any(ys, narrow), stride, dilation, before, after);
  return {{DNNL_ARG_SRC, x, d.src_desc(), false}, {DNNL_ARG_DIFF_DST, y, d.diff_dst_desc(), false}, {DNNL_ARG_DIFF_WEIGHTS, w, d.diff_weights_desc(), true},
          Primitive::of<dnnl::convolution_backward_weights>(d)};
}
const Convolution& convolution(const Part& p, const memory::desc* weights = nullptr) {
  thread_local Cache<Convolution> made;
  return made.get(p.key(weights), [&] { return describe(p, weights); });
}

int64_t over(int64_t n, int64_t by) { return (n + by - 1) / by; }

// A convolution's tasks, by its size alone: runs of images, groups, and pieces of the result's channels.
struct Tasks {
  Side side;
  ConvGeometry q;
  int64_t images, runs, channels, pieces;

  Tasks(Side s, const ConvGeometry& g) : side(s), q(g) {
    constexpr int64_t work = 1 << 21, most = 16, least = 64;  // multiply-adds of a run; tasks; channels
    int64_t all = side == Side::input ? q.c_group() : q.o_group(), an_image = std::max<int64_t>(1, q.o_group() * q.c_group() * q.taps() * q.positions());
    auto cut_images = [&](int64_t wanted) {
      images = std::clamp<int64_t>(std::max(over(q.n, std::max<int64_t>(1, wanted)), over(work, an_image)), 1, q.n);
      runs = over(q.n, images);
    };
    auto cut_channels = [&](int64_t wanted) {
      channels = over(over(all, std::clamp<int64_t>(wanted, 1, std::max<int64_t>(1, all / least))), 16) * 16;
      pieces = over(all, channels);
    };
    if (side == Side::weight) {  // runs have a sum each
      cut_channels(most / q.groups);
      cut_images(most / (q.groups * pieces));
    } else {
      cut_images(most);
      cut_channels(most / (q.groups * runs));
    }
  }
  int64_t count() const { return runs * q.groups * pieces; }
};
struct Task {
  int64_t image, images, group, channel, channels;  // the channel within the group
  Task(const Tasks& t, int64_t i) : image(i / (t.q.groups * t.pieces) * t.images), group(i / t.pieces % t.q.groups), channel(i % t.pieces * t.channels) {
    images = std::min(t.images, t.q.n - image);
    channels = std::min(t.channels, (t.side == Side::input ? t.q.c_group() : t.q.o_group()) - channel);
  }
};

Strides dense(int64_t first, int64_t second, const int64_t* spatial, size_t dims) {
  Shape shape{first, second};
  for (size_t d = 3 - dims; d < 3; ++d) shape.push_back(spatial[d]);
  return contiguous_strides(shape);
}

const char* at(const Tensor& t, int64_t i, int64_t j) {
  return static_cast<const char*>(t.raw_data()) + (i * t.strides()[0] + j * t.strides()[1]) * static_cast<int64_t>(size_of(t.dtype()));
}

// A convolution's weights in the layouts that its tasks want, in order.
struct Laid {
  std::vector<std::shared_ptr<Storage>> rooms;
  std::vector<const void*> weights;
  std::vector<memory::desc> layouts;
  explicit Laid(size_t kinds) : rooms(kinds), weights(kinds), layouts(kinds) {}
};

// Images from images: y from x and w, or x from y and w; `lasting` weights may be those of the next call. finish(plane in f32, image,
// channel) takes what is computed; with a result in f32 it lies there already.
template <class F> void images_from(Side side, const ConvGeometry& q, const Tensor& from, const Tensor& w, bool lasting, const Tensor& result, F finish) {
  bool forward = side == Side::output, direct = result.dtype() == DType::f32;
  size_t dims = static_cast<size_t>(w.rank()) - 2;
  Tasks tasks(side, q);
  int64_t plane = forward ? q.positions() : q.pixels(), of_group = forward ? q.o_group() : q.c_group(), from_group = forward ? q.c_group() : q.o_group();
  auto part = [&](const Task& t) {
    Part p{side, w.dtype(), q, dims, from.strides(), w.strides(), from.strides()};
    p.q.n = t.images;
    p.q.c = forward ? q.c_group() : t.channels;
    p.q.o = forward ? t.channels : q.o_group();
    p.q.groups = 1;
    (forward ? p.y : p.x) = direct ? result.strides() : dense(t.images, t.channels, forward ? q.out : q.in, dims);
    return p;
  };
  Alone alone;
  // Weights take their layout once for all runs; the last run, which may be shorter, is told it.
  int64_t kinds = q.groups * tasks.pieces;
  auto lay = [&] {
    auto made = std::make_shared<Laid>(static_cast<size_t>(kinds));
    parallel_for(kinds, std::max<int64_t>(1, parallel_grain / (q.o_group() * q.c_group() * q.taps() / tasks.pieces + 1)), [&](int64_t begin, int64_t end) {
      Alone here;
      for (int64_t i = begin; i < end; ++i) {
        Task t(tasks, i);
        const Convolution& c = convolution(part(t));
        auto k = static_cast<size_t>(i);
        made->rooms[k] = c.b.room();
        made->layouts[k] = c.b.wanted;
        made->weights[k] = c.b.moved_in(forward ? at(w, t.group * q.o_group() + t.channel, 0) : at(w, t.group * q.o_group(), t.channel), *made->rooms[k]);
      }
    });
    return made;
  };
  auto key = [&] {
    auto k = part(Task(tasks, 0)).key(false);
    k.insert(k.end(), {kinds, q.c, q.o, q.groups, w.meta().offset});
    return k;
  };
  if (!lasting) Packed::drop(*w.storage());
  const std::shared_ptr<const Laid> laid = lasting ? Packed::get(*w.storage(), key(), lay) : lay();
  parallel_for(tasks.count(), 1, [&](int64_t begin, int64_t end) {
    Alone here;
    for (int64_t i = begin; i < end; ++i) {
      Task t(tasks, i);
      auto k = static_cast<size_t>(i % kinds);
      const Convolution& c = t.images == tasks.images ? convolution(part(t)) : convolution(part(t), &laid->layouts[k]);
      auto a_room = c.a.room(), y_room = c.y.room();
      int64_t first = t.group * of_group + t.channel;
      std::unique_ptr<float[]> own;
      float* to = direct ? result.data<float>() + t.image * result.strides()[0] + first * result.strides()[1] : nullptr;
      if (!direct) to = (own = std::make_unique_for_overwrite<float[]>(static_cast<size_t>(t.images * t.channels * plane))).get();
      const void* a = c.a.moved_in(at(from, t.image, t.group * from_group), *a_room);
      c.primitive.run({{c.a.argument, &c.a.wanted, a}, {c.b.argument, &c.b.wanted, laid->weights[k]}, {c.y.argument, &c.y.wanted, c.y.move ? y_room->data() : to}});
      c.y.moved_out(*y_room, to);
      int64_t pitch = direct ? result.strides()[0] : t.channels * plane;
      for (int64_t n = 0; n < t.images; ++n)
        for (int64_t ch = 0; ch < t.channels; ++ch) finish(to + n * pitch + ch * plane, t.image + n, first + ch);
    }
  });
}

// Each run adds up its images, then the runs are added in order.
void weight_from(const ConvGeometry& q, const Tensor& x, const Tensor& g, const Tensor& result) {
  size_t dims = static_cast<size_t>(x.rank()) - 2;
  Tasks tasks(Side::weight, q);
  int64_t a_channel = q.c_group() * q.taps(), size = q.o * a_channel;
  bool direct = tasks.runs == 1 && result.dtype() == DType::f32;
  std::unique_ptr<float[]> own = direct ? nullptr : std::make_unique_for_overwrite<float[]>(static_cast<size_t>(tasks.runs * size));
  float* sums = direct ? result.data<float>() : own.get();
  parallel_for(tasks.count(), 1, [&](int64_t begin, int64_t end) {
    Alone here;
    for (int64_t i = begin; i < end; ++i) {
      Task t(tasks, i);
      Part p{Side::weight, x.dtype(), q, dims, x.strides(), dense(t.channels, q.c_group(), q.kernel, dims), g.strides()};
      p.q.n = t.images;
      p.q.c = q.c_group();
      p.q.o = t.channels;
      p.q.groups = 1;
      const Convolution& c = convolution(p);
      auto a_room = c.a.room(), b_room = c.b.room(), y_room = c.y.room();
      int64_t first = t.group * q.o_group() + t.channel;
      float* to = sums + t.image / tasks.images * size + first * a_channel;
      const void *a = c.a.moved_in(at(x, t.image, t.group * q.c_group()), *a_room), *b = c.b.moved_in(at(g, t.image, first), *b_room);
      c.primitive.run({{c.a.argument, &c.a.wanted, a}, {c.b.argument, &c.b.wanted, b}, {c.y.argument, &c.y.wanted, c.y.move ? y_room->data() : to}});
      c.y.moved_out(*y_room, to);
    }
  });
  if (direct) return;
  visit<floating_types>(result.dtype(), [&]<class T>(Type<T>) {
    T* to = result.data<T>();
    parallel_for(size, parallel_grain, [&](int64_t begin, int64_t end) {
      for (int64_t r = 1; r < tasks.runs; ++r)
        for (int64_t k = begin; k < end; ++k) sums[k] += sums[r * size + k];
      for (int64_t k = begin; k < end; ++k) to[k] = convert<T>(sums[k]);
    });
  });
}

Kernel eigen_conv, eigen_conv_relu, eigen_input, eigen_weight;

// One channel a group is no matrix product, and f64 is Eigen's.
bool takes(const ConvGeometry& q, DType t) {
  return t != DType::f64 && (q.groups == 1 || q.c_group() > 1) && q.n > 0 && q.c > 0 && q.o > 0 && q.positions() > 0 && q.pixels() > 0;
}
// As it is where the processor multiplies its type, else in f32.
Tensor multiplied(const Tensor& t) {
  return t.dtype() == DType::f32 || multiplies_natively(t.dtype()) ? t : t.to(DType::f32);
}

template <bool with_relu> void run_conv(const Call& c, std::span<Tensor> out) {
  ConvGeometry q = conv_geometry(c.as<ConvAttrs>(), c.in[0].shape(), c.in[1].shape(), out[0].shape());
  if (!takes(q, c.in[0].dtype())) return (with_relu ? eigen_conv_relu : eigen_conv)(c, out);
  Tensor bias = c.has(2) ? c.in[2].to(DType::f32).contiguous() : Tensor();
  const float* b = bias.defined() ? bias.data<float>() : nullptr;
  int64_t plane = q.positions();
  visit<floating_types>(out[0].dtype(), [&]<class T>(Type<T>) {
    images_from(Side::output, q, multiplied(c.in[0]), multiplied(c.in[1]), !c.recording, out[0], [&, y = out[0].data<T>()](const float* from, int64_t n, int64_t o) {
      T* to = y + (n * q.o + o) * plane;
      auto rounded = [&](auto f) { for (int64_t i = 0; i < plane; ++i) to[i] = convert<T>(f(from[i])); };
      auto activated = [](float v) { return with_relu ? unary::Relu::f(v) : v; };
      if (b) rounded([add = b[o], activated](float v) { return activated(v + add); });
      else if (with_relu || !std::same_as<T, float>) rounded(activated);
    });
  });
}

void run_conv_input(const Call& c, std::span<Tensor> out) {
  ConvGeometry q = conv_geometry(c.as<ConvAttrs>(), out[0].shape(), c.in[1].shape(), c.in[0].shape());
  if (!takes(q, c.in[0].dtype())) return eigen_input(c, out);
  Tensor addend = c.has(2) ? c.in[2].to(DType::f32).contiguous() : Tensor();
  const float* more = addend.defined() ? addend.data<float>() : nullptr;
  int64_t plane = q.pixels();
  visit<floating_types>(out[0].dtype(), [&]<class T>(Type<T>) {
    images_from(Side::input, q, multiplied(c.in[0]), multiplied(c.in[1]), !c.recording, out[0], [&, x = out[0].data<T>()](const float* from, int64_t n, int64_t k) {
      int64_t first = (n * q.c + k) * plane;
      if (more) for (int64_t i = 0; i < plane; ++i) x[first + i] = convert<T>(from[i] + more[first + i]);
      else if constexpr (!std::same_as<T, float>) for (int64_t i = 0; i < plane; ++i) x[first + i] = convert<T>(from[i]);
    });
  });
}

void run_conv_weight(const Call& c, std::span<Tensor> out) {
  ConvGeometry q = conv_geometry(c.as<ConvAttrs>(), c.in[0].shape(), out[0].shape(), c.in[1].shape());
  if (!takes(q, c.in[0].dtype())) return eigen_weight(c, out);
  weight_from(q, multiplied(c.in[0]), multiplied(c.in[1]), out[0]);
}

// Puts a kernel in the place of another, which it keeps.
void replace(OpDef& op, Kernel& before, Kernel kernel) {
  before = op.kernel[static_cast<size_t>(DeviceType::cpu)];
  set_kernel(op, DeviceType::cpu, kernel);
}

}  // namespace

void register_onednn() {
  // Of other kinds of threads we could not say that they stay away.
  if (DNNL_CPU_THREADING_RUNTIME != DNNL_RUNTIME_OMP && DNNL_CPU_THREADING_RUNTIME != DNNL_RUNTIME_SEQ) return;
  // Units for 16 bits, where the processor has them; HALFTONE_NARROW_UNITS=0 does without.
  constexpr auto units = static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16);
  const char* asked = std::getenv("HALFTONE_NARROW_UNITS");
  bool narrow = !(asked && *asked == '0') && (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & units) == units;
  block_products() = {multiply, narrow && multiplies(DType::bf16) ? multiply<bfloat16> : nullptr, narrow && multiplies(DType::f16) ? multiply<half> : nullptr};
  replace(op::conv, eigen_conv, run_conv<false>);
  replace(op::conv_relu, eigen_conv_relu, run_conv<true>);
  replace(op::conv_input, eigen_input, run_conv_input);
  replace(op::conv_weight, eigen_weight, run_conv_weight);
}

}  // namespace halftone
