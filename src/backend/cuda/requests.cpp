#include "backend/cuda/requests.h"

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
#include "fattn/error.hpp"
#include "plan/architectures.h"
#include "plan/plan.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

constexpr int64_t kL2Bytes = 32 << 20;      // decides the order of the work, not the kernel
constexpr int kMultiprocessors = 132;       // of an H100 or H200: decides the tile of small problems, and v3's ring backward (both are compiled)
constexpr double kBytesPerSecond = 4.8e12;  // of an H200: decides how decode splits the keys

[[noreturn]] void unsupported(const std::string& reason) { throw Error(ErrorCode::kUnsupported, "backend cuda: " + reason); }

// As calls with aligned pointers need them.
std::vector<jit::Request> backward_requests(const cuda::V2BackwardPlan& plan) {
  std::vector<jit::Request> requests;
  const cuda::V2BackwardKeys keys = cuda::v2_backward_keys(plan, fattn_buffers{});
  if (plan.prepare.grid > 0) requests.push_back(cuda::v2_backward_request(keys.prepare));
  if (plan.split.grid > 0) requests.push_back(cuda::v2_backward_request(keys.split));
  if (plan.main.grid > 0) requests.push_back(cuda::v2_backward_request(keys.main));
  if (plan.finish.grid > 0) requests.push_back(cuda::v2_backward_request(keys.finish));
  if (plan.dbias_zero.grid > 0) requests.push_back(cuda::v2_backward_request(keys.dbias_zero));
  if (plan.dbias_finish.grid > 0) requests.push_back(cuda::v2_backward_request(keys.dbias_finish));
  return requests;
}

}  // namespace

cuda::V2Target cuda::target_of(int arch, int level) {
  for (const Architecture& a : kArchitectures) {
    const int64_t bytes = int64_t{a.shared_kib} * 1024;
    // Of which a CTA can have all but what the system keeps, on 7.5 all.
    if (a.capability == arch)
      return {arch, level > 0 ? level : arch < 80 ? 75 : 80, arch < 80 ? bytes : bytes - cuda::kReservedSharedBytes, bytes, kL2Bytes};
  }
  unsupported(text("there are no kernels for architecture ", arch, "; allowed: ", known_architectures()));
}

// With the L2 cache of an H100, the smallest that algorithm v3 meets.
cuda::V3Target cuda::v3_target_of(int arch) { return {target_of(arch).shared_bytes, 50 << 20, kMultiprocessors}; }

