// Between fp32, fp16 and bf16, rounded to the nearest, of ties to the even one.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fattn/types.hpp"

namespace fattn::gpt2 {

// Of n elements at `from` to n at `to`; the same dtype is copied bit by bit. Returns false if a finite value became infinite: it does not fit.
bool convert(const void* from, DType from_dtype, void* to, DType to_dtype, size_t n);

}  // namespace fattn::gpt2
