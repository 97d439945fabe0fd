// Copies of weights in another layout.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "gpt2/weights/weights.h"

namespace fattn::gpt2 {
namespace {

using files::safetensors::Bytes;

// In squares that stay in the nearest cache.
template <class Element>
void transpose(const Element* from, Element* to, int64_t rows, int64_t columns) {
  constexpr int64_t kSquare = 32;
  for (int64_t r0 = 0; r0 < rows; r0 += kSquare)
    for (int64_t c0 = 0; c0 < columns; c0 += kSquare)
      for (int64_t r = r0; r < std::min(rows, r0 + kSquare); ++r)
        for (int64_t c = c0; c < std::min(columns, c0 + kSquare); ++c) to[c * rows + r] = from[r * columns + c];
}

}  // namespace

Bytes transposed(const Weight& tensor) {
  if (tensor.shape.size() != 2) throw std::invalid_argument("only a matrix can be transposed");
  Bytes to = files::safetensors::allocate(tensor.bytes);
  if (size_of(tensor.dtype) == 4)
    transpose(static_cast<const uint32_t*>(tensor.data), reinterpret_cast<uint32_t*>(to.get()), tensor.shape[0], tensor.shape[1]);
  else
    transpose(static_cast<const uint16_t*>(tensor.data), reinterpret_cast<uint16_t*>(to.get()), tensor.shape[0], tensor.shape[1]);
  return to;
}

Bytes with_rows(const Weight& tensor, int64_t rows) {
  if (tensor.shape.empty() || rows < tensor.shape[0]) throw std::invalid_argument("fewer rows than the tensor has");
  const uint64_t row_bytes = tensor.bytes / static_cast<uint64_t>(tensor.shape[0]);
  Bytes to = files::safetensors::allocate(row_bytes * static_cast<uint64_t>(rows));
  std::memcpy(to.get(), tensor.data, tensor.bytes);
  std::memset(to.get() + tensor.bytes, 0, row_bytes * static_cast<uint64_t>(rows) - tensor.bytes);
  return to;
}

}  // namespace fattn::gpt2
