// DataParallel, DistributedDataParallel, SyncBatchNorm and sharded optimizer states, on threads, and on whatever mpirun started:
// gradients are bit for bit those of one process that runs the shards in order of rank and adds them.
// mpirun: 2 4
#include <array>
#include <cmath>
#include <mutex>
#include <set>

#include "halftone/core/shadow.h"
#include "halftone/halftone.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/error_text.h"
#include "halftone/tests/tasks.h"
#include "halftone/tests/temporary.h"
#include "halftone/tests/values.h"

using namespace halftone;
using namespace halftone::tests;
using Catch::Contains;

namespace {

// What ranks find wrong: Catch's macros are for one thread.
class Findings {
 public:
  void expect(bool fine, const std::string& what) {
    std::lock_guard guard(lock_);
    ++count_;
    if (!fine) wrong_.push_back(what);
  }
  ~Findings() noexcept(false) {
    for (auto& w : wrong_) FAIL_CHECK(w);
    CHECK(count_ > 0);
  }

 private:
  std::mutex lock_;
  std::vector<std::string> wrong_;
  int count_ = 0;
};

// f on every rank of 2 and of 4 threads; or, in processes that mpirun started, on theirs: one rank each, then two threads each.
void on_groups(const std::function<void(distributed::Group& rank, Findings& found)>& f) {
  Findings found;
  static const distributed::Group processes = distributed::init({.device = DeviceType::cpu, .deadline = 60});
  if (processes.size() > 1) {
    static const distributed::Group both = distributed::init({.devices_per_process = 2, .device = DeviceType::cpu, .deadline = 60});
    for (auto& group : {processes, both}) group.run([&](distributed::Group& rank) { f(rank, found); });
    return;
  }
  for (int n : {2, 4}) distributed::threads(n, 60).run([&](distributed::Group& rank) { f(rank, found); });
}

Values gradients(const nn::Module& net) {
  Values v;
  for (auto& p : net.parameters()) v.push_back(p.grad().defined() ? p.grad().to_vector<double>() : std::vector<double>());
  return v;
}

// All values are small whole numbers, so that sums are exact in any order.
Task whole_numbers(Task t) {
  NoGrad off;
  for (auto& p : t.net.parameters()) p.detach().copy_(randint(-2, 3, p.shape()));
  t.x = randint(-2, 3, t.x.shape()).to(DType::f32);
  return t;
}
Tensor whole_loss(const Tensor& y) { return (y * y.detach()).mean(); }

std::pair<int64_t, int64_t> share(const distributed::Group& g, int64_t rows) {
  return {rows * g.rank() / g.size(), rows * (g.rank() + 1) / g.size()};
}

// One process: the gradients of the shards, added in order, divided by their number when the mean is wanted.
Values shards_in_order(Task& t, int n, bool mean) {
  std::vector<Tensor> sums;
  for (int i = 0; i < n; ++i) {
    t.net.zero_grad();
    int64_t from = t.size() * i / n, to = t.size() * (i + 1) / n;
    t.loss(t.net(t.x.slice(0, from, to)), from, to).backward();
    size_t k = 0;
    for (auto& p : t.net.parameters()) {
      if (i == 0) sums.push_back(p.grad().clone());
      else sums[k] = sums[k] + p.grad();
      ++k;
    }
  }
  if (mean) for (auto& s : sums) s = s / n;
  return values(sums);
}

constexpr nn::DistributedDataParallelOptions small_buckets{.bucket_mib = 0.0005, .first_bucket_mib = 0.0002};

}  // namespace

TEST_CASE("gradients are those of the shards, added in order of rank") {
  on_groups([](distributed::Group& rank, Findings& found) {
    for (bool images : {false, true}) {
      Task reference = images ? cnn() : mlp(), t = images ? cnn() : mlp();
      if (rank.rank() > 0) t.net.parameters()[0].detach().mul_(3);  // rank 0's count
      nn::DistributedDataParallel ddp(t.net, rank, small_buckets);
      found.expect(ddp.buckets() > 2, "several buckets");
      auto [from, to] = share(rank, t.size());
      t.loss(ddp(t.x.slice(0, from, to)), from, to).backward();
      found.expect(gradients(t.net) == shards_in_order(reference, rank.size(), true), "gradients are the shards'");
      std::set<const Storage*> places;
      for (auto& p : t.net.parameters()) places.insert(p.grad().storage().get());
      t.net.zero_grad();
      t.loss(ddp(t.x.slice(0, from, to)), from, to).backward();
      for (auto& p : t.net.parameters()) found.expect(places.contains(p.grad().storage().get()) && p.grad().storage()->carved(),
          "gradients stay in their buckets");
      found.expect(gradients(t.net) == shards_in_order(reference, rank.size(), true), "gradients are the shards' again");
    }
  });
}

