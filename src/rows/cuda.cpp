#include "rows/cuda.h"

#include <algorithm>
#include <initializer_list>
#include <limits>

#include "device/cuda_device.h"
#include "device_abi/rows_params.h"
#include "jit/kernel_table.h"
#include "plan/architectures.h"
#include "problem/overlap.h"
#include "rows/append.h"
#include "rows/checks.h"
#include "rows/rows.h"
#include "shared/text.h"

namespace fattn::core::rows::cuda {
namespace {

using core::cuda::KernelKind;

RowPlaces places(const Places& s) { return {s.batch, s.row, s.head}; }
RowNumbers numbers(const fattn_tensor& t) {
  if (t.ndim == 0) return {};
  return {t.data, t.ndim == 2 ? RowPlaces{0, t.strides[0], 0} : places(places_of_rows(t)), t.dtype};
}
RowLse lse(const fattn_tensor& t) {
  if (t.ndim == 0) return {};
  return {t.data, places(places_of_lse(t)), t.dtype == FATTN_F64 ? 1 : 0};
}

// Append stands between what makes keys and a step of decode, which waits for little else.
bool comes_up_early(const RowsKey& key) { return key.kind == KernelKind::kAppend && key.arch >= 90; }

// Whether every row begins at a multiple of four elements' bytes.
bool in_fours(const fattn_tensor& t) {
  if (t.ndim == 0) return true;
  const size_t bytes = 4 * size_of(static_cast<DType>(t.dtype));
  if (reinterpret_cast<uintptr_t>(t.data) % bytes != 0) return false;
  for (int i = 0; i + 1 < t.ndim; ++i)
    if (t.shape[i] > 1 && t.strides[i] % 4 != 0) return false;
  return true;
}

// The device of a call, usable and current.
class OnDevice {
 public:
  explicit OnDevice(const fattn_tensor& first) : device_(usable(first.device_index)), scope_(device_.current()) {
    const CudaDeviceInfo& gpu = device_.info();
    const Architecture* known = architecture_for(gpu.capability());
    if (!known)
      throw Error(ErrorCode::kUnsupported,
                  text("CUDA device ", gpu.index, " (", gpu.name, ", compute capability ", gpu.major, ".", gpu.minor,
                       "): the kernels are for capability 7.5, 8.x, 9.0, 10.x and 12.x, of Jetson boards for Orin (8.7) alone. "
                       "Use another device, or copy the tensors to the host"));
    arch_ = known->capability;
  }
  // Memory that a kernel touches: that of the host would be a fault that ends all work of the process there.
  void require(const char* name, const fattn_tensor& t) const {
    if (t.ndim != 0 && span_bytes(extent_of(t)) > 0) device_.require_on_device(t.data, name);
  }
  // A CTA counts the elements of a row's heads in 32 bits.
  static void require_heads(const char* name, int64_t heads, int headdim) {
    if (heads > std::numeric_limits<int32_t>::max() / headdim)
      throw Error(ErrorCode::kUnsupported, text(name, " has ", heads, " heads of ", headdim,
                                                " dimensions; backend cuda takes up to 2^31 - 1 elements of a row. Split the heads"));
  }
  template <class Params>
  void launch(KernelKind kind, int unit, int64_t ctas, Params& params, void* stream) const {
    if (ctas > std::numeric_limits<int32_t>::max())
      throw Error(ErrorCode::kUnsupported,
                  text("backend cuda computes rows by up to 2^31 - 1 CTAs, and these rows take ", ctas, "; split the batch"));
    const RowsKey key{.kind = kind, .arch = arch_, .unit = unit};
    const jit::Loaded& code =
        jit::kernel_table().get(device_, jit::key_of_pod(key), [](const jit::KernelKey& k) { return rows_request(jit::pod_of_key<RowsKey>(k)); });
    CudaLaunch shape;
    shape.grid_x = static_cast<unsigned>(ctas);
    shape.block_x = kRowsThreads;
    shape.early = comes_up_early(key);
    void* parameters[] = {&params};
    device_.launch(code.function, shape, static_cast<CUstream>(stream), parameters, code.name.c_str());
  }

