// Modules: names, ties, moves, clones, conversion, state, and the errors that keep a model whole.
#include <array>
#include <atomic>
#include <cerrno>
#include <map>
#include <optional>
#include <thread>

#include "halftone/amp/amp.h"
#include "halftone/autograd/autograd.h"
#include "halftone/io/file.h"
#include "halftone/nn/nn.h"
#include "halftone/ops/ops.h"
#include "halftone/optim/optim.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/temporary.h"

using namespace halftone;
using Catch::Matchers::Contains;

#define THROWS(expression, text) CHECK_THROWS_WITH(expression, Contains(text))

// ---- models

struct Net : nn::Module {
  nn::Linear fc{4, 3}, head{3, 2};
  nn::Parameter gain{ones({2})};
  nn::Buffer seen{zeros({})};
  HT_FIELDS(fc, head, gain, seen)
  Tensor forward(const Tensor& x) override { return head(relu(fc(x))) * gain; }  // [n, 4] -> [n, 2]
};

struct Block : nn::Module {
  nn::Linear fc;
  nn::Parameter gain;
  explicit Block(int dim) : fc(dim, dim), gain(ones({dim})) {}
  HT_FIELDS(fc, gain)
  Tensor forward(const Tensor& x) override { return x + relu(fc(x)) * gain; }
};

struct Deep : nn::Module {  // every kind of container
  std::vector<Block> blocks;
  std::array<nn::Linear, 2> pair{nn::Linear{4, 4}, nn::Linear{4, 4}};
  nn::Linear old[2] = {{4, 4}, {4, 4}};
  std::optional<nn::Linear> extra;
  std::optional<nn::ReLU> off;
  std::map<std::string, nn::Linear> heads;
  std::vector<nn::Any> any;
  std::vector<nn::Parameter> w;
  std::vector<int> plain;
  explicit Deep(int depth) : plain(static_cast<size_t>(depth), 7) {
    for (int i = 0; i < depth; ++i) blocks.emplace_back(4);
    extra.emplace(4, 4);
    heads.emplace("cls", nn::Linear(4, 2));
    any.emplace_back(nn::Linear(4, 4));
    any.emplace_back(nn::ReLU());
    w.emplace_back(ones({1}));
  }
  HT_FIELDS(blocks, pair, old, extra, off, heads, any, w)
  Tensor forward(const Tensor& x) override {
    Tensor y = x;
    for (auto& b : blocks) y = b(y);
    return y;
  }
};

struct Wide : Net {
  nn::Linear more{2, 2};
  HT_FIELDS_AFTER(Net, more)
};
template <class B> struct Wrapped : B {
  nn::Linear extra{2, 2};
  HT_FIELDS_AFTER(B, extra)
};
template <class Act> struct Generic : nn::Module {
  nn::Linear fc{2, 2};
  Act act;
  HT_FIELDS(fc, act)
  Tensor forward(const Tensor& x) override { return act(fc(x)); }
};
class Private : public nn::Module {
  nn::Linear fc_{2, 2};

 public:
  HT_FIELDS(fc_)
};
struct Pieces { nn::Parameter a{ones({1})}, b{ones({1})}; };
struct Dotted : nn::Module {
  Pieces p;
  HT_FIELDS(p.a, p.b)
};
// Any names but ht_walk will do.
struct Names : nn::Module {
  nn::Linear q{2, 2}, k{2, 2}, v{2, 2}, f{2, 2}, self{2, 2}, m{2, 2}, names{2, 2}, walk{2, 2}, list{2, 2}, path{2, 2};
  HT_FIELDS(q, k, v, f, self, m, names, walk, list, path)
};
struct LanguageModel : nn::Module {  // a decoder tied to its embedding
  nn::Linear tok{4, 10, {.bias = false}}, head{4, 10, {.bias = false}};
  LanguageModel() { head.weight.tie(tok.weight); }
  HT_FIELDS(tok, head)
};
struct TiedByMember : nn::Module {
  nn::Parameter a{ones({2})}, b{a};
  HT_FIELDS(a, b)
};
struct TwoInputs : nn::Module {
  nn::Linear fc{4, 4};
  HT_FIELDS(fc)
  Tensor forward(const Tensor& x, const Tensor& y) { return fc(x) + y; }
  Tensor operator()(const Tensor& x, const Tensor& y) { return forward(x, y); }
};
struct Outer : nn::Module {
  nn::Sequential body{nn::Linear(2, 2), nn::ReLU()};
  nn::Any head{nn::Linear(2, 2)};
  HT_FIELDS(body, head)
};

