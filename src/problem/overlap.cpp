#include "problem/overlap.h"

#include <array>
#include <limits>
#include <utility>

namespace fattn::core {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

// One dimension of a view, or of two views with the same stride: how many elements each has there.
struct Dim {
  int64_t stride, n, other_n;
};

// By falling stride.
void sort_dims(std::array<Dim, 4>& dims, int n) {
  for (int i = 1; i < n; ++i)
    for (int j = i; j > 0 && dims[j].stride > dims[j - 1].stride; --j) std::swap(dims[j], dims[j - 1]);
}

// Dimensions of more than one element, largest stride first.
int sorted_dims(const Extent& e, std::array<Dim, 4>& dims) {
  int n = 0;
  for (int i = 0; i < e.ndim; ++i)
    if (e.shape[i] > 1) dims[n++] = {e.strides[i], e.shape[i], 1};
  sort_dims(dims, n);
  return n;
}

bool is_empty(const Extent& e) {
  for (int i = 0; i < e.ndim; ++i)
    if (e.shape[i] == 0) return true;
  return e.ndim == 0;
}

// Is there an index i_d in (-other_n_d, n_d) per dimension with sum(i_d * stride_d) == delta? Descends from the largest
// stride; only the two quotients around delta / stride can work when the rest of the strides is nested below it.
bool reachable(const std::array<Dim, 4>& dims, int ndim, int level, int64_t delta) {
  if (level == ndim) return delta == 0;
  const int64_t stride = dims[level].stride;
  if (stride == 0) return reachable(dims, ndim, level + 1, delta);
  const int64_t floor = delta >= 0 ? delta / stride : -((-delta + stride - 1) / stride);
  for (int64_t i : {floor, floor + 1})
    if (i > -dims[level].other_n && i < dims[level].n && reachable(dims, ndim, level + 1, delta - i * stride)) return true;
  return false;
}

}  // namespace

int64_t span_bytes(const Extent& e) {
  if (is_empty(e)) return 0;
  int64_t last = 0;
  for (int i = 0; i < e.ndim; ++i) {
    int64_t reach = 0;
    if (__builtin_mul_overflow(e.shape[i] - 1, e.strides[i], &reach) || __builtin_add_overflow(last, reach, &last)) return -1;
  }
  int64_t bytes = 0;
  if (last == kMax || __builtin_mul_overflow(last + 1, e.element_size, &bytes)) return -1;
  return bytes;
}

bool overlaps_itself(const Extent& e) {
  if (is_empty(e)) return false;
  std::array<Dim, 4> dims{};
  const int n = sorted_dims(e, dims);
  int64_t inner = 0;  // the largest offset that the smaller strides reach
  for (int i = n; i-- > 0;) {
    if (dims[i].stride <= inner) return true;
    inner += (dims[i].n - 1) * dims[i].stride;
  }
  return false;
}

bool may_overlap(const void* a, const Extent& ea, const void* b, const Extent& eb) {
  const int64_t sa = span_bytes(ea), sb = span_bytes(eb);
  if (sa == 0 || sb == 0) return false;
  const auto pa = reinterpret_cast<uintptr_t>(a), pb = reinterpret_cast<uintptr_t>(b);
  if (pa + static_cast<uintptr_t>(sa) <= pb || pb + static_cast<uintptr_t>(sb) <= pa) return false;
  // The extents overlap. Interleaved views (packed dq, dk, dv) are disjoint if the strides agree and no index reaches.
  if (ea.element_size != eb.element_size || ea.ndim != eb.ndim) return true;
  std::array<Dim, 4> dims{};
  int n = 0;
  for (int i = 0; i < ea.ndim; ++i) {
    if (ea.shape[i] == 1 && eb.shape[i] == 1) continue;
    if (ea.shape[i] != 1 && eb.shape[i] != 1 && ea.strides[i] != eb.strides[i]) return true;
    dims[n++] = {ea.shape[i] != 1 ? ea.strides[i] : eb.strides[i], ea.shape[i], eb.shape[i]};
  }
  sort_dims(dims, n);
  // The search below is exact only if what the smaller strides reach stays below each stride.
  int64_t reach = 0, other_reach = 0;
  for (int i = n; i-- > 0;) {
    if (dims[i].stride <= reach || dims[i].stride <= other_reach) return true;
    reach += (dims[i].n - 1) * dims[i].stride;
    other_reach += (dims[i].other_n - 1) * dims[i].stride;
  }
  const auto bytes = static_cast<int64_t>(pb - pa);
  if (bytes % ea.element_size != 0) return true;
  return reachable(dims, n, 0, bytes / ea.element_size);
}

}  // namespace fattn::core
