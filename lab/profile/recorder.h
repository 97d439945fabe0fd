// Records what the library and others say of themselves, on any number of threads, until somebody takes it. Needs nothing but libc and libstdc++: a
// preloaded library has it too.
#pragma once

#include <cstddef>
#include <cstdint>

#include "fattn/fattn.h"
#include "lab/profile/event.h"

namespace fattn::lab::profile {

// Gets events in blocks, one call at a time. Must not throw.
using EventSink = void (*)(const TraceEvent* events, size_t count, void* context);

// From now on events go to this sink, once enough of them have come together; null: they are dropped.
void record_to(EventSink sink, void* context);
// Hands all that was recorded to the sink. Events that are open stay open.
void flush_events();

// Around a fork, so that no lock stays taken in the child. The child begins with nothing recorded, and without a sink.
void before_fork();
void after_fork_in_parent();
void after_fork_in_child();

// What the library tells (fattn_set_trace).
void trace_begins(const char* name, const fattn_trace_call* call);
void trace_ends();
inline constexpr fattn_trace kRecordingTrace{sizeof(fattn_trace), 0, trace_begins, trace_ends};

// A named range of this thread; begin and end in pairs.
void begin_range(const char* name, const char* detail = "");
void end_range();
void record(const TraceEvent& event);

int64_t now_ns();
int32_t this_thread();
// Copies what fits, and a whole terminator; never half of a UTF-8 character.
void copy_text(char* to, size_t size, const char* text);

class Range {
 public:
  explicit Range(const char* name, const char* detail = "") { begin_range(name, detail); }
  ~Range() { end_range(); }
  Range(const Range&) = delete;
  Range& operator=(const Range&) = delete;
};

}  // namespace fattn::lab::profile
