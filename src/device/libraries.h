// Libraries that are opened at run time if present, with the reason if not.
#pragma once

#include <string>
#include <vector>

namespace fattn::core {

struct LibraryStatus {
  std::string name, purpose, path, reason;  // reason is empty if the library is loaded
};

std::vector<LibraryStatus> library_status();

// The BLAS calls that the standard algorithm uses (CBLAS interface, 32-bit integers).
struct OpenBlas {
  using SgemmFn = void (*)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda, const float* b, int ldb,
                           float beta, float* c, int ldc);
  SgemmFn sgemm = nullptr;
  std::string path, reason;
  explicit operator bool() const { return sgemm != nullptr; }
};

// Opened at the first call, kept for the life of the process, single-threaded (the caller parallelises over heads).
const OpenBlas& openblas();

}  // namespace fattn::core
