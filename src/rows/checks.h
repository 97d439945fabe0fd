// What the checks of merge, rotary embeddings and append share. Each throws Error with what was given, what is allowed and what to do.
#pragma once

#include <initializer_list>

#include "fattn/types.hpp"
#include "problem/tensor_checks.h"

namespace fattn::core::rows {

// "parts[3].lse", without memory of its own.
class PartName {
 public:
  PartName(int part, const char* member);
  operator const char*() const { return text_; }  // NOLINT: it is a name

 private:
  char text_[32];
};

// A tensor of numbers whose last dimension is contiguous.
void check_numbers(const char* name, const fattn_tensor& tensor, int ndim, const char* dimensions, bool output);
// fp64 goes with fp64 alone.
void check_fits(const char* name, const fattn_tensor& tensor, const char* first_name, const fattn_tensor& first);
void check_device(const char* name, const fattn_tensor& tensor, const char* first_name, const fattn_tensor& first);
void check_shape_of(const char* name, const fattn_tensor& tensor, std::initializer_list<int64_t> wanted, const char* because);
// Neither null nor misaligned, where there are elements.
void check_memory(const char* name, const fattn_tensor& tensor);
// Whether two views are of the same elements in the same order.
bool same_view(const fattn_tensor& a, const fattn_tensor& b);
void check_apart(const char* output_name, const fattn_tensor& output, const char* name, const fattn_tensor& other, bool may_be_same);
// Rows of a sequence that begin at this position. `name` and `index` (-1: none) of who says so.
void check_positions(const char* name, int64_t index, int64_t first, int64_t rows, int64_t positions);
// The CPU has no streams.
void check_stream(const void* stream, Device device);
// fp64 is computed by the reference alone.
Backend backend_for(int32_t asked, const fattn_tensor& first);

}  // namespace fattn::core::rows
