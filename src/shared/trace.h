// Who is told when calls and their parts begin and end: nobody, unless a profiler asked. Then a part costs one load and one branch.
#pragma once

#include <atomic>

#include "fattn/fattn.h"

namespace fattn::core {

// Null: nobody. fattn_set_trace changes it; a library that is preloaded may bring its own (trace.cpp).
extern std::atomic<const fattn_trace*> trace_listener;

// A call or a part of one, for as long as this lives. The name must be a literal.
class Traced {
 public:
  explicit Traced(const char* name, const fattn_trace_call* call = nullptr) noexcept : listener_(trace_listener.load(std::memory_order_acquire)) {
    if (listener_) [[unlikely]]
      listener_->begin(name, call);
  }
  ~Traced() {
    if (listener_) [[unlikely]]
      listener_->end();
  }
  Traced(const Traced&) = delete;
  Traced& operator=(const Traced&) = delete;

 private:
  const fattn_trace* const listener_;  // whoever was told of the beginning is told of the end
};

}  // namespace fattn::core
