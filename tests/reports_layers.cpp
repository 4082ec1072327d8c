// What users of other frameworks reported about layers under mixed precision: normalisation, attention, losses, embeddings, pooling.
// Each test is named by its entry and by what is right.
#include "halftone/tests/reports.h"

using namespace halftone;
using namespace halftone::tests;
using amp::Autocast;
using Catch::Contains;

namespace {

double unit(DType t) { return t == f16 ? 0x1p-11 : 0x1p-8; }
// The largest difference, over the largest of `exact`.
double error(const Tensor& got, const Tensor& exact) {
  Tensor e = exact.to(f64);
  return amax(abs(got.to(f64) - e)).item() / std::max(amax(abs(e)).item(), 1e-30);
}

// A network with batch norm in the middle.
struct Normed {
  explicit Normed(Device d) : net(d) {
    w = ones({17}, {.device = d, .requires_grad = true}), b = zeros({17}, {.device = d, .requires_grad = true});
    mean = zeros({17}, {.device = d}), var = ones({17}, {.device = d});
  }
  std::vector<Tensor> parameters() const { return {net.w1, net.b1, net.w2, net.b2, w, b}; }
  Tensor operator()(const Tensor& x, bool training) const {
    Tensor h = batch_norm(linear(x, net.w1, net.b1), w, b, mean, var, {.training = training});
    return linear(relu(h), net.w2, net.b2);
  }
  Net net;
  Tensor w, b, mean, var;
};

}  // namespace

// ---- normalisation

TEST_CASE("report_14: a batch that overflows is skipped by the running statistics as by the optimizer") {
  tests::report("pytorch#90342");
  everywhere([](Device d, DType t) {
    for (float bad : {inf, -inf, nan_, 1e30f})  // the last overflows in f16 only
      for (int where = 0; where < 2; ++where) {  // in the batch, or in backward alone
        if (bad == 1e30f && (t == bf16 || where == 1)) continue;
        Normed net(d);
        optim::AdamW opt(net.parameters(), {.lr = 1e-2});
        optim::EMA average(opt, {.decay = 0.9});
        amp::GradScaler scaler({.init_scale = 64});
        auto iterate = [&](bool overflow) {
          Batch batch(d, 14);
          if (overflow && where == 0) batch.x[3].slice(0, 2, 3).fill_(bad);
          opt.zero_grad();
          Tensor loss;
          { Autocast region({.dtype = t}); loss = cross_entropy(net(batch.x, true), batch.target); }
          scaler.scale(loss).backward();
          if (overflow && where == 1) net.w.grad().slice(0, 4, 5).fill_(bad);
          auto outcome = scaler.step(opt);
          scaler.update();
          return outcome;
        };
        CHECK(iterate(false).stepped());
        Tensor mean = net.mean.clone(), var = net.var.clone();
        auto averages = weights(average.averages());
        CHECK(iterate(true).skipped());
        CHECK((finite(net.mean) && finite(net.var)));
        // Ours: statistics are written in forward, so that an overflow in backward alone keeps the finite batch's.
        CHECK(same_bits({net.mean, net.var}, {mean, var}) == (where == 0));
        CHECK(same_bits(average.averages(), averages));
        {
          NoGrad off;
          Autocast region({.dtype = t});
          CHECK(finite(net(Batch(d, 15).x, false)));
        }
        CHECK(iterate(false).stepped());
      }
  });
}

