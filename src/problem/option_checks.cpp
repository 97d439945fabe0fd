#include "problem/option_checks.h"

#include <atomic>
#include <cmath>
#include <initializer_list>
#include <utility>

#include "problem/tensor_checks.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

template <class Range>
void check_enum(const char* name, int32_t value, Range allowed, const char* names) {
  for (int32_t a : allowed)
    if (a == value) return;
  invalid(text(name, " is ", value, "; allowed: ", names));
}

std::atomic<int32_t> default_check{FATTN_CHECK_NONE};

constexpr float kLeastSoftcap = 1e-30f;  // its reciprocal is a number of fp32

}  // namespace

void check_abi_version(uint32_t version) {
  if (version != FATTN_ABI_VERSION)
    throw Error(ErrorCode::kAbi, text("the problem is of ABI version ", version, "; this library has version ", FATTN_ABI_VERSION,
                                      ". Set abi_version to FATTN_ABI_VERSION and build against this library's fattn.h"));
}

void check_execution(int32_t backend, int32_t cpu_isa, int32_t num_threads, const fattn_executor* executor) {
  check_enum("backend", backend, std::initializer_list<int32_t>{FATTN_BACKEND_AUTO, FATTN_BACKEND_REFERENCE, FATTN_BACKEND_CPU, FATTN_BACKEND_CUDA},
             "auto (0), reference (1), cpu (2), cuda (3)");
  if (cpu_isa < FATTN_ISA_AUTO || cpu_isa > FATTN_ISA_NEON) invalid(text("cpu_isa is ", cpu_isa, "; allowed: 0 (auto) to ", FATTN_ISA_NEON));
  if (num_threads < 0 || num_threads > 4096) invalid(text("num_threads is ", num_threads, "; allowed: 0 (as many as usable) to 4096"));
  if (executor) {
    if (executor->struct_size != sizeof(fattn_executor))
      throw Error(ErrorCode::kAbi, text("executor.struct_size is ", executor->struct_size, "; this library knows ", sizeof(fattn_executor),
                                        ". Build the caller against this library's fattn.h"));
    if (!executor->parallel || executor->concurrency < 1)
      invalid(text("executor has concurrency ", executor->concurrency, executor->parallel ? "" : " and a null parallel",
                   "; it needs a function and a concurrency of at least 1"));
  }
}

void check_options(const fattn_problem& g) {
  using A = std::initializer_list<int32_t>;
  check_enum("pass", g.pass, A{FATTN_FORWARD, FATTN_BACKWARD}, "forward (0), backward (1)");
  check_execution(g.backend, g.cpu_isa, g.num_threads, g.executor);
  check_enum("algorithm", g.algorithm, A{FATTN_ALGORITHM_AUTO, FATTN_ALGORITHM_STANDARD, FATTN_ALGORITHM_V2, FATTN_ALGORITHM_V3, FATTN_ALGORITHM_V1},
             "auto (0), standard (1), v2 (2), v3 (3), v1 (4)");
  check_enum("causal", g.causal, A{0, 1}, "0, 1");
  check_enum("has_softmax_scale", g.has_softmax_scale, A{0, 1}, "0, 1");
  check_enum("deterministic", g.deterministic, A{0, 1}, "0, 1");
  check_enum("check", g.check, A{FATTN_CHECK_AUTO, FATTN_CHECK_NONE, FATTN_CHECK_SYNC}, "auto (0), none (1), sync (2)");
  check_enum("batch_invariant", g.batch_invariant, A{0, 1}, "0, 1");
  check_enum("cuda_level", g.cuda_level, A{0, 75, 80}, "0 (the best for the device), 75, 80");
  check_enum("has_window", g.has_window, A{0, 1}, "0, 1");
  for (const auto& [name, limit] : {std::pair{"window_left", g.window_left}, std::pair{"window_right", g.window_right}})
    if (g.has_window && limit < -1) invalid(text(name, " is ", limit, "; allowed: -1 (no limit on that side), 0 or more keys"));
  if (!(g.softcap >= 0) || !std::isfinite(static_cast<float>(g.softcap)) || (g.softcap > 0 && static_cast<float>(g.softcap) < kLeastSoftcap))
    invalid(text("softcap is ", g.softcap, "; allowed: 0 (none), or ", kLeastSoftcap, " to the largest fp32"));
  if (g.has_softmax_scale && !std::isfinite(g.softmax_scale))
    invalid(text("softmax_scale is ", g.softmax_scale, "; it must be finite. Leave it unset for 1 / sqrt(headdim)"));
  if (g.has_softmax_scale && !std::isfinite(static_cast<float>(g.softmax_scale)))
    invalid(text("softmax_scale is ", g.softmax_scale, "; it must be within the range of fp32"));
}

int dropout_below(double p) {
  constexpr double kSteps = 65536;
  if (!(p >= 0) || !(p <= (kSteps - 1) / kSteps)) invalid(text("p_dropout is ", p, "; allowed: 0 (none) to 1 - 2^-16"));
  return static_cast<int>(std::lround(p * kSteps));
}

void set_default_check(int32_t check) {
  check_enum("check", check, std::initializer_list<int32_t>{FATTN_CHECK_NONE, FATTN_CHECK_SYNC}, "none (1), sync (2)");
  default_check = check;
}

bool checks_lists(const Problem& p) { return (p.check == FATTN_CHECK_AUTO ? default_check.load() : p.check) == FATTN_CHECK_SYNC; }

}  // namespace fattn::core
