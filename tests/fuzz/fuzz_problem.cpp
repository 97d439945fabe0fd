// Fuzzes the C ABI: any bytes as a problem are refused with a status and a message, or computed inside their tensors.
//
// Every tensor that is computed on gets memory of exactly its extent, so that the sanitizer sees one element too many.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "bytes.h"
#include "fattn/fattn.h"

namespace {

fattn_tensor tensor(Bytes& in, int32_t dtype, std::initializer_list<int64_t> shape) {
  fattn_tensor t{};
  t.dtype = in.mostly(dtype);
  t.ndim = in.mostly(static_cast<int32_t>(shape.size()));
  t.device_type = in.mostly<int32_t>(FATTN_DEVICE_CPU);
  t.device_index = in.mostly<int32_t>(0);
  int dimension = 0;
  for (int64_t n : shape) t.shape[dimension++] = in.mostly(n);
  const uint8_t layout = in.byte() % 8;
  const int64_t padding = layout == 1 ? in.byte() % 4 : 0;
  int order[4] = {0, 1, 2, 3};
  if (layout == 2) order[1] = 2, order[2] = 1;  // (batch, heads, seqlen, headdim)
  uint64_t stride = 1;
  for (int i = static_cast<int>(shape.size()); i-- > 0;) {
    const int d = order[i];
    t.strides[d] = in.mostly(static_cast<int64_t>(stride));
    if (layout == 3 && d == 0) t.strides[d] = 0;  // expanded
    stride *= static_cast<uint64_t>(t.shape[d] > 0 ? t.shape[d] : 1);
    stride += static_cast<uint64_t>(padding);
  }
  return t;
}

// The bytes from the first element to the last; -1 if that is more than a fuzzer wants to allocate.
int64_t extent(const fattn_tensor& t) {
  if (t.ndim < 0 || t.ndim > 4 || element_size(t.dtype) == 0) return -1;
  int64_t elements = 1;
  constexpr int64_t limit = 1 << 16;
  for (int i = 0; i < t.ndim; ++i) {
    if (t.shape[i] < 0 || t.shape[i] > limit || t.strides[i] < 0 || t.strides[i] > limit) return -1;
    if (t.shape[i] == 0) return 0;
    elements += (t.shape[i] - 1) * t.strides[i];
    if (elements > limit) return -1;
  }
  return t.ndim == 0 ? 0 : elements * element_size(t.dtype);
}

// About 4096 multiplications: what the reference does in well under a millisecond.
bool tiny(const fattn_problem& p) {
  double work = 1;
  for (int64_t n : {p.q.shape[0], p.q.shape[1], p.k.shape[1], p.q.shape[2], p.q.shape[3] + p.v.shape[3]}) work *= n > 0 ? static_cast<double>(n) : 1;
  return work <= 1 << 17;
}

class Memory {
 public:
  // Random bits: NaN, infinities and subnormals among them. False if the tensor is too large.
  bool give(fattn_tensor& t, Bytes& in) {
    const int64_t bytes = extent(t);
    if (bytes < 0) return false;
    if (bytes == 0) return true;
    // Exactly the extent, not rounded up; malloc aligns it for every dtype.
    blocks_.emplace_back(static_cast<uint8_t*>(std::malloc(static_cast<size_t>(bytes))), std::free);
    uint8_t* data = blocks_.back().get();
    uint32_t state = in.raw<uint32_t>();
    for (int64_t i = 0; i < bytes; ++i) {
      state = state * 1664525u + 1013904223u;
      data[i] = static_cast<uint8_t>(state >> 24);
    }
    t.data = data;
    return true;
  }