// Wrong models.
struct Forgot : nn::Module {
  nn::Linear a{2, 2}, b{2, 2};
  HT_FIELDS(a)
};
struct ForgotParameter : nn::Module {
  nn::Linear a{2, 2};
  nn::Parameter p{ones({1})};
  HT_FIELDS(a)
};
struct ForgotOptional : nn::Module {
  std::optional<nn::Linear> a{std::in_place, 2, 2};
  HT_FIELDS()
};
struct ForgotAny : nn::Module {
  nn::Any a{nn::Linear(2, 2)};
  HT_FIELDS()
};
struct ForgotBase : Net {
  nn::Linear more{2, 2};
  HT_FIELDS(more)
};
struct ForgotAll : Net {
  nn::Linear more{2, 2};
};
struct Holds : nn::Module {
  Forgot inner;
  HT_FIELDS(inner)
};
struct Refers : nn::Module {
  nn::Linear& a;
  explicit Refers(nn::Linear& l) : a(l) {}
  HT_FIELDS(a)
};
struct OnTheHeap : nn::Module {
  std::vector<nn::Linear> a = nn::list(nn::Linear(2, 2));
  HT_FIELDS()
};
struct NotCopyable : nn::Module {
  std::vector<std::unique_ptr<nn::Module>> layers;
  NotCopyable() { layers.push_back(std::make_unique<nn::Linear>(2, 2)); }
  HT_FIELDS(layers)
};
struct WithDestructor : nn::Module {
  nn::Linear a{1, 1};
  ~WithDestructor() override {}
  HT_FIELDS(a)
};
struct Throws : nn::Module {
  nn::Linear a{1, 1};
  Throws() { throw Error("in the constructor"); }
  HT_FIELDS(a)
};

namespace {

std::string names(const nn::Module& m) {
  std::string all;
  for (auto& [name, t] : m.named_parameters()) all += name + ' ';
  return all;
}
std::vector<const Body*> bodies(const nn::Module& m) {
  std::vector<const Body*> all;
  for (auto& t : m.parameters()) all.push_back(t.body().get());
  return all;
}
void fill(nn::Module& m, double value) {
  NoGrad off;
  for (auto t : m.parameters()) t.fill_(value);
}
Net global;  // a module with static storage

}  // namespace

// ---- what the types promise

template <class M>
inline constexpr bool is_a_value = std::is_nothrow_move_constructible_v<M> && std::is_nothrow_move_assignable_v<M> &&
                                   !std::is_copy_assignable_v<M> && !std::is_convertible_v<nn::Module&, M>;
static_assert(is_a_value<nn::Linear> && is_a_value<nn::Identity> && is_a_value<nn::ReLU> && is_a_value<nn::LeakyReLU>);
static_assert(is_a_value<nn::GELU> && is_a_value<nn::SiLU> && is_a_value<nn::Tanh> && is_a_value<nn::Sigmoid>);
static_assert(is_a_value<nn::Softmax> && is_a_value<nn::LogSoftmax> && is_a_value<nn::Flatten>);
static_assert(is_a_value<nn::CrossEntropyLoss> && is_a_value<nn::MSELoss> && is_a_value<nn::Any>);
static_assert(is_a_value<nn::Sequential> && is_a_value<nn::ModuleList> && is_a_value<nn::Lambda> && is_a_value<Net>);

static_assert(is_a_value<nn::Conv2d> && is_a_value<nn::BatchNorm2d> && is_a_value<nn::LSTM> && is_a_value<nn::GRUCell>);
static_assert(is_a_value<nn::ModuleDict> && is_a_value<nn::Residual> && is_a_value<nn::TransformerEncoderLayer>);
static_assert(is_a_value<nn::Embedding> && is_a_value<nn::RotaryEmbedding> && is_a_value<nn::Dropout> && is_a_value<nn::Pad>);

static_assert(!std::is_assignable_v<nn::Parameter&, Tensor> && !std::is_assignable_v<nn::Parameter&, nn::Parameter&>);
static_assert(std::is_nothrow_assignable_v<nn::Parameter&, nn::Parameter>);
static_assert(!std::is_assignable_v<nn::Buffer&, Tensor> && !std::is_constructible_v<nn::Any, nn::Linear&>);
static_assert(sizeof(nn::Parameter) == sizeof(Tensor) && sizeof(nn::ReLU) == 32);

static_assert(std::is_aggregate_v<nn::LinearOptions> && std::is_aggregate_v<LoadOptions>);
static_assert(std::is_aggregate_v<nn::init::KaimingOptions> && std::is_aggregate_v<nn::init::TruncatedNormalOptions>);
static_assert(Stateful<Net> && Stateful<nn::Sequential>);
static_assert(std::same_as<decltype(NotCopyable().clone()), nn::one_of_the_fields_cannot_be_copied>);
static_assert(std::same_as<decltype(Wide().clone()), Wide> && std::same_as<decltype(Outer().clone()), Outer>);

