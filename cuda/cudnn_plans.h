#pragma once
// cuDNN's graph API by way of cudnn-frontend: checked calls, and plans, which are all that a call needs besides its addresses.
// Internal to the sources that are compiled where cuDNN is found.
#include <cudnn.h>
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <mutex>
#include <optional>
#include <unordered_map>

#include "halftone/cuda/plans.h"
#include "halftone/cuda/runtime.h"

namespace halftone::cuda::cudnn {

namespace fe = cudnn_frontend;
using Sizes = std::vector<int64_t>;
using Addresses = std::unordered_map<int64_t, void*>;  // by uid

inline void check(cudnnStatus_t status, const char* what) {
  HT_CHECK(status == CUDNN_STATUS_SUCCESS, "cuda: ", what, ": ", cudnnGetErrorString(status));
}
inline void check(fe::error_t e, const char* what) { HT_CHECK(e.is_good(), "cuda: ", what, ": ", e.get_message()); }

inline fe::DataType_t type_of(DType t) {
  switch (t) {
    case DType::f16: return fe::DataType_t::HALF;
    case DType::bf16: return fe::DataType_t::BFLOAT16;
    default: return fe::DataType_t::FLOAT;
  }
}

// f(handle) with the current device's handle, on its stream: one caller at a time.
template <class F> auto with_handle(F f) {
  static std::mutex lock;
  static auto* handles = new std::unordered_map<int, cudnnHandle_t>;
  std::lock_guard guard(lock);
  cudnnHandle_t& h = (*handles)[device()];
  if (!h) check(cudnnCreate(&h), "cudnnCreate");
  check(cudnnSetStream(h, stream()), "cudnnSetStream");
  return f(h);
}

struct Plan {
  std::shared_ptr<fe::graph::Graph> graph;
  int64_t workspace = 0;  // bytes

  void run(Addresses addresses, const char* what) const {
    Scratch memory(static_cast<size_t>(workspace));
    with_handle([&](cudnnHandle_t h) { check(graph->execute(h, addresses, memory.as<void>()), what); });
  }
};

// The library's first choice for a graph; nothing where it has none. Unlike its status codes, its exceptions are not documented.
inline std::optional<Plan> plan_for(std::shared_ptr<fe::graph::Graph> graph) {
  return with_handle([&](cudnnHandle_t h) -> std::optional<Plan> {
    Plan plan{std::move(graph)};
    auto& g = *plan.graph;
    try {
      if (g.validate().is_bad() || g.build_operation_graph(h).is_bad() || g.create_execution_plans({fe::HeurMode_t::A}).is_bad() ||
          g.check_support().is_bad() || g.build_plans(fe::BuildPlanPolicy_t::HEURISTICS_CHOICE).is_bad() ||
          g.get_workspace_size(plan.workspace).is_bad())
        return std::nullopt;
    } catch (const std::exception&) {
      return std::nullopt;
    }
    return plan;
  });
}

}  // namespace halftone::cuda::cudnn
