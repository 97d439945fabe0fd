// Fuzzes merge, rotary embeddings and append of the C ABI: any bytes as a problem are refused with a status and a message, or computed inside their
// tensors.
//
// Every tensor that is computed on gets memory of exactly its extent, so that the sanitizer sees one element too many.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <vector>

#include "bytes.h"
#include "fattn/fattn.h"

namespace {

// Tensors, and memory of exactly their extent in random bits: NaN, infinities and subnormals among them. From the first on that is too large none has
// memory, so that the call is refused.
class Tensors {
 public:
  explicit Tensors(Bytes& in) : in_(in) {}

  fattn_tensor make(int32_t dtype, std::initializer_list<int64_t> shape) {
    fattn_tensor t{};
    t.dtype = in_.mostly(dtype);
    t.ndim = in_.mostly(static_cast<int32_t>(shape.size()));
    t.device_type = in_.mostly<int32_t>(FATTN_DEVICE_CPU);
    t.device_index = in_.mostly<int32_t>(0);
    int dimension = 0;
    for (const int64_t n : shape) t.shape[dimension++] = in_.mostly(n);
    const uint8_t layout = in_.byte() % 8;
    int order[4] = {0, 1, 2, 3};
    if (layout == 2) order[1] = 2, order[2] = 1;
    uint64_t stride = 1;
    for (int i = static_cast<int>(shape.size()); i-- > 0;) {
      const int d = shape.size() == 4 ? order[i] : i;
      t.strides[d] = in_.mostly(static_cast<int64_t>(stride));
      if (layout == 3 && d == 0) t.strides[d] = 0;  // expanded
      stride *= static_cast<uint64_t>(t.shape[d] > 0 ? t.shape[d] : 1);
      stride += layout == 1 ? in_.byte() % 4 : 0;
    }
    give_memory(t);
    return t;
  }