TEST_CASE("on whole numbers, gradients are the joined batch's bit for bit") {
  on_groups([](distributed::Group& rank, Findings& found) {
    for (bool images : {false, true}) {
      Task joined = whole_numbers(images ? cnn() : mlp()), t = whole_numbers(images ? cnn() : mlp());
      whole_loss(joined.net(joined.x)).backward();
      nn::DistributedDataParallel ddp(t.net, rank, small_buckets);
      auto [from, to] = share(rank, t.size());
      whole_loss(ddp(t.x.slice(0, from, to))).backward();
      found.expect(gradients(t.net) == gradients(joined.net), "the joined batch's gradients");

      // The same in two parts, of which only the last reduces.
      t.net.zero_grad();
      int64_t middle = (from + to) / 2;
      int issued = 0;
      auto hook = rank.on_issue([&](const distributed::Issued&) { ++issued; });
      {
        auto guard = ddp.no_sync();
        (whole_loss(ddp(t.x.slice(0, from, middle))) / 2).backward();
      }
      found.expect(issued == 0, "no_sync sends nothing");
      (whole_loss(ddp(t.x.slice(0, middle, to))) / 2).backward();
      found.expect(issued > 0, "the last part sends");
      found.expect(gradients(t.net) == gradients(joined.net), "accumulated gradients are the joined batch's");
    }
  });
}

TEST_CASE("training takes the same steps on every rank, and those of one process") {
  on_groups([](distributed::Group& rank, Findings& found) {
    for (bool images : {false, true}) {
      Task reference = images ? cnn() : mlp(), t = images ? cnn() : mlp();
      optim::SGD plain(reference.net.parameters(), {.lr = .1, .momentum = .9});
      nn::DistributedDataParallel ddp(t.net, rank, small_buckets);
      optim::SGD opt(ddp.parameters(), {.lr = .1, .momentum = .9});
      auto [from, to] = share(rank, t.size());
      auto step = capture([&, begin = from, end = to](const Tensor& x) {
        opt.zero_grad();
        t.loss(ddp(x), begin, end).backward();
        opt.step();
      });
      for (int i = 0; i < 10; ++i) {
        step(t.x.slice(0, from, to));
        Values sums = shards_in_order(reference, rank.size(), true);
        found.expect(gradients(t.net) == sums, text::cat("gradients of step ", i, ", images: ", images));
        size_t k = 0;
        for (auto& p : reference.net.parameters()) p.set_grad(tensor(sums[k++]).to(DType::f32).view(p.shape()));
        plain.step();
      }
      found.expect(values(t.net.parameters()) == values(reference.net.parameters()), text::cat("weights after 10 steps, images: ", images));
    }
  });
}

TEST_CASE("training follows the joined batch's within rounding, with batch norm where it is over all ranks") {
  struct Case { const char* name; bool images; int norms; };
  on_groups([](distributed::Group& rank, Findings& found) {
    for (auto& [name, images, norms] : {Case{"MLP", false, 0}, Case{"CNN", true, 0}, Case{"CNN with SyncBatchNorm", true, 2}}) {
      Task joined = images ? cnn(16, norms) : mlp(), t = images ? cnn(16, norms) : mlp();
      found.expect(nn::convert_sync_batch_norm(t.net, rank) == norms, "norms");
      nn::DistributedDataParallel ddp(t.net, rank, small_buckets);
      optim::SGD opt(ddp.parameters(), {.lr = .1, .momentum = .9}), plain(joined.net.parameters(), {.lr = .1, .momentum = .9});
      Values begun = values(t.net.parameters());
      auto [from, to] = share(rank, t.size());
      for (int i = 0; i < 10; ++i) {
        opt.zero_grad();
        plain.zero_grad();
        t.loss(ddp(t.x.slice(0, from, to)), from, to).backward();
        joined.loss(joined.net(joined.x), 0, joined.size()).backward();
        if (i == 0) {
          double apart = largest_difference(gradients(t.net), gradients(joined.net));
          found.expect(apart < 1e-5, text::cat(name, ": gradients are ", apart, " apart"));
        }
        opt.step();
        plain.step();
      }
      double apart = largest_difference(values(t.net.parameters()), values(joined.net.parameters())),
             moved = largest_difference(begun, values(joined.net.parameters()));
      found.expect(apart < 1e-4 && moved > .05, text::cat(name, ": weights are ", apart, " apart after 10 steps, which moved them by ", moved));
    }
  });
}

namespace {
thread_local std::vector<std::string>* events = nullptr;
struct Mark : Function<Mark> {
  static Tensor forward(Context&, const Tensor& x) { return x.clone(); }
  static std::vector<Tensor> backward(Context&, const Tensor& g) {
    events->push_back("node");
    return {g};
  }
};
struct Marked : nn::Module {
  nn::Linear first{8, 8}, second{8, 8}, third{8, 8};
  HT_FIELDS(first, second, third)
  Tensor forward(const Tensor& x) override { return third(relu(second(Mark::apply(relu(first(x)))))); }
};
}  // namespace

