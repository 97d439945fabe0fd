// build() with everything that is known of the cubin: for listings and packs.
#pragma once

#include "jit/entry.h"

namespace fattn::core::jit {

struct Built {
  Entry entry;
  Origin origin = Origin::kNvrtc;
};
Built build_entry(const Request& request, Origin first = Origin::kDisk);

}  // namespace fattn::core::jit