 private:
  std::vector<std::unique_ptr<uint8_t, decltype(&std::free)>> blocks_;
};

struct Sequences {
  fattn_tensor* first;  // where they begin
  int64_t rows, most;   // of their tensor, of one of them
};

fattn_problem problem(Bytes& in) {
  fattn_problem p{};
  p.struct_size = in.mostly<uint32_t>(sizeof p);
  p.abi_version = in.mostly<uint32_t>(FATTN_ABI_VERSION);
  p.pass = in.mostly<int32_t>(in.byte() % 2);
  p.backend = in.mostly<int32_t>(in.byte() % 3);
  p.algorithm = in.mostly<int32_t>(in.byte() % 5);
  p.causal = in.mostly<int32_t>(in.byte() % 2);
  p.has_softmax_scale = in.mostly<int32_t>(in.byte() % 2);
  p.cpu_isa = in.mostly<int32_t>(in.byte() % 7);
  p.softmax_scale = in.mostly(0.25);
  p.num_threads = in.mostly<int32_t>(in.byte() % 4);
  p.has_window = in.mostly<int32_t>(in.byte() % 2);
  p.window_left = in.mostly<int64_t>(in.byte() % 10 - 1);
  p.window_right = in.mostly<int64_t>(in.byte() % 10 - 1);
  p.softcap = in.mostly(in.byte() % 2 * 0.75);

  constexpr int32_t dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16, FATTN_F64};
  const int32_t dtype = dtypes[in.byte() % 4];
  const int64_t batch = in.byte() % 3, seqlen_q = in.byte() % 9, seqlen_k = in.byte() % 9, nheads_k = 1 + in.byte() % 2;
  const int64_t nheads = nheads_k * (1 + in.byte() % 3), headdim = 1 + in.byte() % 18, headdim_v = 1 + in.byte() % 18;
  const bool packed = in.byte() % 4 == 3;  // batch * seqlen rows, whose sequences have up to seqlen of them
  const auto queries = [&](int64_t width) {
    return packed ? tensor(in, dtype, {batch * seqlen_q, nheads, width}) : tensor(in, dtype, {batch, seqlen_q, nheads, width});
  };
  const auto keys = [&](int64_t width) {
    return packed ? tensor(in, dtype, {batch * seqlen_k, nheads_k, width}) : tensor(in, dtype, {batch, seqlen_k, nheads_k, width});
  };
  const auto lse = [&] {
    const int32_t of = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    return packed ? tensor(in, of, {nheads, batch * seqlen_q}) : tensor(in, of, {batch, nheads, seqlen_q});
  };
  p.q = queries(headdim);
  p.k = keys(headdim);
  p.v = keys(headdim_v);
  p.o = queries(headdim_v);
  if (packed) {
    p.cu_seqlens_q = tensor(in, FATTN_I32, {batch + 1});
    p.cu_seqlens_k = tensor(in, FATTN_I32, {batch + 1});
    p.max_seqlen_q = in.mostly(seqlen_q);
    p.max_seqlen_k = in.mostly(seqlen_k);
  }
  const uint8_t optional = in.byte();
  if (p.pass == FATTN_BACKWARD || optional % 2) p.lse = lse();
  if (optional % 8 == 7) p.weights = tensor(in, dtype, {batch, nheads, seqlen_q, seqlen_k});
  if (p.pass == FATTN_BACKWARD || optional % 16 == 15) {
    p.dout = queries(headdim_v);
    p.dq = queries(headdim);
    p.dk = keys(headdim);
    p.dv = keys(headdim_v);
  }
  if (in.byte() % 4 == 3) {
    p.document_q = packed ? tensor(in, FATTN_I32, {batch * seqlen_q}) : tensor(in, FATTN_I32, {batch, seqlen_q});
    p.document_k = packed ? tensor(in, FATTN_I32, {batch * seqlen_k}) : tensor(in, FATTN_I32, {batch, seqlen_k});
  }
  const uint8_t scores = in.byte();
  const auto pairs = [&](int32_t of) {
    const uint8_t one = in.byte();
    return tensor(in, of, {one % 2 ? 1 : batch, one / 2 % 2 ? 1 : nheads, one / 4 % 2 ? 1 : seqlen_q, seqlen_k});
  };
  if (scores % 2) p.seqused_k = tensor(in, FATTN_I32, {batch});
  if (scores / 2 % 2) p.alibi_slopes = in.byte() % 2 ? tensor(in, FATTN_F32, {nheads}) : tensor(in, FATTN_F32, {batch, nheads});
  if (scores / 4 % 2) p.bias = pairs(in.byte() % 2 ? FATTN_F32 : dtype);
  if (scores / 8 % 2) p.mask = pairs(FATTN_U8);
  if (scores / 16 % 2) p.dropout_state = tensor(in, FATTN_I64, {2});
  p.p_dropout = in.mostly(scores / 32 % 2 * 0.25);
  if (p.pass == FATTN_BACKWARD && scores / 64 % 2) p.dbias = pairs(in.byte() % 2 ? FATTN_F32 : dtype);
  if (p.pass == FATTN_BACKWARD && scores / 128 % 2) p.dlse = lse();
  if (in.byte() % 4 == 3) p.sinks = tensor(in, dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32, {nheads});
  if (p.sinks.ndim == 1 && p.pass == FATTN_BACKWARD) p.dsinks = tensor(in, p.sinks.dtype, {nheads});
  p.check = in.mostly<int32_t>(in.byte() % 3);
  p.batch_invariant = in.mostly<int32_t>(0);
  if (in.byte() % 4 == 3) p.status = tensor(in, FATTN_I32, {2});
  if (in.byte() % 4 == 3) {  // as many pages as keys have room in, of one key to three
    const int64_t page_size = 1 + in.byte() % 3, pages = batch * seqlen_k / page_size;
    p.k = tensor(in, dtype, {pages, page_size, nheads_k, headdim});
    p.v = tensor(in, dtype, {pages, page_size, nheads_k, headdim_v});
    p.block_table = tensor(in, FATTN_I32, {batch, in.byte() % 5});
    if (in.byte() % 4 < 3) p.cu_seqlens_k = {}, p.pass = FATTN_FORWARD;
    if (packed && in.byte() % 4 < 3) p.seqused_k = tensor(in, FATTN_I32, {batch});
  }
  return p;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in(data, size, 16);
  fattn_problem p = problem(in);
  char reason[256];
  std::memset(reason, 'x', sizeof reason);
  const size_t reason_size = in.byte() % (sizeof reason + 1);
  const fattn_status supported = fattn_supported(&p, reason, reason_size);
  require(supported >= FATTN_OK && supported <= FATTN_ERROR_INTERNAL);
  require(supported != FATTN_ERROR_INTERNAL);  // bad input is never the library's own defect
  if (reason_size > 0) require(std::memchr(reason, '\0', reason_size) != nullptr);
  if (supported != FATTN_OK) {
    require(fattn_last_error()[0] != '\0');
    return 0;
  }