// ---- slots

TEST_CASE("a parameter requires a gradient, a buffer does not") {
  Tensor value = ones({2});
  nn::Parameter p{value};
  nn::Buffer b{value};
  CHECK(p.requires_grad());
  CHECK(p.is_leaf());
  CHECK_FALSE(b.requires_grad());
  CHECK_FALSE(value.requires_grad());
  CHECK(p.storage() == value.storage());
  CHECK(p.body() != value.body());
  { NoGrad off; CHECK(nn::Parameter(value).requires_grad()); }
  CHECK_FALSE(nn::Parameter().defined());
  THROWS(nn::Parameter(arange(3)),
         "nn::Parameter: expected a floating dtype, got i64; what is not trained is an nn::Buffer");
  CHECK(nn::Buffer(arange(3)).dtype() == DType::i64);
}

TEST_CASE("bodies know how many slots own them") {
  nn::Parameter a{ones({2})};
  auto body = a.body();
  CHECK(body->owners == 1);
  CHECK(body->was_owned);
  {
    nn::Parameter b{a};
    CHECK(b.body() == body);
    CHECK(body->owners == 2);
    Tensor handle = a;
    CHECK(body->owners == 2);
    nn::Parameter c = std::move(b);
    CHECK(body->owners == 2);
  }
  CHECK(body->owners == 1);
  a = nn::Parameter(zeros({2}));
  CHECK(body->owners == 0);
  CHECK(a.body()->owners == 1);
  nn::Parameter d{zeros({2})};
  auto old = d.body();
  d.tie(a);
  d.tie(a);
  CHECK(old->owners == 0);
  CHECK(a.body()->owners == 2);
  THROWS(d.tie(nn::Parameter()), "tie: the other tensor is undefined");
  THROWS(d.tie(nn::Parameter(ones({3}))), "tie: expected [2], got [3]");
  CHECK(Net().fc.weight.body()->owners == 1);
}

// ---- names

TEST_CASE("every container names what it holds") {
  Deep d(2);
  CHECK(names(d) ==
        "blocks.0.fc.weight blocks.0.fc.bias blocks.0.gain blocks.1.fc.weight blocks.1.fc.bias blocks.1.gain "
        "pair.0.weight pair.0.bias pair.1.weight pair.1.bias old.0.weight old.0.bias old.1.weight old.1.bias "
        "extra.weight extra.bias heads.cls.weight heads.cls.bias any.0.weight any.0.bias w.0 ");
  CHECK(names(NotCopyable()) == "layers.0.weight layers.0.bias ");
}

TEST_CASE("models of every kind name their fields") {
  struct Local : nn::Module {
    nn::Linear fc{2, 2};
    HT_FIELDS(fc);
    Tensor forward(const Tensor& x) override { return fc(x); }
  };
  CHECK(names(Local().clone()) == "fc.weight fc.bias ");
  CHECK(names(Private()) == "fc_.weight fc_.bias ");
  CHECK(names(Generic<nn::ReLU>().clone()) == "fc.weight fc.bias ");
  CHECK(names(Dotted().clone()) == "p.a p.b ");
  CHECK(names(Wide().clone()) == names(Net()) + "more.weight more.bias ");
  CHECK(names(Wrapped<Net>()) == names(Net()) + "extra.weight extra.bias ");
  CHECK(names(Outer()) == "body.0.weight body.0.bias head.weight head.bias ");
  CHECK(names(Names().clone()).starts_with("q.weight q.bias k.weight"));
  CHECK(global.parameters().size() == 5);
}

TEST_CASE("modules() has each module once, without what only holds one") {
  Outer o;
  std::string all;
  for (auto& [name, m] : o.named_modules()) all += name + ',';
  CHECK(all == ",body,body.0,body.1,head,");
  CHECK(o.modules().front() == &o);
  int linears = 0;
  o.apply([&](nn::Module& m) { linears += dynamic_cast<nn::Linear*>(&m) != nullptr; });
  CHECK(linears == 2);
}

TEST_CASE("a field that is not named is an error") {
  THROWS(names(Forgot()), "Forgot: a module or parameter at byte 104 is missing from HT_FIELDS");
  THROWS(names(ForgotParameter()), "ForgotParameter: a module or parameter at byte 104 is missing");
  THROWS(names(ForgotOptional()), "is missing from HT_FIELDS");
  THROWS(names(ForgotAny()), "is missing from HT_FIELDS");
  THROWS(names(ForgotBase()), "is missing from HT_FIELDS");
  THROWS(names(Holds()), "missing from HT_FIELDS (in inner)");
  THROWS(names(ForgotAll()), "ForgotAll does not name its own fields; write HT_FIELDS_AFTER(Net, ...) in it");
  THROWS(ForgotAll().clone(), "clone: ForgotAll would be cut down to Net; write HT_FIELDS_AFTER(Net, ...) in it");
  nn::Linear outside(2, 2);
  THROWS(names(Refers(outside)), "HT_FIELDS: a lies outside its module (a reference?); hold it by value");
  CHECK(names(OnTheHeap()).empty());  // the documented limit
}

