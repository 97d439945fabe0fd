#include "lab/profile/trace_file.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>

#include "lab/record_error.h"

namespace fattn::lab::profile {

bool is_sound(const TraceEvent& e) {
  const auto kind = static_cast<int32_t>(e.kind);
  return kind >= 0 && kind < kEventKinds && std::memchr(e.name, 0, sizeof e.name) && std::memchr(e.detail, 0, sizeof e.detail) && e.begin_ns >= 0 &&
         e.end_ns >= e.begin_ns && e.depth >= 0 && std::isfinite(e.flops) && std::isfinite(e.bytes);
}

void sort_events(std::vector<TraceEvent>& events) {
  std::stable_sort(events.begin(), events.end(),
                   [](const TraceEvent& a, const TraceEvent& b) { return a.begin_ns != b.begin_ns ? a.begin_ns < b.begin_ns : a.end_ns > b.end_ns; });
}

Trace read_trace(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw RecordError("'" + path + "' cannot be read; give a folder that `fattn profile` wrote");
  TraceHeader header, expected;
  const auto no_trace = [&](const std::string& what) {
    return RecordError("'" + path + "' " + what + "; record the program again with this version");
  };
  if (!file.read(reinterpret_cast<char*>(&header), sizeof header) || std::memcmp(header.magic, expected.magic, sizeof header.magic) != 0)
    throw no_trace("is no trace of fattn");
  if (header.event_bytes != expected.event_bytes) throw no_trace("is a trace of another version of fattn");
  header.program[sizeof header.program - 1] = header.notes[sizeof header.notes - 1] = 0;
  Trace trace;
  trace.process = header.process;
  trace.begin_ns = header.begin_ns;
  trace.program = header.program;
  trace.notes = header.notes;
  TraceEvent event;
  while (file.read(reinterpret_cast<char*>(&event), sizeof event)) {
    if (!is_sound(event)) throw no_trace("has an event that cannot be");
    if (static_cast<int64_t>(trace.events.size()) < kMostEvents)
      trace.events.push_back(event);
    else
      ++trace.left_out;
  }
  sort_events(trace.events);
  return trace;
}

}  // namespace fattn::lab::profile
