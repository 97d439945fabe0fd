// The stack on which torch hands an operator its arguments and takes its results.
#pragma once

#include <cstring>
#include <memory>
#include <optional>

#include "torch/tensor.h"

namespace fattn::torch {

// Reads the arguments in the order of the schema. Braces of an initialiser are evaluated in that order, arguments of a call need not be.
class Arguments {
 public:
  explicit Arguments(const StableIValue* stack) : next_(stack) {}
  Tensor tensor() { return Tensor(take<AtenTensorHandle>()); }
  double number() { return take<double>(); }
  std::optional<double> optional_number() { return optional(&Arguments::number); }
  std::optional<Tensor> optional_tensor() { return optional(&Arguments::tensor); }
  bool flag() { return take<bool>(); }
  int64_t integer() { return take<int64_t>(); }

 private:
  template <class T>
  std::optional<T> optional(T (Arguments::*read)()) {
    const std::unique_ptr<const StableIValue> value(take<const StableIValue*>());  // torch made it with new, for the receiver
    if (!value) return std::nullopt;
    Arguments inner(value.get());
    return (inner.*read)();
  }
  template <class T>
  T take() {
    T value;
    std::memcpy(&value, next_++, sizeof value);  // the lowest bytes: little endian, as are all machines that fattn runs on
    return value;
  }
  const StableIValue* next_;
};

inline StableIValue result(Tensor&& tensor) {
  const AtenTensorHandle handle = tensor.release();
  StableIValue value = 0;
  std::memcpy(&value, &handle, sizeof handle);
  return value;
}

}  // namespace fattn::torch
