// The tensors of an operator that a score depends on beside q and k, each of which may be absent.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>

#include "fattn/problem.hpp"
#include "torch/stack.h"

namespace fattn::torch {

// Owns them: views are good as long as it lives.
struct Scores {
  std::optional<Tensor> seqused_k, alibi_slopes, bias, mask, dropout_state, document_q, document_k, cu_seqlens_q, cu_seqlens_k;

  // In the order of the schema; `take_packed` for the operators on packed sequences.
  void take(Arguments& arguments) { take(arguments, {&seqused_k, &alibi_slopes, &bias, &mask, &dropout_state, &document_q, &document_k}); }
  void take_packed(Arguments& arguments) { take(arguments, {&cu_seqlens_q, &cu_seqlens_k}); }

  ScoreTensors views() const {
    ScoreTensors views;
    if (seqused_k) views.seqused_k = of("seqused_k", *seqused_k, aoti_torch_dtype_int32(), DType::kI32, "int32");
    if (alibi_slopes) views.alibi_slopes = of("alibi_slopes", *alibi_slopes, aoti_torch_dtype_float32(), DType::kF32, "float32");
    if (bias) views.bias = four_dimensions("bias", beside("bias", *bias, bias->data(), dtype_of("bias", *bias)));
    if (mask) {
      const bool is_bool = mask->dtype() == aoti_torch_dtype_bool();  // one byte, 0 or 1
      views.mask = four_dimensions("mask", of("mask", *mask, is_bool ? mask->dtype() : aoti_torch_dtype_uint8(), DType::kU8,
                                              "bool, uint8. Numbers that are added to the scores are a bias"));
    }
    if (dropout_state) views.dropout_state = of("dropout_state", *dropout_state, aoti_torch_dtype_int64(), DType::kI64, "int64");
    if (document_q) views.document_q = of("document_q", *document_q, aoti_torch_dtype_int32(), DType::kI32, "int32");
    if (document_k) views.document_k = of("document_k", *document_k, aoti_torch_dtype_int32(), DType::kI32, "int32");
    if (cu_seqlens_q) views.cu_seqlens_q = of("cu_seqlens_q", *cu_seqlens_q, aoti_torch_dtype_int32(), DType::kI32, "int32");
    if (cu_seqlens_k) views.cu_seqlens_k = of("cu_seqlens_k", *cu_seqlens_k, aoti_torch_dtype_int32(), DType::kI32, "int32");
    return views;
  }

 private:
  static void take(Arguments& arguments, std::initializer_list<std::optional<Tensor>*> tensors) {
    for (std::optional<Tensor>* tensor : tensors)
      if (auto given = arguments.optional_tensor()) tensor->emplace(std::move(*given));
  }
  static fattn::Tensor of(const char* name, const Tensor& tensor, int32_t dtype, DType ours, const char* allowed) {
    if (tensor.dtype() != dtype) throw refused_dtype(name, tensor, allowed);
    return beside(name, tensor, tensor.data(), ours);
  }
  static fattn::Tensor four_dimensions(const char* name, const fattn::Tensor& view) {
    if (view.ndim() != 4)
      throw Error(ErrorCode::kInvalidArgument, std::string(name) + " has " + std::to_string(view.ndim()) +
                                                   " dimensions; allowed: 4 (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k)");
    return view;
  }
};

}  // namespace fattn::torch
