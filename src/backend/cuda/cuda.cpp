#include "backend/cuda/cuda.h"

#include <algorithm>
#include <initializer_list>
#include <string>

#include "backend/cuda/decode.h"
#include "backend/cuda/lists.h"
#include "backend/cuda/sequence_rest.h"
#include "backend/cuda/standard.h"
#include "backend/cuda/v1.h"
#include "backend/cuda/v2_backward.h"
#include "backend/cuda/v2_forward.h"
#include "backend/cuda/v3_backward.h"
#include "backend/cuda/v3_forward.h"
#include "backend/cuda/v3_forward_f32.h"
#include "backend/cuda/v3_mask_words.h"
#include "device/cuda_device.h"
#include "device/tensor_map.h"
#include "jit/kernel_table.h"
#include "shared/text.h"
#include "shared/v3_documents.h"
#include "shared/v3_packed_tiles.h"

namespace fattn::core {

// What the tables chose for one problem on one device. A plan of algorithm v3 and one of decode have v2's too, for pointers that TMA and 16-byte
// copies do not take.
struct CudaKernels {
  cuda::DecodePlan decode;  // grid 0: not decode
  cuda::V3ForwardPlan v3_forward;
  cuda::V3ForwardF32Plan v3_forward_f32;
  cuda::V3BackwardPlan v3_backward;
  cuda::V2ForwardPlan forward;
  cuda::V2BackwardPlan backward;
  cuda::StandardPlan standard;
  cuda::V1ForwardPlan v1_forward;
};

namespace {

using jit::KernelKey;
using jit::Loaded;

jit::Request forward_request(const KernelKey& key) { return cuda::v2_forward_request(jit::pod_of_key<cuda::V2ForwardKey>(key)); }

const Loaded& forward_kernel(CudaDevice& device, cuda::V2ForwardKey key) {
  return jit::kernel_table().get(device, jit::key_of_pod(key), forward_request);
}

jit::Request v3_forward_request(const KernelKey& key) { return cuda::v3_forward_request(jit::pod_of_key<cuda::V3ForwardKey>(key)); }

// The warps of such kernels move registers among them, as many as the launch gives by the table; with fewer the CTA would wait for ever.
const Loaded& with_registers(const Loaded& kernel, int registers) {
  if (kernel.registers < registers)
    throw Error(ErrorCode::kInternal, text(kernel.name, " has ", kernel.registers, " registers a thread, and its warps count on ", registers));
  return kernel;
}

jit::Request decode_request(const KernelKey& key) { return cuda::decode_request(jit::pod_of_key<cuda::DecodeKey>(key)); }

const Loaded& decode_kernel(CudaDevice& device, const cuda::DecodeKey& key) {
  return jit::kernel_table().get(device, jit::key_of_pod(key), decode_request);
}

const Loaded& v3_forward_kernel(CudaDevice& device, const cuda::V3ForwardPlan& chosen) {
  return with_registers(jit::kernel_table().get(device, jit::key_of_pod(chosen.key), v3_forward_request), chosen.tile.launch_registers());
}

jit::Request v3_packed_tiles_request(const KernelKey& key) { return cuda::v3_packed_tiles_request(jit::pod_of_key<cuda::V3PackedTilesKey>(key)); }

const Loaded& v3_packed_tiles_kernel(CudaDevice& device, const Problem& problem, const cuda::V3ForwardPlan& plan) {
  return jit::kernel_table().get(device, jit::key_of_pod(cuda::v3_packed_tiles_key(problem, plan)), v3_packed_tiles_request);
}

jit::Request v3_document_ranges_request(const KernelKey& key) {
  return cuda::v3_document_ranges_request(jit::pod_of_key<cuda::V3DocumentRangesKey>(key));
}

template <class V3Plan>
const Loaded& v3_document_ranges_kernel(CudaDevice& device, const V3Plan& plan) {
  return jit::kernel_table().get(device, jit::key_of_pod(cuda::v3_document_ranges_key(plan)), v3_document_ranges_request);
}

jit::Request v3_forward_f32_request(const KernelKey& key) { return cuda::v3_forward_f32_request(jit::pod_of_key<cuda::V3ForwardF32Key>(key)); }

// The kernel that splits, or the one behind it.
const Loaded& v3_forward_f32_kernel(CudaDevice& device, cuda::V3ForwardF32Key key, bool aligned, int registers) {
  key.aligned = aligned;
  return with_registers(jit::kernel_table().get(device, jit::key_of_pod(key), v3_forward_f32_request), registers);
}

jit::Request v3_backward_request(const KernelKey& key) { return cuda::v3_backward_request(jit::pod_of_key<cuda::V3BackwardKey>(key)); }

const Loaded& v3_backward_kernel(CudaDevice& device, const cuda::V3BackwardKey& key, int registers) {
  return with_registers(jit::kernel_table().get(device, jit::key_of_pod(key), v3_backward_request), registers);
}

jit::Request v3_packed_key_tiles_request(const KernelKey& key) {
  return cuda::v3_packed_key_tiles_request(jit::pod_of_key<cuda::V3PackedKeyTilesKey>(key));
}

const Loaded& v3_packed_key_tiles_kernel(CudaDevice& device, const Problem& problem, const cuda::V3BackwardPlan& plan) {
  return jit::kernel_table().get(device, jit::key_of_pod(cuda::v3_packed_key_tiles_key(problem, plan)), v3_packed_key_tiles_request);
}

jit::Request v3_mask_words_request(const KernelKey& key) { return cuda::v3_mask_words_request(jit::pod_of_key<cuda::V3MaskWordsKey>(key)); }

const Loaded& v3_mask_words_kernel(CudaDevice& device, const Plan& plan) {
  return jit::kernel_table().get(device, jit::key_of_pod(cuda::v3_mask_words_key(plan.problem)), v3_mask_words_request);
}

jit::Request backward_request(const KernelKey& key) { return cuda::v2_backward_request(jit::pod_of_key<cuda::V2BackwardKey>(key)); }

const Loaded& backward_kernel(CudaDevice& device, cuda::V2BackwardKey key) {
  return jit::kernel_table().get(device, jit::key_of_pod(key), backward_request);
}

jit::Request v1_forward_request(const KernelKey& key) { return cuda::v1_forward_request(jit::pod_of_key<cuda::V1ForwardKey>(key)); }

const Loaded& v1_forward_kernel(CudaDevice& device, const cuda::V1ForwardKey& key) {
  return jit::kernel_table().get(device, jit::key_of_pod(key), v1_forward_request);
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
  for (size_t i = 0; i < kTensorCount; ++i) {
    const TensorRow& row = kTensors[i];
    if (p.bytes[i] == 0 || (row.role == TensorRole::kTerm && !p.has_pairs())) continue;
    device.require_on_device(row.pointer.get(b), row.name);
  }
  if (workspace_bytes > 0 && b.workspace) device.require_on_device(b.workspace, "workspace");
}

// Two kernels where the keys are split: the second puts the splits together.
void decode(CudaDevice& device, const Plan& plan, const fattn_buffers& b, CUstream stream) {
  const cuda::DecodePlan& chosen = plan.cuda.kernels->decode;
  float* lse = plan.problem.want_lse ? static_cast<float*>(b.lse) : nullptr;
  const int* lengths = plan.problem.has_seqused_k ? static_cast<const int*>(b.seqused_k) : nullptr;
  cuda::DecodeParams params = cuda::decode_params(plan.problem, chosen, b.q, b.k, b.v, b.o, lse, lengths, b.workspace);
  auto parameters = params.pointers();
  const auto launch = [&](const cuda::DecodeKey& key, CudaLaunch shape) {
    const Loaded& kernel = decode_kernel(device, key);
    shape.early = chosen.early();
    device.launch(kernel.function, shape, stream, parameters.data(), kernel.name.c_str());
  };
  launch(chosen.key, shape_of(chosen.grid, chosen.tile.threads(), chosen.shared_bytes));
  if (chosen.combine_grid > 0) launch(chosen.combine_key(), shape_of(chosen.combine_grid, kDecodeCombineThreads, 0));
}

jit::Request sequence_rest_request(const KernelKey& key) { return cuda::sequence_rest_request(jit::pod_of_key<cuda::SequenceRestKey>(key)); }

const Loaded& sequence_rest_kernel(CudaDevice& device, const Plan& plan) {
  return jit::kernel_table().get(device, jit::key_of_pod(cuda::sequence_rest_key(plan.problem, plan.cuda.arch)), sequence_rest_request);
}

jit::Request list_status_request(const KernelKey& key) { return cuda::list_status_request(jit::pod_of_key<cuda::ListStatusKey>(key)); }

const Loaded& list_status_kernel(CudaDevice& device, const Plan& plan) {
  return jit::kernel_table().get(device, jit::key_of_pod(cuda::ListStatusKey{.arch = plan.cuda.arch}), list_status_request);
}

// Ahead of all else of a pass.
void write_list_status(CudaDevice& device, const Plan& plan, const fattn_buffers& b, CUstream stream) {
  const Loaded& kernel = list_status_kernel(device, plan);
  ListStatusParams params = cuda::list_status_params(plan.problem, b);
  void* parameters[] = {&params};
  device.launch(kernel.function, shape_of(1, kListStatusThreads, 0), stream, parameters, kernel.name.c_str());
}

// Behind all else of a pass.
void write_sequence_rest(CudaDevice& device, const Plan& plan, const fattn_buffers& b, CUstream stream) {
  const Problem& p = plan.problem;
  if (!cuda::has_sequence_rest(p)) return;
  const Loaded& kernel = sequence_rest_kernel(device, plan);
  float* const lse = p.want_lse && !p.backward ? static_cast<float*>(b.lse) : nullptr;
  const auto ints = [](const void* pointer) { return static_cast<const int*>(pointer); };
  SequenceRestParams params =
      cuda::sequence_rest_params(p, {b.o, b.dq, b.dk, b.dv, lse, ints(b.cu_seqlens_q), ints(b.cu_seqlens_k), ints(b.seqused_k)});
  void* parameters[] = {&params};
  CudaLaunch shape = shape_of(cuda::kRestCtas, kRestThreads, 0);
  shape.early = plan.cuda.arch >= 90;
  device.launch(kernel.function, shape, stream, parameters, kernel.name.c_str());
}

void forward_v3(CudaDevice& device, const Plan& plan, const fattn_buffers& b, CUstream stream) {
  const cuda::V3ForwardPlan& chosen = plan.cuda.kernels->v3_forward;
  if (chosen.grid == 0) return;
  const Loaded& kernel = v3_forward_kernel(device, chosen);
  float* lse = plan.problem.want_lse ? static_cast<float*>(b.lse) : nullptr;
  cuda::V3ForwardParams params;
  cuda::set_v3_forward_params(params, plan.problem, chosen, device, b.q, b.k, b.v, b.o, lse, b, b.workspace);
  const auto launch_before = [&](const Loaded& before, int64_t grid, int threads, bool early) {
    void* parameters[] = {&params.call};
    CudaLaunch shape = shape_of(grid, threads, 0);
    shape.early = early;
    device.launch(before.function, shape, stream, parameters, before.name.c_str());
  };
  if (chosen.document_grid > 0) launch_before(v3_document_ranges_kernel(device, chosen), chosen.document_grid, kV3DocumentThreads, false);
  if (plan.problem.packed) {
    const bool waits = cuda::v3_packed_tiles_key(plan.problem, chosen).documents != 0;  // for what the one before finds
    launch_before(v3_packed_tiles_kernel(device, plan.problem, chosen), 1, kV3PackThreads, waits);
  }
  if (chosen.mask_grid > 0) launch_before(v3_mask_words_kernel(device, plan), chosen.mask_grid, chosen.mask_threads, false);
  CudaLaunch shape = shape_of(chosen.grid, chosen.threads, chosen.shared_bytes);
  shape.early = plan.problem.packed || plan.problem.has_documents || chosen.mask_grid > 0;
  device.launch(kernel.function, shape, stream, params.pointers().data(), kernel.name.c_str());
}

// Two kernels: keys and values in two parts, then attention. Any pointers will do.
void forward_v3_f32(CudaDevice& device, const Plan& plan, const fattn_buffers& b, CUstream stream) {
  const cuda::V3ForwardF32Plan& chosen = plan.cuda.kernels->v3_forward_f32;
  const bool aligned = cuda::v3_forward_f32_aligned(chosen, b.q, b.k, b.v, b.o);
  float* lse = plan.problem.want_lse ? static_cast<float*>(b.lse) : nullptr;
  cuda::V3ForwardF32Params params = cuda::v3_forward_f32_params(plan.problem, chosen, b.q, b.k, b.v, b.o, lse, b.workspace);
  const Loaded& split = v3_forward_f32_kernel(device, chosen.split_key(), aligned, 0);
  device.launch(split.function, shape_of(chosen.split_grid, kV3F32SplitThreads, 0), stream, params.of_split().data(), split.name.c_str());
  const Loaded& kernel = v3_forward_f32_kernel(device, chosen.key, aligned, chosen.tile.launch_registers());
  CudaLaunch shape = shape_of(chosen.grid, chosen.threads, chosen.shared_bytes);
  shape.early = true;
  device.launch(kernel.function, shape, stream, params.of_forward().data(), kernel.name.c_str());
}

void forward_v1(CudaDevice& device, const Plan& plan, const fattn_buffers& b, CUstream stream) {
  const cuda::V1ForwardPlan& chosen = plan.cuda.kernels->v1_forward;
  if (chosen.grid == 0) return;
  const Loaded& kernel = v1_forward_kernel(device, cuda::v1_forward_key(chosen, b.q, b.k, b.v, b.o));
  FeatureParams params = cuda::v1_forward_params(plan.problem, b.q, b.k, b.v, b.o, plan.problem.want_lse ? static_cast<float*>(b.lse) : nullptr);
  V1State state = cuda::v1_state(chosen, b.workspace);
  void* parameters[] = {static_cast<AttentionParams*>(&params), &state};  // the kernel takes that part
  device.launch(kernel.function, shape_of(chosen.grid, chosen.threads, chosen.shared_bytes), stream, parameters, kernel.name.c_str());
}

void forward(CudaDevice& device, const Plan& plan, const fattn_buffers& b, CUstream stream) {
  if (plan.algorithm == Algorithm::kV1) return forward_v1(device, plan, b, stream);
  if (plan.cuda.kernels->decode.grid > 0) {
    if (cuda::aligned(b.q) && cuda::aligned(b.k) && cuda::aligned(b.v) && cuda::aligned(b.o)) return decode(device, plan, b, stream);
    if (plan.cuda.kernels->forward.grid == 0)
      unsupported(
          "q, k, v or o begins at an address that is no multiple of 16 bytes, and only the decode kernels, which take no other, can compute the "
          "problem; align it");
  }
  if (plan.algorithm == Algorithm::kV3 && plan.problem.dtype == DType::kF32) return forward_v3_f32(device, plan, b, stream);
  if (plan.algorithm == Algorithm::kV3) {
    if (tensor_map_takes(b.q) && tensor_map_takes(b.k) && tensor_map_takes(b.v) && tensor_map_takes(b.o)) return forward_v3(device, plan, b, stream);
    if (plan.problem.algorithm == Algorithm::kV3)
      unsupported("q, k, v or o begins at an address that is no multiple of 16 bytes, and algorithm v3 was asked for; ask for auto or v2");
  }
  const cuda::V2ForwardPlan& chosen = plan.cuda.kernels->forward;
  if (chosen.grid == 0) return;
  const Loaded& kernel = forward_kernel(device, cuda::v2_forward_key(chosen, b.q, b.k, b.v, b.o));
  float* lse = plan.problem.want_lse ? static_cast<float*>(b.lse) : nullptr;
  PairParams params = cuda::v2_forward_params(plan.problem, chosen, b.q, b.k, b.v, b.o, lse, b);
  void* parameters[] = {&params};
  device.launch(kernel.function, shape_of(chosen.grid, chosen.threads, chosen.shared_bytes), stream, parameters, kernel.name.c_str());
}

// Three kernels, in v2 (where fp32 may be split by one more before) as in v3: row sums and zeros, the gradients with dq in fp32, dq in its dtype. In
// v3 one before them lists the tiles of packed sequences; the first then waits for it at its end. One that finds the blocks of documents is the
// second.
void backward_v3(CudaDevice& device, const Plan& plan, const fattn_buffers& b, CUstream stream) {
  const cuda::V3BackwardPlan& chosen = plan.cuda.kernels->v3_backward;
  cuda::V3BackwardParams params;
  cuda::set_v3_backward_params(params, plan.problem, chosen, device, b);
  auto parameters = params.pointers();
  const auto launch_kernel = [&](const Loaded& kernel, CudaLaunch shape, bool early) {
    shape.early = early;
    device.launch(kernel.function, shape, stream, parameters.data(), kernel.name.c_str());
  };
  const auto launch = [&](const cuda::V3BackwardKey& key, int registers, const CudaLaunch& shape, bool early) {
    if (shape.grid_x > 0) launch_kernel(v3_backward_kernel(device, key, registers), shape, early);
  };
  const auto launch_dbias = [&](cuda::KernelKind kind) {
    if (chosen.dbias_grid > 0)
      launch_kernel(backward_kernel(device, cuda::dbias_key(plan.problem, cuda::kV3Arch, kind)), shape_of(chosen.dbias_grid, kDbiasThreads, 0),
                    false);
  };
  launch_dbias(cuda::KernelKind::kV2DbiasZero);
  const bool lists = plan.problem.packed && chosen.grid > 0;
  if (lists) launch_kernel(v3_packed_key_tiles_kernel(device, plan.problem, chosen), shape_of(1, kV3PackThreads, 0), false);
  launch(chosen.prepare, 0, shape_of(chosen.prepare_grid, kV3PrepareThreads, 0), lists);
  if (chosen.document_grid > 0) launch_kernel(v3_document_ranges_kernel(device, chosen), shape_of(chosen.document_grid, kV3DocumentThreads, 0), true);
  if (chosen.mask_grid > 0) launch_kernel(v3_mask_words_kernel(device, plan), shape_of(chosen.mask_grid, chosen.mask_threads, 0), true);
  launch(chosen.main, chosen.tile.launch_registers(), shape_of(chosen.grid, chosen.threads, chosen.shared_bytes), true);
  launch(chosen.finish, 0, shape_of(chosen.finish_grid, kV3FinishThreads, chosen.finish_shared_bytes), true);
  if (chosen.dbias_tiles > 0) {
    cuda::set_v3_dbias_params(params, plan.problem, device, b);
    CudaLaunch shape = shape_of(chosen.dbias_ctas, cuda::kV3DbiasThreads, chosen.dbias_shared_bytes);
    shape.grid_y = static_cast<unsigned>(chosen.dbias_parts);
    launch(chosen.dbias, cuda::v3_launch_registers(cuda::kV3DbiasThreads), shape, false);
  }
  if (!cuda::dbias_in_place(plan.problem)) launch_dbias(cuda::KernelKind::kV2DbiasFinish);
}

void backward(CudaDevice& device, const Plan& plan, const fattn_buffers& b, CUstream stream) {
  if (plan.algorithm == Algorithm::kV3) {
    bool taken = true;
    for (const void* pointer : std::initializer_list<const void*>{b.q, b.k, b.v, b.o, b.dout, b.dq, b.dk, b.dv})
      taken = taken && tensor_map_takes(pointer);
    if (!cuda::v3_takes_bias(plan.problem, b.bias)) {
      if (plan.problem.algorithm == Algorithm::kV3)
        unsupported("the bias begins at an address that is no multiple of 4 bytes, and algorithm v3 was asked for; ask for auto or v2");
      taken = false;
    }
    if (taken) return backward_v3(device, plan, b, stream);
    if (plan.problem.algorithm == Algorithm::kV3)
      unsupported("a tensor begins at an address that is no multiple of 16 bytes, and algorithm v3 was asked for; ask for auto or v2");
  }
  const cuda::V2BackwardPlan& chosen = plan.cuda.kernels->backward;
  const cuda::V2BackwardKeys keys = cuda::v2_backward_keys(chosen, b);
  PairParams params = cuda::v2_backward_params(plan.problem, chosen, b);
  BackwardF32Parts parts = cuda::v2_backward_f32_parts(chosen, b.workspace);
  void* parameters[] = {&params, &parts};  // most kernels take the first alone
  const auto launch = [&](const cuda::V2BackwardKey& key, const cuda::V2BackwardLaunch& shape) {
    if (shape.grid == 0) return;
    const Loaded& kernel = backward_kernel(device, key);
    device.launch(kernel.function, shape_of(shape.grid, shape.threads, shape.shared_bytes), stream, parameters, kernel.name.c_str());
  };
  launch(keys.dbias_zero, chosen.dbias_zero);
  launch(keys.prepare, chosen.prepare);
  launch(keys.split, chosen.split);
  launch(keys.main, chosen.main);
  launch(keys.finish, chosen.finish);
  launch(keys.dbias_finish, chosen.dbias_finish);
}

}  // namespace

void plan_cuda_kernels(Plan& plan) {
  const Problem& p = plan.problem;
  const CudaDeviceInfo& gpu = cuda_device(p.device_index).info();
  const cuda::V2Target target{plan.cuda.arch, plan.cuda.level, gpu.shared_per_block_optin, gpu.shared_per_multiprocessor, gpu.l2_bytes};
  const std::string built =
      text(name_of(p.dtype), " sm_", target.arch, target.level / 10 == target.arch / 10 ? "" : text(" (level ", target.level, ")"));
  auto kernels = std::make_shared<CudaKernels>();
  if (plan.algorithm == Algorithm::kV1) {
    std::string why = cuda::v1_refusal(p, target);
    if (why.empty() && p.backward) why = cuda::v2_backward_refusal(p, target);
    if (!why.empty()) unsupported(why);
    if (p.backward) {
      const cuda::V2BackwardPlan& chosen = kernels->backward = cuda::plan_v1_backward(p, target);
      plan.workspace_bytes = static_cast<size_t>(chosen.workspace_bytes);
      plan.kernel = text("cuda v1 backward ", built);
      plan.why = text("asked for; tiles of ", chosen.tile.block_m, " queries x ", chosen.tile.block_n, " keys, one CTA for each of ",
                      chosen.main.grid, " key heads");
    } else {
      const cuda::V1ForwardPlan& chosen = kernels->v1_forward = cuda::plan_v1_forward(p, target);
      plan.workspace_bytes = static_cast<size_t>(chosen.workspace_bytes);
      plan.kernel = text("cuda v1 forward ", built);
      plan.why = text("asked for; tiles of ", kV1TileRows, " queries x ", cuda::kV1BlockN, " keys, ", cuda::kV1Warps, " warps, one CTA for each of ",
                      chosen.grid, " heads");
    }
    plan.cuda.kernels = std::move(kernels);
    return;
  }
  if (plan.algorithm == Algorithm::kStandard) {
    if (const std::string why = cuda::standard_refusal(p, plan.cuda.arch); !why.empty()) unsupported(why);
    if (!cublaslt()) unsupported("algorithm standard needs cuBLASLt: " + cublaslt().reason);
    kernels->standard = cuda::plan_standard(p, cuda_device(p.device_index), plan.cuda.arch);
    plan.workspace_bytes = static_cast<size_t>(kernels->standard.workspace_bytes);
    plan.kernel = text("cuda standard ", p.backward ? "backward " : "forward ", name_of(p.dtype), " sm_", plan.cuda.arch);
    plan.why = text(p.algorithm == Algorithm::kStandard ? "asked for" : "the weights are wanted, which only standard attention has",
                    "; products by cuBLASLt ", cublaslt().major, ".", cublaslt().minor);
    plan.cuda.kernels = std::move(kernels);
    return;
  }
  const cuda::V3Target v3_target{gpu.shared_per_block_optin, gpu.l2_bytes, gpu.multiprocessors};
  const cuda::DecodeTarget decode_target = cuda::decode_target(target, gpu);
  const bool decodes = p.algorithm != Algorithm::kV3 && cuda::decode_takes(p, decode_target);
  if (decodes) plan.algorithm = Algorithm::kV2;
  const bool f32_forward = !p.backward && p.dtype == DType::kF32;
  std::string not_v3;
  if (plan.algorithm == Algorithm::kV3) {
    not_v3 = p.backward    ? cuda::v3_backward_refusal(p, v3_target)
             : f32_forward ? cuda::v3_forward_f32_refusal(p, v3_target)
                           : cuda::v3_forward_refusal(p, v3_target);
    if (!not_v3.empty()) {
      if (p.algorithm == Algorithm::kV3) unsupported(text("algorithm v3 was asked for: ", not_v3));
      plan.algorithm = Algorithm::kV2;
    }
  }
  if (p.backward && plan.algorithm == Algorithm::kV3) {
    const cuda::V3BackwardPlan& chosen = kernels->v3_backward = cuda::plan_v3_backward(p, v3_target);
    plan.workspace_bytes = static_cast<size_t>(chosen.workspace_bytes);
    if (cuda::v2_backward_refusal(p, target).empty()) {
      kernels->backward = cuda::plan_v2_backward(p, target);
      plan.workspace_bytes = std::max(plan.workspace_bytes, static_cast<size_t>(kernels->backward.workspace_bytes));
    }
    plan.cuda.level = cuda::kV3Arch;
    plan.kernel = text("cuda v3 backward ", name_of(p.dtype), " sm_", cuda::kV3Arch, "a", p.deterministic ? " deterministic" : "");
    plan.why = text("tiles of ", kV3BackwardRows, " queries x ", chosen.tile.block_n(), " keys, ", chosen.threads / 128, " warpgroups, ",
                    chosen.shared_bytes, " bytes of shared memory, grid ", chosen.grid);
  } else if (p.backward) {
    if (const std::string why = cuda::v2_backward_refusal(p, target); !why.empty()) unsupported(why);
    const cuda::V2BackwardPlan& chosen = kernels->backward = cuda::plan_v2_backward(p, target);
    plan.workspace_bytes = static_cast<size_t>(chosen.workspace_bytes);
    plan.kernel = text("cuda v2 backward ", built, p.deterministic ? " deterministic" : "");
    plan.why = text("tiles of ", chosen.tile.block_m, " queries x ", chosen.tile.block_n, " keys, ", chosen.main.threads / 32, " warps, ",
                    chosen.main.shared_bytes, " bytes of shared memory, grid ", chosen.main.grid);
  } else if (decodes) {
    const cuda::DecodePlan& chosen = kernels->decode = cuda::plan_decode(p, decode_target);
    if (cuda::v2_forward_refusal(p, target).empty()) kernels->forward = cuda::plan_v2_forward(p, target);
    plan.workspace_bytes = static_cast<size_t>(chosen.workspace_bytes);
    plan.kernel = text("cuda v2 decode ", built);
    plan.why = text(chosen.rows, " rows of a key head in tiles of ", chosen.tile.rows(), ", ", chosen.tile.teams, " teams of ", chosen.tile.row_warps,
                    chosen.tile.row_warps == 1 ? " warp" : " warps", " with steps of ", chosen.tile.block_n, " keys and ", chosen.tile.stages,
                    " stages, keys in ", chosen.splits, chosen.splits == 1 ? " split, " : " splits, ", chosen.shared_bytes,
                    " bytes of shared memory, grid ", chosen.grid);
  } else if (plan.algorithm == Algorithm::kV3 && f32_forward) {
    const cuda::V3ForwardF32Plan& chosen = kernels->v3_forward_f32 = cuda::plan_v3_forward_f32(p, v3_target);
    plan.workspace_bytes = static_cast<size_t>(chosen.workspace_bytes);
    plan.cuda.level = cuda::kV3Arch;
    plan.kernel = text("cuda v3 forward ", name_of(p.dtype), " sm_", cuda::kV3Arch, "a");
    plan.why = text("tiles of ", chosen.tile.block_m(), " queries x ", kV3F32Block, " keys, ", chosen.tile.groups, " warpgroups, ",
                    chosen.tile.stages_k, " + ", chosen.tile.stages_v, " stages, ", chosen.shared_bytes, " bytes of shared memory, grid ",
                    chosen.grid, ", keys and values in two parts in the workspace");
  } else if (plan.algorithm == Algorithm::kV3) {
    const cuda::V3ForwardPlan& chosen = kernels->v3_forward = cuda::plan_v3_forward(p, v3_target);
    if (cuda::v2_forward_refusal(p, target).empty()) kernels->forward = cuda::plan_v2_forward(p, target);
    plan.workspace_bytes = static_cast<size_t>(chosen.workspace_bytes);
    plan.cuda.level = cuda::kV3Arch;
    plan.kernel = text("cuda v3 forward ", name_of(p.dtype), " sm_", cuda::kV3Arch, "a");
    plan.why =
        text("tiles of ", chosen.tile.block_m(), " queries x ", chosen.tile.block_n, " keys, ", chosen.tile.groups, " warpgroups, ",
             chosen.tile.stages_k, " + ", chosen.tile.stages_v, " stages, ", chosen.shared_bytes, " bytes of shared memory, grid ", chosen.grid);
  } else {
    if (const std::string why = cuda::v2_forward_refusal(p, target); !why.empty()) unsupported(why);
    const cuda::V2ForwardPlan& chosen = kernels->forward = cuda::plan_v2_forward(p, target);
    plan.kernel = text("cuda v2 forward ", built);
    plan.why = text("tiles of ", chosen.tile.block_m(), " queries x ", chosen.tile.block_n, " keys, ", chosen.tile.warps, " warps, ",
                    chosen.tile.stages, " stages, ", chosen.shared_bytes, " bytes of shared memory, grid ", chosen.grid);
  }
  if (!not_v3.empty()) plan.why += text("; not v3: ", not_v3);
  plan.cuda.kernels = std::move(kernels);
}

void load_cuda_kernels(const Plan& plan) {
  CudaDevice& device = cuda_device(plan.problem.device_index);
  device.require_usable();
  const CudaKernels& chosen = *plan.cuda.kernels;
  if (plan.problem.want_status) list_status_kernel(device, plan);
  if (plan.algorithm == Algorithm::kStandard) return cuda::load_standard(device, plan.problem, chosen.standard);
  if (cuda::has_sequence_rest(plan.problem)) sequence_rest_kernel(device, plan);
  if (!plan.problem.backward) {
    if (plan.algorithm == Algorithm::kV1) {
      if (chosen.v1_forward.grid > 0) v1_forward_kernel(device, cuda::v1_forward_key(chosen.v1_forward, nullptr, nullptr, nullptr, nullptr));
      return;
    }
    if (chosen.decode.grid > 0) {
      decode_kernel(device, chosen.decode.key);
      if (chosen.decode.combine_grid > 0) decode_kernel(device, chosen.decode.combine_key());
      return;
    }
    if (plan.algorithm == Algorithm::kV3 && plan.problem.dtype == DType::kF32) {
      const cuda::V3ForwardF32Plan& f32 = chosen.v3_forward_f32;
      v3_forward_f32_kernel(device, f32.split_key(), f32.aligned_strides, 0);
      v3_forward_f32_kernel(device, f32.key, f32.aligned_strides, f32.tile.launch_registers());
      return;
    }
    if (plan.algorithm == Algorithm::kV3) {
      if (plan.problem.packed) v3_packed_tiles_kernel(device, plan.problem, chosen.v3_forward);
      if (plan.problem.has_documents) v3_document_ranges_kernel(device, chosen.v3_forward);
      if (plan.problem.pair_mask.given) v3_mask_words_kernel(device, plan);
      v3_forward_kernel(device, chosen.v3_forward);
      return;
    }
    if (chosen.forward.grid > 0) forward_kernel(device, cuda::v2_forward_key(chosen.forward, nullptr, nullptr, nullptr, nullptr));
    return;
  }
  if (plan.algorithm == Algorithm::kV3) {
    if (plan.problem.packed) v3_packed_key_tiles_kernel(device, plan.problem, chosen.v3_backward);
    if (plan.problem.has_documents) v3_document_ranges_kernel(device, chosen.v3_backward);
    if (plan.problem.pair_mask.given) v3_mask_words_kernel(device, plan);
    if (chosen.v3_backward.dbias_grid > 0) {
      backward_kernel(device, cuda::dbias_key(plan.problem, cuda::kV3Arch, cuda::KernelKind::kV2DbiasZero));
      if (!cuda::dbias_in_place(plan.problem))
        backward_kernel(device, cuda::dbias_key(plan.problem, cuda::kV3Arch, cuda::KernelKind::kV2DbiasFinish));
    }
    v3_backward_kernel(device, chosen.v3_backward.prepare, 0);
    v3_backward_kernel(device, chosen.v3_backward.main, chosen.v3_backward.tile.launch_registers());
    v3_backward_kernel(device, chosen.v3_backward.finish, 0);
    if (chosen.v3_backward.dbias_tiles > 0) v3_backward_kernel(device, chosen.v3_backward.dbias, cuda::v3_launch_registers(cuda::kV3DbiasThreads));
    return;
  }
  const cuda::V2BackwardKeys keys = cuda::v2_backward_keys(chosen.backward, fattn_buffers{});
  if (chosen.backward.prepare.grid > 0) backward_kernel(device, keys.prepare);
  if (chosen.backward.split.grid > 0) backward_kernel(device, keys.split);
  if (chosen.backward.main.grid > 0) backward_kernel(device, keys.main);
  if (chosen.backward.finish.grid > 0) backward_kernel(device, keys.finish);
  if (chosen.backward.dbias_zero.grid > 0) backward_kernel(device, keys.dbias_zero);
  if (chosen.backward.dbias_finish.grid > 0) backward_kernel(device, keys.dbias_finish);
}

void execute_cuda(const Plan& plan, const fattn_buffers& buffers) {
  CudaDevice& device = cuda_device(plan.problem.device_index);
  device.require_usable();
  const CudaCurrent scope = device.current();
  require_on_device(device, plan.problem, buffers, plan.workspace_bytes);
  const auto stream = static_cast<CUstream>(buffers.stream);
  if (checks_lists(plan.problem)) cuda::require_good_lists(device, plan.problem, buffers, stream);
  if (plan.problem.want_status) write_list_status(device, plan, buffers, stream);
  if (plan.algorithm == Algorithm::kStandard) return cuda::run_standard(device, plan.problem, plan.cuda.kernels->standard, buffers, stream);
  plan.problem.backward ? backward(device, plan, buffers, stream) : forward(device, plan, buffers, stream);
  write_sequence_rest(device, plan, buffers, stream);
}

}  // namespace fattn::core
