// What has no registers in any tile of the v2 kernels, forward or backward.
#pragma once

#include "backend/cuda/spills.h"

namespace fattn::core::cuda {

inline constexpr RefusalRule kV2Refusals[] = {
    {.name = "documents, bias and mask above 192",
     .where = {.above = 192, .all = with::kDocuments | with::kBias | with::kMask},
     .why =
         "{headdims}; with documents, a bias and a mask of pairs together the CUDA kernels have registers for up to {most}: have the mask, or -Inf "
         "in the bias, say what documents say, or use the CPU",
     .bytes = {}},
};

}  // namespace fattn::core::cuda