  // The plan says the same as the question.
  fattn_plan* plan = nullptr;
  require(fattn_plan_create(&p, &plan) == FATTN_OK);
  fattn_plan_info info{};
  info.struct_size = sizeof info;
  require(fattn_plan_query(plan, &info) == FATTN_OK);
  fattn_plan_destroy(plan);
  if (!tiny(p) || info.workspace_bytes > size_t{1} << 28) return 0;

  Memory memory;
  for (fattn_tensor* t : {&p.q,
                          &p.k,
                          &p.v,
                          &p.o,
                          &p.lse,
                          &p.weights,
                          &p.dout,
                          &p.dq,
                          &p.dk,
                          &p.dv,
                          &p.seqused_k,
                          &p.alibi_slopes,
                          &p.bias,
                          &p.mask,
                          &p.dropout_state,
                          &p.dbias,
                          &p.dlse,
                          &p.cu_seqlens_q,
                          &p.cu_seqlens_k,
                          &p.document_q,
                          &p.document_k,
                          &p.status,
                          &p.sinks,
                          &p.dsinks,
                          &p.block_table})
    if (!memory.give(*t, in)) return 0;
  // Lengths are values, which random bits rarely hit: either all are in range or the call says which is not.
  const bool packed = p.cu_seqlens_q.ndim == 1, paged = p.block_table.ndim == 2;
  const auto number = [](const fattn_tensor& t, int64_t n) -> int32_t& { return static_cast<int32_t*>(t.data)[n * t.strides[0]]; };
  bool lengths_fit = true;
  for (const auto& [first, rows, most] :
       {Sequences{&p.cu_seqlens_q, p.q.shape[0], p.max_seqlen_q}, Sequences{&p.cu_seqlens_k, p.k.shape[0], p.max_seqlen_k}}) {
    if (!packed) break;
    if (first->ndim == 0) continue;
    for (int64_t n = 0; n < first->shape[0]; ++n) {
      const int64_t before = n == 0 ? 0 : number(*first, n - 1);
      if (in.byte() % 16 < 15) number(*first, n) = static_cast<int32_t>(n == 0 ? 0 : before + in.byte() % (most % 16 + 1));
    }
    for (int64_t n = 0; n < first->shape[0]; ++n) {
      const int64_t before = n == 0 ? 0 : number(*first, n - 1), now = number(*first, n);
      lengths_fit = lengths_fit && (n == 0 ? now == 0 : now >= before && now - before <= most && now <= rows);
    }
  }
  if (p.seqused_k.ndim == 1 && lengths_fit && (packed || p.q.shape[1] > 0)) {
    const auto keys_of = [&](int64_t n) {
      if (paged) return p.block_table.shape[1] * p.k.shape[1];
      return packed ? int64_t{number(p.cu_seqlens_k, n + 1)} - number(p.cu_seqlens_k, n) : p.k.shape[1];
    };
    for (int64_t n = 0; n < p.seqused_k.shape[0]; ++n)
      if (in.byte() % 8 < 7) number(p.seqused_k, n) = static_cast<int32_t>(in.byte() % (keys_of(n) + 1));
    for (int64_t n = 0; n < p.seqused_k.shape[0]; ++n)
      lengths_fit = lengths_fit && number(p.seqused_k, n) >= 0 && number(p.seqused_k, n) <= keys_of(n);
  }
  const bool has_queries = packed ? p.q.shape[0] > 0 : p.q.shape[0] > 0 && p.q.shape[1] > 0;
  if (paged && lengths_fit && has_queries) {
    const auto page = [&](int64_t n, int64_t i) -> int32_t& { return static_cast<int32_t*>(p.block_table.data)[n * p.block_table.strides[0] + i]; };
    const int64_t columns = p.block_table.shape[1];
    for (int64_t n = 0; n < p.block_table.shape[0]; ++n)
      for (int64_t i = 0; i < columns; ++i)
        if (in.byte() % 16 < 15 && p.k.shape[0] > 0) page(n, i) = static_cast<int32_t>(in.byte() % p.k.shape[0]);
    for (int64_t n = 0; n < p.block_table.shape[0]; ++n) {
      const int64_t keys = p.seqused_k.ndim == 1 ? int64_t{number(p.seqused_k, n)} : columns * p.k.shape[1];
      for (int64_t i = 0; i * p.k.shape[1] < keys; ++i) lengths_fit = lengths_fit && page(n, i) >= 0 && page(n, i) < p.k.shape[0];
    }
  }
  require(fattn_execute(&p) == (lengths_fit ? FATTN_OK : FATTN_ERROR_INVALID_ARGUMENT));
  return 0;
}