TEST_CASE("report_39: norms take and give 16 bits, with f32 inside and f32 weights") {
  tests::report("pytorch#188955");
  everywhere([](Device d, DType t) {
    manual_seed(39);
    for (double size : {1., 3e4})
      for (int64_t width : {7, 64, 1025}) {
        INFO("values near " << size << ", width " << width);
        auto leaf = [&](const Shape& s) { return randn(s, {.device = d}).requires_grad_(); };
        Tensor x = leaf({9, 5}), w1 = leaf({width, 5}), g = leaf({width}), b = leaf({width}), w2 = leaf({3, width});
        for (int norm = 0; norm < 3; ++norm) {
          auto apply = [&](const Tensor& h) {
            if (norm == 0) return layer_norm(h, {width}, g, b);
            if (norm == 1) return rms_norm(h, {width}, g);
            return group_norm(h, 1, g, b);
          };
          Tensor h, n, y;
          amp::Trace trace = amp::trace([&] {
            Autocast region({.dtype = t, .strict = true});
            h = linear(x, w1);
            n = apply(h);
            y = linear(n, w2);
          });
          INFO(trace);
          CHECK((h.dtype() == t && n.dtype() == t && y.dtype() == t));
          CHECK(trace.casts() <= 3);  // x and two weights: nothing about the norm
          y.sum().backward();
          for (auto& grad : gradients({x, w1, g, w2})) CHECK((grad.dtype() == f32 && finite(grad)));
          // Statistics of large values neither overflow nor lose digits.
          NoGrad off;
          Tensor large = (randn({9, width}, {.device = d}) * 0.01 + 1).to(f64) * size, low = large.to(t);
          auto exact = [&](const Tensor& v) {
            if (norm == 0) return layer_norm(v, {width}, g.to(f64), b.to(f64));
            if (norm == 1) return rms_norm(v, {width}, g.to(f64));
            return group_norm(v, 1, g.to(f64), b.to(f64));
          };
          Autocast region({.dtype = t});
          CHECK(error(apply(low), exact(low.to(f64))) < 2 * unit(t));
        }
      }
  });
}

TEST_CASE("report_40: batch norm of 16-bit batches keeps f32 statistics, which hold any variance") {
  tests::report("apex#301");
  everywhere([](Device d, DType t) {
    manual_seed(40);
    for (const Shape& shape : {Shape{64, 5}, Shape{8, 5, 7}, Shape{4, 5, 6, 6}}) {
      Tensor w = ones({5}, {.device = d, .requires_grad = true}), b = zeros({5}, {.device = d, .requires_grad = true});
      Tensor mean = zeros({5}, {.device = d}), var = ones({5}, {.device = d});
      Tensor x;
      Autocast region({.dtype = t});
      for (int i = 0; i < 10; ++i) {
        x = (randn(shape, {.device = d}) * 300).to(t).requires_grad_();
        Tensor y = batch_norm(x, w, b, mean, var, {.training = true, .momentum = 0.5});
        CHECK(y.dtype() == t);
        y.backward({.gradient = ones_like(y)});
        CHECK((x.grad().dtype() == t && w.grad().dtype() == f32 && finite(x.grad())));
      }
      CHECK((mean.dtype() == f32 && var.dtype() == f32));
      CHECK(amin(var).item() > 65504. / 2);  // 90000, which f16 has not
      CHECK(amax(var).item() < 200000);
      NoGrad off;
      Tensor y = batch_norm(x, w, b, mean, var), exact = batch_norm(x.to(f64), w.to(f64), b.to(f64), mean.to(f64), var.to(f64));
      CHECK(y.dtype() == t);
      CHECK(error(y, exact) < 2 * unit(t));
      CHECK_THROWS_AS(batch_norm(x, w, b, mean.to(t), var.to(t), {.training = true}), Error);  // statistics of 16 bits
    }
  });
}

TEST_CASE("report_20: norms and pools sum in f32") {
  everywhere([](Device d, DType t) {
    manual_seed(20);
    Tensor x = (randn({3, 8192}, {.device = d}) * 300).to(t), wide = x.to(f64);
    CHECK(error(layer_norm(x, {8192}), layer_norm(wide, {8192})) < 2 * unit(t));
    CHECK(error(rms_norm(x, {8192}), rms_norm(wide, {8192})) < 2 * unit(t));
    CHECK(error(instance_norm(x.reshape({1, 3, 8192})), instance_norm(wide.reshape({1, 3, 8192}))) < 2 * unit(t));
    for (int64_t n : {16, 65, 128}) {
      Tensor image = full({1, 2, n, n}, 3, {.dtype = t, .device = d}).requires_grad_();
      for (auto& y : {avg_pool2d(image, n), adaptive_avg_pool2d(image, 1)}) {
        CHECK(all_are(y.detach(), 3));
        image.zero_grad();
        y.backward({.gradient = full(y.shape(), double(n * n), {.dtype = t, .device = d})});
        CHECK(all_are(image.grad(), rounded(rounded(double(n * n), t) / double(n * n), t)));
      }
      Tensor windows = ones({1, 1, n, n}, {.dtype = t, .device = d}).requires_grad_();
      avg_pool2d(windows, 3, {.stride = 1, .padding = 1}).sum().backward();
      CHECK(windows.grad()[0][0].to_vector<double>()[size_t(n + 1)] == rounded(1, t));  // nine ninths
    }
  });
}

// ---- attention

