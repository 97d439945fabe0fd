#include "backend/cuda/sequence_rest.h"

#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

RestOutput output_of(void* to, const Strides& strides, int64_t columns) {
  return {static_cast<unsigned short*>(to), strides.row, strides.head, static_cast<int>(columns)};
}

}  // namespace

bool has_sequence_rest(const Problem& problem) { return problem.packed && (problem.total_q > 0 || (problem.backward && problem.total_k > 0)); }

SequenceRestParams sequence_rest_params(const Problem& problem, const RestBuffers& b) {
  SequenceRestParams params{};
  params.batch = static_cast<int>(problem.batch);
  RestOfRows& queries = params.parts[0];
  queries = {b.cu_seqlens_q,
             problem.cu_seqlens_q_stride,
             problem.total_q,
             static_cast<int>(problem.seqlen_q),
             static_cast<int>(problem.nheads),
             {},
             b.lse,
             problem.lse.row,
             problem.lse.head};
  RestOfRows& keys = params.parts[1];
  keys = {b.cu_seqlens_k,
          problem.cu_seqlens_k_stride,
          problem.total_k,
          static_cast<int>(problem.seqlen_k),
          static_cast<int>(problem.nheads_k),
          {},
          nullptr,
          0,
          0};
  if (problem.backward) {
    queries.outputs[0] = output_of(b.dq, problem.dq, problem.headdim);
    keys.outputs[0] = output_of(b.dk, problem.dk, problem.headdim);
    keys.outputs[1] = output_of(b.dv, problem.dv, problem.headdim_v);
  } else {
    queries.outputs[0] = output_of(b.o, problem.o, problem.headdim_v);
  }
  return params;
}

jit::Request sequence_rest_request(const SequenceRestKey& key) {
  const char* const entry = "fattn_sequence_rest";
  return {.entry = entry,
          .source = text("// rows of no packed sequence\n#include \"kernels/sequence_rest.h\"\nextern \"C\" __global__ void __launch_bounds__(",
                         kRestThreads, ") ", entry, "(const __grid_constant__ fattn::SequenceRestParams p) {\n  fattn::sequence_rest(p);\n}\n"),
          .arch = key.arch};
}

}  // namespace fattn::core::cuda
