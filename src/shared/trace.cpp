#include "shared/trace.h"

// Of a library that is loaded before this one (LD_PRELOAD); null where there is none.
extern "C" __attribute__((weak, visibility("default"))) const fattn_trace fattn_trace_preloaded;

namespace fattn::core {

std::atomic<const fattn_trace*> trace_listener{&fattn_trace_preloaded};

}  // namespace fattn::core
