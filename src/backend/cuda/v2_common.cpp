#include "backend/cuda/v2_common.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "plan/features.h"
#include "shared/dropout.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr double kLog2E = 1.4426950408889634;

// Scores are then tanh(q k * score_factor) and the exponential multiplies by softcap.
void set_softcap(FeatureParams& params, double softmax_scale, double softcap) {
  params.score_factor = static_cast<float>(kTanhUnit * softmax_scale / softcap);
  params.softmax_scale_log2 = static_cast<float>(std::min(softcap * kLog2E, double{std::numeric_limits<float>::max()}));
}

}  // namespace

std::string v2_refusal(const Problem& problem, const V2Target& target) {
  if (std::string why = lacks(problem, Way::kCudaV2); !why.empty()) return why;
  if (problem.dtype == DType::kF64) return "dtype is fp64; the CUDA kernels of algorithm v2 take fp32, fp16 and bf16";
  if (target.level != 75 && target.level != 80) return text("the level is ", target.level, "; algorithm v2 has kernels for 75 and 80");
  if (target.level < 80 && problem.dtype == DType::kBF16)
    return "bf16 needs compute capability 8.0: matrix instructions for it begin there; use fp16";
  if (target.level < 80 && problem.dtype == DType::kF32)
    return "fp32 needs compute capability 8.0: its kernels need asynchronous copies, which begin there; use fp16";
  if (problem.dbias.given && problem.softcap > 0)
    return "the CUDA kernels have no dbias with softcap: the gradient of a score is not kept apart from that of what softcap is taken of; use the "
           "CPU";
  if (problem.has_documents && problem.bias.given && problem.pair_mask.given && std::max(problem.headdim, problem.headdim_v) > 192)
    return text(
        "headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v,
        "; with documents, a bias and a mask of pairs together the CUDA kernels have registers for up to 192: have the mask, or -Inf in the bias, "
        "say what documents say, or use the CPU");
  if (problem.headdim > 256 || problem.headdim_v > 256) {
    return text("headdim is ", problem.headdim, " and headdim_v ", problem.headdim_v, "; the CUDA kernels of algorithm v2 take up to 256");
  }
  if (problem.seqlen_q > kMaxSeqlen || problem.seqlen_k > kMaxSeqlen) {
    return text("seqlen_q is ", problem.seqlen_q, " and seqlen_k ", problem.seqlen_k, "; the CUDA kernels take up to ", kMaxSeqlen);
  }
  return window_refusal(problem);
}

std::string window_refusal(const Problem& problem) {
  constexpr int64_t kMaxWindowed = kMaxSeqlen / 2;  // a row plus an end of its window is a number of 32 bits, even of rows behind the last
  if (!problem.windowed() || (problem.seqlen_q <= kMaxWindowed && problem.seqlen_k <= kMaxWindowed)) return {};
  return text("seqlen_q is ", problem.seqlen_q, " and seqlen_k ", problem.seqlen_k, "; with a window the CUDA kernels take up to ", kMaxWindowed);
}

bool aligned(const Strides& strides, int64_t batch, int64_t rows, int64_t heads, DType dtype) {
  const auto fits = [=](int64_t stride, int64_t size) { return size <= 1 || stride % copied_at_once(dtype) == 0; };
  return fits(strides.batch, batch) && fits(strides.row, rows) && fits(strides.head, heads);
}

PairFeatures pair_features(const Problem& problem) {
  PairFeatures pair;
  pair.lengths = problem.has_seqused_k;
  pair.alibi = problem.has_alibi;
  pair.bias = !problem.bias.given ? 0 : problem.bias.dtype == DType::kF32 ? 2 : 1;
  pair.mask = problem.pair_mask.given;
  pair.dropout = problem.dropout_below > 0;
  pair.dbias = problem.backward && problem.dbias.given;
  pair.packed = problem.packed;
  pair.documents = problem.has_documents;
  return pair;
}

int32_t pair_bits(const PairFeatures& pair) {
  return (pair.lengths ? 1 : 0) | (pair.alibi ? 2 : 0) | pair.bias << 2 | (pair.mask ? 16 : 0) | (pair.dropout ? 32 : 0) | (pair.dbias ? 64 : 0) |
         (pair.packed ? 128 : 0) | (pair.documents ? 256 : 0) | (pair.dlse ? 512 : 0);
}

PairFeatures pair_features_of(int32_t bits) {
  return {(bits & 1) != 0,  (bits & 2) != 0,   bits >> 2 & 3,     (bits & 16) != 0, (bits & 32) != 0,
          (bits & 64) != 0, (bits & 128) != 0, (bits & 256) != 0, (bits & 512) != 0};
}

std::string pair_line(int32_t bits) {
  if (bits == 0) return {};
  const PairFeatures pair = pair_features_of(bits);
  const auto flag = [](bool x) { return x ? "true" : "false"; };
  return text("  static constexpr fattn::PairFeatures kPair = {.lengths = ", flag(pair.lengths), ", .alibi = ", flag(pair.alibi),
              ", .bias = ", pair.bias, ", .mask = ", flag(pair.mask), ", .dropout = ", flag(pair.dropout), ", .dbias = ", flag(pair.dbias),
              pair.packed ? ", .packed = true" : "", pair.documents ? ", .documents = true" : "", pair.dlse ? ", .dlse = true" : "", "};\n");
}

