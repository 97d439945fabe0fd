// Events in a file that a process leaves for another, which takes nothing in it for granted.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "lab/profile/event.h"

namespace fattn::lab::profile {

// What the file begins with.
struct TraceHeader {
  char magic[16] = {'f', 'a', 't', 't', 'n', ' ', 't', 'r', 'a', 'c', 'e', ' ', '1', '\n', 0, 0};
  int32_t event_bytes = sizeof(TraceEvent), process = 0;
  int64_t begin_ns = 0;
  char program[256] = {};
  char notes[512] = {};  // what could not be watched, and why
};

struct Trace {
  int32_t process = 0;
  int64_t begin_ns = 0;
  std::string program, notes;
  std::vector<TraceEvent> events;  // by their beginning
  int64_t left_out = 0;            // beyond what is kept
};

inline constexpr int64_t kMostEvents = 2'000'000;

// Throws RecordError: not there, no trace, of another version. A last event that is cut off is left out.
Trace read_trace(const std::string& path);

// Every text terminated, times in order, the kind one that there is.
bool is_sound(const TraceEvent& event);
void sort_events(std::vector<TraceEvent>& events);

}  // namespace fattn::lab::profile