TEST_CASE("the first bucket is on its way before backward's last nodes run") {
  on_groups([](distributed::Group& rank, Findings& found) {
    for (std::optional<DType> compress : {std::optional<DType>(), std::optional(DType::f16)}) {
      std::vector<std::string> log;
      events = &log;
      manual_seed(1);
      Marked net;
      nn::DistributedDataParallel ddp(net, rank, {.bucket_mib = 1e-6, .first_bucket_mib = 1e-6, .compress = compress});
      auto watched = rank.on_issue([&](const distributed::Issued& i) { log.push_back(distributed::str(i.operation)); });
      ddp(randn({4, 8})).mean().backward();
      auto node = std::find(log.begin(), log.end(), "node");
      // third and second lie above the mark, first below it.
      auto before = std::count(log.begin(), node, "all_reduce"), after = std::count(node, log.end(), "all_reduce");
      found.expect(before == (compress ? 7 : 4) && after == (compress ? 5 : 2),
                   text::cat("all_reduces before the mark: ", before, ", after it: ", after));
      events = nullptr;
    }
  });
}

TEST_CASE("an overflow on one rank skips the step on all, and scales stay alike") {
  on_groups([](distributed::Group& rank, Findings& found) {
    Task t = mlp();
    nn::DistributedDataParallel ddp(t.net, rank);
    optim::AdamW opt(ddp.parameters(), {.lr = .01});
    amp::GradScaler scaler({.init_scale = 1024, .growth_interval = 3});
    scaler.set_agreement(ddp.agreement());
    auto [from, to] = share(rank, t.size());
    for (int i = 0; i < 8; ++i) {
      opt.zero_grad();
      bool in_backward = i == 2 && rank.rank() == rank.size() - 1, afterwards = i == 5 && rank.rank() == 0;
      Values before = values(t.net.parameters());
      scaler.scale(t.loss(ddp(t.x.slice(0, from, to)), from, to) * (in_backward ? INFINITY : 1)).backward();
      if (afterwards) t.net.parameters()[2].grad().detach().fill_(INFINITY);
      auto outcome = scaler.step(opt);
      scaler.update();
      bool skipped = i == 2 || i == 5;
      found.expect(outcome.skipped() == skipped, text::cat("step ", i, " is skipped: ", skipped));
      found.expect((values(t.net.parameters()) == before) == skipped, text::cat("step ", i, " changes weights: ", !skipped));
      Tensor scale = scaler.scale_tensor().clone(), most = scale.clone();
      rank.all_reduce(most, distributed::Reduce::max).wait();
      found.expect(scale.item() == most.item(), "one scale");
    }
    found.expect(scaler.skipped_steps() == 2, "two steps were skipped");
    Tensor first = t.net.parameters()[0].detach().clone(), own = first.clone();
    rank.broadcast(first).wait();
    found.expect(first.to_vector<double>() == own.to_vector<double>(), "one set of weights");
  });
}

namespace {
struct Branches : nn::Module {
  nn::Linear trunk{4, 4}, left{4, 2}, right{4, 2}, never{4, 2};
  HT_FIELDS(trunk, left, right, never)
  Tensor run(const Tensor& x, bool both) {
    Tensor h = trunk(x), y = left(h);
    return both ? y + right(h) : y;
  }
  Tensor operator()(const Tensor& x, bool both) { return run(x, both); }
};
}  // namespace

TEST_CASE("parameters that some ranks or all of them leave out") {
  on_groups([](distributed::Group& rank, Findings& found) {
    manual_seed(2);
    Branches net, reference;
    reference.load_state_dict(net.state_dict());
    Tensor x = randn({8, 4});
    std::optional<nn::DistributedDataParallel<Branches>> ddp;
    ddp.emplace(net, rank, nn::DistributedDataParallelOptions{.bucket_mib = 1e-6, .first_bucket_mib = 1e-6, .unused_parameters = true});
    for (int i = 0; i < 3; ++i) {
      net.zero_grad();
      bool both = rank.rank() == rank.size() - 1 && i != 1;  // in the second step nobody uses `right`
      (*ddp)(x, both).sum().backward();
      reference.zero_grad();
      reference(x, true).sum().backward();
      Tensor right = reference.right.weight.grad() / rank.size();
      found.expect(!net.never.weight.grad().defined(), "what no rank uses has no gradient");
      found.expect(net.right.weight.grad().defined() == (i != 1), "what one rank uses has a gradient on all");
      if (i != 1) found.expect(net.right.weight.grad().to_vector<double>() == right.to_vector<double>(),
          "the mean, with 0 for those who did not use it");
    }
    net.zero_grad();
    Tensor y = (*ddp)(x, true), z = (*ddp)(x, false);  // one backward of two forwards
    (y + z).sum().backward();
    found.expect(net.right.weight.grad().defined() && !net.never.weight.grad().defined(), "what either forward used has a gradient");
    std::string beside;
    try {
      ((*ddp)(x, false).sum() + net.never.weight.sum()).backward();
    } catch (const Error& e) {
      beside = e.what();
    }
    found.expect(beside.find("parameter never.weight has a gradient, and the model's outputs since the last backward do not depend on it") != beside.npos, beside);
    ddp.reset();
    net.zero_grad();
    nn::DistributedDataParallel strict(net, rank);
    std::string error;
    try {
      strict(x, false).sum().backward();
    } catch (const Error& e) {
      error = e.what();
    }
    found.expect(error == "DistributedDataParallel: parameter right.weight [2, 4] (f32) got no gradient in this backward; if a loss may leave out parameters, pass "
                          "{.unused_parameters = true}; freeze what is never trained by requires_grad_(false) before",
                 error);
  });
}

