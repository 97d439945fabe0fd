// One execution on the CPU: the problem, its workspace and what tasks are filled from. The passes are in forward.cpp, decode.cpp and backward.cpp of
// this folder.
#pragma once

#include "backend/cpu/entries.h"
#include "backend/cpu/tasks.h"
#include "device_abi/dropout.h"

namespace fattn::core {

// Where the pieces of the workspace begin.
struct CpuWorkspace {
  size_t scratch = 0, scratch_of_worker = 0;  // all paths
  size_t largest = 0, sum = 0, acc = 0;       // decode: (batch, nheads_k, chunk, row[, headdim_v])
  size_t delta = 0;                           // backward: (batch, nheads, seqlen_q); packed: batch 1, total_q
  size_t dq_low = 0;                          // backward in 16 bits: (batch, nheads, seqlen_q, headdim), likewise; see dq_sums.h
  size_t walked = 0;                          // backward, if there are splits: (batch, nheads_k, split), see dq_order.h
  size_t dbias = 0;                           // backward: the same for dbias
  bool dbias_in_output = false;
  size_t order = 0, ends = 0;  // packed: (batch) each, see entries.h
  size_t total = 0;
};

CpuWorkspace lay_out_cpu(const Plan& plan);

// Is every pair of a batch entry and head some task's? Then the first to come stores its part of dbias and the last writes the tensor.
bool walks_all_of_dbias(const Problem& problem);

struct CpuCall {
  const Plan& plan;
  const Problem& p;
  const CpuPlan& c;
  const fattn_buffers& b;
  const CpuKernels& kernels;
  KernelDType dtype;
  size_t element;
  KernelDType out_dtype;  // of o, or of dq, dk and dv
  size_t out_element;
  CpuWorkspace w;
  char* workspace;

  void* scratch(int worker) const { return workspace + w.scratch + static_cast<size_t>(worker) * w.scratch_of_worker; }
  float* floats(size_t offset) const { return reinterpret_cast<float*>(workspace + offset); }
  int64_t* numbers(size_t offset) const { return reinterpret_cast<int64_t*>(workspace + offset); }
  // The mask of a batch entry as the tasks have it.
  int64_t diagonal(const Sequence& s) const { return p.mask(s).ends() ? p.mask(s).diagonal() : s.keys; }
  int64_t left_diagonal(const Sequence& s) const { return p.mask(s).begins() ? p.mask(s).left_diagonal() : kNoBegin; }

  // Entries of tasks_of(sequence) tasks, each of a work that grows with work_of(sequence).
  template <class Tasks, class Work>
  Entries entries(const Tasks& tasks_of, const Work& work_of) const {
    if (!p.packed) return {p.batch, tasks_of(Sequence{0, p.seqlen_q, 0, p.seqlen_k, p.seqlen_k})};
    const auto sequence = [&](int64_t n) { return sequence_of(p, b, n); };
    return {p.batch, numbers(w.order), numbers(w.ends), [&](int64_t n) { return tasks_of(sequence(n)); },
            [&](int64_t n) { return work_of(sequence(n)); }};
  }

  // Of the query heads from h on.
  ScoreInputs inputs(int64_t n, int64_t h, const Sequence& s) const {
    ScoreInputs in{};
    if (p.has_alibi) in.alibi_slopes = static_cast<const float*>(b.alibi_slopes) + n * p.alibi_batch_stride + h * p.alibi_head_stride;
    in.alibi_head_stride = p.alibi_head_stride;
    const auto head_of = [&](const PairTensor& t, const void* data) {
      return t.given ? at(data, n * t.strides.batch + h * t.strides.head, size_of(t.dtype)) : nullptr;
    };
    in.bias = head_of(p.bias, b.bias);
    in.bias_stride = p.bias.strides.row;
    in.bias_head_stride = p.bias.strides.head;
    in.bias_fp32 = p.bias.dtype == DType::kF32;
    in.mask = static_cast<const uint8_t*>(head_of(p.pair_mask, b.mask));
    in.mask_stride = p.pair_mask.strides.row;
    in.mask_head_stride = p.pair_mask.strides.head;
    if (p.has_documents) {
      in.document_q = at(static_cast<const int32_t*>(b.document_q), n * p.document_q_stride + s.q_begin);
      in.document_k = at(static_cast<const int32_t*>(b.document_k), n * p.document_k_stride + s.k_begin);
    }
    in.shift = s.keys - s.seqlen_q;
    in.dropout_below = p.dropout_below;
    in.dropout_scale = static_cast<float>(p.dropout_scale());
    if (p.dropout_below > 0) {
      const auto* state = static_cast<const int64_t*>(b.dropout_state);
      in.seed = static_cast<uint64_t>(state[0]);
      in.stream = static_cast<uint64_t>(state[1]) + static_cast<uint64_t>(n * p.nheads + h);
      if (p.dropout_places) {
        in.dropout_query = dropout_query(static_cast<uint32_t>(state[2]));
        in.dropout_call = static_cast<uint32_t>(state[3] / kDropoutBlock * kDropoutCalls);
      }
    }
    if (p.has_sinks) in.sink = sink_of(h);
    return in;
  }
  KeyPages pages(int64_t n) const { return p.paged ? KeyPages{pages_of(p, b, n), p.page_size, p.k_page_stride, p.v_page_stride} : KeyPages{}; }
  // Of a query head; null: none.
  const float* sink_of(int64_t h) const { return p.has_sinks ? static_cast<const float*>(b.sinks) + h * p.sinks_stride : nullptr; }
};

// Rows of packed tensors that belong to no sequence see nothing: o = 0, lse = -inf.
void finish_packed_rows(const CpuCall& call);

void cpu_forward(const CpuCall& call);
void cpu_decode(const CpuCall& call);
void cpu_backward(const CpuCall& call);

}  // namespace fattn::core
