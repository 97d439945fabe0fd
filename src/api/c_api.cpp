// The C ABI: struct sizes, status codes, this thread's last message. No exception leaves a function here.
#include "fattn/fattn.h"

#include <cstdlib>
#include <iterator>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "api/guard.h"
#include "attention.h"
#include "cpu/openblas.h"
#include "device/cpu_info.h"
#include "device/cuda_device.h"
#include "device/libraries.h"
#include "device_abi/dropout.h"
#include "fattn/tensors.hpp"
#include "jit/nvrtc.h"
#include "plan/architectures.h"
#include "plan/features.h"
#include "problem/problem.h"
#include "shared/env.h"
#include "shared/text.h"
#include "shared/trace.h"

struct fattn_plan {
  fattn::core::Plan plan;
};

namespace {

using fattn::Error;
using fattn::ErrorCode;
using fattn::core::checked;
using fattn::core::copy;
using fattn::core::guarded;
using fattn::core::sized;
using fattn::core::text;

// A plain array: a destructor would keep the library loaded until every thread that saw an error has ended.
thread_local char last_error[2048] = "";

// The workspace of one call, on the plan's device.
class Workspace {
 public:
  explicit Workspace(const fattn::core::Plan& plan) {
    if (plan.backend == fattn::Backend::kCuda) {
      device_ = &fattn::core::cuda_device(plan.problem.device_index);
      memory_ = reinterpret_cast<void*>(device_->alloc(plan.workspace_bytes));
      return;
    }
    const size_t bytes = (plan.workspace_bytes + 63) / 64 * 64;
    memory_ = bytes && !fattn::core::beyond_memory(bytes) ? std::aligned_alloc(64, bytes) : nullptr;
    if (bytes && !memory_)
      throw Error(ErrorCode::kOutOfMemory, text("no memory for a workspace of ", bytes, " bytes; ", fattn::core::free_memory_text(),
                                                "; use a smaller problem or free memory"));
  }
  ~Workspace() {
    if (!device_) {
      std::free(memory_);
      return;
    }
    try {
      device_->free(reinterpret_cast<fattn::core::CUdeviceptr>(memory_));
    } catch (...) {  // the device is broken, and its memory gone; the call that broke it has said so
    }
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* get() const { return memory_; }
  // Waits for what was launched on the default stream.
  void synchronize() const {
    if (!device_) return;
    const fattn::core::CudaCurrent scope = device_->current();
    device_->check(fattn::core::cuda_driver().streamSynchronize(nullptr), "waiting for the default stream");
  }

 private:
  fattn::core::CudaDevice* device_ = nullptr;
  void* memory_ = nullptr;
};

// What is opened at run time, by the layers that open it.
std::vector<fattn::core::LibraryStatus> all_libraries() {
  const fattn::core::OpenBlas& blas = fattn::core::openblas();
  std::vector<fattn::core::LibraryStatus> all{{"OpenBLAS", "matrix products of algorithm standard on the CPU", blas.path, blas.reason}};
  for (auto& library : fattn::core::library_status()) all.push_back(std::move(library));
  const fattn::core::jit::Nvrtc& nvrtc = fattn::core::jit::nvrtc();
  all.push_back({"NVRTC", "compiles kernels for NVIDIA GPUs at their first use", nvrtc.path, nvrtc.reason});
  return all;
}

}  // namespace

namespace fattn::core {

fattn_status fail(fattn_status status, const char* message) noexcept {
  copy(last_error, message);
  return status;
}

fattn_status fail_without_memory() noexcept {
  try {
    const std::string message = text("out of memory; ", free_memory_text(), "; use a smaller problem or free memory");
    return fail(FATTN_ERROR_OUT_OF_MEMORY, message.c_str());
  } catch (...) {  // not even for the message
    return fail(FATTN_ERROR_OUT_OF_MEMORY, "out of memory; use a smaller problem or free memory");
  }
}

}  // namespace fattn::core

extern "C" {

const char* fattn_version(void) { return FATTN_VERSION_STRING; }
uint32_t fattn_abi_version(void) { return FATTN_ABI_VERSION; }
const char* fattn_last_error(void) { return last_error; }

const char* fattn_status_name(fattn_status status) {
  switch (status) {
    case FATTN_OK: return "ok";
    case FATTN_ERROR_INVALID_ARGUMENT: return "invalid_argument";
    case FATTN_ERROR_UNSUPPORTED: return "unsupported";
    case FATTN_ERROR_OUT_OF_MEMORY: return "out_of_memory";
    case FATTN_ERROR_WORKSPACE: return "workspace";
    case FATTN_ERROR_ABI: return "abi";
    case FATTN_ERROR_INTERNAL: return "internal";
    case FATTN_ERROR_DEVICE: return "device";
    case FATTN_ERROR_COMPILE: return "compile";
    default: return "unknown";
  }
}

fattn_status fattn_dropout_mask(int64_t seed, int64_t offset, double p_dropout, int64_t batch, int64_t nheads, int64_t seqlen_q, int64_t seqlen_k,
                                uint8_t* mask) {
  return guarded([&] {
    const int below = fattn::core::dropout_below(p_dropout);
    int64_t count = 1;
    for (const auto& [name, n] :
         {std::pair{"batch", batch}, std::pair{"nheads", nheads}, std::pair{"seqlen_q", seqlen_q}, std::pair{"seqlen_k", seqlen_k}}) {
      if (n < 0 || n >= int64_t{1} << 31) throw Error(ErrorCode::kInvalidArgument, text(name, " is ", n, "; allowed: 0 to 2^31 - 1"));
      if (__builtin_mul_overflow(count, n, &count)) throw Error(ErrorCode::kInvalidArgument, "the mask has more elements than memory can have");
    }
    if (count == 0) return;
    uint8_t* to = &checked(mask, "mask");
    for (int64_t n = 0; n < batch * nheads; ++n)
      for (int64_t i = 0; i < seqlen_q; ++i)
        for (int64_t j = 0; j < seqlen_k; ++j)
          *to++ = fattn::core::dropout_number(static_cast<uint64_t>(seed), static_cast<uint64_t>(offset) + static_cast<uint64_t>(n), i, j) >= below;
  });
}

fattn_status fattn_set_check(int32_t check) {
  return guarded([&] { fattn::core::set_default_check(check); });
}

fattn_status fattn_set_trace(const fattn_trace* trace) {
  return guarded([&] {
    if (trace && (!sized(trace, "trace").begin || !trace->end))
      throw Error(ErrorCode::kInvalidArgument, "begin and end of a trace must both be functions; pass null for no trace");
    fattn::core::trace_listener.store(trace, std::memory_order_release);
  });
}

fattn_status fattn_supported(const fattn_problem* problem, char* reason, size_t reason_size) {
  const fattn_status status = guarded([&] { fattn::core::prepare(sized(problem, "problem")); });
  if (reason && reason_size > 0) copy(reason, reason_size, status == FATTN_OK ? "" : last_error);
  return status;
}

fattn_status fattn_plan_create(const fattn_problem* problem, fattn_plan** plan) {
  return guarded([&] {
    checked(plan, "plan") = nullptr;
    auto made = std::make_unique<fattn_plan>(fattn_plan{fattn::core::prepare(sized(problem, "problem"))});
    fattn::core::load(made->plan);
    *plan = made.release();
  });
}

fattn_status fattn_plan_query(const fattn_plan* plan, fattn_plan_info* info) {
  return guarded([&] {
    const fattn::core::Plan& p = checked(plan, "plan").plan;
    fattn_plan_info& i = sized(info, "info");
    i.backend = static_cast<int32_t>(p.backend);
    i.algorithm = static_cast<int32_t>(p.algorithm);
    i.cpu_isa = p.backend == fattn::Backend::kCpu ? static_cast<int32_t>(p.cpu.isa) : FATTN_ISA_AUTO;
    i.num_threads = p.backend == fattn::Backend::kCpu ? p.cpu.threads : 1;
    i.cuda_level = p.cuda.level;
    i.workspace_bytes = p.workspace_bytes;
    i.flops = p.cost.flops;
    i.flops_nominal = p.cost.flops_nominal;
    i.bytes = p.cost.bytes;
    i.kernel = p.kernel.c_str();
    i.why = p.why.c_str();
  });
}

fattn_status fattn_plan_execute(const fattn_plan* plan, const fattn_buffers* buffers) {
  return guarded([&] { fattn::core::execute(checked(plan, "plan").plan, sized(buffers, "buffers")); });
}

void fattn_plan_destroy(fattn_plan* plan) { delete plan; }

fattn_status fattn_execute(const fattn_problem* problem) {
  return guarded([&] {
    const fattn::core::Plan plan = fattn::core::prepare(sized(problem, "problem"));
    const Workspace workspace(plan);
    const fattn_problem& p = *problem;
    fattn_buffers b{};
    b.struct_size = sizeof b;
    for (const fattn::TensorRow& row : fattn::kTensors) row.pointer.set(b, (p.*row.described).data);
    b.workspace = workspace.get();
    b.workspace_bytes = plan.workspace_bytes;
    fattn::core::load(plan);
    fattn::core::execute(plan, b);
    workspace.synchronize();
  });
}

fattn_status fattn_query_cpu(fattn_cpu_info* info) {
  return guarded([&] {
    fattn_cpu_info& out = sized(info, "info");
    const fattn::core::CpuInfo cpu = fattn::core::cpu_info();
    out.logical_cpus = cpu.logical_cpus;
    out.usable_threads = cpu.usable_threads;
    out.isa_default = static_cast<int32_t>(cpu.isa_default);
    out.isas_available = cpu.isas_available;
    out.reserved = 0;
    out.l1d_bytes = cpu.l1d_bytes;
    out.l2_bytes = cpu.l2_bytes;
    out.l3_bytes = cpu.l3_bytes;
    fattn::core::memory_info(out.memory_bytes, out.memory_available_bytes);
    copy(out.vendor, cpu.vendor);
    copy(out.model, cpu.model);
  });
}

fattn_status fattn_query_library(int32_t index, fattn_library_info* info) {
  return guarded([&] {
    fattn_library_info& out = sized(info, "info");
    const auto all = all_libraries();
    if (index < 0 || static_cast<size_t>(index) >= all.size())
      throw Error(ErrorCode::kInvalidArgument, text("library index ", index, "; allowed: 0 to ", all.size() - 1));
    const auto& library = all[static_cast<size_t>(index)];
    out.loaded = library.reason.empty() ? 1 : 0;
    copy(out.name, library.name);
    copy(out.purpose, library.purpose);
    copy(out.path, library.path);
    copy(out.reason, library.reason);
  });
}

fattn_status fattn_query_architecture(int32_t index, fattn_architecture_info* info) {
  return guarded([&] {
    fattn_architecture_info& out = sized(info, "info");
    constexpr int32_t kCount = static_cast<int32_t>(std::size(fattn::core::kArchitectures));
    if (index < 0 || index >= kCount) throw Error(ErrorCode::kInvalidArgument, text("architecture ", index, "; there are ", kCount));
    const fattn::core::Architecture& a = fattn::core::kArchitectures[index];
    out.capability = a.capability;
    copy(out.name, a.name);
    copy(out.executed_on, a.executed_on);
  });
}

fattn_status fattn_query_feature(int32_t feature, int32_t way, fattn_feature_info* info) {
  return guarded([&] {
    fattn_feature_info& out = sized(info, "info");
    const int features = fattn::core::feature_count(), ways = fattn::core::way_count();
    if (feature < 0 || feature >= features || way < 0 || way >= ways)
      throw Error(ErrorCode::kInvalidArgument, text("feature ", feature, " of way ", way, "; allowed: 0 to ", features - 1, " of 0 to ", ways - 1));
    const fattn::core::FeatureCell cell = fattn::core::feature_cell(feature, way);
    out.supported = cell.has ? 1 : 0;
    copy(out.feature, cell.feature);
    copy(out.way, cell.way);
  });
}

fattn_status fattn_query_environment(int32_t index, fattn_env_info* info) {
  return guarded([&] {
    fattn_env_info& out = sized(info, "info");
    constexpr int32_t count = static_cast<int32_t>(std::size(fattn::core::kEnvironment));
    if (index < 0 || index >= count)
      throw Error(ErrorCode::kInvalidArgument, text("environment variable index ", index, "; allowed: 0 to ", count - 1));
    const auto& variable = fattn::core::kEnvironment[index];
    const std::string value = fattn::core::env_value(variable);
    out.is_set = value.empty() ? 0 : 1;
    copy(out.name, variable.name);
    copy(out.meaning, variable.meaning);
    copy(out.value, value);
  });
}

}  // extern "C"
