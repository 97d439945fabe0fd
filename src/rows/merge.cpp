// Results over parts of the keys become that over all of them: what a call is checked for, and who computes it.
#include <algorithm>

#include "problem/option_checks.h"
#include "rows/checks.h"
#include "rows/rows.h"
#include "rows/workers.h"
#include "shared/text.h"

namespace fattn::core::rows {
namespace {

static_assert(kMostHeaddim == kMaxHeaddim);

constexpr int kMostParts = 1024;
constexpr const char* kFirst = "parts[0].o";

// The views of a call that fit together: all that must hold for a tensor beside the first part's o.
class Checker {
 public:
  explicit Checker(const fattn_tensor& first) : first_(first), packed_(first.ndim == 3) {}

  void rows(const char* name, const fattn_tensor& t, bool output) const {
    check_numbers(name, t, packed_ ? 3 : 4, packed_ ? "(total_q, nheads, headdim_v), as parts[0].o has" : "(batch, seqlen_q, nheads, headdim_v)",
                  output);
    check_fits(name, t, kFirst, first_);
    check_shape(name, t, {first_.shape[0], first_.shape[1], first_.shape[2], first_.shape[3]}, "the shape of parts[0].o");
    common(name, t);
  }
  // `wide`: fp64 is allowed beside parts that are not.
  void lse(const char* name, const fattn_tensor& t, bool output, bool wide = false) const {
    check_tensor(name, t, packed_ ? 2 : 3, packed_ ? "(nheads, total_q)" : "(batch, nheads, seqlen_q)", output);
    const int32_t wanted = first_.dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    if (!wide || t.dtype != FATTN_F64) check_dtype(name, t, wanted, wanted == FATTN_F64 ? ", as parts[0].o is" : wide ? " or fp64" : "");
    if (packed_)
      check_shape_of(name, t, {first_.shape[1], first_.shape[0]}, "from parts[0].o");
    else
      check_shape_of(name, t, {first_.shape[0], first_.shape[2], first_.shape[1]}, "from parts[0].o");
    common(name, t);
  }
  MergeSizes sizes() const {
    const int d = packed_ ? 0 : 1;
    return {packed_ ? 1 : first_.shape[0], first_.shape[d], first_.shape[d + 1], static_cast<int>(first_.shape[d + 2])};
  }

