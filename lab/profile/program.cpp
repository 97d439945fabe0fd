#include "lab/profile/program.h"

#include <algorithm>

#include "lab/profile/trace_file.h"

namespace fattn::lab::profile {

std::vector<TraceEvent> all_events(const Profile& profile) {
  std::vector<TraceEvent> events;
  for (const Lane& lane : profile.lanes) events.insert(events.end(), lane.events.begin(), lane.events.end());
  sort_events(events);
  return events;
}

void summarise(const Profile& profile, PassProfile& pass) {
  pass.operations = operations_of(all_events(profile));
  pass.calls = 0;
  for (const Operation& operation : pass.operations)
    if (operation.kind == EventKind::kCall) pass.calls += operation.times;
}

void finish_recording(Profile& profile) {
  const std::vector<TraceEvent> events = all_events(profile);
  Side& side = profile.sides.emplace_back();
  side.name = "recording";
  side.memory.changes = memory_changes(events);
  side.memory.samples_reason = "nobody looked from outside";
  PassProfile& pass = side.passes.emplace_back();
  pass.pass = "all";
  summarise(profile, pass);
  int64_t end = 0;
  for (const TraceEvent& event : events) end = std::max(end, event.end_ns);
  profile.begin_ns = events.empty() ? 0 : events.front().begin_ns;
  pass.seconds = static_cast<double>(std::max<int64_t>(0, end - profile.begin_ns)) * 1e-9;
}

}  // namespace fattn::lab::profile