// ---- moving and copying

TEST_CASE("moving keeps every parameter") {
  Deep d(3);
  auto before = bodies(d);
  Deep moved = std::move(d);
  CHECK(bodies(moved) == before);
  CHECK(d.parameters().empty());
  Deep other(1);
  other = std::move(moved);
  CHECK(bodies(other) == before);

  std::vector<nn::Linear> v;
  for (int i = 0; i < 5; ++i) v.emplace_back(1, 1);
  auto last = v[4].weight.body();
  v.erase(v.begin());
  CHECK(v[3].weight.body() == last);
  std::swap(v[0], v[3]);
  CHECK(v[0].weight.body() == last);
  CHECK(last->owners == 1);

  auto make = [] {
    Net n;
    n.eval();
    return n;
  };
  Net n = make();
  CHECK_FALSE(n.training());
  std::optional<Net> o;
  o.emplace();
  o = Net();
  CHECK(o->parameters().size() == 5);
}

TEST_CASE("accidental copies throw") {
  Net net;
  auto by_value = [](Net n) { return n.parameters().size(); };
  THROWS(by_value(net), "a Net was copied by accident; pass modules by reference, std::move them, or call clone()");
  auto by_member = [&] {
    auto head = net.head;
    return head.training();
  };
  THROWS(by_member(), "a halftone::nn::Linear was copied by accident");
  auto by_capture = [&] {
    auto f = [net] { return net.training(); };
    return f();
  };
  THROWS(by_capture(), "copied by accident");
  THROWS((std::vector<nn::Linear>{nn::Linear(1, 1)}), "copied by accident");
  WithDestructor d;
  THROWS(WithDestructor(std::move(d)), "own destructor moves only after Class(Class&&) = default");
  CHECK(by_value(std::move(net)) == 5);
  CHECK(nn::list(nn::Linear(1, 1), nn::Linear(1, 1)).size() == 2);
  THROWS(Throws(), "in the constructor");
  CHECK(Net().parameters().size() == 5);
}

TEST_CASE("clone is deep, typed, and keeps what is plain") {
  Deep d(3);
  d.eval();
  d.blocks[1].gain.requires_grad_(false);
  const Deep& constant = d;
  auto c = constant.clone();
  CHECK(names(c) == names(d));
  CHECK(c.plain == d.plain);
  CHECK_FALSE(c.blocks[0].training());
  auto a = d.parameters(), b = c.parameters();
  for (size_t i = 0; i < a.size(); ++i) {
    CHECK(a[i].body() != b[i].body());
    CHECK(a[i].storage() != b[i].storage());
    CHECK(a[i].to_vector<float>() == b[i].to_vector<float>());
    CHECK(a[i].requires_grad() == b[i].requires_grad());
    CHECK(a[i].body()->owners == 1);
    CHECK(b[i].body()->owners == 1);
  }
  fill(c, 5);
  CHECK(d.w[0].item() == 1);
  Net n;
  { NoGrad off; n.seen.fill_(3); }
  Net m = n.clone();
  CHECK(m.seen.item() == 3);
  CHECK_FALSE(m.seen.requires_grad());
  CHECK(m.seen.body() != n.seen.body());
}

TEST_CASE("several threads make, clone and move models") {
  std::atomic<int> wrong = 0;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      for (int k = 0; k < 20; ++k) {
        Net n, m = n.clone(), q = std::move(n);
        if (m.parameters().size() != 5) ++wrong;
        try {
          Net copy(q);
          ++wrong;
        } catch (const Error&) {
        }
      }
    });
  for (auto& t : threads) t.join();
  CHECK(wrong == 0);
}

TEST_CASE("tied parameters stay tied") {
  LanguageModel lm;
  CHECK(lm.parameters().size() == 1);
  CHECK(lm.named_parameters()[0].first == "tok.weight");
  CHECK(lm.state_dict().size() == 2);
  lm.to(DType::f64);
  CHECK(lm.head.weight.body() == lm.tok.weight.body());
  CHECK(lm.head.weight.dtype() == DType::f64);
  LanguageModel copy = lm.clone();
  CHECK(copy.head.weight.body() == copy.tok.weight.body());
  CHECK(copy.tok.weight.body() != lm.tok.weight.body());
  CHECK(copy.tok.weight.body()->owners == 2);
  LanguageModel moved = std::move(copy);
  CHECK(moved.head.weight.body() == moved.tok.weight.body());
  TiedByMember t;
  CHECK(t.parameters().size() == 1);
  TiedByMember u = t.clone();
  CHECK(u.a.body() == u.b.body());
  CHECK(u.a.body() != t.a.body());
}