 private:
  static CudaDevice& usable(int index) {
    CudaDevice& device = cuda_device(index);
    device.require_usable();
    return device;
  }
  CudaDevice& device_;
  const CudaCurrent scope_;
  int arch_ = 0;
};

template <class Params>
void set_sizes(Params& params, const fattn_merge_problem& g, const MergeSizes& sizes) {
  params.rows = sizes.batch * sizes.seqlen * sizes.heads;
  params.seqlen = sizes.seqlen;
  params.heads = sizes.heads;
  params.headdim = sizes.headdim;
  params.nparts = g.nparts;
  for (int i = 0; i < g.nparts; ++i) params.parts[i] = {numbers(g.parts[i].o), lse(g.parts[i].lse)};
}

}  // namespace

jit::Request rows_request(const RowsKey& key) {
  struct Kernel {
    const char *header, *function, *params, *what;
  };
  const Kernel kernel = key.kind == KernelKind::kMerge           ? Kernel{"merge", "merge", "MergeParams", "merge"}
                        : key.kind == KernelKind::kMergeBackward ? Kernel{"merge", "merge_backward", "MergeBackwardParams", "gradients of merge"}
                        : key.kind == KernelKind::kRotary        ? Kernel{"rotary", "rotary", "RotaryRowParams", "rotary embeddings"}
                                                                 : Kernel{"append", "append", "AppendParams", "append to a cache"};
  jit::Request request;
  request.entry = text("fattn_", kernel.function);
  request.arch = key.arch;
  request.source = text("// ", kernel.what, ", ", key.unit, key.unit == 1 ? " element" : " elements", " at once\n#include \"kernels/rows/",
                        kernel.header, ".h\"\nstruct Spec {\n  static constexpr int kUnit = ", key.unit, ";\n",
                        comes_up_early(key) ? "  static constexpr bool kDependent = true;\n" : "",
                        "};\nextern \"C\" __global__ void __launch_bounds__(", kRowsThreads, ") ", request.entry,
                        "(const __grid_constant__ fattn::", kernel.params, " p) {\n  fattn::rows::", kernel.function, "<Spec>(p);\n}\n");
  return request;
}

void merge(const fattn_merge_problem& g, const MergeSizes& sizes, bool backward) {
  if (g.nparts > kMergeParts)
    throw Error(ErrorCode::kUnsupported, text("nparts is ", g.nparts, "; backend cuda merges up to ", kMergeParts,
                                              " parts in a call. Merge as many into o and lse in fp32, then these as one part with the others"));
  const OnDevice device(g.parts[0].o);
  bool fours = sizes.headdim % 4 == 0;
  const auto take = [&](const char* name, const fattn_tensor& t, bool of_headdim) {
    device.require(name, t);
    fours = fours && (!of_headdim || in_fours(t));
  };
  for (int i = 0; i < g.nparts; ++i) {
    const fattn_merge_part& part = g.parts[i];
    take(PartName(i, "o"), part.o, true);
    take(PartName(i, "lse"), part.lse, false);
    if (!backward) continue;
    take(PartName(i, "dout"), part.dout, true);
    take(PartName(i, "dlse"), part.dlse, false);
  }
  constexpr int64_t kWarps = kRowsThreads / 32;  // a row each
  const int64_t rows = sizes.batch * sizes.seqlen * sizes.heads, ctas = rows / kWarps + (rows % kWarps != 0 ? 1 : 0);
  if (!backward) {
    take("o", g.o, true);
    take("lse", g.lse, false);
    MergeParams params{};
    set_sizes(params, g, sizes);
    params.merged = {numbers(g.o), lse(g.lse)};
    return device.launch(KernelKind::kMerge, fours ? 4 : 1, ctas, params, g.stream);
  }
  take("dout", g.dout, true);
  take("dlse", g.dlse, false);
  MergeBackwardParams params{};
  set_sizes(params, g, sizes);
  params.dout = numbers(g.dout);
  params.dlse = lse(g.dlse);
  for (int i = 0; i < g.nparts; ++i) {
    params.gradients[i] = {numbers(g.parts[i].dout), lse(g.parts[i].dlse)};
    if (g.parts[i].dlse.ndim != 0) params.want_dlse = 1;
  }
  device.launch(KernelKind::kMergeBackward, fours ? 4 : 1, ctas, params, g.stream);
}

void rotary(const fattn_rotary_problem& g, const RotarySizes& sizes) {
  const OnDevice device(g.x);
  device.require("x", g.x);
  device.require("y", g.y);
  device.require("cos", g.cos);
  device.require("sin", g.sin);
  device.require("offsets", g.offsets);
  device.require("cu_seqlens", g.cu_seqlens);
  OnDevice::require_heads("x", sizes.heads, sizes.headdim);
  RotaryRowParams params{};
  params.x = numbers(g.x);
  params.y = numbers(g.y);
  params.angles = {numbers(g.cos), numbers(g.sin), sizes.positions, sizes.half, g.interleaved, g.inverse};
  params.cu_seqlens = g.cu_seqlens.ndim != 0 ? static_cast<const int*>(g.cu_seqlens.data) : nullptr;
  params.cu_seqlens_stride = g.cu_seqlens.strides[0];
  params.sequences = g.cu_seqlens.ndim != 0 ? static_cast<int>(g.cu_seqlens.shape[0] - 1) : 0;
  params.offsets = g.offsets.ndim != 0 ? g.offsets.data : nullptr;
  params.offsets_stride = g.offsets.strides[0];
  params.wide_offsets = g.offsets.dtype == FATTN_I64 ? 1 : 0;
  params.offset = g.offset;
  params.seqlen = sizes.seqlen;
  params.heads = sizes.heads;
  params.headdim = sizes.headdim;
  const bool fours = sizes.half % 4 == 0 && in_fours(g.x) && in_fours(g.y);
  device.launch(KernelKind::kRotary, fours ? 4 : 1, sizes.batch * sizes.seqlen, params, g.stream);
}

namespace {

RowList numbers_of(const fattn_tensor& t) {
  if (t.ndim == 0) return {};
  return {t.data, t.strides[0], t.dtype == FATTN_I64 ? 1 : 0};
}
AppendRows rows_of(const fattn_tensor& cu_seqlens, int64_t rows, int64_t all, int64_t heads) {
  return {cu_seqlens.ndim != 0 ? static_cast<const int*>(cu_seqlens.data) : nullptr, cu_seqlens.strides[0], rows, all, heads};
}
int* output_of(const fattn_tensor& t) { return t.ndim != 0 ? static_cast<int*>(t.data) : nullptr; }

AppendParams params_of(const fattn_append_problem& g, const AppendSizes& sizes) {
  AppendParams params{};
  params.k = numbers(g.k);
  params.v = numbers(g.v);
  params.q = numbers(g.q);
  params.k_cache = numbers(g.k_cache);
  params.v_cache = numbers(g.v_cache);
  params.q_out = numbers(g.q_out);
  params.angles = {numbers(g.cos), numbers(g.sin), sizes.positions, sizes.half, g.interleaved, 0};
  params.of_new = rows_of(g.cu_seqlens_new, sizes.rows_new, sizes.all_new(), sizes.heads_k);
  params.of_q = rows_of(g.cu_seqlens_q, sizes.rows_q, sizes.all_queries(), sizes.heads);
  params.lengths = numbers_of(g.cache_seqlens);
  params.entries = numbers_of(g.cache_batch_idx);
  params.positions = numbers_of(g.positions);
  params.table = numbers_of(g.block_table);
  params.table_column_stride = g.block_table.strides[1];
  params.paged = g.block_table.ndim != 0 ? 1 : 0;
  params.length = g.cache_seqlen;
  params.batch = sizes.batch;
  params.cache_entries = sizes.cache_entries;
  params.cache_rows = sizes.cache_rows;
  params.room = sizes.room;
  params.seqused_k = output_of(g.seqused_k);
  params.status = output_of(g.status);
  params.seqused_k_stride = g.seqused_k.strides[0];
  params.status_stride = g.status.strides[0];
  params.headdim = sizes.headdim;
  params.headdim_v = sizes.headdim_v;
  params.turns = g.cos.ndim != 0 ? 1 : 0;
  params.queries_last = g.q_positions == FATTN_QUERIES_LAST ? 1 : 0;
  params.queries_together = g.q_positions == FATTN_QUERIES_TOGETHER ? 1 : 0;
  return params;
}

}  // namespace

void append(const fattn_append_problem& g, const AppendSizes& sizes) {
  const bool lists = g.seqused_k.ndim != 0 || g.status.ndim != 0;
  const int64_t ctas = 2 * sizes.all_new() + sizes.all_queries() + (lists ? 1 : 0);
  if (ctas == 0) return;
  const OnDevice device(g.k);
  bool fours = sizes.half % 4 == 0 && sizes.headdim % 4 == 0 && sizes.headdim_v % 4 == 0;
  for (const fattn_tensor* t : {&g.k, &g.v, &g.k_cache, &g.v_cache, &g.q, &g.q_out}) fours = fours && in_fours(*t);
  for (const auto& [name, t] : inputs_of(g)) device.require(name, *t);
  for (const auto& [name, t] : outputs_of(g)) device.require(name, *t);
  OnDevice::require_heads("k", sizes.heads_k, std::max(sizes.headdim, sizes.headdim_v));
  OnDevice::require_heads("q", sizes.heads, sizes.headdim);
  if (g.block_table.ndim != 0 && sizes.room > std::numeric_limits<int32_t>::max())
    throw Error(ErrorCode::kUnsupported,
                text("block_table has room for ", sizes.room, " keys of a sequence; backend cuda takes up to 2^31 - 1. Give fewer columns"));
  AppendParams params = params_of(g, sizes);
  device.launch(KernelKind::kAppend, fours ? 4 : 1, ctas, params, g.stream);
}

}  // namespace fattn::core::rows::cuda