TEST_CASE("gradients of 40000 and of 1e-7 survive 16 bits on their way") {
  on_groups([](distributed::Group& rank, Findings& found) {
    struct Weight : nn::Module {
      nn::Parameter w{zeros({600})};
      HT_FIELDS(w)
      Tensor operator()(const Tensor& c) { return (w * c).sum(); }
    };
    for (double size : {4e4, 1e-7, 1e-30, 0.})
      for (DType compress : {DType::f16, DType::bf16}) {
        Weight net;
        nn::DistributedDataParallel ddp(net, rank, {.compress = compress});
        manual_seed(5);
        Tensor all = rand({rank.size(), 600}) * size + size;  // each from size to twice that
        ddp(all[rank.rank()]).backward();
        double apart = largest_difference({net.w.grad().to_vector<double>()}, {all.mean(0).to_vector<double>()});
        if (size > 0) found.expect(apart < (compress == DType::f16 ? 0x1p-10 : 0x1p-7),
                                    text::cat("of size ", size, ", ", compress, " on the way: ", apart));
        else found.expect(amax(abs(net.w.grad())).item() == 0, "zeros stay zeros");
      }
    Weight net;
    nn::DistributedDataParallel ddp(net, rank, {.compress = DType::f16});
    ddp(full({600}, rank.rank() == 1 ? INFINITY : 1.)).backward();
    found.expect(std::isinf(net.w.grad().to_vector<double>()[7]), "an inf of one rank reaches all");

    Weight half;
    half.to(DType::f16);
    nn::DistributedDataParallel of_half(half, rank);
    of_half(full({600}, 4e4, {.dtype = DType::f16})).backward();
    found.expect(half.w.grad().dtype() == DType::f16 && half.w.grad().to_vector<double>()[9] == 4e4, "gradients in f16");
  });
}

TEST_CASE("sharded states take the plain optimizer's steps") {
  on_groups([](distributed::Group& rank, Findings& found) {
    for (int kind = 0; kind < 4; ++kind) {
      Task plain_task = cnn(), t = cnn();
      if (kind == 2) plain_task.net.to(DType::bf16), t.net.to(DType::bf16);  // with masters
      auto make = [&](nn::Module& net) -> std::unique_ptr<optim::Optimizer> {
        std::unique_ptr<optim::Optimizer> opt;
        if (kind == 1) opt = std::make_unique<optim::LAMB>(net.parameters(), optim::LAMBOptions{.lr = .02});
        else opt = std::make_unique<optim::AdamW>(net.parameters(), optim::AdamWOptions{.lr = .02});
        if (kind == 2) opt->use_master_weights();
        return opt;
      };
      nn::DistributedDataParallel plain_ddp(plain_task.net, rank), ddp(t.net, rank);
      auto plain = make(plain_task.net), opt = make(t.net);
      distributed::ShardedState shards(*opt, rank);
      auto [from, to] = share(rank, t.size());
      auto run = [&, begin = from, end = to](Task& task, auto& model, optim::Optimizer& o, amp::GradScaler& scaler, int i) {
        o.zero_grad();
        amp::Autocast region({.dtype = DType::bf16, .enabled = kind == 3});
        Tensor y = model(task.x.slice(0, begin, end).to(kind == 2 ? DType::bf16 : DType::f32));
        scaler.scale(task.loss(y, begin, end) * (i == 2 && rank.rank() == 0 ? INFINITY : 1)).backward();
        scaler.step(o, {.clip_norm = .5});
        scaler.update();
      };
      amp::GradScaler a({.init_scale = 64}), b({.init_scale = 64});
      for (int i = 0; i < 5; ++i) {
        run(plain_task, plain_ddp, *plain, a, i);
        run(t, ddp, *opt, b, i);
      }
      found.expect(values(t.net.parameters()) == values(plain_task.net.parameters()), text::cat("weights after 5 steps, kind ", kind));
      int copies = 0;
      for (auto& p : t.net.parameters()) {  // autocast's copies are current, whoever has updated the weight
        if (kind != 3 || !p.storage()->has_shadows()) continue;
        auto* copy = p.storage()->shadows().find(DType::bf16);
        copies += copy && copy->version == p.version() && copy->copy.to_vector<float>() == p.detach().to(DType::bf16).to_vector<float>();
      }
      if (kind == 3) found.expect(copies >= 3, text::cat(copies, " current copies"));
      StateDict whole = plain->state_dict();
      found.expect(shards.state_dict().size() < whole.size(), "a rank has a share of the states");
      shards.consolidate();
      StateDict joined = shards.state_dict();
      if (rank.rank() == 0) {
        found.expect(joined.size() == whole.size(), text::cat("all states at rank 0: ", joined.size(), " of ", whole.size()));
        for (auto& [name, v] : whole)
          found.expect(joined.at(name).to_vector<double>() == v.to_vector<double>() && joined.at(name).dtype() == v.dtype(), name);
      }
      // Another program goes on from the plain state.
      Task other = cnn();
      if (kind == 2) other.net.to(DType::bf16);
      other.net.load_state_dict(plain_task.net.state_dict());
      nn::DistributedDataParallel other_ddp(other.net, rank);
      auto resumed = make(other.net);
      distributed::ShardedState other_shards(*resumed, rank);
      other_shards.load_state_dict(whole);
      amp::GradScaler c({.init_scale = 64});
      c.load_state_dict(a.state_dict());
      run(plain_task, plain_ddp, *plain, a, 5);
      run(other, other_ddp, *resumed, c, 5);
      found.expect(values(other.net.parameters()) == values(plain_task.net.parameters()), text::cat("weights of a resumed run, kind ", kind));
    }
  });
}