 private:
  void give_memory(fattn_tensor& t) {
    constexpr int64_t limit = 1 << 14;
    int64_t elements = 1;
    bool empty = t.ndim == 0;
    for (int i = 0; i < t.ndim && i < 4; ++i) {
      if (t.shape[i] < 0 || t.shape[i] > limit || t.strides[i] < 0 || t.strides[i] > limit) complete_ = false;
      if (!complete_) return;
      empty = empty || t.shape[i] == 0;
      elements += t.shape[i] == 0 ? 0 : (t.shape[i] - 1) * t.strides[i];
    }
    if (t.ndim < 0 || t.ndim > 4 || elements > limit || element_size(t.dtype) == 0) complete_ = false;
    if (!complete_ || empty) return;
    const auto bytes = static_cast<size_t>(elements * element_size(t.dtype));
    blocks_.emplace_back(static_cast<uint8_t*>(std::malloc(bytes)), std::free);
    auto state = in_.raw<uint32_t>();
    for (size_t i = 0; i < bytes; ++i) {
      state = state * 1664525u + 1013904223u;
      blocks_.back()[i] = static_cast<uint8_t>(state >> 24);
    }
    t.data = blocks_.back().get();
  }
  Bytes& in_;
  bool complete_ = true;
  std::vector<std::unique_ptr<uint8_t[], decltype(&std::free)>> blocks_;
};

template <class Problem>
Problem begun(Bytes& in) {
  Problem p{};
  p.struct_size = in.mostly<uint32_t>(sizeof p);
  p.abi_version = in.mostly<uint32_t>(FATTN_ABI_VERSION);
  p.backend = in.mostly<int32_t>(in.byte() % 3);
  p.cpu_isa = in.mostly<int32_t>(in.byte() % 4);
  p.num_threads = in.mostly<int32_t>(in.byte() % 4);
  return p;
}

void require_answer(fattn_status status) {
  require(status >= FATTN_OK && status <= FATTN_ERROR_COMPILE && status != FATTN_ERROR_INTERNAL);  // bad input is never the library's own defect
  require(status == FATTN_OK || fattn_last_error()[0] != '\0');
}

void fuzz_merge(Bytes& in) {
  constexpr int32_t dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
  auto p = begun<fattn_merge_problem>(in);
  Tensors tensors(in);
  const int64_t batch = in.byte() % 3, seqlen = in.byte() % 5, heads = in.byte() % 4, headdim = 1 + in.byte() % 20;
  const bool packed = in.byte() % 2, f64 = in.byte() % 4 == 3, backward = in.byte() % 2;
  const auto rows = [&] {
    const int32_t dtype = f64 ? FATTN_F64 : dtypes[in.byte() % 3];
    return packed ? tensors.make(dtype, {seqlen, heads, headdim}) : tensors.make(dtype, {batch, seqlen, heads, headdim});
  };
  const auto lse = [&] {
    const int32_t dtype = f64 ? FATTN_F64 : FATTN_F32;
    return packed ? tensors.make(dtype, {heads, seqlen}) : tensors.make(dtype, {batch, heads, seqlen});
  };
  std::vector<fattn_merge_part> parts(in.byte() % 5);
  for (fattn_merge_part& part : parts) {
    part.o = rows();
    part.lse = lse();
    if (backward && in.byte() % 4 < 3) part.dout = rows();
    if (backward && in.byte() % 4 < 3) part.dlse = lse();
  }
  p.nparts = static_cast<int32_t>(parts.size());
  p.parts = in.byte() % 32 == 31 ? nullptr : parts.data();
  if (backward) {
    p.dout = rows();
    if (in.byte() % 2) p.dlse = lse();
    return require_answer(fattn_merge_backward(&p));
  }
  p.o = in.byte() % 4 == 3 && !parts.empty() ? parts[0].o : rows();
  if (in.byte() % 2) p.lse = in.byte() % 4 == 3 && !parts.empty() ? parts[0].lse : lse();
  require_answer(fattn_merge(&p));
}

void fuzz_rotary(Bytes& in) {
  constexpr int32_t dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16, FATTN_F64};
  auto p = begun<fattn_rotary_problem>(in);
  Tensors tensors(in);
  const int64_t batch = in.byte() % 3, seqlen = in.byte() % 5, heads = in.byte() % 4, headdim = 1 + in.byte() % 20, positions = in.byte() % 12;
  const int64_t half = in.byte() % (headdim / 2 + 1);
  const bool packed = in.byte() % 2;
  const int32_t dtype = dtypes[in.byte() % 4];
  const auto rows = [&] { return packed ? tensors.make(dtype, {seqlen, heads, headdim}) : tensors.make(dtype, {batch, seqlen, heads, headdim}); };
  p.interleaved = in.mostly<int32_t>(in.byte() % 2);
  p.inverse = in.mostly<int32_t>(in.byte() % 2);
  p.reserved = in.mostly<int32_t>(0);
  p.x = rows();
  p.y = in.byte() % 4 == 3 ? p.x : rows();
  p.cos = tensors.make(in.byte() % 2 ? dtype : FATTN_F32, {positions, half});
  p.sin = tensors.make(in.byte() % 2 ? dtype : FATTN_F32, {positions, half});
  if (packed) p.cu_seqlens = tensors.make(FATTN_I32, {batch + 1});
  const bool has_offsets = in.byte() % 2;
  if (has_offsets) p.offsets = tensors.make(in.byte() % 2 ? FATTN_I32 : FATTN_I64, {batch});
  p.offset = in.mostly<int64_t>(has_offsets ? 0 : in.byte() % 8);
  // Numbers of lists, which random bits rarely hit.
  if (p.cu_seqlens.dtype == FATTN_I32 && p.cu_seqlens.ndim == 1 && p.cu_seqlens.data)
    for (int64_t n = 0, at = 0; n < p.cu_seqlens.shape[0]; ++n) {
      if (in.byte() % 16 < 15) static_cast<int32_t*>(p.cu_seqlens.data)[n * p.cu_seqlens.strides[0]] = static_cast<int32_t>(at);
      at += in.byte() % 3;
    }
  if (p.offsets.ndim == 1 && p.offsets.data)
    for (int64_t n = 0; n < p.offsets.shape[0]; ++n) {
      const int64_t to = n * p.offsets.strides[0], offset = in.byte() % 8;
      if (in.byte() % 16 == 15) continue;
      if (p.offsets.dtype == FATTN_I64) static_cast<int64_t*>(p.offsets.data)[to] = offset;
      if (p.offsets.dtype == FATTN_I32) static_cast<int32_t*>(p.offsets.data)[to] = static_cast<int32_t>(offset);
    }
  require_answer(fattn_rotary(&p));
}

// Numbers of a list, which random bits rarely hit: each mostly `number(i)`.
template <class Number>
void set_list(Bytes& in, const fattn_tensor& t, const Number& number) {
  if (t.ndim != 1 || !t.data) return;
  for (int64_t n = 0; n < t.shape[0]; ++n) {
    const int64_t to = n * t.strides[0], usual = number(n);
    if (in.byte() % 32 == 31) continue;
    if (t.dtype == FATTN_I64) static_cast<int64_t*>(t.data)[to] = usual;
    if (t.dtype == FATTN_I32) static_cast<int32_t*>(t.data)[to] = static_cast<int32_t>(usual);
  }
}

