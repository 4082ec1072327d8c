// Checkpoints: a resumed run is the run that never stopped, and whatever fails or is killed leaves the old or the new file.
#include "halftone/io/checkpoint.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <map>
#include <random>
#include <thread>

#include "halftone/halftone.h"
#include "halftone/io/crc.h"
#include "halftone/tests/catch.h"
#include "halftone/tests/faults.h"
#include "halftone/tests/temporary.h"

namespace {

using namespace halftone;
using Steps = std::vector<int64_t>;

using Environment = std::map<std::string, std::string>;

// Starts one of this program's hidden test cases as a process, with these variables; what it prints goes to the file `log`.
pid_t start_case(const std::string& name, const Environment& environment, const std::string& log) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  for (const auto& [key, value] : environment) ::setenv(key.c_str(), value.c_str(), 1);
  const int out = ::open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0666);
  ::dup2(out, 1);
  ::dup2(out, 2);
  ::execl("/proc/self/exe", "test", name.c_str(), static_cast<char*>(nullptr));
  ::_exit(126);
}
// Its exit status; -1 when a signal ended it.
int wait_for(pid_t child) {
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value ? value : "";
}

// A part all of whose numbers are the same.
struct Value {
  Tensor a = zeros({3, 2}), b = zeros({}, {.dtype = DType::i64});
  void set(double v) {
    a.fill_(v);
    b.fill_(v);
  }
  // What all are; -1 for a mixture.
  double get() const {
    const auto all = a.to_vector<double>();
    for (const double v : all)
      if (v != b.item()) return -1;
    return b.item();
  }
  StateDict state_dict() const {
    StateDict s;
    s.add("a", a);
    s.add("b", b);
    return s;
  }
  void load_state_dict(const StateDict& s) {
    HT_CHECK(s.at("a").shape() == a.shape(), "expected a of ", a.shape(), ", got ", s.at("a").shape());
    a.copy_(s.at("a"));
    b.copy_(s.at("b"));
  }
};
// Another such part, from which a mixture of two saves would be seen.
struct Pair {
  Value first, second;
  io::Checkpoint checkpoint;
  explicit Pair(const std::string& folder, io::CheckpointOptions o = {}) : checkpoint(folder, o) {
    checkpoint.add("first", first).add("second", second);
  }
  void set(double v) {
    first.set(v);
    second.set(v);
  }
  double get() const { return first.get() == second.get() ? first.get() : -1; }
  void save(int64_t step, io::SaveStepOptions o = {}) {
    set(static_cast<double>(step));
    checkpoint.save(step, o);
  }
};

}  // namespace

TEST_CASE("checks of known texts") {
  const std::string digits = "123456789", zeros(32, '\0');
  CHECK(io::crc32(digits.data(), 9) == 0xcbf43926);
  CHECK(io::crc32c(digits.data(), 9) == 0xe3069283);
  CHECK(io::crc32c(zeros.data(), 32) == 0x8a9136aa);  // RFC 3720, B.4
  for (size_t cut = 0; cut <= 9; ++cut)
    CHECK(io::crc32c(digits.data() + cut, 9 - cut, io::crc32c(digits.data(), cut)) == 0xe3069283);
}

TEST_CASE("parts come back, the newest step first; the last ones and the best one stay") {
  const Temporary t;
  Pair run(t / "deep/run/", {.keep = 2, .best = io::Best::lowest});
  CHECK_FALSE(run.checkpoint.resume());
  CHECK(run.checkpoint.steps().empty());
  const double losses[] = {5, NAN, 2, 3, 4, 6};
  for (int64_t step = 1; step <= 6; ++step) run.save(step, {.metric = losses[step - 1]});
  CHECK(run.checkpoint.steps() == Steps{3, 5, 6});
  run.set(0);
  CHECK(run.checkpoint.resume() == 6);
  CHECK(run.get() == 6);
  CHECK(run.checkpoint.resume_best() == 3);
  CHECK(run.get() == 3);
  run.checkpoint.load(5);
  CHECK(run.get() == 5);
  CHECK(io::load(run.checkpoint.path(6)).part("second").at("b").item() == 6);

  Pair up(t / "up", {.keep = 1, .best = io::Best::highest});
  up.save(1, {.metric = .5});
  up.save(2, {.metric = .25});
  up.save(3);
  CHECK(up.checkpoint.steps() == Steps{1, 3});
  up.save(1, {.metric = .125});  // a step that is saved again is another
  CHECK(up.checkpoint.resume_best() == 1);
  Pair all(t / "all", {.keep = 0});
  for (int64_t step = 8; step <= 12; ++step) all.save(step);
  CHECK(all.checkpoint.steps() == Steps{8, 9, 10, 11, 12});
}