TEST_CASE("batch norm over all ranks is that of the joined batch") {
  on_groups([](distributed::Group& rank, Findings& found) {
    const int64_t rows = 13;  // shares differ
    for (bool converted : {false, true}) {
      Task joined = cnn(rows, 2), t = cnn(rows, 2);
      if (converted) found.expect(nn::convert_sync_batch_norm(t.net, rank) == 2, "two norms");
      auto sum_loss = [&](Task& task, const Tensor& y, int64_t from, int64_t to) { return task.loss(y, from, to) * static_cast<double>(to - from); };
      sum_loss(joined, joined.net(joined.x), 0, rows).backward();
      nn::DistributedDataParallel ddp(t.net, rank, {.broadcast_buffers = converted});
      auto [from, to] = share(rank, rows);
      sum_loss(t, ddp(t.x.slice(0, from, to)), from, to).backward();
      for (auto& p : t.net.parameters()) p.grad().detach().mul_(rank.size());
      double apart = largest_difference(gradients(t.net), gradients(joined.net));
      found.expect(converted ? apart < 1e-5 : apart > 1e-3, text::cat("gradients are ", apart, " apart; over all ranks: ", converted));
      double statistics = largest_difference(values(t.net.buffers()), values(joined.net.buffers()));
      found.expect(converted ? statistics < 1e-6 : statistics > 1e-4, text::cat("running statistics are ", statistics, " apart"));
    }
    // Of vectors, with gradients of x, against the formula's; evaluation needs no other rank.
    manual_seed(9);
    Tensor x = randn({rows, 3}) * 5 + 100, g = randn({rows, 3});
    nn::BatchNorm1d plain(3);
    Tensor whole = x.clone().requires_grad_();
    plain(whole).backward({.gradient = g});
    nn::SyncBatchNorm norm(3, rank);
    auto [from, to] = share(rank, rows);
    Tensor part = x.slice(0, from, to).clone().requires_grad_();
    norm(part).backward({.gradient = g.slice(0, from, to)});
    found.expect(largest_difference({part.grad().to_vector<double>()}, {whole.grad().slice(0, from, to).to_vector<double>()}) < 1e-4,
        "gradient of x");
    norm.eval();
    if (rank.rank() == 0) found.expect(norm(x).shape() == x.shape(), "evaluation on one rank");
  });
}

TEST_CASE("buffers are rank 0's before each forward in training") {
  on_groups([](distributed::Group& rank, Findings& found) {
    Task t = cnn(16, 2);
    nn::DistributedDataParallel ddp(t.net, rank);
    Tensor running = t.net.buffers()[0];
    running.fill_(rank.rank() + 5);
    auto [from, to] = share(rank, t.size());
    Tensor seen;
    auto hook = t.net.register_forward_pre_hook([&](nn::Module&, const Tensor&) {
      seen = running.clone();
      return Tensor();
    });
    ddp(t.x.slice(0, from, to));
    found.expect(seen.to_vector<double>() == std::vector<double>(6, 5), "rank 0's");
    t.net.eval();
    if (rank.rank() == 0) ddp(t.x);  // evaluation on one rank waits for nobody
  });
}

TEST_CASE("models that differ are named on every rank") {
  on_groups([](distributed::Group& rank, Findings& found) {
    auto error_of = [&](auto make) {
      try {
        nn::Sequential net = make();
        nn::DistributedDataParallel ddp(net, rank);
      } catch (const distributed::MismatchError& e) {
        return std::string(e.what());
      }
      return std::string("none");
    };
    bool last = rank.rank() == rank.size() - 1;
    std::string shape = error_of([&] { return nn::Sequential{nn::Linear(2, 3), nn::Linear(3, last ? 5 : 4)}; });
    found.expect(shape == text::cat("DistributedDataParallel: the ranks' models differ, at tensor 2: rank 0 has parameter 1.weight [4, 3] (f32), rank ", rank.size() - 1,
                                    " has parameter 1.weight [5, 3] (f32); build the same model on every rank"), shape);
    std::string fewer = error_of([&] { return last ? nn::Sequential{nn::Linear(2, 3)} : nn::Sequential{nn::Linear(2, 3), nn::Linear(3, 4)}; });
    found.expect(fewer.find("at tensor 2: rank 0 has parameter 1.weight [4, 3] (f32), rank " + std::to_string(rank.size() - 1) + " has nothing") != fewer.npos, fewer);
  });
}

