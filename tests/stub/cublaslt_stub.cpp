// A libcublasLt for tests, never installed: the functions that fattn binds, on memory of the host. fp32 products are computed, one element after the
// other; of 16-bit ones only the call counts. It stands for the real one because it has its name (soname) and is loaded before the library looks.
// One variant lacks a function (STUB_INCOMPLETE).
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInvalidValue = 7, kNotSupported = 15;
constexpr uint32_t kBias = 4, kGelu = 32;
constexpr int kF32 = 0, kF16 = 2, kBF16 = 14, kCompute32F = 68;

struct Desc {
  int32_t transposed[2] = {};
  uint32_t epilogue = 1;
  const void* bias = nullptr;
  int bias_type = -1;
};
struct Layout {
  int type = 0;
  uint64_t rows = 0, columns = 0;
  int64_t ld = 0;
  int32_t batch = 1;
  int64_t step = 0;
};
struct Preference {
  std::map<int, uint64_t> values;
};
struct Algorithm {
  uint64_t data[8];
};
struct Heuristic {
  Algorithm algorithm;
  size_t workspace_bytes;
  int state;
  float waves;
  int reserved[4];
};
constexpr uint64_t kMark = 0x5374756242;  // what an algorithm of this library begins with

struct State {
  std::mutex mutex;
  // "workspace": what algorithms ask for; "needs": the least alignment that they ask for; "gelu" 0: none with GELU; NAME: the status that the
  // function NAME returns.
  std::map<std::string, int64_t> settings{{"workspace", 0}, {"needs", 1}, {"gelu", 1}};
  std::map<std::string, int64_t> counts;
};
State& state() {
  static State& s = *new State;
  return s;
}

int enter(const char* function) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  ++s.counts[function];
  const auto fault = s.settings.find(function);
  return fault == s.settings.end() ? 0 : static_cast<int>(fault->second);
}
int64_t setting(const char* name) {
  const std::lock_guard lock(state().mutex);
  return state().settings[name];
}
#define ENTER() \
  if (const int bad = enter(__func__)) return bad

bool known(int type) { return type == kF32 || type == kF16 || type == kBF16; }

// Whether op(a) (m, k) op(b) (k, n) = d (m, n), all column-major.
bool fits(const Desc& desc, const Layout& a, const Layout& b, const Layout& d) {
  const auto rows = [&](const Layout& x, int side) { return desc.transposed[side] != 0 ? x.columns : x.rows; };
  const auto columns = [&](const Layout& x, int side) { return desc.transposed[side] != 0 ? x.rows : x.columns; };
  return rows(a, 0) == d.rows && columns(b, 1) == d.columns && columns(a, 0) == rows(b, 1) && a.batch == d.batch && b.batch == d.batch &&
         a.type == b.type;
}

void multiply(const Desc& desc, float alpha, const float* a, const Layout& la, const float* b, const Layout& lb, float beta, const float* c, float* d,
              const Layout& ld) {
  const bool across = desc.transposed[0] != 0;
  const auto depth = static_cast<int64_t>(across ? la.rows : la.columns);
  for (int64_t i = 0; i < static_cast<int64_t>(ld.rows); ++i)
    for (int64_t j = 0; j < static_cast<int64_t>(ld.columns); ++j) {
      float sum = 0;
      for (int64_t l = 0; l < depth; ++l)
        sum += a[across ? l + i * la.ld : i + l * la.ld] * b[desc.transposed[1] != 0 ? j + l * lb.ld : l + j * lb.ld];
      float& to = d[i + j * ld.ld];
      to = alpha * sum + (beta != 0 ? beta * c[i + j * ld.ld] : 0.0f);
      if ((desc.epilogue & kBias) != 0) to += static_cast<const float*>(desc.bias)[i];
      if ((desc.epilogue & kGelu) != 0) to = to / 2 * (1 + std::tanh(0.7978845608f * (to + 0.044715f * to * to * to)));
    }
}

}  // namespace

STUB_EXPORT void stub_cublaslt_set(const char* name, int64_t value) {
  const std::lock_guard lock(state().mutex);
  state().settings[name] = value;
}
STUB_EXPORT int64_t stub_cublaslt_calls(const char* function) {
  const std::lock_guard lock(state().mutex);
  return state().counts[function];
}

