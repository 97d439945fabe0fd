#include "backend/cuda/standard.h"

#include <algorithm>

#include "backend/cuda/kernel_source.h"
#include "backend/cuda/limits.h"
#include "backend/cuda/matmul.h"
#include "backend/cuda/pair_features.h"
#include "backend/cuda/v2_backward.h"
#include "plan/features.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kElementsHeld = 32;  // of a row, by a thread
constexpr int kMostThreads = 512;  // of a row: with more, a thread has too few registers to hold its part

StandardKey key_of(KernelKind kind, const Problem& p, int arch) {
  StandardKey key;
  key.kind = kind;
  key.arch = arch;
  key.dtype = static_cast<int32_t>(p.dtype);
  key.aligned = 1;
  return key;
}

}  // namespace

// One warp a row as long as its registers hold it, so that no warp waits for another.
StandardKey standard_softmax_key(const Problem& p, int arch) {
  StandardKey key = key_of(KernelKind::kStandardSoftmax, p, arch);
  key.capped = p.softcap > 0;
  key.pair = pair_bits(pair_features(p));
  key.row_threads = kWarp;
  while (key.row_threads < kMostThreads && int64_t{key.row_threads} * kElementsHeld < p.seqlen_k) key.row_threads *= 2;
  const bool held = int64_t{key.row_threads} * kElementsHeld >= p.seqlen_k;
  const bool small = p.seqlen_k <= kWarp * standard_unit(p.dtype);
  key.units = !held ? 0 : small ? 1 : kElementsHeld / static_cast<int>(standard_unit(p.dtype));
  return key;
}

StandardKey standard_gradient_key(const Problem& p, int arch) {
  StandardKey key = key_of(KernelKind::kStandardGradient, p, arch);
  key.capped = p.softcap > 0;
  PairFeatures pair = pair_features(p);
  pair.dlse = p.has_dlse;
  key.pair = pair_bits(pair);
  key.row_threads = p.seqlen_k <= 2048 ? kWarp : p.seqlen_k <= 16384 ? 128 : 512;
  return key;
}

StandardKey standard_finish_key(const Problem& p, int arch, bool queries) {
  StandardKey key = key_of(KernelKind::kStandardFinish, p, arch);
  key.row_threads = kWarp;
  key.queries = queries;
  const PairFeatures pair = pair_features(p);  // what hides pairs; forward, dropout, whose weights of 0 are of pairs that are seen
  key.pair =
      pair_bits({.lengths = pair.lengths, .bias = pair.bias, .mask = pair.mask, .dropout = pair.dropout && !p.backward, .documents = pair.documents});
  return key;
}

StandardKey standard_clean_key(const Problem& p, int arch) {
  StandardKey key = key_of(KernelKind::kStandardClean, p, arch);
  key.row_threads = kWarp;
  return key;
}