// ---- conversion, modes, gradients

TEST_CASE("to(dtype) converts floating tensors in place") {
  struct Counted : nn::Module {
    nn::Linear fc{2, 2};
    nn::Buffer mean{zeros({2})}, count{zeros({}, {.dtype = DType::i64})};
    HT_FIELDS(fc, mean, count)
  } m;
  auto before = bodies(m);
  CHECK(&m.to(DType::bf16) == &m);
  CHECK(bodies(m) == before);
  CHECK(m.fc.weight.dtype() == DType::bf16);
  CHECK(m.fc.weight.requires_grad());
  CHECK(m.mean.dtype() == DType::bf16);
  CHECK(m.count.dtype() == DType::i64);
  m.to(Device::cpu());
  CHECK(bodies(m) == before);
  THROWS(m.to(DType::i64), "Module::to: expected a floating dtype, got i64");
}

TEST_CASE("to(dtype) takes gradients along") {
  Net net;
  net(ones({2, 4})).sum().backward();
  Tensor handle = net.fc.weight;
  auto before = net.gain.grad().to_vector<double>();
  net.to(DType::f64);
  CHECK(handle.dtype() == DType::f64);
  CHECK(net.gain.grad().dtype() == DType::f64);
  CHECK(net.gain.grad().to_vector<double>() == before);
  net(ones({2, 4}, {.dtype = DType::f64})).sum().backward();
  for (size_t i = 0; i < 2; ++i) CHECK(net.gain.grad().to_vector<double>()[i] == Approx(2 * before[i]).margin(1e-6));
  net.zero_grad();
  net.to(DType::f32);
  CHECK_FALSE(net.gain.grad().defined());
  net(ones({2, 4})).sum().backward();
  CHECK(net.gain.grad().dtype() == DType::f32);
}

TEST_CASE("train, eval, requires_grad_ and zero_grad reach everything") {
  Outer o;
  o.eval();
  for (auto* m : o.modules()) CHECK_FALSE(m->training());
  CHECK_FALSE(o.head.training());
  CHECK(&o.train() == &o);
  for (auto* m : o.modules()) CHECK(m->training());
  Net net;
  net.requires_grad_(false);
  for (auto& p : net.parameters()) CHECK_FALSE(p.requires_grad());
  net.requires_grad_();
  net(ones({1, 4})).sum().backward();
  CHECK(net.head.bias.grad().defined());
  net.zero_grad();
  CHECK_FALSE(net.head.bias.grad().defined());
  THROWS(o(ones({1, 2})), "Outer has no forward(const Tensor&)");
}

TEST_CASE("a model may take several inputs") {
  TwoInputs m;
  Tensor x = ones({1, 4}), y = m(x, x);
  CHECK(y.shape() == Shape{1, 4});
  THROWS(m.forward(x), "TwoInputs has no forward(const Tensor&)");
}

TEST_CASE("a model can be a function") {
  Net net;
  std::function<Tensor(const Tensor&)> f = std::ref(net);
  CHECK(f(ones({1, 4})).shape() == Shape{1, 2});
}

// ---- identity: optimizers and autocast hold parameters, not modules

TEST_CASE("an optimizer follows a model that converts or moves") {
  Net net;
  fill(net, 1);
  optim::SGD opt(net.parameters(), {.lr = 0.5});
  auto step = [&](Net& n, DType t) {
    opt.zero_grad();
    n(ones({1, 4}, {.dtype = t})).sum().backward();
    opt.step();
  };
  step(net, DType::f32);
  double once = net.gain.to_vector<double>()[0];
  CHECK(once < 1);
  net.to(DType::f64);
  Net moved = std::move(net);
  step(moved, DType::f64);
  CHECK(moved.gain.dtype() == DType::f64);
  CHECK(moved.gain.to_vector<double>()[0] < once);
  THROWS(optim::SGD(net.parameters(), {.lr = 0.5}), "there are no parameters to optimize");
}

TEST_CASE("an optimizer refuses parameters that were replaced") {
  auto refuses = [](auto replace) {
    Net net;
    optim::SGD opt(net.parameters(), {.lr = 0.5});
    net(ones({1, 4})).sum().backward();
    replace(net);
    THROWS(opt.step(), "belongs to no module any more; it was replaced after this optimizer was made");
  };
  refuses([](Net& n) { n.fc.bias = nn::Parameter(zeros({3})); });
  refuses([](Net& n) { n.head = nn::Linear(3, 2); });
  refuses([](Net& n) { n = Net(); });
  optim::SGD orphan(Net().parameters(), {.lr = 0.5});
  THROWS(orphan.step(), "belongs to no module any more");
}

