// The tensors of a case: inputs in their layout, outputs between guard zones, and conversion to dense float64.
#pragma once

#include <string>
#include <vector>

#include "fattn/problem.hpp"
#include "testing/cases.h"
#include "testing/memory.h"

namespace fattn::testing {

// A tensor's elements in row-major order of its shape.
using Dense = std::vector<double>;

Dense read(const Tensor& tensor);
void write(const Tensor& tensor, const Dense& values);  // rounds to the tensor's dtype

// The same values bit by bit: -0 is not 0, and a NaN equals the same NaN.
bool same_bits(const Dense& a, const Dense& b);

// A dense float64 copy, and the view of it.
struct Widened {
  Dense values;
  Tensor view;
};
Widened widen(const Tensor& tensor);

// Tensors that lie in one allocation. All bytes that belong to none of them can be checked for having stayed as they were.
class TensorBlock {
 public:
  // What is in an element before it is written: all ones, which is a NaN in every format.
  static constexpr unsigned char kUnwritten = 0xff;
  static constexpr unsigned char kCanary = 0xa5;

  TensorBlock() = default;
  // `views` have offsets in elements as data pointers (made by layout functions below); `elements` is the whole extent.
  TensorBlock(DType dtype, int64_t elements, int64_t guard_elements, unsigned char fill);
  Tensor place(int64_t offset, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides);

  // Empty if no byte outside the tensors has changed, else which one has.
  std::string damage() const;

  const Memory& memory() const { return memory_; }

 private:
  DType dtype_ = DType::kF32;
  int64_t guard_ = 0;
  unsigned char fill_ = 0;
  Memory memory_;
  std::vector<Tensor> tensors_;
};

// q, k, v, dout and what else scores depend on, filled, in the case's layout. What lies between their elements is NaN.
struct CaseInputs {
  Tensor q, k, v, dout, dlse;
  ScoreTensors scores;
  std::vector<TensorBlock> blocks;
};
CaseInputs make_inputs(const Case& c);

// o and lse of a case: to write (guarded), or, with o in the case's dtype, to hand to the backward pass.
struct CaseForward {
  Tensor o, lse;
  std::vector<TensorBlock> blocks;
};
CaseForward make_forward(const Case& c);
CaseForward make_saved(const Case& c);

// dq, dk, dv of a case, dbias if it has a bias, and dsinks if it has sinks, guarded.
struct CaseGradients {
  Tensor dq, dk, dv, dbias, dsinks;
  std::vector<TensorBlock> blocks;
};
CaseGradients make_gradients(const Case& c);

}  // namespace fattn::testing
