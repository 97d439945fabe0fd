#include "backend/cuda/cuda.h"

#include <string>

#include "backend/cuda/v2_backward.h"
#include "backend/cuda/v2_forward.h"
#include "device/cuda_device.h"
#include "jit/kernel_table.h"
#include "shared/text.h"

namespace fattn::core {

// What the tables chose for one problem on one device.
struct CudaKernels {
  cuda::V2ForwardPlan forward;
  cuda::V2BackwardPlan backward;
};

namespace {

using jit::KernelKey;
using jit::Loaded;

jit::Request forward_request(const KernelKey& key) { return cuda::v2_forward_request(jit::pod_of_key<cuda::V2ForwardKey>(key)); }

const Loaded& forward_kernel(CudaDevice& device, cuda::V2ForwardKey key) {
  return jit::kernel_table().get(device, jit::key_of_pod(key), forward_request);
}

jit::Request backward_request(const KernelKey& key) { return cuda::v2_backward_request(jit::pod_of_key<cuda::V2BackwardKey>(key)); }

const Loaded& backward_kernel(CudaDevice& device, cuda::V2BackwardKey key) {
  return jit::kernel_table().get(device, jit::key_of_pod(key), backward_request);
}

[[noreturn]] void unsupported(const std::string& reason) { throw Error(ErrorCode::kUnsupported, "backend cuda: " + reason); }

CudaLaunch shape_of(int64_t grid, int threads, int shared_bytes) {
  CudaLaunch launch;
  launch.grid_x = static_cast<unsigned>(grid);
  launch.block_x = static_cast<unsigned>(threads);
  launch.shared_bytes = static_cast<unsigned>(shared_bytes);
  return launch;
}

// Every pointer that the kernels touch is memory of the device: host memory would be a fault that ends all work of the process there.
void require_on_device(CudaDevice& device, const Problem& p, const fattn_buffers& b, size_t workspace_bytes) {
  const auto require = [&](const void* pointer, const char* name) {
    if (pointer) device.require_on_device(pointer, name);
  };
  const bool rows = !p.empty(), keys = p.batch > 0 && p.seqlen_k > 0;  // nothing of an empty tensor is touched
  if (rows) {
    require(b.q, "q");
    require(b.o, "o");
    if (p.want_lse) require(b.lse, "lse");
  }
  if (keys) {
    require(b.k, "k");
    require(b.v, "v");
  }
  if (!p.backward) return;
  if (rows) {
    require(b.dout, "dout");
    require(b.dq, "dq");
  }
  if (keys) {
    require(b.dk, "dk");
    require(b.dv, "dv");
  }
  if (workspace_bytes > 0) require(b.workspace, "workspace");
}

void forward(CudaDevice& device, const Plan& plan, const fattn_buffers& b, CUstream stream) {
  const cuda::V2ForwardPlan& chosen = plan.cuda.kernels->forward;
  if (chosen.grid == 0) return;
  const Loaded& kernel = forward_kernel(device, cuda::v2_forward_key(chosen, b.q, b.k, b.v, b.o));
  float* lse = plan.problem.want_lse ? static_cast<float*>(b.lse) : nullptr;
  AttentionParams params = cuda::v2_forward_params(plan.problem, chosen, b.q, b.k, b.v, b.o, lse);
  void* parameters[] = {&params};
  device.launch(kernel.function, shape_of(chosen.grid, chosen.threads, chosen.shared_bytes), stream, parameters, kernel.name.c_str());
}

cuda::V2BackwardBuffers backward_buffers(const fattn_buffers& b) {
  return {b.q, b.k, b.v, b.o, b.dout, static_cast<const float*>(b.lse), b.dq, b.dk, b.dv, b.workspace};
}

// Three kernels: row sums and zeros, the gradients with dq in fp32, dq in its dtype.
void backward(CudaDevice& device, const Plan& plan, const fattn_buffers& b, CUstream stream) {
  const cuda::V2BackwardPlan& chosen = plan.cuda.kernels->backward;
  const cuda::V2BackwardBuffers buffers = backward_buffers(b);
  const cuda::V2BackwardKeys keys = cuda::v2_backward_keys(chosen, buffers);
  AttentionParams params = cuda::v2_backward_params(plan.problem, chosen, buffers);
  void* parameters[] = {&params};
  const auto launch = [&](const cuda::V2BackwardKey& key, const cuda::V2BackwardLaunch& shape) {
    if (shape.grid == 0) return;
    const Loaded& kernel = backward_kernel(device, key);
    device.launch(kernel.function, shape_of(shape.grid, shape.threads, shape.shared_bytes), stream, parameters, kernel.name.c_str());
  };
  launch(keys.prepare, chosen.prepare);
  launch(keys.main, chosen.main);
  launch(keys.finish, chosen.finish);
}

}  // namespace

void plan_cuda_kernels(Plan& plan) {
  const Problem& p = plan.problem;
  const CudaDeviceInfo& gpu = cuda_device(p.device_index).info();
  const cuda::V2Target target{plan.cuda.arch, plan.cuda.level, gpu.shared_per_block_optin, gpu.shared_per_multiprocessor, gpu.l2_bytes};
  const std::string built =
      text(name_of(p.dtype), " sm_", target.arch, target.level / 10 == target.arch / 10 ? "" : text(" (level ", target.level, ")"));
  auto kernels = std::make_shared<CudaKernels>();
  if (p.backward) {
    if (const std::string why = cuda::v2_backward_refusal(p, target); !why.empty()) unsupported(why);
    const cuda::V2BackwardPlan& chosen = kernels->backward = cuda::plan_v2_backward(p, target);
    plan.workspace_bytes = static_cast<size_t>(chosen.workspace_bytes);
    plan.kernel = text("cuda v2 backward ", built, p.deterministic ? " deterministic" : "");
    plan.why = text("tiles of ", chosen.tile.block_m, " queries x ", chosen.tile.block_n, " keys, ", chosen.main.threads / 32, " warps, ",
                    chosen.main.shared_bytes, " bytes of shared memory, grid ", chosen.main.grid);
  } else {
    if (const std::string why = cuda::v2_forward_refusal(p, target); !why.empty()) unsupported(why);
    const cuda::V2ForwardPlan& chosen = kernels->forward = cuda::plan_v2_forward(p, target);
    plan.kernel = text("cuda v2 forward ", built);
    plan.why = text("tiles of ", chosen.tile.block_m(), " queries x ", chosen.tile.block_n, " keys, ", chosen.tile.warps, " warps, ",
                    chosen.tile.stages, " stages, ", chosen.shared_bytes, " bytes of shared memory, grid ", chosen.grid);
  }
  plan.cuda.kernels = std::move(kernels);
}

void load_cuda_kernels(const Plan& plan) {
  CudaDevice& device = cuda_device(plan.problem.device_index);
  device.require_usable();
  const CudaKernels& chosen = *plan.cuda.kernels;
  if (!plan.problem.backward) {
    if (chosen.forward.grid > 0) forward_kernel(device, cuda::v2_forward_key(chosen.forward, nullptr, nullptr, nullptr, nullptr));
    return;
  }
  const cuda::V2BackwardKeys keys = cuda::v2_backward_keys(chosen.backward, cuda::V2BackwardBuffers{});
  if (chosen.backward.prepare.grid > 0) backward_kernel(device, keys.prepare);
  if (chosen.backward.main.grid > 0) backward_kernel(device, keys.main);
  if (chosen.backward.finish.grid > 0) backward_kernel(device, keys.finish);
}

void execute_cuda(const Plan& plan, const fattn_buffers& buffers) {
  CudaDevice& device = cuda_device(plan.problem.device_index);
  device.require_usable();
  const CudaCurrent scope = device.current();
  require_on_device(device, plan.problem, buffers, plan.workspace_bytes);
  const auto stream = static_cast<CUstream>(buffers.stream);
  plan.problem.backward ? backward(device, plan, buffers, stream) : forward(device, plan, buffers, stream);
}

}  // namespace fattn::core