TEST_CASE("under autocast a model computes in 16 bit, and its clone stays f32") {
  Net net;
  amp::Autocast autocast;
  CHECK(net.fc(ones({1, 4})).dtype() == DType::bf16);
  net(ones({1, 4})).sum().backward();
  CHECK(net.fc.weight.grad().dtype() == DType::f32);
  CHECK(net.clone().fc.weight.dtype() == DType::f32);
  Net other;
  fill(other, 3);
  net.load_state_dict(other.state_dict());  // the 16-bit copies are stale now
  CHECK(net(ones({1, 4})).to_vector<float>() == other(ones({1, 4})).to_vector<float>());
}

// ---- state

TEST_CASE("state_dict aliases the live weights") {
  Net net;
  StateDict state = net.state_dict(), kept = state.clone();
  std::string all;
  for (auto& [name, t] : state) all += name + ' ';
  CHECK(all == "fc.weight fc.bias head.weight head.bias gain seen ");
  CHECK_FALSE(state.at("gain").requires_grad());
  fill(net, 9);
  CHECK(state.at("gain").to_vector<float>()[0] == 9);
  CHECK(kept.at("gain").to_vector<float>()[0] == 1);
}

TEST_CASE("load_state_dict writes into the live tensors") {
  Net a, b;
  fill(a, 2);
  auto before = bodies(b);
  StateDict state;
  for (auto& [name, t] : a.state_dict()) state.add(name, t.to(DType::f64));
  b.load_state_dict(state);
  CHECK(bodies(b) == before);
  for (auto& p : b.parameters()) {
    CHECK(p.dtype() == DType::f32);
    CHECK(p.requires_grad());
    for (float v : p.to_vector<float>()) CHECK(v == 2);
  }
  auto version = b.gain.version();
  b.load_state_dict(a.state_dict());
  CHECK(b.gain.version() > version);
}

TEST_CASE("load_state_dict says everything that does not fit, and changes nothing") {
  Net net;
  StateDict state;
  state.add("fc.weight", zeros({3, 4}));
  state.add("fc.bias", zeros({4}));
  state.add("gain", zeros({2}));
  state.add("gane", zeros({2}));
  auto before = net.fc.weight.to_vector<float>();
  try {
    net.load_state_dict(state);
    FAIL("nothing was thrown");
  } catch (const Error& e) {
    CHECK(std::string(e.what()) ==
          "load_state_dict: the state does not fit Net, nothing was loaded\n"
          "  3 missing: head.weight, head.bias, seen\n"
          "  1 unexpected: gane\n"
          "  1 of another shape: fc.bias [3] given as [4]\n"
          "  {.strict = false} leaves out missing and unexpected names");
  }
  THROWS(net.load_state_dict(state, {.strict = false}), "1 of another shape: fc.bias [3] given as [4]");
  CHECK(net.fc.weight.to_vector<float>() == before);
  CHECK(net.gain.to_vector<float>()[0] == 1);

  StateDict some;
  some.add("gain", zeros({2}));
  some.add("gane", zeros({2}));
  net.load_state_dict(some, {.strict = false});
  CHECK(net.gain.to_vector<float>()[0] == 0);
  CHECK(net.fc.weight.to_vector<float>() == before);
}

TEST_CASE("a checkpoint's state, or one with names under another, is refused with the part to take") {
  Net net;
  StateDict state;
  state.add("model", net.state_dict().clone());
  auto before = net.fc.weight.to_vector<float>();
  const std::string under =
      "load_state_dict: the state does not fit Net, nothing was loaded\n"
      "  6 missing: fc.weight, fc.bias, head.weight, head.bias, gain, seen\n"
      "  6 unexpected: model.fc.bias, model.fc.weight, model.gain, model.head.bias, model.head.weight, model.seen\n"
      "  all that is missing is there under \"model.\": load_state_dict(state.part(\"model\"))";
  CHECK_THROWS_WITH(net.load_state_dict(state), under);
  state.add("opt.0.lr", zeros({}));
  state.add("rng.seed", zeros({}, {.dtype = DType::i64}));
  const std::string whole =
      "load_state_dict: the state is a whole checkpoint (parts: model, opt, rng), not a Net; for weights alone, "
      "load_state_dict(state.part(\"model\")); to go on with its run, io::Checkpoint(folder).add(\"model\", net), the other parts alike, "
      "and resume()";
  fill(net, 3);
  for (bool strict : {true, false}) CHECK_THROWS_WITH(net.load_state_dict(state, {.strict = strict}), whole);
  CHECK(net.fc.weight.sum().item() == 36);
  nn::Linear other(2, 2);
  THROWS(other.load_state_dict(state), "not a halftone::nn::Linear; for weights alone, load_state_dict(state.part(\"<part>\"))");
  net.load_state_dict(state.part("model"));
  CHECK(net.fc.weight.to_vector<float>() == before);
  state.add("fc", net.fc.state_dict());  // beside names that fit, the rest is listed
  THROWS(net.load_state_dict(state), "4 missing: head.weight");
  net.load_state_dict(state, {.strict = false});

  CHECK_THROWS_WITH(state.at("0.lr"), "state: there is no entry '0.lr'; there is 'opt.0.lr', so this is a state of several parts, "
                                      "as a checkpoint's: take part(\"opt\") of it");
  CHECK_THROWS_WITH(state.at("lr"), "state: there is no entry 'lr'");
}

