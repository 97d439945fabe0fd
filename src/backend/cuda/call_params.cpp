#include "backend/cuda/call_params.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "device_abi/dropout.h"
#include "device_abi/v3_forward_work.h"

namespace fattn::core::cuda {
namespace {

constexpr double kLog2E = 1.4426950408889634;

// Scores are then tanh(q k * score_factor) and the exponential multiplies by softcap.
void set_softcap(FeatureParams& params, double softmax_scale, double softcap) {
  params.score_factor = static_cast<float>(kTanhUnit * softmax_scale / softcap);
  params.softmax_scale_log2 = static_cast<float>(std::min(softcap * kLog2E, double{std::numeric_limits<float>::max()}));
}

// Times log2(e) it is a number still, in both passes.
float number_of(double softmax_scale) {
  constexpr double kMost = std::numeric_limits<float>::max() / 2;
  return static_cast<float>(std::clamp(softmax_scale, -kMost, kMost));
}

}  // namespace

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
  pairs.sinks = static_cast<const float*>(b.sinks);
  pairs.sinks_stride = problem.sinks_stride;
  return pairs;
}

Pages page_params(const Problem& problem, const fattn_buffers& b) {
  constexpr int64_t kMost = std::numeric_limits<int>::max();                         // no number of a page is greater
  const int size = static_cast<int>(std::min(problem.page_size, int64_t{1} << 30));  // greater ones have no column, and are not read
  const Divisor by_size = divisor_of(size);
  Pages pages{};
  pages.table = static_cast<const int*>(b.block_table);
  pages.table_stride = problem.block_table_stride;
  pages.k_stride = problem.k_page_stride;
  pages.v_stride = problem.v_page_stride;
  pages.count = static_cast<int>(std::min(problem.pages, kMost));
  pages.size = size;
  pages.size_factor = by_size.factor;
  pages.size_shift = by_size.shift;
  return pages;
}

FeatureParams call_params(const Problem& problem, int heads_per_section) {
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

FeatureParams forward_params(const Problem& problem, int heads_per_section, const fattn_buffers& b) {
  FeatureParams params = call_params(problem, heads_per_section);
  params.q = b.q;
  params.k = b.k;
  params.v = b.v;
  params.o = b.o;
  params.lse = problem.want_lse ? static_cast<float*>(b.lse) : nullptr;
  set_forward_scale(params, problem.softmax_scale, problem.softcap);
  return params;
}

FeatureParams backward_params(const Problem& problem, int heads_per_section, const fattn_buffers& b, bool deterministic, int64_t row_sum_offset,
                              int64_t semaphore_offset) {
  FeatureParams params = call_params(problem, heads_per_section);
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
  params.softmax_scale = number_of(problem.softmax_scale);
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
  params.softmax_scale = scale_log2 > 0 ? number_of(softmax_scale) : 0.0f;
  params.softmax_scale_log2 = scale_log2 > 0 ? scale_log2 : 1.0f;
}

}  // namespace fattn::core::cuda