std::string standard_refusal(const Problem& p, int arch) {
  if (std::string why = lacks(p, Way::kCudaStandard); !why.empty()) return why;
  if (p.dtype == DType::kF64) return "algorithm standard takes fp32, fp16 and bf16, not fp64; backend reference computes it on the host";
  if (p.dtype == DType::kBF16 && arch < 80) return "bf16 needs compute capability 8.0: conversions to it begin there; use fp16 or fp32";
  if (p.seqlen_q > kMaxSeqlen || p.seqlen_k > kMaxSeqlen)
    return text("seqlen_q is ", p.seqlen_q, " and seqlen_k ", p.seqlen_k, "; algorithm standard takes up to ", kMaxSeqlen);
  struct Input {
    const char* name;
    const Strides& strides;
    int64_t rows, width;
  };
  for (const Input& x : {Input{"q", p.q, p.seqlen_q, p.headdim}, Input{"k", p.k, p.seqlen_k, p.headdim}, Input{"v", p.v, p.seqlen_k, p.headdim_v},
                         Input{"dout", p.dout, p.backward ? p.seqlen_q : 0, p.headdim_v}})
    if (!Matmul::takes(x.strides.row, x.rows, x.width))
      return text(x.name, " has a stride of ", x.strides.row, " elements along the sequence, less than a row of ", x.width,
                  ": cuBLASLt takes no such matrix; copy it, or use algorithm v2");
  const int64_t threads = standard_softmax_key(p, arch).threads() / standard_softmax_key(p, arch).row_threads;
  const int64_t most = kMaxGrid * std::min<int64_t>(threads, standard_gradient_key(p, arch).threads() / standard_gradient_key(p, arch).row_threads);
  if (p.batch > 0 && p.seqlen_q > 0 && p.nheads > most / p.seqlen_q / p.batch)
    return text("batch ", p.batch, " * nheads ", p.nheads, " * seqlen_q ", p.seqlen_q, " is more rows than a grid has; split the batch");
  if (p.batch > 0 && p.seqlen_k > 0 && p.nheads_k > kMaxGrid / p.seqlen_k / p.batch)
    return text("batch ", p.batch, " * nheads_k ", p.nheads_k, " * seqlen_k ", p.seqlen_k, " is more rows than a grid has; split the batch");
  if (standard_dbias_ctas(p) > kMaxGrid)
    return text("dbias has ", standard_dbias_ctas(p), " rows, more than a grid of ", kMaxGrid, "; split the batch");
  return dbias_order_refusal(p);
}

jit::Request standard_request(const StandardKey& key) {
  struct Kernel {
    const char *file, *function, *entry, *params;
  };
  const Kernel kernel = key.kind == KernelKind::kStandardSoftmax    ? Kernel{"softmax", "softmax_rows", "fattn_std_softmax", "StandardRowsParams"}
                        : key.kind == KernelKind::kStandardGradient ? Kernel{"gradient", "gradient_rows", "fattn_std_gradient", "StandardRowsParams"}
                        : key.kind == KernelKind::kStandardClean    ? Kernel{"clean", "clean_rows", "fattn_std_clean", "StandardCleanParams"}
                        : key.queries != 0 ? Kernel{"finish", "finish_rows", "fattn_std_finish_queries", "StandardFinishParams"}
                                           : Kernel{"finish", "finish_rows", "fattn_std_finish_keys", "StandardFinishParams"};
  const DType dtype = static_cast<DType>(key.dtype);
  const char* const element = dtype == DType::kBF16 ? "fattn::bf16" : dtype == DType::kF16 ? "fattn::f16" : "fattn::standard::f32";
  const auto flag = [](int x) { return x != 0 ? "true" : "false"; };
  const bool finish = key.kind == KernelKind::kStandardFinish || key.kind == KernelKind::kStandardClean;
  std::string comment = text("// ", name_of(dtype));
  if (!finish) comment += text(", ", key.row_threads, " threads a row");
  if (key.capped != 0) comment += ", softcap";
  comment += names_of_pair(key.pair);
  if (key.aligned == 0) comment += ", unaligned";
  jit::Request request;
  request.entry = kernel.entry;
  request.arch = key.arch;
  request.source =
      text(comment, "\n#include \"kernels/standard/", kernel.file, ".h\"\n\nstruct Spec {\n  using Element = ", element,
           ";\n  static constexpr bool kAligned = ", flag(key.aligned), ", kCapped = ", flag(key.capped), ", kQueries = ", flag(key.queries),
           ";\n  static constexpr int kThreads = ", key.threads(), ", kRowThreads = ", key.row_threads, ", kUnits = ", key.units, ";\n",
           pair_line(key.pair), "};\n\nextern \"C\" __global__ void __launch_bounds__(Spec::kThreads, ", key.ctas(), ") ", kernel.entry,
           "(const __grid_constant__ fattn::", kernel.params, " p) {\n  fattn::standard::", kernel.function, "<Spec>(p);\n}\n");
  return request;
}

}  // namespace fattn::core::cuda