 private:
  void common(const char* name, const fattn_tensor& t) const {
    check_device(name, t, kFirst, first_);
    check_memory(name, t);
  }
  const fattn_tensor& first_;
  const bool packed_;
};

// An output and everything that it must not touch; `forward`: it may be the tensor of a part.
void check_output(const char* name, const fattn_tensor& output, const fattn_merge_problem& g, bool backward) {
  if (output.ndim == 0) return;
  const auto apart = [&](const char* other_name, const fattn_tensor& other, bool may_be_same) {
    if (other.ndim != 0 && &other != &output) check_apart(name, output, other_name, other, may_be_same);
  };
  for (int i = 0; i < g.nparts; ++i) {
    const fattn_merge_part& part = g.parts[i];
    apart(PartName(i, "o"), part.o, !backward);
    apart(PartName(i, "lse"), part.lse, !backward);
    if (!backward) continue;
    apart(PartName(i, "dout"), part.dout, false);
    apart(PartName(i, "dlse"), part.dlse, false);
  }
  if (backward) {
    apart("dout", g.dout, false);
    apart("dlse", g.dlse, false);
  }
}

MergeSizes check(const fattn_merge_problem& g, bool backward) {
  check_execution(g.backend, g.cpu_isa, g.num_threads, g.executor);
  if (g.nparts < 1 || g.nparts > kMostParts) invalid(text("nparts is ", g.nparts, "; allowed: 1 to ", kMostParts));
  if (!g.parts) invalid(text("parts is a null pointer; pass an array of nparts, ", g.nparts, ", parts"));
  const fattn_tensor& first = g.parts[0].o;
  if (first.ndim != 3 && first.ndim != 4)
    invalid(text(kFirst, " has ", first.ndim,
                 " dimensions; allowed: 4 (batch, seqlen_q, nheads, headdim_v), or 3 (total_q, nheads, headdim_v) of packed sequences"));
  const Checker checker(first);
  const bool sums = g.parts[0].lse.ndim == 0;
  if (sums && (backward || g.lse.ndim != 0))
    invalid(text("parts have no lse, which is their sum; ", backward ? "its gradient is that of every part" : "a sum has no lse: leave lse absent"));
  for (int i = 0; i < g.nparts; ++i) {
    const fattn_merge_part& part = g.parts[i];
    checker.rows(PartName(i, "o"), part.o, false);
    if ((part.lse.ndim == 0) != sums)
      invalid(text(PartName(sums ? i : 0, "lse"), " is there and ", PartName(sums ? 0 : i, "lse"),
                   " is absent; give all parts theirs (a merge) or none (a sum)"));
    if (!sums) checker.lse(PartName(i, "lse"), part.lse, false, !backward);
    if (!backward) continue;
    if (part.dout.ndim != 0) checker.rows(PartName(i, "dout"), part.dout, true);
    if (part.dlse.ndim != 0) checker.lse(PartName(i, "dlse"), part.dlse, true);
  }
  const MergeSizes sizes = checker.sizes();
  if (sizes.headdim < 1 || first.shape[first.ndim - 1] > kMostHeaddim)
    invalid(text("headdim_v of ", kFirst, " is ", first.shape[first.ndim - 1], "; allowed: 1 to ", kMostHeaddim));
  int64_t rows = 0;
  if (__builtin_mul_overflow(sizes.batch, sizes.seqlen, &rows) || __builtin_mul_overflow(rows, sizes.heads, &rows))
    invalid(text(kFirst, " has the shape ", shape_text(first), "; batch, seqlen_q and nheads together must be at most 2^63 - 1. Split the batch"));
  if (backward) {
    checker.rows("dout", g.dout, false);
    if (g.dlse.ndim != 0) checker.lse("dlse", g.dlse, false);
    for (int i = 0; i < g.nparts; ++i) {
      check_output(PartName(i, "dout"), g.parts[i].dout, g, true);
      check_output(PartName(i, "dlse"), g.parts[i].dlse, g, true);
    }
  } else {
    checker.rows("o", g.o, true);
    if (g.lse.ndim != 0) {
      checker.lse("lse", g.lse, true, true);
      check_apart("o", g.o, "lse", g.lse, false);
    }
    check_output("o", g.o, g, false);
    check_output("lse", g.lse, g, false);
  }
  check_stream(g.stream, static_cast<Device>(first.device_type));
  return sizes;
}

}  // namespace

void merge(const fattn_merge_problem& problem, bool backward) {
  const MergeSizes sizes = check(problem, backward);
  const Backend backend = backend_for(problem.backend, problem.parts[0].o);
  if (backend == Backend::kCpu) choose_isa(static_cast<Isa>(problem.cpu_isa), detected_cpu());
  if (sizes.batch * sizes.seqlen * sizes.heads == 0) return;
  switch (backend) {
    case Backend::kReference: return reference::merge(problem, sizes, backward);
    case Backend::kCuda: return cuda::merge(problem, sizes, backward);
    default: return cpu::merge(problem, sizes, backward);
  }
}

namespace cpu {

void merge(const fattn_merge_problem& problem, const MergeSizes& sizes, bool backward) {
  const RowKernels& kernels = kernels_of(choose_isa(static_cast<Isa>(problem.cpu_isa), detected_cpu()));
  constexpr int64_t kTile = 16;  // rows that a kernel takes together
  const int64_t row_bytes = int64_t{problem.nparts + 1} * sizes.headdim * static_cast<int64_t>(size_of(static_cast<DType>(problem.parts[0].o.dtype)));
  by_rows(problem, backward ? "merge backward" : "merge", sizes.batch * sizes.seqlen * sizes.heads, row_bytes, kTile,
          [&](int64_t begin, int64_t end) {
            (backward ? kernels.merge_backward : kernels.merge)({&problem, sizes, begin, end});
          });
}

}  // namespace cpu

}  // namespace fattn::core::rows