TEST_CASE("what others have in the folder stays, and what killed saves left goes") {
  const Temporary t;
  Pair run(t.folder);
  const std::string gone = "999999999";  // beyond every process number
  const std::vector<std::string> others{"notes", "step-x.safetensors", "step-007.safetensors", "step-1.safetensors.tmp.1.0",
                                        "other.tmp." + gone + ".0"};
  for (const std::string& name : others)
    write_bytes(t / name, "");
  write_bytes(t / ("step-1.safetensors.tmp." + gone + ".0"), "half");
  run.save(4);
  CHECK(t.list() == "notes other.tmp.999999999.0 step-007.safetensors step-1.safetensors.tmp.1.0 step-4.safetensors step-x.safetensors ");
}

TEST_CASE("random numbers go on from where they were") {
  const Temporary t;
  Pair run(t.folder);
  manual_seed(3);
  randn({5});
  run.save(1);
  const auto expected = randn({6}).to_vector<float>();
  manual_seed(4);
  run.checkpoint.resume();
  CHECK(generator().seed() == 3);
  CHECK(randn({6}).to_vector<float>() == expected);
}

TEST_CASE("what does not fit is refused in one sentence") {
  const Temporary t;
  Pair run(t.folder);
  run.save(1);
  const auto error = [&](auto&& f) { return error_of(f, t.folder); };
  Value value;
  CHECK(error([&] { run.checkpoint.add("first", value); }) == "Checkpoint: there is a part 'first' already");
  for (const char* name : {"", "a.b", "a,b", "rng"})
    CHECK(error([&] { run.checkpoint.add(name, value); }) ==
          text::cat("Checkpoint: expected a part's name without '.' and ',', and not 'rng', got '", name, "'"));
  CHECK(error([&] { run.checkpoint.save(-1); }) == "Checkpoint: expected a step of 0 or more, got -1");
  CHECK(error([] { io::Checkpoint(""); }) == "Checkpoint: expected a folder, got an empty name; \".\" is the current one");
  CHECK(error([] { io::Checkpoint("a", {.keep = -1}); }) == "Checkpoint: expected keep of 0 (all) or more, got -1");
  CHECK(error([&] { run.checkpoint.resume_best(); }) == "Checkpoint: to know the best, say .best = Best::lowest or Best::highest");
  io::Checkpoint empty(t.folder);
  CHECK(error([&] { empty.save(1); }) == "Checkpoint: nothing to save; add() the model and what trains it");
  CHECK(error([&] { empty.resume(); }) == "Checkpoint: nothing to load into; add() the model and what trains it");

  io::Checkpoint other(t.folder);
  other.add("second", value).add("third", value);
  CHECK(error([&] { other.resume(); }) ==
        "step-1.safetensors: its parts are others; missing: third; unexpected: first; {.strict = false} loads what both have");
  CHECK(other.resume({.strict = false}) == 1);
  CHECK(value.get() == 1);
  Value wide;
  wide.a = zeros({4});
  io::Checkpoint misshaped(t.folder);
  misshaped.add("first", value).add("second", wide);
  CHECK(error([&] { misshaped.resume(); }) == "step-1.safetensors: second: expected a of [4], got [3, 2]");
  io::save(run.checkpoint.path(2), value.state_dict());
  const auto as_weights = [&](const std::string& file) { return "weights are loaded by net.load_state_dict(io::load(\"" + file + "\"))"; };
  CHECK(error([&] { run.checkpoint.resume(); }) ==
        "step-2.safetensors: not a checkpoint, but tensors alone, as io::save writes them; " + as_weights("step-2.safetensors"));
  io::save(t / "net.safetensors", value.state_dict());
  for (const std::string file : {"step-1.safetensors", "net.safetensors"}) {
    Pair named(t / file);
    CHECK(error([&] { named.checkpoint.resume(); }) ==
          file + ": is a file, and a Checkpoint takes a folder of steps; " +
              (file == "net.safetensors" ? as_weights(file) : "call load(1) of a Checkpoint(\"" + t.folder + "\")"));
  }
  CHECK(error([&] { run.checkpoint.load(3); }) == "step-3.safetensors: cannot open: No such file or directory");
  write_bytes(t / "file", "");
  Pair blocked(t / "file");
  CHECK(error([&] { blocked.save(1); }) == "file: cannot make the folder: File exists");
}

