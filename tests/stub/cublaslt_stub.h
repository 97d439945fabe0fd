// The stub of cuBLASLt (cublaslt_stub.cpp) as a test drives it, which is compiled with FATTN_STUB_CUBLASLT_PATH.
#pragma once

#include <dlfcn.h>

#include <cstdint>

namespace fattn::test {

// Loaded before the library looks for it by its name, which finds what is loaded.
inline void* const cublaslt_stub = dlopen(FATTN_STUB_CUBLASLT_PATH, RTLD_NOW | RTLD_LOCAL);

inline void set_blas(const char* name, int64_t value) {
  reinterpret_cast<void (*)(const char*, int64_t)>(dlsym(cublaslt_stub, "stub_cublaslt_set"))(name, value);
}
inline int64_t blas_calls(const char* function) {
  return reinterpret_cast<int64_t (*)(const char*)>(dlsym(cublaslt_stub, "stub_cublaslt_calls"))(function);
}

}  // namespace fattn::test
