// The operator torch.ops.fattn.append: new keys and values into a cache, in place, with rotary embeddings of them and of the queries.
#pragma once

#include <optional>
#include <string>
#include <utility>

#include "fattn/append.hpp"
#include "torch/stack.h"

namespace fattn::torch {

// All tensors (batch, seqlen, heads, headdim), or packed. The results: the turned queries, without q nothing; and the lengths afterwards, without
// cache_seqlens nothing.
inline constexpr const char* kAppendSchema =
    "append(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, SymInt cache_seqlen=0, Tensor? cache_seqlens=None, Tensor? block_table=None, "
    "Tensor? q=None, Tensor? cos=None, Tensor? sin=None, bool interleaved=False, int q_positions=0, Tensor? positions=None, "
    "Tensor? cache_batch_idx=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_new=None) -> (Tensor q_out, Tensor seqused_k)";

// Of int32 or int64; the core checks which of them it takes.
inline fattn::Tensor indices(const char* name, const std::optional<Tensor>& tensor) {
  if (!tensor) return {};
  const int32_t dtype = tensor->dtype();
  if (dtype == aoti_torch_dtype_int32()) return beside(name, *tensor, tensor->data(), DType::kI32);
  if (dtype == aoti_torch_dtype_int64()) return beside(name, *tensor, tensor->data(), DType::kI64);
  throw refused_dtype(name, *tensor, "int32, int64");
}

// In the memory order of its dimensions.
inline Tensor empty_like(const char* name, const Tensor& like) {
  const int64_t* const n = like.sizes();
  if (like.dim() != 3 && like.dim() != 4)
    throw Error(ErrorCode::kInvalidArgument,
                std::string(name) + " has " + std::to_string(like.dim()) +
                    " dimensions; allowed: 4 (batch, seqlen, heads, headdim), 3 (total, heads, headdim) of packed sequences");
  if (like.dim() == 3) return Tensor::empty<3>({n[0], n[1], n[2]}, like.dtype(), like);
  return Tensor::empty<4>({n[0], n[1], n[2], n[3]}, like.dtype(), like);
}

// Of torch's int64_t, of which the core has 32 bits.
inline QueryPositions query_positions(int64_t given) {
  if (given < FATTN_QUERIES_LAST || given > FATTN_QUERIES_TOGETHER)
    throw Error(ErrorCode::kInvalidArgument, "q_positions is " + std::to_string(given) + "; allowed: 0 (last), 1 (first), 2 (together)");
  return static_cast<QueryPositions>(given);
}

// `stream_of`: the current stream of a tensor's device.
template <void* (*stream_of)(const Tensor&)>
void append(StableIValue* stack) {
  Arguments arguments(stack);
  const Tensor k = arguments.tensor(), v = arguments.tensor(), k_cache = arguments.tensor(), v_cache = arguments.tensor();
  AppendOptions options;
  options.cache_seqlen = arguments.integer();
  const std::optional<Tensor> cache_seqlens = arguments.optional_tensor(), block_table = arguments.optional_tensor(), q = arguments.optional_tensor(),
                              cos = arguments.optional_tensor(), sin = arguments.optional_tensor();
  options.interleaved = arguments.flag();
  options.q_positions = query_positions(arguments.integer());
  const std::optional<Tensor> positions = arguments.optional_tensor(), cache_batch_idx = arguments.optional_tensor(),
                              cu_seqlens_q = arguments.optional_tensor(), cu_seqlens_new = arguments.optional_tensor();
  options.cache_seqlens = indices("cache_seqlens", cache_seqlens);
  options.block_table = indices("block_table", block_table);
  options.positions = indices("positions", positions);
  options.cache_batch_idx = indices("cache_batch_idx", cache_batch_idx);
  options.cu_seqlens_q = indices("cu_seqlens_q", cu_seqlens_q);
  options.cu_seqlens_new = indices("cu_seqlens_new", cu_seqlens_new);
  if (cos) options.cos = input("cos", *cos);
  if (sin) options.sin = input("sin", *sin);
  if (q) options.q = input("q", *q);
  Tensor q_out = q ? empty_like("q", *q) : Tensor::empty<1>({0}, k.dtype(), k);
  if (q) options.q_out = output("q_out", q_out);
  Tensor seqused_k = Tensor::empty<1>({cache_seqlens ? options.cache_seqlens.shape(0) : 0}, aoti_torch_dtype_int32(), k);
  if (cache_seqlens) options.seqused_k = beside("seqused_k", seqused_k, seqused_k.mutable_data(), DType::kI32);
  uint32_t threads = 0;
  check_torch(torch_get_num_threads(&threads), "reading the number of threads");
  options.num_threads = static_cast<int>(threads);
  options.stream = stream_of(k);
  fattn::append(input("k", k), input("v", v), output("k_cache", k_cache), output("v_cache", v_cache), options);
  stack[0] = result(std::move(q_out));
  stack[1] = result(std::move(seqused_k));
}

}  // namespace fattn::torch