TEST_CASE("a checkpoint is no weights, but has them") {
  const Temporary t;
  nn::Sequential net{nn::Linear(2, 3)}, other{nn::Linear(2, 3)};
  optim::AdamW opt(net.parameters());
  amp::GradScaler scaler;
  io::Checkpoint checkpoint(t.folder);
  checkpoint.add("net", net).add("opt", opt).add("scaler", scaler);
  checkpoint.save(1);
  const StateDict whole = io::load(checkpoint.path(1));
  for (const bool strict : {true, false})
    CHECK(error_of([&] { other.load_state_dict(whole, {.strict = strict}); }) ==
          "load_state_dict: the state is a whole checkpoint (parts: net, opt, rng, scaler), not a halftone::nn::Sequential; for weights alone, "
          "load_state_dict(state.part(\"net\")); to go on with its run, io::Checkpoint(folder).add(\"net\", net), the other parts alike, "
          "and resume()");
  CHECK(error_of([&] { opt.load_state_dict(whole); }) ==
        "state: there is no entry '0.lr'; there is 'opt.0.lr', so this is a state of several parts, as a checkpoint's: take part(\"opt\") of it");
  CHECK(error_of([&] { scaler.load_state_dict(whole); }).ends_with("take part(\"scaler\") of it"));
  other.load_state_dict(whole.part("net"));
  opt.load_state_dict(whole.part("opt"));
  scaler.load_state_dict(whole.part("scaler"));
  for (const auto& [name, w] : other.state_dict()) CHECK(w.to_vector<float>() == net.state_dict().at(name).to_vector<float>());
}

TEST_CASE("a checkpoint that is cut or changed anywhere is noticed") {
  const Temporary t;
  Pair run(t.folder);
  run.save(7, {.metric = .5});
  const std::string path = run.checkpoint.path(7), whole = bytes_of(path);
  int same = 0;
  const auto try_bytes = [&](const std::string& bytes) {
    write_bytes(path, bytes);
    run.set(0);
    const std::string error = error_of([&] { run.checkpoint.resume(); });
    if (error.empty()) ++same;
    return error.empty() ? run.get() == 7 : run.get() == 0;
  };
  for (size_t n = 0; n < whole.size(); ++n) CHECK(try_bytes(whole.substr(0, n)));
  const bool full = !variable("HALFTONE_FULL").empty();
  for (size_t at = 0; at < whole.size(); ++at)
    for (int change = 1; change < 256; change += full ? 1 : 37) {
      std::string bytes = whole;
      bytes[at] = static_cast<char>(bytes[at] ^ change);
      if (!try_bytes(bytes)) FAIL_CHECK("byte " << at << " changed by " << change);
    }
  // Only blanks that pad the header may be other blanks.
  CHECK(same <= 8 * 3);
}

TEST_CASE("whichever call fails, an old or the new checkpoint is there, and training can go on") {
  for (const int reason : {ENOSPC, EIO, EACCES}) {
    for (int fail_at = 0;; ++fail_at) {
      const Temporary t;
      Pair run(t.folder, {.keep = 1});
      run.save(1);
      Faults faults;
      faults.every_call = true;
      faults.longest_write = 100;
      faults.fail_at = fail_at;
      faults.reason = reason;
      std::string error;
      {
        const io::UseFileOps use(faults);
        error = error_of([&] { run.save(2); }, t.folder);
      }
      if (fail_at >= static_cast<int>(faults.calls.size())) break;
      INFO("call " << fail_at << ", " << faults.calls[static_cast<size_t>(fail_at)] << ": " << error);
      const auto step = run.checkpoint.resume();
      CHECK(run.get() == static_cast<double>(step.value()));
      if (step == 1) CHECK_FALSE(error.empty());
      run.save(3);
      CHECK(t.list() == "step-3.safetensors ");
    }
  }
}