TEST_CASE("gradients with a graph, and second gradients, are refused") {
  on_groups([](distributed::Group& rank, Findings& found) {
    Task t = mlp();
    nn::DistributedDataParallel ddp(t.net, rank);
    auto error_of = [&](auto f) {
      try {
        f();
      } catch (const Error& e) {
        return std::string(e.what());
      }
      return std::string("none");
    };
    std::string graph = error_of([&] { ddp(t.x).sum().backward({.create_graph = true}); });
    found.expect(graph.find("has a graph: backward ran with create_graph, which cannot be reduced") != graph.npos, graph);
    t.net.zero_grad();
    // A gradient penalty takes its inner gradient by grad().
    Tensor x = t.x.clone().requires_grad_();
    auto [inner] = grad({ddp(x).sum()}, {x}, {.create_graph = true});
    (square(inner).sum() + ddp(x).sum()).backward();
    found.expect(std::isfinite(t.net.parameters()[0].grad().sum().item()), "a penalty");
    t.net.zero_grad();
    bool once = true;
    auto hook = register_post_accumulate_hook(t.net.parameters()[5], [&](const Tensor&) {
      if (std::exchange(once, false)) {
        EnableGrad on;
        square(t.net.parameters()[5]).sum().backward();
      }
    });
    std::string twice = error_of([&] { ddp(t.x).sum().backward(); });
    found.expect(twice.find("parameter 4.bias got a gradient twice in one backward") != twice.npos, twice);
  });
}

TEST_CASE("a position in the data goes on with another number of ranks") {
  Tensor all = zeros({50, 1});
  for (int64_t i = 0; i < 50; ++i) all.slice(0, i, i + 1).fill_(i);
  data::TensorDataset set{all, zeros({50}, {.dtype = DType::i64})};
  // The examples of each step, of all ranks together, from where `saved` says.
  auto steps = [&](int ranks, std::vector<StateDict>* saved, const StateDict* from) {
    std::vector<std::multiset<double>> seen;
    std::mutex lock;
    distributed::threads(ranks).run([&](distributed::Group& rank) {
      data::DataLoader loader(set, {.batch_size = 8 / ranks, .seed = 3,
                                    .sampler = data::DistributedSampler(50, rank.rank(), ranks, {.drop_last = true})});
      distributed::SharedPosition position(loader, rank);
      if (from) position.load_state_dict(*from);
      for (int epoch = 0, step = 0; epoch < 2; ++epoch)
        for (auto& [x, target] : loader) {
          std::lock_guard guard(lock);
          if (static_cast<size_t>(step) == seen.size()) seen.emplace_back();
          for (double v : x.to_vector<double>()) seen[static_cast<size_t>(step)].insert(v);
          if (saved && rank.rank() == 0) saved->push_back(position.state_dict());
          ++step;
        }
    });
    return seen;
  };
  std::vector<StateDict> saved;
  auto whole = steps(2, &saved, nullptr);
  for (int ranks : {1, 2, 4}) {
    auto rest = steps(ranks, nullptr, &saved[2]);
    for (size_t k = 0; k < 3; ++k) CHECK(rest[k] == whole[k + 3]);  // full batches of the first epoch
  }
  data::DataLoader other(set, {.batch_size = 3});
  distributed::SharedPosition position(other, distributed::Group());
  TEXT(position.load_state_dict(saved[0]), "SharedPosition: the position is one of batches of 8 on 2 ranks, these have 3 on 1; give each rank 8 / 1");
}

