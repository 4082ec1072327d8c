// An inference service in one process: threads ask, a loop answers in batches of what has arrived, under autocast and without a tape, and
// says how long answers took. Takes the weights that 02_mlp saved.
// ctest: --requests 200 --clients 3 --out serving_test
#include <algorithm>
#include <condition_variable>
#include <deque>
#include <future>
#include <mutex>
#include <thread>

#include "halftone/examples/run.h"

namespace ht = halftone;
using namespace ht;
using namespace ht::examples;

namespace {

struct Options : Run {
  std::string weights;
  int64_t requests = 20000, clients = 4, batch = 32;
  Options() : Run("runs/serving") {}
};

struct Request {
  Tensor x;                     // [1, 28, 28]
  std::promise<int64_t> class_of;
  Clock asked = {};
};

// What has been asked and not been answered.
class Queue {
 public:
  void put(Request r) {
    {
      std::lock_guard guard(lock_);
      requests_.push_back(std::move(r));
    }
    arrived_.notify_one();
  }
  // Up to `most` requests, as soon as there is one; none when the service closes.
  std::vector<Request> take(size_t most) {
    std::unique_lock guard(lock_);
    arrived_.wait(guard, [&] { return closed_ || !requests_.empty(); });
    std::vector<Request> taken;
    for (; taken.size() < most && !requests_.empty(); requests_.pop_front()) taken.push_back(std::move(requests_.front()));
    return taken;
  }
  void close() {
    {
      std::lock_guard guard(lock_);
      closed_ = true;
    }
    arrived_.notify_all();
  }

 private:
  std::mutex lock_;
  std::condition_variable arrived_;
  std::deque<Request> requests_;
  bool closed_ = false;
};

int run(const Options& o) {  // what the program ends with
  Device device = o.place();
  manual_seed(o.seed);
  nn::Sequential net{nn::Flatten(), nn::Linear(784, 256), nn::ReLU(), nn::Linear(256, 128), nn::ReLU(), nn::Linear(128, 10)};
  if (!o.weights.empty()) net.load_state_dict(io::load(o.weights));
  net.to(device);
  net.eval();
  // The whole batch each time, padded, so that one graph serves all.
  auto answer = o.replayed([&](const Tensor& x) {
    NoGrad off;
    amp::Autocast region(o.mixed());  // 16-bit copies of the weights are made once
    return argmax(net(x), 1);
  });

  Queue queue;
  std::vector<double> latencies;
  int64_t batches = 0;
  Interrupt interrupt;
  std::thread service([&] {
    Tensor x = zeros({o.batch, 1, 28, 28});
    for (auto requests = queue.take(static_cast<size_t>(o.batch)); !requests.empty(); requests = queue.take(static_cast<size_t>(o.batch))) {
      for (size_t i = 0; i < requests.size(); ++i) x.select(0, static_cast<int64_t>(i)).copy_(requests[i].x);
      auto classes = answer(x.to(device)).template to_vector<int64_t>();
      ++batches;
      for (size_t i = 0; i < requests.size(); ++i) {
        latencies.push_back(requests[i].asked.seconds());
        requests[i].class_of.set_value(classes[i]);
      }
    }
  });

  Clock clock;
  std::atomic<int64_t> left = o.requests, wrong = 0;
  std::vector<std::thread> clients;
  for (int64_t c = 0; c < o.clients; ++c)
    clients.emplace_back([&, c] {
      manual_seed(o.seed + static_cast<uint64_t>(c));
      NoGrad off;
      while (!interrupt.asked() && left-- > 0) {
        Request r{.x = randn({1, 28, 28}), .class_of = {}};
        Tensor x = r.x;
        auto answered = r.class_of.get_future();
        queue.put(std::move(r));
        int64_t got = answered.get();
        if (o.precision == "fp32" && device == Device::cpu() && got != argmax(net(x.unsqueeze(0)), 1).item<int64_t>()) ++wrong;
      }
    });
  for (auto& t : clients) t.join();
  queue.close();
  service.join();

  double seconds = clock.seconds();
  HT_CHECK(wrong == 0, wrong.load(), " answers are not those of the model alone");
  HT_CHECK(!latencies.empty(), "--requests: there were none");
  std::sort(latencies.begin(), latencies.end());
  auto quantile = [&](double q) { return 1e3 * latencies[static_cast<size_t>(q * static_cast<double>(latencies.size() - 1))]; };
  auto n = static_cast<double>(latencies.size());
  std::printf("%zu answers in %.2f s (%.0f a second), %.1f a batch; latency %.3f ms, of one in a hundred above %.3f ms, at most %.3f ms\n", latencies.size(),
              seconds, n / seconds, n / static_cast<double>(batches), quantile(0.5), quantile(0.99), quantile(1));
  o.write_metrics({{"answers", static_cast<int64_t>(latencies.size())}, {"answers_per_s", n / seconds}, {"answers_per_batch", n / static_cast<double>(batches)},
                   {"latency_ms_50", quantile(0.5)}, {"latency_ms_99", quantile(0.99)}, {"latency_ms_most", quantile(1)}});
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  Arguments arguments("serving", "Serves the network 784-256-128-10 to threads of this process and reports latencies. OUT gets metrics.json.",
                      {"serving --weights runs/mlp/mlp.safetensors", "serving --device cuda --capture --precision fp16 --clients 16 --batch 64"});
  o.add_to(arguments);
  arguments.add_file("--weights", o.weights, "mlp.safetensors, as 02_mlp saves it; none: random weights");
  arguments.add("--requests", o.requests, "to answer", Arguments::positive);
  arguments.add("--clients", o.clients, "threads that ask, each one question at a time", Arguments::positive);
  arguments.add("--batch", o.batch, "questions answered at once, at most", Arguments::positive);
  return arguments.run(argc, argv, [&] { return run(o); });
}
