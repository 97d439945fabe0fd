#include "backend/cuda/sequence_rest.h"

#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

// An element of fp32 is two of 16 bits: of zeros they make 0, of NaNs (0x7fff7fff) NaN.
RestOutput output_of(const Problem& problem, void* to, const Strides& strides, int64_t columns) {
  const int64_t words = static_cast<int64_t>(size_of(problem.out_dtype())) / 2;
  return {static_cast<unsigned short*>(to), words * strides.row, words * strides.head, static_cast<int>(words * columns)};
}

}  // namespace

bool has_sequence_rest(const Problem& problem) { return problem.packed && (problem.total_q > 0 || (problem.backward && problem.total_k > 0)); }

SequenceRestKey sequence_rest_key(const Problem& problem, int arch) {
  return {.arch = arch, .lengths = problem.has_seqused_k ? 1 : 0, .paged = problem.paged ? 1 : 0};
}

SequenceRestParams sequence_rest_params(const Problem& problem, const fattn_buffers& b) {
  const auto ints = [](const void* list) { return static_cast<const int*>(list); };
  SequenceRestParams params{};
  params.batch = static_cast<int>(problem.batch);
  params.lengths = problem.has_seqused_k ? ints(b.seqused_k) : nullptr;
  params.length_stride = problem.seqused_k_stride;
  RestOfRows& queries = params.parts[0];
  queries = {ints(b.cu_seqlens_q),
             problem.cu_seqlens_q_stride,
             problem.total_q,
             static_cast<int>(problem.seqlen_q),
             static_cast<int>(problem.nheads),
             {},
             problem.want_lse && !problem.backward ? static_cast<float*>(b.lse) : nullptr,
             problem.lse.row,
             problem.lse.head};
  RestOfRows& keys = params.parts[1];
  keys = {ints(b.cu_seqlens_k),
          problem.cu_seqlens_k_stride,
          problem.total_k,
          static_cast<int>(problem.seqlen_k),
          static_cast<int>(problem.nheads_k),
          {},
          nullptr,
          0,
          0};
  if (problem.backward) {
    queries.outputs[0] = output_of(problem, b.dq, problem.dq, problem.headdim);
    keys.outputs[0] = output_of(problem, b.dk, problem.dk, problem.headdim);
    keys.outputs[1] = output_of(problem, b.dv, problem.dv, problem.headdim_v);
  } else {
    queries.outputs[0] = output_of(problem, b.o, problem.o, problem.headdim_v);
  }
  return params;
}

jit::Request sequence_rest_request(const SequenceRestKey& key) {
  const char* const entry = "fattn_sequence_rest";
  return {.entry = entry,
          .source = text("// rows of no packed sequence\n#include \"kernels/sequence_rest.h\"\nextern \"C\" __global__ void __launch_bounds__(",
                         kRestThreads, ") ", entry, "(const __grid_constant__ fattn::SequenceRestParams p) {\n  fattn::sequence_rest<",
                         key.lengths != 0 ? "true" : "false", key.paged != 0 ? ", true" : "", ">(p);\n}\n"),
          .arch = key.arch};
}

}  // namespace fattn::core::cuda