TEST_CASE("another number of ranks goes on from rank 0's checkpoint") {
  struct Seen {
    Values weights, states;
    bool operator==(const Seen&) const = default;
  };
  // What rank 0 has when it begins and when it saves, at step `last`.
  auto train = [](int ranks, const std::string& folder, int64_t last) {
    std::array<Seen, 2> seen;
    distributed::threads(ranks, 60).run([&](distributed::Group& rank) {
      Task t = cnn(48);
      nn::DistributedDataParallel ddp(t.net, rank, small_buckets);
      optim::AdamW opt(ddp.parameters(), {.lr = .02, .eps = .1});  // steps that follow the gradient, so that rounding stays small
      distributed::ShardedState shards(opt, rank);
      amp::GradScaler scaler({.init_scale = 64, .growth_interval = 2});
      data::TensorDataset set{t.x, t.target};
      data::DataLoader loader(set, {.batch_size = 8 / ranks, .seed = 3, .sampler = data::DistributedSampler(48, rank.rank(), ranks)});
      distributed::SharedPosition position(loader, rank);
      io::Checkpoint checkpoint(folder);
      checkpoint.add("net", t.net).add("opt", shards).add("scaler", scaler).add("loader", position);
      auto look = [&](Seen& at) {
        shards.consolidate();
        if (rank.rank() > 0) return;
        at.weights = values(t.net.parameters());
        for (auto& state : {shards.state_dict(), scaler.state_dict()})
          for (auto& [name, v] : state) at.states.push_back(v.to_vector<double>());
      };
      int64_t step = checkpoint.resume().value_or(0);
      rank.barrier();
      look(seen[0]);
      while (step < last)
        for (auto& [x, target] : loader) {
          opt.zero_grad();
          scaler.scale(cross_entropy(ddp(x), target)).backward();
          scaler.step(opt);
          scaler.update();
          if (++step < last) continue;
          look(seen[1]);
          if (rank.rank() == 0) checkpoint.save(step);
          break;
        }
    });
    return seen;
  };
  Temporary unbroken;
  Seen whole = train(4, unbroken.folder, 9)[1];  // ends in the second epoch
  for (int ranks : {4, 2, 1, 8}) {
    INFO(ranks << " ranks go on");
    Temporary folder;
    Seen saved = train(4, folder.folder, 4)[1];
    auto [begun, ended] = train(ranks, folder.folder, 9);
    CHECK(begun == saved);
    CHECK((ranks != 4 || ended == whole));
    CHECK(largest_difference(ended.weights, whole.weights) < 1e-5);
    CHECK(largest_difference(saved.weights, whole.weights) > 1e-2);
  }
}

// ---- DataParallel

TEST_CASE("DataParallel: gradients are those of the shards, and replicas follow the model") {
  for (size_t n : {1u, 2u, 4u})
    for (bool images : {false, true}) {
      Task reference = images ? cnn() : mlp(), t = images ? cnn() : mlp();
      nn::DataParallel dp(t.net, std::vector<Device>(n));
      Tensor y = dp(t.x);
      Tensor loss = cross_entropy(y, t.target, {.reduction = Reduction::sum});
      loss.backward();
      // Sums of rows' losses have the same gradients by parts.
      std::vector<Tensor> sums;
      for (size_t i = 0; i < n; ++i) {
        reference.net.zero_grad();
        auto rows = t.size() / static_cast<int64_t>(n), from = static_cast<int64_t>(i) * rows;
        cross_entropy(reference.net(t.x.slice(0, from, from + rows)), t.target.slice(0, from, from + rows), {.reduction = Reduction::sum}).backward();
        size_t k = 0;
        for (auto& p : reference.net.parameters()) {
          if (i == 0) sums.push_back(p.grad().clone());
          else sums[k] = sums[k] + p.grad();
          ++k;
        }
      }
      CHECK(gradients(t.net) == values(sums));
      CHECK(y.shape() == Shape{16, 4});

      optim::SGD opt(t.net.parameters(), {.lr = .1, .momentum = .9});
      for (int i = 0; i < 10; ++i) {
        opt.zero_grad();
        cross_entropy(dp(t.x), t.target).backward();
        opt.step();
      }
      dp.refresh();
      for (size_t i = 0; i < n; ++i) CHECK(values(dp.replica(i).parameters()) == values(t.net.parameters()));
      if (n > 1) {
        auto version = dp.replica(1).parameters()[0].version();
        dp.refresh();
        CHECK(dp.replica(1).parameters()[0].version() == version);  // copied only when the model has changed
        CHECK(dp.replica(1).parameters()[0].storage() != t.net.parameters()[0].storage());
        CHECK(dp.replica(0).parameters()[0].storage() == t.net.parameters()[0].storage());
      }
    }
}

TEST_CASE("DataParallel: batches that do not come out even, and those of few rows") {
  Task t = whole_numbers(mlp(7));
  nn::DataParallel dp(t.net, std::vector<Device>(4));
  for (int64_t rows : {7, 5, 3, 1}) {
    Task joined = whole_numbers(mlp(7));
    t.net.zero_grad();
    Tensor x = t.x.slice(0, 0, rows).clone().requires_grad_(), x2 = x.detach().clone().requires_grad_();
    Tensor y = dp(x), y2 = joined.net(x2);
    CHECK(y.to_vector<float>() == y2.to_vector<float>());
    y.backward({.gradient = y.detach()});
    y2.backward({.gradient = y2.detach()});
    CHECK(gradients(t.net) == gradients(joined.net));
    CHECK(x.grad().to_vector<float>() == x2.grad().to_vector<float>());
  }
  NoGrad off;
  CHECK(dp(t.x).requires_grad() == false);
  CHECK(dp(t.x.slice(0, 0, 0)).shape() == Shape{0, 4});
}

