#pragma once
// Everything that one thread's calls depend on besides their arguments. Workers, loaders and replicas
// capture() it where work is handed over and install() it where the work runs; what is inside is not their concern.
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "halftone/core/device.h"

namespace halftone {

// What a call passes on its way to a kernel; the highest runs first.
enum class Layer : uint8_t { profile, autograd, autocast };
inline constexpr int num_layers = 3;

class Generator;
struct CaptureLog;

// Whose call is running on this thread: modules, innermost first. Addresses only, so that a report may name them.
struct Within {
  const void* object;
  const Within* outer;
};

// What a layer keeps for one thread.
struct HT_API LayerState {
  virtual ~LayerState();
  // Appends what calls depend on: where two states append the same, one captured step may stand for the other.
  virtual void append_key(std::vector<int64_t>&) const {}
};

struct ThreadState {
  uint8_t layers = 1u << static_cast<int>(Layer::autograd);
  bool forbid_sync = false;
  bool deterministic = true;
  int cuda_device = 0;
  void* stream = nullptr;                                          // null: the device's own stream
  CaptureLog* capture = nullptr;                                   // set while a step is being captured
  const Within* within = nullptr;                                  // null: no module's
  std::array<std::shared_ptr<const LayerState>, num_layers> slot;  // by layer, opaque here
  std::shared_ptr<Generator> generator;                            // null: the process-wide one

  bool on(Layer l) const { return (layers >> static_cast<int>(l)) & 1u; }
};
HT_API ThreadState& thread_state();

// The state of this thread by value. A capture in progress stays behind.
HT_API ThreadState capture_thread_state();
// Makes `state` this thread's for the guard's lifetime.
class HT_API InstallThreadState {
 public:
  [[nodiscard]] explicit InstallThreadState(const ThreadState& state);
  ~InstallThreadState();
  InstallThreadState(const InstallThreadState&) = delete;

 private:
  ThreadState saved_;
};

// Sets this thread's layer byte for the guard's lifetime.
class LayerScope {
 public:
  [[nodiscard]] explicit LayerScope(uint8_t layers) : LayerScope(thread_state(), layers) {}
  [[nodiscard]] LayerScope(Layer l, bool on) : LayerScope(with(l, on)) {}
  // `state` is this thread's.
  [[nodiscard]] LayerScope(ThreadState& state, uint8_t layers) : state_(state), saved_(state.layers) { state.layers = layers; }
  ~LayerScope() { state_.layers = saved_; }
  LayerScope(const LayerScope&) = delete;

 private:
  static uint8_t with(Layer l, bool on) {
    unsigned bit = 1u << static_cast<int>(l), now = thread_state().layers;
    return static_cast<uint8_t>(on ? now | bit : now & ~bit);
  }
  ThreadState& state_;
  uint8_t saved_;
};

// Says so for its lifetime.
class WithinScope {
 public:
  [[nodiscard]] explicit WithinScope(const void* object) : state_(thread_state()), here_{object, state_.within} { state_.within = &here_; }
  ~WithinScope() { state_.within = here_.outer; }
  WithinScope(const WithinScope&) = delete;

 private:
  ThreadState& state_;
  Within here_;
};

// While it lives, a call on this thread that would make the host wait for a device throws, on any device:
// item(), to_vector(), printing, copies to the CPU.
class HT_API ForbidSync {
 public:
  [[nodiscard]] ForbidSync();
  ~ForbidSync();
  ForbidSync(const ForbidSync&) = delete;

 private:
  bool saved_;
};
// Throws when this thread may not wait now; `who` is the call's name.
HT_API void check_may_sync(const char* who);

// Tensors made while it lives neither record nor require gradients.
class HT_API NoGrad {
 public:
  [[nodiscard]] NoGrad() : scope_(Layer::autograd, false) {}
  ~NoGrad() {}
  NoGrad(const NoGrad&) = delete;

 private:
  LayerScope scope_;
};

}  // namespace halftone