TEST_CASE("report_34: a mask of any dtype goes with 16-bit attention") {
  tests::report("pytorch#99012");
  everywhere([](Device d, DType t) {
    manual_seed(34);
    Tensor q = randn({2, 3, 9, 8}, {.device = d, .requires_grad = true}), k = randn({2, 3, 11, 8}, {.device = d, .requires_grad = true});
    Tensor v = randn({2, 3, 11, 8}, {.device = d, .requires_grad = true});
    Tensor seen = gt(rand({9, 11}, {.device = d}), 0.3);
    { NoGrad off; seen = logical_or(seen, eq(arange(11, {.device = d}), 0)); }  // each query sees one key at least
    Autocast region({.dtype = t});
    Tensor expected = scaled_dot_product_attention(q, k, v, seen);
    CHECK(expected.dtype() == t);
    {
      Autocast off({.enabled = false});
      Tensor exact = scaled_dot_product_attention(q.to(t).to(f64), k.to(t).to(f64), v.to(t).to(f64), seen);
      CHECK(error(expected, exact) < 4 * unit(t));
    }
    for (double hidden : {-double(inf), -1e9, -3.4e38}) {
      Tensor mask = where(seen, 0.0, full({}, hidden, {.device = d}));
      CHECK(mask.dtype() == f32);
      for (auto& m : {mask, mask.to(t)}) {
        Tensor y = scaled_dot_product_attention(q, k, v, m);
        CHECK(y.dtype() == t);
        CHECK(error(y, expected) < 2 * unit(t));
        for (auto& x : {q, k, v}) x.zero_grad();
        y.sum().backward();
        for (auto& g : gradients({q, k, v})) CHECK((g.dtype() == f32 && finite(g)));
      }
    }
    // A query that sees nothing is 0, by any mask.
    Tensor nothing = zeros({9, 11}, {.dtype = DType::b8, .device = d});
    CHECK(all_are(scaled_dot_product_attention(q, k, v, nothing).detach(), 0));
    CHECK(all_are(scaled_dot_product_attention(q, k, v, full({9, 11}, -inf, {.device = d})).detach(), 0));
  });
}

// ---- losses

TEST_CASE("report_35: binary cross entropy of probabilities is refused in f16 with the cure, and right in bf16") {
  tests::report("pytorch#61098");
  everywhere([](Device d, DType t) {
    manual_seed(35);
    Tensor x = (randn({257}, {.device = d}) * 6).to(t).requires_grad_(), target = gt(rand({257}, {.device = d}), 0.5).to(f32);
    Tensor wide = x.detach().to(f64).requires_grad_();
    Autocast region({.dtype = t});
    if (t == f16) CHECK_THROWS_WITH(binary_cross_entropy(sigmoid(x), target.to(t)), Contains("unsafe under f16 autocast; use binary_cross_entropy_with_logits"));
    else {
      Tensor loss = binary_cross_entropy(sigmoid(x), target.to(t));
      CHECK((loss.dtype() == f32 && std::isfinite(loss.item())));
    }
    Tensor loss = binary_cross_entropy_with_logits(x, target), exact = binary_cross_entropy_with_logits(wide, target.to(f64));
    CHECK(loss.dtype() == f32);
    CHECK(loss.item() == Approx(exact.item()).epsilon(1e-5));
    loss.backward();
    exact.backward();
    CHECK(error(x.grad(), wide.grad()) < 2 * unit(t));
    // Far out, where 1 - p is 0 in 16 bits.
    Tensor far = full({3}, 40, {.dtype = t, .device = d}).requires_grad_();
    Tensor none = binary_cross_entropy_with_logits(far, zeros({3}, {.device = d}));
    CHECK(none.item() == Approx(40));
    none.backward();
    for (double g : values(far.grad())) CHECK(g == Approx(1. / 3).epsilon(2 * unit(t)));
  });
}

