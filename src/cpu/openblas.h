// OpenBLAS, opened at run time if present, with the reason if not.
#pragma once

#include <string>

namespace fattn::core {

// The BLAS calls that are used (CBLAS interface, 32-bit integers).
struct OpenBlas {
  using SgemmFn = void (*)(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float* a, int lda, const float* b, int ldb,
                           float beta, float* c, int ldc);
  SgemmFn sgemm = nullptr;
  int (*get_num_threads)() = nullptr;
  void (*set_num_threads)(int) = nullptr;
  std::string path, reason;
  explicit operator bool() const { return sgemm != nullptr; }
};

// Opened at the first call (FATTN_OPENBLAS is read then), kept for the life of the process. If it cannot be used,
// `reason` says what was tried and what to do.
const OpenBlas& openblas();

// While one lives, OpenBLAS computes every call on the thread that makes it; the caller parallelises over heads.
// OpenBLAS has one thread count for the whole process and no count of a thread's own, so this is visible to other users
// of the same library: it is set to 1 by the first of these objects and put back by the last. Calls made on several
// threads at once are safe then: they share nothing but OpenBLAS's pool of packing buffers, which has a lock.
class OneBlasThread {
 public:
  explicit OneBlasThread(const OpenBlas& blas);
  ~OneBlasThread();
  OneBlasThread(const OneBlasThread&) = delete;
  OneBlasThread& operator=(const OneBlasThread&) = delete;

 private:
  const OpenBlas& blas_;
};

}  // namespace fattn::core