std::string names_of_pair(int32_t bits) {
  const PairFeatures pair = pair_features_of(bits);
  std::string names;
  if (pair.lengths) names += ", lengths";
  if (pair.alibi) names += ", ALiBi";
  if (pair.bias != 0) names += pair.bias == 2 ? ", fp32 bias" : ", bias";
  if (pair.mask) names += ", mask";
  if (pair.dropout) names += ", dropout";
  if (pair.dbias) names += ", dbias";
  if (pair.packed) names += ", packed";
  if (pair.documents) names += ", documents";
  if (pair.dlse) names += ", dlse";
  return names;
}

PairParams pair_params(const FeatureParams& params, const Problem& problem, const fattn_buffers& b) {
  const auto ints = [](const void* pointer) { return static_cast<const int*>(pointer); };
  PairParams pairs{};
  static_cast<FeatureParams&>(pairs) = params;
  pairs.lengths = problem.has_seqused_k ? ints(b.seqused_k) : nullptr;  // kernels ask whether there are any
  pairs.length_stride = problem.seqused_k_stride;
  pairs.alibi_slopes = static_cast<const float*>(b.alibi_slopes);
  pairs.alibi_batch_stride = problem.alibi_batch_stride;
  pairs.alibi_head_stride = problem.alibi_head_stride;
  pairs.bias = b.bias;
  pairs.pair_mask = static_cast<const unsigned char*>(b.mask);
  pairs.bias_strides = strides_of(problem.bias.strides);
  pairs.pair_mask_strides = strides_of(problem.pair_mask.strides);
  pairs.dropout_state = static_cast<const unsigned long long*>(b.dropout_state);
  pairs.dropout_below = static_cast<unsigned>(problem.dropout_below);
  pairs.dropout_scale = static_cast<float>(problem.dropout_scale());
  for (int bit = 0; bit < kDropoutBits; ++bit) pairs.dropout_thresholds[bit] = dropout_threshold(pairs.dropout_below, bit);
  pairs.cu_seqlens_q = ints(b.cu_seqlens_q);
  pairs.cu_seqlens_k = ints(b.cu_seqlens_k);
  pairs.cu_seqlens_q_stride = problem.cu_seqlens_q_stride;
  pairs.cu_seqlens_k_stride = problem.cu_seqlens_k_stride;
  pairs.total_q = problem.total_q;
  pairs.total_k = problem.total_k;
  pairs.document_q = ints(b.document_q);
  pairs.document_k = ints(b.document_k);
  pairs.document_q_stride = problem.document_q_stride;
  pairs.document_k_stride = problem.document_k_stride;
  pairs.dlse = static_cast<const float*>(b.dlse);
  pairs.dlse_strides = strides_of(problem.dlse);
  return pairs;
}

FeatureParams v2_params(const Problem& problem, int heads_per_section) {
  FeatureParams params{};
  params.q_strides = strides_of(problem.q);
  params.k_strides = strides_of(problem.k);
  params.v_strides = strides_of(problem.v);
  params.o_strides = strides_of(problem.o);
  params.lse_strides = strides_of(problem.lse);
  params.batch = static_cast<int>(problem.batch);
  params.seqlen_q = static_cast<int>(problem.seqlen_q);
  params.seqlen_k = static_cast<int>(problem.seqlen_k);
  params.nheads = static_cast<int>(problem.nheads);
  params.nheads_k = static_cast<int>(problem.nheads_k);
  params.group = static_cast<int>(problem.group());
  params.heads_per_section = heads_per_section;
  params.window_left = static_cast<int>(problem.window_left);
  params.window_right = problem.causal ? 0 : static_cast<int>(problem.window_right);
  return params;
}

FeatureParams backward_params(const Problem& problem, int heads_per_section, const fattn_buffers& b, bool deterministic, int64_t row_sum_offset,
                              int64_t semaphore_offset) {
  FeatureParams params = v2_params(problem, heads_per_section);
  params.q = b.q;
  params.k = b.k;
  params.v = b.v;
  params.o = b.o;                           // read only, here
  params.lse = static_cast<float*>(b.lse);  // likewise
  params.dout = b.dout;
  params.dq = b.dq;
  params.dk = b.dk;
  params.dv = b.dv;
  char* const workspace = static_cast<char*>(b.workspace);
  params.dq_accum = reinterpret_cast<float*>(workspace);
  params.row_sum = reinterpret_cast<float*>(workspace + row_sum_offset);
  params.dq_semaphore = deterministic ? reinterpret_cast<int*>(workspace + semaphore_offset) : nullptr;
  params.dout_strides = strides_of(problem.dout);
  params.dq_strides = strides_of(problem.dq);
  params.dk_strides = strides_of(problem.dk);
  params.dv_strides = strides_of(problem.dv);
  constexpr double kMax = std::numeric_limits<float>::max() / 2;  // times log2(e) still a number
  params.softmax_scale = static_cast<float>(std::clamp(problem.softmax_scale, -kMax, kMax));
  if (problem.softcap > 0) set_softcap(params, problem.softmax_scale, problem.softcap);
  return params;
}

void set_forward_scale(FeatureParams& params, double softmax_scale, double softcap) {
  if (softcap > 0) {
    params.softmax_scale = 1;
    return set_softcap(params, softmax_scale, softcap);
  }
  // A scale that fp32 cannot tell from 0 counts as 0, one beyond its range as the greatest.
  const float scale_log2 = static_cast<float>(std::min(std::abs(softmax_scale) * kLog2E, double{std::numeric_limits<float>::max()}));
  params.softmax_scale = scale_log2 > 0 ? static_cast<float>(softmax_scale) : 0.0f;
  params.softmax_scale_log2 = scale_log2 > 0 ? scale_log2 : 1.0f;
}

}  // namespace fattn::core::cuda
