// The tensors of an operator that a score depends on beside q and k, each of which may be absent: the inputs among ScoreTensors.
#pragma once

#include <array>
#include <optional>
#include <string>

#include "fattn/problem.hpp"
#include "torch/stack.h"

namespace fattn::torch {

// Whether operators take it: those on packed sequences, then, or all that take scores.
constexpr bool is_taken(const TensorRow& row, bool packed) {
  return row.view.of_scores() && row.role != TensorRole::kOutput && (row.dims == TensorDims::kBounds) == packed;
}

// Owns them: views are good as long as it lives.
class Scores {
 public:
  // In the order of the schema; `packed` of the operators on packed sequences alone.
  void take(Arguments& arguments, bool packed) {
    for (size_t i = 0; i < kTensorCount; ++i)
      if (is_taken(kTensors[i], packed))
        if (auto given = arguments.optional_tensor()) tensors_[i].emplace(std::move(*given));
  }
  static std::string schema(bool packed) {
    std::string text;
    for (const TensorRow& row : kTensors)
      if (is_taken(row, packed)) text += std::string(", Tensor? ") + row.name + "=None";
    return text;
  }

  ScoreTensors views() const {
    ScoreTensors views;
    for (size_t i = 0; i < kTensorCount; ++i)
      if (tensors_[i]) *kTensors[i].view.in(views) = view_of(kTensors[i], *tensors_[i]);
    return views;
  }
  const std::optional<Tensor>& bias() const { return tensors_[tensor_index("bias")]; }
  const std::optional<Tensor>& sinks() const { return tensors_[tensor_index("sinks")]; }

 private:
  static fattn::Tensor view_of(const TensorRow& row, const Tensor& tensor) {
    const fattn::Tensor view = of_dtype(row, tensor);
    if (row.dims == TensorDims::kPairs && view.ndim() != 4)
      throw Error(ErrorCode::kInvalidArgument, std::string(row.name) + " has " + std::to_string(view.ndim()) +
                                                   " dimensions; allowed: 4 (batch or 1, nheads or 1, seqlen_q or 1, seqlen_k)");
    return view;
  }
  static fattn::Tensor of_dtype(const TensorRow& row, const Tensor& tensor) {
    switch (row.dtype) {
      case TensorDType::kI32: return of(row.name, tensor, aoti_torch_dtype_int32(), DType::kI32, "int32");
      case TensorDType::kI64: return of(row.name, tensor, aoti_torch_dtype_int64(), DType::kI64, "int64");
      case TensorDType::kF32: return of(row.name, tensor, aoti_torch_dtype_float32(), DType::kF32, "float32");
      case TensorDType::kU8: {
        const bool is_bool = tensor.dtype() == aoti_torch_dtype_bool();  // one byte, 0 or 1
        return of(row.name, tensor, is_bool ? tensor.dtype() : aoti_torch_dtype_uint8(), DType::kU8,
                  "bool, uint8. Numbers that are added to the scores are a bias");
      }
      default: return beside(row.name, tensor, tensor.data(), dtype_of(row.name, tensor));
    }
  }
  static fattn::Tensor of(const char* name, const Tensor& tensor, int32_t dtype, DType ours, const char* allowed) {
    if (tensor.dtype() != dtype) throw refused_dtype(name, tensor, allowed);
    return beside(name, tensor, tensor.data(), ours);
  }

  std::array<std::optional<Tensor>, kTensorCount> tensors_;  // in the order of kTensors
};

}  // namespace fattn::torch
