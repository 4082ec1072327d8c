// Trains a network on Fashion-MNIST on several ranks at once: alone with one, by threads of one process, or in as many processes as
// mpirun or srun start. Each rank takes its share of every batch; all take the same step. docs/distributed.md has more.
//   ./distributed --threads 4            mpirun -n 4 ./distributed            srun --mpi=pmix -N 2 --ntasks-per-node=8 ./distributed --device cuda
// ctest: --data @data@/fashion-mnist-subset --epochs 2 --threads 2 --sharded --fresh --out distributed_test
#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

struct Options : Run {
  int64_t epochs = 10, batch = 128, threads = 0, per_process = 1;
  double lr = 1e-3, deadline = 300;
  bool sharded = false;
  Options() : Run("runs/distributed") {}
};

distributed::Group group_for(const Options& o) {
  DeviceType type = device(o.device).type;
  if (o.threads == 0) return distributed::init({.devices_per_process = static_cast<int>(o.per_process), .device = type, .deadline = o.deadline});
  std::vector<Device> all = devices(type), used;
  HT_CHECK(type == DeviceType::cpu || o.threads <= static_cast<int64_t>(all.size()), "--threads: there are ", all.size(),
           " GPUs; each serves one rank");
  for (int64_t i = 0; i < o.threads; ++i) used.push_back(type == DeviceType::cpu ? Device::cpu() : all[static_cast<size_t>(i)]);
  return distributed::threads(used, o.deadline);
}

// The sum over the ranks.
double total(const distributed::Group& rank, double mine) {
  Tensor t = full({}, mine, {.dtype = DType::f64, .device = rank.device()});
  rank.all_reduce(t).wait();
  return t.item();
}

// What each rank runs.
void train(const Options& o, distributed::Group& rank, const data::TensorDataset& train_set, const data::TensorDataset& test_set) {
  const bool first = rank.rank() == 0;
  HT_CHECK(o.batch % rank.size() == 0, "--batch: ", rank.size(), " ranks cannot share a batch of ", o.batch);
  manual_seed(o.seed);
  nn::Sequential net{nn::Flatten(), nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 128), nn::ReLU(), nn::Linear(128, 10)};
  net.to(rank.device());
  nn::DistributedDataParallel ddp(net, rank);
  optim::AdamW opt(ddp.parameters(), {.lr = o.lr});
  std::optional<distributed::ShardedState> shards;
  if (o.sharded) shards.emplace(opt, rank);
  amp::GradScaler scaler = o.scaler();
  data::DataLoader loader(train_set, {.batch_size = o.batch / rank.size(), .workers = 1, .drop_last = true, .seed = o.seed, .device = rank.device(),
                                      .sampler = data::DistributedSampler(train_set.size(), rank.rank(), rank.size(), {.drop_last = true})});
  data::DataLoader test_loader(test_set, {.batch_size = 500, .device = rank.device(),
                                          .sampler = data::DistributedSampler(test_set.size(), rank.rank(), rank.size(), {.shuffle = false})});

  // Rank 0 saves, and every rank goes on from what it finds: also another number of ranks.
  distributed::SharedPosition position(loader, rank);
  io::Checkpoint checkpoint(o.out + "/checkpoints", {.keep = 2});
  checkpoint.add("net", net).add("loader", position);
  if (shards) checkpoint.add("opt", *shards);
  else checkpoint.add("opt", opt);
  if (scaler.enabled()) checkpoint.add("scaler", scaler);
  bool goes_on = total(rank, first && o.resuming()) > 0;  // rank 0 looks, and clears the folder
  int64_t epoch = goes_on ? checkpoint.resume().value_or(0) : 0;
  rank.barrier();  // nobody saves before all have read
  if (first && epoch > 0) std::printf("going on after epoch %lld\n", static_cast<long long>(epoch));

  Epochs epochs(rank.device());
  auto step = o.replayed([&](const Tensor& x, const Tensor& target) {
    opt.zero_grad();
    Tensor loss;
    {
      amp::Autocast region(o.mixed());
      loss = cross_entropy(ddp(x), target);
    }
    scaler.scale(loss).backward();  // gradients are reduced meanwhile
    scaler.step(opt);
    scaler.update();
    epochs.add(loss);
  });
  Clock clock;
  const int64_t begun = epoch;
  while (epoch < o.epochs) {
    for (auto& [x, target] : loader) step(x, target);
    epochs.end_epoch(loader.size());
    double loss = total(rank, epochs.losses.back()) / rank.size();
    ++epoch;
    if (shards) shards->consolidate();  // on all ranks
    if (first) {
      checkpoint.save(epoch);
      std::printf("epoch %lld  loss %.4f  %.1f s\n", static_cast<long long>(epoch), loss, clock.seconds());
      std::fflush(stdout);
    }
  }
  double seconds = clock.seconds();
  net.eval();
  double right = total(rank, accuracy(net, test_loader, o.mixed())) / rank.size();
  if (!first) return;
  std::printf("%d ranks, batches of %lld: %.2f%% right\n", rank.size(), static_cast<long long>(o.batch), right);
  io::save(o.file("distributed.safetensors"), net.state_dict());
  o.write_metrics({{"test_accuracy", right},
                   {"ranks", rank.size()},
                   {"epochs", o.epochs},
                   {"samples_per_s", static_cast<double>((epoch - begun) * loader.size() * o.batch) / seconds}});
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  Arguments arguments("distributed", "Trains a network on Fashion-MNIST on several ranks, and writes to OUT: distributed.safetensors, metrics.json and checkpoints.",
                      {"distributed --threads 4", "mpirun -n 4 distributed", "distributed --device cuda --threads 2 --capture --precision fp16"});
  o.add_data(arguments);
  o.add_to(arguments);
  arguments.add("--threads", o.threads, "ranks that are threads of this process; 0: the launcher's processes", Arguments::not_negative);
  arguments.add("--per-process", o.per_process, "ranks of each process of the launcher", Arguments::positive);
  arguments.add("--epochs", o.epochs, "times through the training set", Arguments::not_negative);
  arguments.add("--batch", o.batch, "examples a step, of all ranks together", Arguments::positive);
  arguments.add("--lr", o.lr, "learning rate", Arguments::not_negative);
  arguments.add("--deadline", o.deadline, "seconds that a collective may take", Arguments::positive);
  arguments.add_flag("--sharded", o.sharded, "each rank keeps a share of the optimizer's states");
  return arguments.run(argc, argv, [&] {
    o.place();
    data::TensorDataset train_set = data::mnist(o.data, {.train = true, .mean = 0.2860, .std = 0.3530});
    data::TensorDataset test_set = data::mnist(o.data, {.train = false, .mean = 0.2860, .std = 0.3530});
    HT_CHECK(o.batch <= train_set.size(), "--batch: ", o.batch, " is more than the ", train_set.size(), " training examples");
    try {
      group_for(o).run([&](distributed::Group& rank) { train(o, rank, train_set, test_set); });
      return 0;
    } catch (const distributed::CommunicationError& e) {
      std::fprintf(stderr, "distributed: %s\n", e.what());
      return distributed::communication_exit_code;
    }
  });
}