TEST_CASE("a tied tensor is loaded by any of its names") {
  LanguageModel lm;
  for (const char* name : {"tok.weight", "head.weight"}) {
    fill(lm, 0);
    StateDict state;
    state.add(name, ones({10, 4}));
    lm.load_state_dict(state);
    CHECK(lm.tok.weight.sum().item() == 40);
  }
  THROWS(lm.load_state_dict({}), "2 missing: tok.weight, head.weight");
}

// ---- errors

namespace {

struct Refusing : nn::Module {
  HT_FIELDS()
  Tensor forward(const Tensor&) override { throw io::FileError("weights", "open", ENOENT); }
};
struct Holder : nn::Module {
  nn::Sequential body;
  nn::Any kept;
  Holder(nn::Sequential b, nn::Any k) : body(std::move(b)), kept(std::move(k)) {}
  HT_FIELDS(body, kept)
  Tensor forward(const Tensor& x) override { return kept(body(x)); }
};

}  // namespace

TEST_CASE("an error says in which layer") {
  const Tensor x = ones({2, 4});
  nn::Linear alone(3, 2);
  const std::string plain = error_of([&] { alone(x); });
  CHECK(plain.find("layer") == plain.npos);
  nn::Sequential fits{nn::Linear(4, 4), nn::ReLU()};
  for (bool fused : {true, false}) {
    Holder net(nn::Sequential{nn::Linear(4, 5), nn::Sequential{nn::Tanh(), nn::Linear(3, 2), nn::ReLU()}.fuse(fused)}, nn::ReLU());
    CHECK(error_of([&] { net(x); }).ends_with("[2, 5] (f32) (in layer body.1.1)"));
    CHECK(error_of([&] { net.body(x); }).ends_with(" (in layer 1.1)"));
    CHECK(error_of([&] { net.clone()(x); }).ends_with(" (in layer body.1.1)"));
    CHECK(error_of([&] { nn::Any(net.clone())(x); }).ends_with(" (in layer body.1.1)"));
  }
  Holder held(fits.clone(), nn::Linear(3, 2));
  CHECK(error_of([&] { held(x); }) == plain + " (in layer kept)");
  nn::Sequential around{nn::Residual(fits.clone()), nn::Residual(nn::Linear(3, 2))};
  CHECK(error_of([&] { around(x); }) == plain + " (in layer 1)");
  nn::Sequential foreign{nn::Lambda([&](const Tensor& v) { return alone(v); })};  // no layer of it: the one that called
  CHECK(error_of([&] { foreign(x); }) == plain + " (in layer 0)");
  nn::Sequential again{nn::Lambda([&](const Tensor& v) {
    try {
      return foreign(v);
    } catch (const Error& e) {
      throw Error(text::cat("again: ", e.what()));
    }
  })};
  CHECK(error_of([&] { again(x); }) == "again: " + plain + " (in layer 0)");

  Holder typed(fits.clone(), Refusing());
  try {
    typed(x);
    FAIL("nothing was thrown");
  } catch (const io::FileError& e) {
    CHECK(e.reason == ENOENT);
    CHECK(std::string(e.what()) == "weights: cannot open: No such file or directory (in layer kept)");
  }
  auto handle = held.kept.get().register_forward_pre_hook([](nn::Module&, const Tensor&) -> Tensor { throw Error("hook"); });
  CHECK(error_of([&] { held(x); }) == "hook (in layer kept)");
  CHECK(error_of([&] { alone(x); }) == plain);  // nothing of it stays
}

// ---- summary

