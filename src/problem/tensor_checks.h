// What holds for each tensor of a description alone, and for two of them: rank, dtype, device, shape, strides. Each throws Error(kInvalidArgument)
// with what was given, what is allowed and what to do.
#pragma once

#include <array>
#include <string>

#include "problem/problem.h"

namespace fattn::core {

[[noreturn]] void invalid(const std::string& message);

std::string shape_text(const fattn_tensor& tensor);  // "(2, 3)"
std::string dtype_text(const fattn_tensor& tensor);  // "int64 (7)"; of a number that is no dtype "99 (unknown)"
Extent extent_of(const fattn_tensor& tensor);

// What holds for every tensor alone: rank, device, shape, strides, size. The dtype is known already. `dimensions` names them.
void check_view(const char* name, const fattn_tensor& tensor, int ndim, const char* dimensions, bool output);
// A tensor that the call needs, of a dtype that attention is computed in.
void check_tensor(const char* name, const fattn_tensor& tensor, int ndim, const char* dimensions, bool output);
// q, k, v, o and their gradients.
void check_rows(const char* name, const fattn_tensor& tensor, bool packed, bool output, bool paged = false);
void check_shape(const char* name, const fattn_tensor& tensor, std::array<int64_t, 4> wanted, const char* because);
void check_dtype(const char* name, const fattn_tensor& tensor, int32_t wanted, const char* because);
// As q's.
void check_same_dtype(const char* name, const fattn_tensor& tensor, int32_t dtype);
// Of an output: as q's, or fp32 where that has 16 bits.
void check_output_dtype(const char* name, const fattn_tensor& tensor, int32_t dtype);
void check_same_device(const char* name, const fattn_tensor& tensor, const fattn_tensor& q);

Strides row_strides(const fattn_tensor& tensor);

}  // namespace fattn::core