TEST_CASE("a disk that fills up at any byte leaves the old checkpoint, and takes the next when it has room again") {
  const Temporary t;
  Pair run(t.folder, {.keep = 1});
  run.save(1);
  const int64_t size = static_cast<int64_t>(bytes_of(run.checkpoint.path(1)).size());
  for (int64_t room = 0; room < size; ++room) {
    INFO("room for " << room << " of " << size << " bytes");
    Faults disk;
    disk.room = room;
    {
      const io::UseFileOps use(disk);
      CHECK(error_of([&] { run.save(2); }, t.folder) == "step-2.safetensors: cannot write: No space left on device");
    }
    CHECK(t.list() == "step-1.safetensors ");
    CHECK(run.checkpoint.resume() == 1);
    CHECK(run.get() == 1);
  }
  run.save(2);
  CHECK(t.list() == "step-2.safetensors ");
}

TEST_CASE("a folder that nobody may write to is said so, and left as it was") {
  const Temporary t;
  Pair run(t.folder);
  run.save(1);
  // A process of root may write anywhere, so it becomes someone else meanwhile.
  const bool root = ::geteuid() == 0;
  ::chmod(t.folder.c_str(), 0555);
  if (root) REQUIRE(::seteuid(65534) == 0);
  const std::string error = error_of([&] { run.save(2); }, t.folder), deeper = error_of([&] { Pair(t / "deep").save(1); }, t.folder);
  const auto step = run.checkpoint.resume();
  if (root) REQUIRE(::seteuid(0) == 0);
  ::chmod(t.folder.c_str(), 0755);
  CHECK(error == "step-2.safetensors: cannot create: Permission denied");
  CHECK(deeper == "deep: cannot make the folder: Permission denied");
  CHECK(step == 1);
  CHECK(t.list() == "step-1.safetensors ");
  run.save(2);
  CHECK(run.checkpoint.resume() == 2);
}

TEST_CASE("a real limit of the disk leaves the old checkpoint") {
  const Temporary t;
  Pair run(t.folder);
  run.save(1);
  rlimit old{};
  ::getrlimit(RLIMIT_FSIZE, &old);
  const rlimit small{100, old.rlim_max};
  auto* const handler = ::signal(SIGXFSZ, SIG_IGN);
  ::setrlimit(RLIMIT_FSIZE, &small);
  const std::string error = error_of([&] { run.save(2); }, t.folder);
  ::setrlimit(RLIMIT_FSIZE, &old);
  ::signal(SIGXFSZ, handler);
  CHECK(error == "step-2.safetensors: cannot write: File too large");
  CHECK(t.list() == "step-1.safetensors ");
  CHECK(run.checkpoint.resume() == 1);
  CHECK(run.get() == 1);
}

// ---- resuming equals never having stopped