namespace {

// But for the one that says what is out of range.
std::vector<jit::Request> requests_of_pass(const Problem& problem, int arch) {
  const cuda::V2Target target = cuda::target_of(arch, problem.cuda_level);
  if (target.level > arch) unsupported(text("cuda_level is ", target.level, ", which architecture ", arch, " cannot run; leave it at 0"));
  if (problem.algorithm == Algorithm::kStandard || (problem.algorithm == Algorithm::kAuto && problem.want_weights)) {
    if (const std::string why = cuda::standard_refusal(problem, arch); !why.empty()) unsupported(why);
    return cuda::standard_requests(problem, arch);
  }
  if (problem.algorithm == Algorithm::kV1) {
    std::string why = cuda::v1_refusal(problem, target);
    if (why.empty() && problem.backward) why = cuda::v2_backward_refusal(problem, target);
    if (!why.empty()) unsupported(why);
    if (problem.backward) return backward_requests(cuda::plan_v1_backward(problem, target));
    const cuda::V1ForwardPlan plan = cuda::plan_v1_forward(problem, target);
    if (plan.grid == 0) return {};
    return {cuda::v1_forward_request(cuda::v1_forward_key(plan, nullptr, nullptr, nullptr, nullptr))};
  }
  const bool f32_forward = !problem.backward && problem.dtype == DType::kF32;
  const auto v3_refusal = problem.backward ? cuda::v3_backward_refusal : f32_forward ? cuda::v3_forward_f32_refusal : cuda::v3_forward_refusal;
  const std::string not_v3 = wants_v3(problem, arch) ? v3_refusal(problem, cuda::v3_target_of(arch)) : "it is for compute capability 9.0 alone";
  const bool v3 = not_v3.empty();
  if (problem.algorithm == Algorithm::kV3 && !v3) unsupported(text("algorithm v3 was asked for: ", not_v3));
  std::vector<jit::Request> requests;
  const cuda::DecodeTarget decode_target{target, kMultiprocessors, kBytesPerSecond};
  if (problem.algorithm != Algorithm::kV3 && cuda::decode_takes(problem, decode_target)) {
    const cuda::DecodePlan plan = cuda::plan_decode(problem, decode_target);
    requests.push_back(cuda::decode_request(plan.key));
    if (plan.combine_grid > 0) requests.push_back(cuda::decode_request(plan.combine_key()));
    return requests;
  }
  // As calls with aligned pointers need them.
  if (problem.backward && v3) {
    const cuda::V3BackwardPlan plan = cuda::plan_v3_backward(problem, cuda::v3_target_of(arch));
    if (problem.packed) requests.push_back(cuda::v3_packed_key_tiles_request(cuda::v3_packed_key_tiles_key(problem, plan)));
    if (problem.has_documents) requests.push_back(cuda::v3_document_ranges_request(cuda::v3_document_ranges_key(plan)));
    if (problem.pair_mask.given) requests.push_back(cuda::v3_mask_words_request(cuda::v3_mask_words_key(problem)));
    if (problem.dbias.given) {  // whether they are launched follows from lengths, on which no other kernel depends
      requests.push_back(cuda::v2_backward_request(cuda::dbias_key(problem, cuda::kV3Arch, cuda::KernelKind::kV2DbiasZero)));
      if (!cuda::dbias_in_place(problem))
        requests.push_back(cuda::v2_backward_request(cuda::dbias_key(problem, cuda::kV3Arch, cuda::KernelKind::kV2DbiasFinish)));
    }
    for (const cuda::V3BackwardKey& key : {plan.prepare, plan.main, plan.finish}) requests.push_back(cuda::v3_backward_request(key));
    if (plan.dbias_tiles > 0) requests.push_back(cuda::v3_backward_request(plan.dbias));
    for (const cuda::V3BackwardKey& key : cuda::other_keys_of(problem, plan))
      if (key.ring != plan.main.ring) requests.push_back(cuda::v3_backward_request(key));
  } else if (problem.backward) {
    if (const std::string why = cuda::v2_backward_refusal(problem, target); !why.empty()) unsupported(why);
    requests = backward_requests(cuda::plan_v2_backward(problem, target));
  } else if (v3 && f32_forward) {
    const cuda::V3ForwardF32Plan plan = cuda::plan_v3_forward_f32(problem, cuda::v3_target_of(arch));
    for (cuda::V3ForwardF32Key key : {plan.split_key(), plan.key}) {
      key.aligned = plan.aligned_strides;
      requests.push_back(cuda::v3_forward_f32_request(key));
    }
  } else if (v3) {
    const cuda::V3ForwardPlan plan = cuda::plan_v3_forward(problem, cuda::v3_target_of(arch));
    if (problem.packed) requests.push_back(cuda::v3_packed_tiles_request(cuda::v3_packed_tiles_key(problem, plan)));
    if (problem.has_documents) requests.push_back(cuda::v3_document_ranges_request(cuda::v3_document_ranges_key(plan)));
    if (problem.pair_mask.given) requests.push_back(cuda::v3_mask_words_request(cuda::v3_mask_words_key(problem)));
    requests.push_back(cuda::v3_forward_request(plan.key));
  } else {
    if (const std::string why = cuda::v2_forward_refusal(problem, target); !why.empty()) unsupported(why);
    const cuda::V2ForwardPlan plan = cuda::plan_v2_forward(problem, target);
    if (plan.grid > 0) requests.push_back(cuda::v2_forward_request(cuda::v2_forward_key(plan, nullptr, nullptr, nullptr, nullptr)));
  }
  if (cuda::has_sequence_rest(problem)) requests.push_back(cuda::sequence_rest_request(cuda::sequence_rest_key(problem, arch)));
  return requests;
}

}  // namespace

std::vector<jit::Request> requests_for(const Problem& problem, int arch) {
  std::vector<jit::Request> requests = requests_of_pass(problem, arch);
  if (problem.want_status) requests.push_back(cuda::list_status_request({.arch = arch}));
  return requests;
}

}  // namespace fattn::core