TEST_CASE("a summary is a table of layers") {
  struct Small : nn::Module {
    nn::Sequential body{nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 10, {.bias = false})};
    nn::Linear unused{2, 2};
    nn::Buffer seen{zeros({3})};
    HT_FIELDS(body, unused, seen)
    Tensor forward(const Tensor& x) override { return body(x); }
  } m;
  m.unused.requires_grad_(false);
  m.unused.eval();
  CHECK(m.summary({32, 784}) ==
        "layer    type        output     parameters      bytes\n"
        "(model)  Small       [32, 10]            0       12 B\n"
        "body     Sequential  [32, 10]            0        0 B\n"
        "body.0   Linear      [32, 256]     200,960  785.0 KiB\n"
        "body.1   ReLU        [32, 256]           0        0 B\n"
        "body.2   Linear      [32, 10]        2,560   10.0 KiB\n"
        "unused   Linear      -                   6       24 B\n"
        "parameters 203,526 (203,520 trained), 795.0 KiB\n"
        "buffers 3, 12 B\n"
        "outputs of layers 16,704, 65.2 KiB\n");
  CHECK(m.training());
  CHECK_FALSE(m.unused.training());
}

TEST_CASE("a summary of any run, of any dtype, leaves the model as it was") {
  TwoInputs two;
  Tensor x = ones({1, 4});
  CHECK_THAT(two.summary([&] { two(x, x); }), Contains("fc       Linear     [1, 4]"));
  Net net;
  net.to(DType::bf16).eval();
  CHECK_THAT(net.summary({5, 4}), Contains("[5, 2]"));
  CHECK_FALSE(net.training());
  nn::Linear fc(2, 3);
  CHECK_THAT(fc.summary({{7, 2}}), Contains("(model)  Linear  [7, 3]           9   36 B"));
  THROWS(fc.summary({7, 5}), "linear");
  CHECK(fc.training());
  CHECK(fc(ones({7, 2})).requires_grad());
}

// ---- hooks

TEST_CASE("forward hooks see and replace what goes in and comes out") {
  Net net;
  Tensor x = randn({3, 4}), plain = net(x);
  std::string order;
  auto mark = [&](const char* what) { return [&order, what](nn::Module&, const Tensor&) { order += what; return Tensor(); }; };
  HookHandle first = net.register_forward_pre_hook(mark("a")), second = net.register_forward_pre_hook(mark("b"));
  const nn::Module* seen = nullptr;
  HookHandle after = net.fc.register_forward_hook([&](nn::Module& m, const Tensor& in, const Tensor& out) {
    order += "c";
    seen = &m;
    CHECK(in.shape() == Shape{3, 4});
    CHECK(out.shape() == Shape{3, 3});
    return Tensor();
  });
  CHECK(net(x).to_vector<float>() == plain.to_vector<float>());
  CHECK(order == "abc");
  CHECK(seen == &net.fc);

  first.remove();
  order.clear();
  net(x);
  CHECK(order == "bc");
  after = net.register_forward_hook([](nn::Module&, const Tensor&, const Tensor& y) { return y * 2; });
  CHECK(net(x).to_vector<float>() == (plain * 2).to_vector<float>());
  HookHandle before = net.register_forward_pre_hook([](nn::Module&, const Tensor& in) { return in * 0; });
  CHECK(net(x).to_vector<float>() == (net.forward(x * 0) * 2).to_vector<float>());
}

TEST_CASE("hooks move with a module, are not cloned, and outlive nothing") {
  int calls = 0;
  auto count = [&](nn::Module&, const Tensor&, const Tensor&) { ++calls; return Tensor(); };
  HookHandle kept;
  {
    Net net;
    HookHandle handle = net.register_forward_hook(count);
    CHECK(net.observed());
    Net copy = net.clone(), moved = std::move(net);
    CHECK_FALSE(copy.observed());
    copy(ones({1, 4}));
    CHECK(calls == 0);
    moved(ones({1, 4}));
    CHECK(calls == 1);
    moved.register_forward_hook(count).detach();
    moved(ones({1, 4}));
    CHECK(calls == 3);
    handle.remove();
    moved(ones({1, 4}));
    CHECK(calls == 4);
    kept = moved.register_forward_hook(count);
  }
  kept.remove();  // its module is gone
  Net net;
  HookHandle once;
  once = net.register_forward_hook([&](nn::Module&, const Tensor&, const Tensor&) { once.remove(); ++calls; return Tensor(); });
  net(ones({1, 4}));
  net(ones({1, 4}));
  CHECK(calls == 5);
  CHECK_FALSE(net.observed());
}

// ---- vocabulary

// A method hides a function of the same name inside every forward.
TEST_CASE("the methods of Module are no operators") {
  for (const char* method : {"forward", "to", "train", "eval", "training", "requires_grad_", "zero_grad", "apply",
                             "parameters", "named_parameters", "buffers", "named_buffers", "modules", "named_modules",
                             "state_dict", "load_state_dict", "summary", "observed", "keeps_f32", "fixed_dtype", "register_forward_hook",
                             "register_forward_pre_hook"}) {
    INFO(method);
    CHECK(find_op(method) == nullptr);
  }
}