TEST_CASE("DataParallel: autocast around the call, inside the model and as a decorator give the same bits") {
  auto train = [](int how) {
    struct Inside : nn::Module {
      nn::Linear a{12, 32}, b{32, 4};
      bool cast = false;
      DType seen = DType::f64;
      HT_FIELDS(a, b)
      Tensor forward(const Tensor& x) override {
        std::optional<amp::Autocast> region;
        if (cast) region.emplace(amp::AutocastOptions{.dtype = DType::bf16});
        Tensor h = a(x);
        seen = h.dtype();
        return b(relu(h)).to(DType::f32);
      }
    };
    manual_seed(6);
    Inside net;
    net.cast = how == 1;
    nn::DataParallel dp(net, std::vector<Device>(3));
    Tensor x = randn({9, 12}), target = randint(0, 4, {9});
    optim::SGD opt(net.parameters(), {.lr = .1});
    auto decorated = amp::autocasted([&](const Tensor& v) { return dp(v); }, {.dtype = DType::bf16});
    for (int i = 0; i < 3; ++i) {
      opt.zero_grad();
      Tensor y;
      if (how == 0) {
        amp::Autocast region({.dtype = DType::bf16});
        y = dp(x);
      } else y = how == 1 ? dp(x) : decorated(x);
      for (size_t k = 0; k < 3; ++k) CHECK(dp.replica(k).seen == DType::bf16);
      cross_entropy(y, target).backward();
      opt.step();
    }
    return values(net.parameters());
  };
  Values around = train(0);
  CHECK(train(1) == around);
  CHECK(train(2) == around);
}

TEST_CASE("DataParallel: a scaler, several results, dropout that can be repeated, statistics of the first replica") {
  struct Two : nn::Module {
    nn::Linear a{4, 6};
    nn::BatchNorm1d norm{6};
    nn::Dropout drop{.5};
    HT_FIELDS(a, norm, drop)
    std::pair<Tensor, std::vector<Tensor>> operator()(const Tensor& x, double by) {
      Tensor h = drop(norm(a(x))) * by;
      return {h, {h.argmax(1), h.mean()}};
    }
  };
  auto run = [] {
    manual_seed(8);
    Two net;
    nn::DataParallel dp(net, std::vector<Device>(2));
    amp::GradScaler scaler({.init_scale = 256});
    optim::Adam opt(net.parameters());
    Tensor x = randn({8, 4});
    std::vector<double> means;
    for (int i = 0; i < 3; ++i) {
      opt.zero_grad();
      auto [y, rest] = dp(x, 2.);
      CHECK(y.shape() == Shape{8, 6});
      CHECK(rest[0].shape() == Shape{8});
      CHECK(rest[1].shape() == Shape{2});
      scaler.scale(square(y).mean() + rest[1].sum()).backward();
      scaler.step(opt);
      scaler.update();
      means.push_back(rest[1].sum().item());
    }
    CHECK(net.norm.num_batches_tracked.item() == 3);
    nn::BatchNorm1d alone(6);
    CHECK(values({net.norm.running_mean}) != values({alone.running_mean}));
    net.eval();
    Tensor half = dp(x, 1.).first;
    CHECK(largest_difference(values({half}), values({net(x, 1.).first})) < 1e-6);
    return means;
  };
  auto once = run();
  CHECK(run() == once);
}

TEST_CASE("DataParallel: what it refuses") {
  struct Fails : nn::Module {
    nn::Linear a{2, 2};
    HT_FIELDS(a)
    Tensor forward(const Tensor& x) override {
      if (x.slice(1, 0, 1).sum().item() < 0) throw std::out_of_range("row below 0");
      return a(x);
    }
  };
  Fails net;
  nn::DataParallel dp(net, std::vector<Device>(2));
  Tensor bad = ones({4, 2});
  bad.slice(0, 3, 4).fill_(-9);
  CHECK_THROWS_AS(dp(bad), std::out_of_range);
  CHECK_THROWS_WITH(dp(bad), "row below 0");
  CHECK(dp(ones({4, 2})).shape() == Shape{4, 2});

  TEXT(dp(ones({})), "DataParallel: expected tensor arguments of equally many rows, got [] (f32) and [] (f32)");
  TEXT(nn::DataParallel(net, std::vector<Device>()), "DataParallel: expected at least one device");
  Tensor y = dp(ones({4, 2}));
  y.sum().backward({.retain_graph = true});
  TEXT(y.sum().backward(), "DataParallel: a second backward through one call, whose replicas' graphs were freed by the first; call it again");
  CHECK_THROWS_WITH(dp(ones({4, 2})).sum().backward({.create_graph = true}), Contains("create_graph does not reach the replicas' graphs"));
}

TEST_CASE("DistributedDataParallel: options and arguments") {
  nn::Sequential net{nn::Linear(2, 2)};
  TEXT(nn::DistributedDataParallel(net, distributed::Group(), {.bucket_mib = 0}),
       "DistributedDataParallel: expected bucket_mib and first_bucket_mib above 0, got 0 and 1");
  TEXT(nn::DistributedDataParallel(net, distributed::Group(), {.compress = DType::f32}),
      "DistributedDataParallel: expected compress = f16 or bf16, got f32");
  net.requires_grad_(false);
  TEXT(nn::DistributedDataParallel(net, distributed::Group()), "DistributedDataParallel: the model has no parameter that requires a gradient");
}