TEST_CASE("report_31: every loss of 16-bit outputs is f32 inside and out, in an island as in a region") {
  everywhere([](Device d, DType t) {
    manual_seed(31);
    Tensor y = (randn({33, 17}, {.device = d}) * 4).to(t), z = (randn({33, 17}, {.device = d}) * 300).to(t), target = randint(0, 17, {33}, {.device = d});
    Tensor sign = where(gt(z, 0), ones_like(z), -ones_like(z));
    using Loss = std::function<Tensor(const std::function<Tensor(const Tensor&)>& as)>;
    const std::pair<const char*, Loss> losses[] = {
        {"kl_div", [&](auto& as) { return kl_div(log_softmax(as(y), 1), softmax(as(y * 0.5), 1).to(f32), {.by_batch = true}); }},
        {"l1", [&](auto& as) { return l1_loss(as(z), as(y)); }},
        {"mse", [&](auto& as) { return mse_loss(as(z), as(y)); }},
        {"huber", [&](auto& as) { return huber_loss(as(z), as(y)); }},
        {"smooth_l1", [&](auto& as) { return smooth_l1_loss(as(z), as(y)); }},
        {"cross_entropy", [&](auto& as) { return cross_entropy(as(y), target); }},
        {"nll", [&](auto& as) { return nll_loss(log_softmax(as(y), 1), target); }},
        {"gaussian_nll", [&](auto& as) { return gaussian_nll_loss(as(z), as(y), as(ones_like(y))); }},
        {"poisson_nll", [&](auto& as) { return poisson_nll_loss(as(y), as(abs(y))); }},
        {"bce_with_logits", [&](auto& as) { return binary_cross_entropy_with_logits(as(y), as(zeros_like(y))); }},
        {"hinge", [&](auto& as) { return hinge_loss(as(z), as(sign)); }},
        {"cosine_embedding", [&](auto& as) { return cosine_embedding_loss(as(z), as(y), as(sign.select(1, 0))); }},
        {"triplet_margin", [&](auto& as) { return triplet_margin_loss(as(y), as(z), as(y * 2)); }}};
    for (auto& [name, loss] : losses) {
      INFO(name);
      double exact = 0;
      if (std::string_view(name) != "kl_div") exact = loss([](const Tensor& v) { return v.to(f64); }).item();
      for (bool enabled : {true, false}) {
        Autocast region({.dtype = t, .enabled = enabled});
        Tensor got = loss([](const Tensor& v) { return v; });
        CHECK(got.dtype() == f32);
        CHECK(std::isfinite(got.item()));
        if (std::string_view(name) != "kl_div") CHECK(got.item() == Approx(exact).epsilon(1e-3).margin(1e-6));
      }
    }
  });
}

TEST_CASE("report_32: CTC and NLL of 16-bit logits are those of f32") {
  everywhere([](Device d, DType t) {
    manual_seed(32);
    Tensor logits = (randn({50, 2, 300}, {.device = d}) * 30).to(t).requires_grad_(), wide = logits.detach().to(f64).requires_grad_();
    Tensor targets = randint(1, 300, {2, 10}, {.device = d}), steps = full({2}, 50, {.dtype = DType::i64, .device = d});
    Tensor lengths = tensor({10, 7}).to(DType::i64).to(d);
    Tensor loss, exact = ctc_loss(log_softmax(wide, 2), targets, steps, lengths);
    { Autocast region({.dtype = t}); loss = ctc_loss(log_softmax(logits, 2), targets, steps, lengths); }
    CHECK(loss.dtype() == f32);
    CHECK(loss.item() == Approx(exact.item()).epsilon(1e-4));
    loss.backward();
    exact.backward();
    CHECK(error(logits.grad(), wide.grad()) < 4 * unit(t));
    Autocast region({.dtype = t});
    Tensor classes = randint(0, 300, {2}, {.device = d});
    CHECK(nll_loss(log_softmax(logits[0], 1), classes).item() == Approx(nll_loss(log_softmax(wide[0], 1), classes).item()).epsilon(1e-5));
  });
}

// ---- what many places read