namespace {

constexpr int64_t last_step = 14, overflow_at = 7, growth_interval = 3;

// A run with everything that has a state. It saves after every step, to continue from any. On a GPU its steps may be replayed.
void train(const std::string& folder, Device device, bool captured) {
  manual_seed(11);
  nn::Sequential net{nn::Linear(6, 16), nn::BatchNorm1d(16), nn::ReLU(), nn::Dropout(0.3), nn::Linear(16, 3)};
  net.to(device);
  optim::AdamW opt(net.parameters(), {.lr = 0.05});
  optim::CosineAnnealingLR schedule(opt, {.steps = 20, .warmup = 4});
  optim::EMA ema(opt, {.decay = 0.9, .warmup = true});
  amp::GradScaler scaler({.init_scale = 256, .growth_interval = growth_interval});
  const Tensor x = randn({22, 6}), target = randint(0, 3, {22});
  data::DataLoader loader(data::TensorDataset(x, target), {.batch_size = 4, .shuffle = true, .workers = 2, .seed = 5, .device = device});

  io::Checkpoint checkpoint(folder, {.keep = 0});
  checkpoint.add("net", net).add("opt", opt).add("schedule", schedule).add("ema", ema).add("scaler", scaler).add("loader", loader);
  const auto one = [&](const Tensor& batch, const Tensor& classes, const Tensor& factor) {
    opt.zero_grad();
    Tensor loss;
    {
      const amp::Autocast autocast({.dtype = DType::f16});
      loss = cross_entropy(net(batch), classes);
    }
    scaler.scale(loss * factor).backward();
    scaler.step(opt);
    scaler.update();
  };
  auto replayed = capture(one);
  int64_t step = checkpoint.resume().value_or(0);
  while (step < last_step)
    for (auto& [batch, classes] : loader) {
      const Tensor factor = full({}, step == overflow_at ? INFINITY : 1, {.device = device});
      captured ? replayed(batch, classes, factor) : one(batch, classes, factor);
      checkpoint.save(++step);
      if (step == last_step) break;
    }
}

void resume_everywhere(Device device, bool captured) {
  INFO(str(device) << (captured ? ", captured" : ""));
  const Temporary t;
  train(t / "straight", device, captured);
  const auto file = [](int64_t step) { return text::cat("/step-", step, ".safetensors"); };
  std::vector<double> scales;
  for (int64_t step = 1; step <= last_step; ++step)
    scales.push_back(io::load(t / ("straight" + file(step))).at("scaler.scale").item());
  // It grew, fell at the overflow, and grew again.
  CHECK(scales == std::vector<double>{256, 256, 512, 512, 512, 1024, 1024, 512, 512, 512, 1024, 1024, 1024, 2048});
  for (int64_t stop = 1; stop < last_step; ++stop) {
    const std::string folder = t / text::cat("from", stop);
    io::make_folders(folder);
    write_bytes(folder + file(stop), bytes_of(t / ("straight" + file(stop))));
    const pid_t child = start_case("train on from a checkpoint",
                                   {{"HALFTONE_TEST_FOLDER", folder},
                                    {"HALFTONE_TEST_DEVICE", str(device)},
                                    {"HALFTONE_TEST_CAPTURED", captured ? "1" : ""}},
                                   folder + "/log");
    INFO("stopped after step " << stop);
    if (wait_for(child) != 0) FAIL_CHECK(bytes_of(folder + "/log"));
    for (int64_t step = stop + 1; step <= last_step; ++step) {
      INFO("step " << step);
      CHECK(bytes_of(folder + file(step)) == bytes_of(t / ("straight" + file(step))));
    }
  }
}

}  // namespace

TEST_CASE("train on from a checkpoint", "[.child]") {
  train(variable("HALFTONE_TEST_FOLDER"), device(variable("HALFTONE_TEST_DEVICE")), !variable("HALFTONE_TEST_CAPTURED").empty());
}

TEST_CASE("resuming at any step, in a new process, equals never having stopped, bit for bit") { resume_everywhere(Device::cpu(), false); }
TEST_CASE("the same on a GPU, with steps that are called and steps that are replayed") {
  if (devices(DeviceType::cuda).empty()) HT_SKIP("no CUDA device");
  for (const bool captured : {false, true}) resume_everywhere(Device::cuda(), captured);
}

// ---- killed while it saves

TEST_CASE("save until killed", "[.child]") {
  Pair run(variable("HALFTONE_TEST_FOLDER"), {.keep = 2});
  run.first.a = zeros({100, 1000});
  run.second.a = zeros({100, 1000});
  // Every step twice, so that files are replaced, too.
  for (int64_t v = 2 * run.checkpoint.resume().value_or(0) + 1;; ++v) {
    run.set(static_cast<double>(v));
    run.checkpoint.save(v / 2);
  }
}

TEST_CASE("killed during saves, the folder has the old or the new checkpoint") {
  const Temporary t;
  const int rounds = variable("HALFTONE_FULL").empty() ? 12 : 500;
  std::minstd_rand random(1);
  Pair run(t / "run");
  run.first.a = zeros({100, 1000});
  run.second.a = zeros({100, 1000});
  int64_t before = -1;
  for (int round = 0; round < rounds; ++round) {
    const pid_t child = start_case("save until killed", {{"HALFTONE_TEST_FOLDER", t / "run"}}, t / "log");
    const auto newest = [&] {
      const Steps steps = run.checkpoint.steps();
      return steps.empty() ? -1 : steps.back();
    };
    for (int tries = 0; newest() <= before && tries < 20000; ++tries) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 8000));
    ::kill(child, SIGKILL);
    REQUIRE(wait_for(child) == -1);
    const auto step = run.checkpoint.resume();
    INFO("round " << round << ", step " << step.value_or(-1));
    REQUIRE(step.value_or(-1) > before);
    before = *step;
    REQUIRE(static_cast<int64_t>(run.get()) / 2 == before);
    int files = 0;
    for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(t / "run")) ++files;
    CHECK(files <= 4);  // two steps, one that was about to be removed, one temporary
  }
}