void fuzz_append(Bytes& in) {
  constexpr int32_t dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
  auto p = begun<fattn_append_problem>(in);
  Tensors tensors(in);
  const int64_t batch = in.byte() % 3, seqlen_new = in.byte() % 4, seqlen_q = in.byte() % 4, heads_k = in.byte() % 3, heads = in.byte() % 4;
  const int64_t headdim = 1 + in.byte() % 12, headdim_v = 1 + in.byte() % 12, half = in.byte() % (headdim / 2 + 1), rows = 1 + in.byte() % 6;
  const uint8_t what = in.byte();
  const bool packed = what & 1, packed_q = what & 2, paged = what & 4, indexed = what & 8 && !paged, turned = what & 16,
             queries = turned && what & 32;
  const bool f64 = in.byte() % 4 == 3;
  const auto dtype = [&] { return f64 ? FATTN_F64 : dtypes[in.byte() % 3]; };
  const auto index = [&] { return in.byte() % 2 ? FATTN_I32 : FATTN_I64; };
  p.interleaved = in.mostly<int32_t>(in.byte() % 2);
  p.q_positions = in.mostly<int32_t>(in.byte() % 3);
  p.reserved = in.mostly<int32_t>(0);
  p.k = packed ? tensors.make(dtype(), {batch * seqlen_new, heads_k, headdim}) : tensors.make(dtype(), {batch, seqlen_new, heads_k, headdim});
  p.v = packed ? tensors.make(dtype(), {batch * seqlen_new, heads_k, headdim_v}) : tensors.make(dtype(), {batch, seqlen_new, heads_k, headdim_v});
  const int64_t columns = 8 / rows + 1, pages = batch * columns, entries = paged ? pages : indexed ? batch + 1 : batch, longest = paged ? rows : 8;
  p.k_cache = tensors.make(dtype(), {entries, longest, heads_k, headdim});
  p.v_cache = tensors.make(dtype(), {entries, longest, heads_k, headdim_v});
  if (packed) p.cu_seqlens_new = tensors.make(FATTN_I32, {batch + 1});
  const bool lengths = in.byte() % 2;
  if (lengths) p.cache_seqlens = tensors.make(index(), {batch});
  p.cache_seqlen = in.mostly<int64_t>(lengths ? 0 : in.byte() % 6);
  if (indexed) p.cache_batch_idx = tensors.make(index(), {batch});
  if (paged) p.block_table = tensors.make(index(), {batch, columns});
  if (turned) {
    p.cos = tensors.make(dtype(), {14, half});
    p.sin = tensors.make(dtype(), {14, half});
    if (in.byte() % 2) p.positions = tensors.make(index(), {batch});
  }
  if (queries) {
    const int32_t of_q = dtype();
    const auto make = [&] {
      return packed_q ? tensors.make(of_q, {batch * seqlen_q, heads, headdim}) : tensors.make(of_q, {batch, seqlen_q, heads, headdim});
    };
    p.q = make();
    p.q_out = in.byte() % 4 == 3 ? p.q : make();
    if (packed_q) p.cu_seqlens_q = tensors.make(FATTN_I32, {batch + 1});
  }
  if (in.byte() % 2) p.seqused_k = tensors.make(FATTN_I32, {batch});
  if (in.byte() % 2) p.status = tensors.make(FATTN_I32, {2});
  set_list(in, p.cu_seqlens_new, [&](int64_t n) { return n * seqlen_new - (n > 0 && in.byte() % 2 ? 1 : 0); });
  set_list(in, p.cu_seqlens_q, [&](int64_t n) { return n * seqlen_q; });
  set_list(in, p.cache_seqlens, [&](int64_t) { return in.byte() % 6; });
  set_list(in, p.cache_batch_idx, [&](int64_t n) { return batch - n; });
  set_list(in, p.positions, [&](int64_t) { return 3 + in.byte() % 8; });
  if (p.block_table.ndim == 2 && p.block_table.data && (p.block_table.dtype == FATTN_I32 || p.block_table.dtype == FATTN_I64))
    for (int64_t i = 0; i < p.block_table.shape[0] * p.block_table.shape[1]; ++i) {
      const int64_t to = i / p.block_table.shape[1] * p.block_table.strides[0] + i % p.block_table.shape[1] * p.block_table.strides[1];
      const int64_t page = in.byte() % 32 == 31 ? in.raw<int64_t>() : pages - 1 - i;
      if (p.block_table.dtype == FATTN_I64) static_cast<int64_t*>(p.block_table.data)[to] = page;
      if (p.block_table.dtype == FATTN_I32) static_cast<int32_t*>(p.block_table.data)[to] = static_cast<int32_t>(page);
    }
  require_answer(fattn_append(&p));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in(data, size, 32);
  switch (in.byte() % 4) {
    case 0: fuzz_rotary(in); break;
    case 1: fuzz_merge(in); break;
    default: fuzz_append(in);
  }
  return 0;
}