STUB_EXPORT size_t cublasLtGetVersion() { return 130002; }
STUB_EXPORT const char* cublasLtGetStatusName(int status) { return status == kNotSupported ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_OTHER"; }
STUB_EXPORT int cublasLtCreate(void** handle) {
  ENTER();
  *handle = &state();
  return 0;
}
STUB_EXPORT int cublasLtMatmulDescCreate(Desc** desc, int compute, int scale) {
  ENTER();
  if (compute != kCompute32F || scale != kF32) return kInvalidValue;
  *desc = new Desc;
  return 0;
}
#ifndef STUB_INCOMPLETE
STUB_EXPORT int cublasLtMatmulDescDestroy(Desc* desc) {
  delete desc;
  return enter(__func__);
}
#endif
STUB_EXPORT int cublasLtMatmulDescSetAttribute(Desc* desc, int what, const void* value, size_t bytes) {
  ENTER();
  if (what == 3 || what == 4) {
    if (bytes != 4) return kInvalidValue;
    std::memcpy(&desc->transposed[what - 3], value, 4);
  } else if (what == 7 && bytes == 4) {
    std::memcpy(&desc->epilogue, value, 4);
  } else if (what == 8 && bytes == 8) {
    std::memcpy(&desc->bias, value, 8);
  } else if (what == 26 && bytes == 4) {
    std::memcpy(&desc->bias_type, value, 4);
  } else {
    return kInvalidValue;
  }
  return 0;
}
STUB_EXPORT int cublasLtMatrixLayoutCreate(Layout** layout, int type, uint64_t rows, uint64_t columns, int64_t ld) {
  ENTER();
  if (!known(type) || rows == 0 || columns == 0 || ld < static_cast<int64_t>(rows)) return kInvalidValue;
  *layout = new Layout{type, rows, columns, ld};
  return 0;
}
STUB_EXPORT int cublasLtMatrixLayoutDestroy(Layout* layout) {
  delete layout;
  return enter(__func__);
}
STUB_EXPORT int cublasLtMatrixLayoutSetAttribute(Layout* layout, int what, const void* value, size_t bytes) {
  ENTER();
  if (what == 5 && bytes == 4)
    std::memcpy(&layout->batch, value, 4);
  else if (what == 6 && bytes == 8)
    std::memcpy(&layout->step, value, 8);
  else
    return kInvalidValue;
  return 0;
}
STUB_EXPORT int cublasLtMatmulPreferenceCreate(Preference** preference) {
  ENTER();
  *preference = new Preference;
  return 0;
}
STUB_EXPORT int cublasLtMatmulPreferenceDestroy(Preference* preference) {
  delete preference;
  return enter(__func__);
}
STUB_EXPORT int cublasLtMatmulPreferenceSetAttribute(Preference* preference, int what, const void* value, size_t bytes) {
  ENTER();
  if (bytes != (what == 1 ? 8 : 4)) return kInvalidValue;
  uint64_t number = 0;
  std::memcpy(&number, value, bytes);
  preference->values[what] = number;
  return 0;
}
STUB_EXPORT int cublasLtMatmulAlgoGetHeuristic(void*, Desc* desc, Layout* a, Layout* b, Layout* c, Layout* d, Preference* preference, int wanted,
                                               Heuristic* found, int* count) {
  ENTER();
  if (wanted < 1 || !fits(*desc, *a, *b, *d) || c != d) return kInvalidValue;
  if (desc->bias_type >= 0 && desc->bias_type != d->type) return kInvalidValue;
  if ((desc->epilogue & kGelu) != 0 && setting("gelu") == 0) return kNotSupported;
  uint64_t least = UINT64_MAX;
  for (const int which : {5, 6, 7, 8}) least = std::min(least, preference->values[which]);
  *count = 0;
  if (least < static_cast<uint64_t>(setting("needs"))) return kNotSupported;
  *found = {};
  found->algorithm.data[0] = kMark;
  found->algorithm.data[1] = least;
  found->workspace_bytes = static_cast<size_t>(setting("workspace"));
  *count = 1;
  return 0;
}
STUB_EXPORT int cublasLtMatmul(void*, Desc* desc, const float* alpha, const void* a, Layout* la, const void* b, Layout* lb, const float* beta,
                               const void* c, Layout* lc, void* d, Layout* ld, const Algorithm* algorithm, void* workspace, size_t workspace_bytes,
                               void*) {
  ENTER();
  if (lc != ld || !fits(*desc, *la, *lb, *ld) || algorithm->data[0] != kMark) return kInvalidValue;
  for (const void* pointer : {a, b, c, static_cast<const void*>(d)})
    if (reinterpret_cast<uintptr_t>(pointer) % algorithm->data[1] != 0) return kInvalidValue;
  if (workspace_bytes < static_cast<size_t>(setting("workspace")) || (workspace_bytes > 0 && reinterpret_cast<uintptr_t>(workspace) % 256 != 0))
    return kInvalidValue;
  if (workspace_bytes > 0) std::memset(workspace, 0x7f, workspace_bytes);
  if (la->type != kF32 || ld->type != kF32) return 0;
  for (int32_t i = 0; i < ld->batch; ++i)
    multiply(*desc, *alpha, static_cast<const float*>(a) + i * la->step, *la, static_cast<const float*>(b) + i * lb->step, *lb, *beta,
             static_cast<const float*>(c) + i * lc->step, static_cast<float*>(d) + i * ld->step, *ld);
  return 0;
}
