// Training runs on the CPU in this version: every plan of it is refused with that reason.
#include "fattn/error.hpp"
#include "ops/backends.h"

namespace fattn::ops::cuda {

#define FATTN_OPS_REFUSED(Problem)                                                                                                   \
  std::unique_ptr<const Kernel<Problem>> make(const Problem&, const Device&) {                                                       \
    throw Error(ErrorCode::kUnsupported, "training runs on the CPU in this version, not on a GPU; choose the CPU (`--device cpu`)"); \
  }                                                                                                                                  \
  static_assert(true)
FATTN_OPS_FOR_TRAINING(FATTN_OPS_REFUSED);
#undef FATTN_OPS_REFUSED

}  // namespace fattn::ops::cuda
