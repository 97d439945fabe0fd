// Rotary embeddings: what a call is checked for, and who computes it.
#include <algorithm>
#include <cstring>

#include "problem/option_checks.h"
#include "rows/checks.h"
#include "rows/lists.h"
#include "rows/rows.h"
#include "rows/workers.h"
#include "shared/text.h"

namespace fattn::core::rows {
namespace {

int64_t offset_of(const fattn_rotary_problem& g, int64_t sequence) { return g.offsets.ndim == 0 ? g.offset : number_at(g.offsets, sequence); }
int64_t sequences_of(const fattn_rotary_problem& g) { return g.cu_seqlens.ndim != 0 ? g.cu_seqlens.shape[0] - 1 : g.x.shape[0]; }

void check_angles(const char* name, const fattn_tensor& t, const fattn_tensor& x) {
  check_numbers(name, t, 2, "(positions, rotary_dim / 2)", false);
  if (t.dtype != FATTN_F32 && t.dtype != x.dtype)
    invalid(text(name, " is ", name_of(static_cast<DType>(t.dtype)), "; allowed: x's dtype, ", name_of(static_cast<DType>(x.dtype)), ", or fp32"));
  check_device(name, t, "x", x);
  check_memory(name, t);
}

RotarySizes check(const fattn_rotary_problem& g) {
  check_execution(g.backend, g.cpu_isa, g.num_threads, g.executor);
  for (const auto& [name, value] : {std::pair{"interleaved", g.interleaved}, std::pair{"inverse", g.inverse}})
    if (value != 0 && value != 1) invalid(text(name, " is ", value, "; allowed: 0, 1"));
  const bool packed = g.cu_seqlens.ndim != 0;
  const int ndim = packed ? 3 : 4;
  const char* const dimensions = packed ? "(total, nheads, headdim) of packed sequences (cu_seqlens)" : "(batch, seqlen, nheads, headdim)";
  check_numbers("x", g.x, ndim, dimensions, false);
  check_numbers("y", g.y, ndim, dimensions, true);
  if (g.y.dtype != g.x.dtype)
    invalid(text("y is ", name_of(static_cast<DType>(g.y.dtype)), " but x is ", name_of(static_cast<DType>(g.x.dtype)), "; they share one dtype"));
  check_shape("y", g.y, {g.x.shape[0], g.x.shape[1], g.x.shape[2], g.x.shape[3]}, "the shape of x");
  check_device("y", g.y, "x", g.x);
  check_angles("cos", g.cos, g.x);
  check_angles("sin", g.sin, g.x);
  check_shape("sin", g.sin, {g.cos.shape[0], g.cos.shape[1], 0, 0}, "the shape of cos");
  const int64_t headdim = g.x.shape[ndim - 1];
  if (headdim < 1 || headdim > kMostHeaddim) invalid(text("headdim of x is ", headdim, "; allowed: 1 to ", kMostHeaddim));
  if (g.cos.shape[1] > headdim / 2)
    invalid(text("cos has the shape ", shape_text(g.cos), ", a rotary_dim of 2 * ", g.cos.shape[1], ", and headdim is ", headdim,
                 "; rotary_dim is at most headdim"));
  if (packed) check_cu_seqlens("cu_seqlens", g.cu_seqlens, "x", g.x);
  if (g.offsets.ndim != 0) {
    check_index_dtype("offsets", g.offsets);
    if (g.offset != 0) invalid(text("offset is ", g.offset, ", and offsets are given; leave one of them out"));
    check_list("offsets", g.offsets, "(batch)", "x", g.x);
    check_shape_of("offsets", g.offsets, {sequences_of(g)}, packed ? "an offset for each sequence" : "from x's batch");
  }
  const RotarySizes sizes{packed ? 1 : g.x.shape[0],       g.x.shape[ndim - 3], g.x.shape[ndim - 2], g.cos.shape[0], static_cast<int>(headdim),
                          static_cast<int>(g.cos.shape[1])};
  int64_t rows = 0;
  if (__builtin_mul_overflow(sizes.batch, sizes.seqlen, &rows) || __builtin_mul_overflow(rows, sizes.heads, &rows))
    invalid(text("x has the shape ", shape_text(g.x), "; batch, seqlen and nheads together must be at most 2^63 - 1. Split the batch"));
  check_memory("x", g.x);
  check_memory("y", g.y);
  check_apart("y", g.y, "x", g.x, true);
  check_apart("y", g.y, "cos", g.cos, false);
  check_apart("y", g.y, "sin", g.sin, false);
  if (packed) check_apart("y", g.y, "cu_seqlens", g.cu_seqlens, false);
  if (g.offsets.ndim != 0) check_apart("y", g.y, "offsets", g.offsets, false);
  check_stream(g.stream, static_cast<Device>(g.x.device_type));
  return sizes;
}

// Lists that the host can read.
void check_values(const fattn_rotary_problem& g, const RotarySizes& sizes) {
  const bool packed = g.cu_seqlens.ndim != 0, offsets = g.offsets.ndim != 0;
  if (!packed && !offsets) return check_positions("offset", -1, g.offset, sizes.batch > 0 ? sizes.seqlen : 0, sizes.positions);
  if (packed) check_cu_seqlens_values("cu_seqlens", g.cu_seqlens, "x", sizes.seqlen);
  for (int64_t n = 0; n < sequences_of(g); ++n) {
    const int64_t rows = packed ? number_at(g.cu_seqlens, n + 1) - number_at(g.cu_seqlens, n) : sizes.seqlen;
    check_positions(offsets ? "offsets" : "offset", offsets ? n : -1, offset_of(g, n), rows, sizes.positions);
  }
}

}  // namespace

int64_t position_of(const fattn_rotary_problem& g, int64_t batch, int64_t row) {
  if (g.cu_seqlens.ndim == 0) return offset_of(g, batch) + row;
  const int64_t sequence = sequence_of(g.cu_seqlens, row);
  return sequence < sequences_of(g) ? offset_of(g, sequence) + row - number_at(g.cu_seqlens, sequence) : -1;
}

void rotary(const fattn_rotary_problem& problem) {
  const RotarySizes sizes = check(problem);
  const Backend backend = backend_for(problem.backend, problem.x);
  if (backend == Backend::kCpu) choose_isa(static_cast<Isa>(problem.cpu_isa), detected_cpu());
  const bool has_lists = problem.cu_seqlens.ndim != 0 || problem.offsets.ndim != 0;
  if (backend != Backend::kCuda || !has_lists) check_values(problem, sizes);
  if (sizes.batch * sizes.seqlen * sizes.heads == 0) return;
  switch (backend) {
    case Backend::kReference: return reference::rotary(problem, sizes);
    case Backend::kCuda: return cuda::rotary(problem, sizes);
    default: return cpu::rotary(problem, sizes);
  }
}

namespace cpu {

void rotary(const fattn_rotary_problem& g, const RotarySizes& sizes) {
  const RowKernels& kernels = kernels_of(choose_isa(static_cast<Isa>(g.cpu_isa), detected_cpu()));
  const Places x = places_of_rows(g.x), y = places_of_rows(g.y);
  const auto bytes = [](const fattn_tensor& t, int64_t element) -> char* {
    return t.data ? static_cast<char*>(t.data) + element * static_cast<int64_t>(size_of(static_cast<DType>(t.dtype))) : nullptr;
  };
  const int64_t row_bytes = 2 * sizes.heads * sizes.headdim * static_cast<int64_t>(size_of(static_cast<DType>(g.x.dtype)));
  by_rows(g, "rotary", sizes.batch * sizes.seqlen, row_bytes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const Row row{i / sizes.seqlen, i % sizes.seqlen, 0};
      const int64_t position = position_of(g, row.batch, row.row);
      const bool turns = position >= 0 && sizes.half > 0;  // without pairs cos and sin are empty: no memory, and strides of any size
      kernels.rotary({.x = bytes(g.x, rows::offset_of(x, row)),
                      .y = bytes(g.y, rows::offset_of(y, row)),
                      .cos = turns ? bytes(g.cos, position * g.cos.strides[0]) : nullptr,
                      .sin = turns ? bytes(g.sin, position * g.sin.strides[0]) : nullptr,
                      .x_head_stride = x.head,
                      .y_head_stride = y.head,
                      .heads = sizes.heads,
                      .headdim = sizes.headdim,
                      .half = turns ? sizes.half : 0,
                      .dtype = g.x.dtype,
                      .y_dtype = g.y.dtype,
                      .cos_dtype = g.cos.dtype,
                      .sin_dtype = g.sin.dtype,
                      .interleaved = g.interleaved != 0,
                      .inverse = g.inverse != 0});
    }
  });
}

}  // namespace cpu

}  // namespace fattn::core::rows