TEST_CASE("report_46: gradients of embedding, resize, gather and index operators are exact sums, the same every time") {
  everywhere([](Device d, DType t) {
    constexpr int64_t n = 5000;
    auto leaf = [&](const Shape& s) { return ones(s, {.dtype = t, .device = d}).requires_grad_(); };
    Tensor same = ones({n}, {.dtype = DType::i64, .device = d}), expected = tensor({0., rounded(double(n), t), 0.});
    auto row_sums = [&](const Tensor& g) { return g.to(f64).mean(1).cpu(); };
    auto run = [&](int how) {
      Tensor w = leaf({3, 7});
      if (how == 0) embedding(w, same).backward({.gradient = ones({n, 7}, {.dtype = t, .device = d})});
      if (how == 1) index_select(w, 0, same).backward({.gradient = ones({n, 7}, {.dtype = t, .device = d})});
      if (how == 2) gather(w, 0, same.unsqueeze(1).expand({n, 7})).backward({.gradient = ones({n, 7}, {.dtype = t, .device = d})});
      if (how == 3) return index_add(zeros({3, 7}, {.dtype = t, .device = d}), 0, same, leaf({n, 7}).detach());
      if (how == 4) return scatter_add(zeros({3, 7}, {.dtype = t, .device = d}), 0, same.unsqueeze(1).expand({n, 7}).contiguous(), leaf({n, 7}).detach());
      return w.grad();
    };
    for (int how = 0; how < 5; ++how) {
      INFO(how);
      Tensor g = run(how);
      CHECK(g.dtype() == t);
      CHECK(values(row_sums(g)) == values(expected));
      CHECK(same_bits(run(how), g));
    }
    // An f32 table under autocast: the gradient is a sum in f32.
    Tensor table = ones({3, 7}, {.device = d, .requires_grad = true}), rows;
    { Autocast region({.dtype = t}); rows = embedding(table, same); }
    rows.to(f32).sum().backward();
    CHECK(values(row_sums(table.grad())) == std::vector<double>{0, n, 0});
    for (auto mode : {Interpolation::nearest, Interpolation::bilinear}) {
      Tensor image = leaf({1, 2, 3, 3});
      Tensor y = resize(image, {3 * 64, 3 * 64}, {.mode = mode});
      y.backward({.gradient = ones_like(y)});
      CHECK(error(image.grad().to(f64).sum({2, 3}), full({1, 2}, 9 * 4096, {.dtype = f64, .device = d})) < 2 * unit(t));
      if (mode == Interpolation::nearest) CHECK(all_are(image.grad(), 4096));
      Tensor again = leaf({1, 2, 3, 3});
      resize(again, {3 * 64, 3 * 64}, {.mode = mode}).backward({.gradient = ones_like(y)});
      CHECK(same_bits(again.grad(), image.grad()));
    }
  });
}

// ---- recurrent layers

TEST_CASE("report_58: weights of recurrent layers are cast once, and later calls allocate nothing that stays") {
  tests::report("pytorch#36428");
  everywhere([](Device d, DType t) {
    auto check = [&](auto net) {
      net.to(d);
      Tensor x = randn({5, 3, 8}, {.device = d}), low = x.to(t);
      auto casts_of_weights = [&](const auto& f) {
        amp::Trace trace = amp::trace(f);
        int64_t n = 0;
        for (auto& l : trace.lines)
          for (auto& p : net.parameters()) if (l.op == "cast" && l.in[0].dtype == f32 && l.in[0].shape == p.shape()) { ++n; break; }
        return n;
      };
      auto infer = [&] {
        NoGrad off;
        Autocast region({.dtype = t});
        return net(low);
      };
      CHECK(casts_of_weights(infer) == int64_t(net.parameters().size()));  // one each: cell by cell and step by step they are used again
      if (d.type == DeviceType::cpu) infer();  // packs weights for the calls to come
      int64_t before = memory_stats(d).allocated;
      Tensor first = infer(), y;
      int64_t held = memory_stats(d).allocated - before;
      CHECK(casts_of_weights([&] { for (int i = 0; i < 10; ++i) y = infer(); }) == 0);
      CHECK(same_bits(y, first));
      CHECK(memory_stats(d).allocated == before + 2 * held);
      auto by_hand = net.clone();  // a model in 16 bits
      by_hand.to(t);
      { NoGrad off; CHECK(same_bits(by_hand(low), first)); }
      // The optimizer keeps the copies current.
      optim::AdamW opt(net.parameters(), {.lr = 1e-2});
      amp::GradScaler scaler({.init_scale = 256});
      for (int i = 0; i < 3; ++i) {
        CHECK(casts_of_weights([&] {
          opt.zero_grad();
          Tensor loss;
          { Autocast region({.dtype = t}); loss = net(low).to(f32).pow(2).mean(); }
          scaler.scale(loss).backward();
          scaler.step(opt);
          scaler.update();
        }) == 0);
      }
      CHECK(scaler.skipped_steps() == 0);
      CHECK_FALSE(same_bits(infer(), first));
    };
    manual_seed(58);
    check(nn::LSTM(8, 4, {.layers = 2, .bidirectional = true}));
    check(nn::GRU(8, 4, {.layers = 2}));
    check(nn::RNN(8, 4, {.bias = false, .bidirectional = true}));
  });
}
