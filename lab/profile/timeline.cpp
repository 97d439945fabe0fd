// The timeline: a track for each thread and each stream, memory as counters.
#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "lab/profile/profile.h"

namespace fattn::lab::profile {
namespace {

using Json = nlohmann::ordered_json;

// Text that JSON can hold: what is no UTF-8 would throw later.
std::string utf8(const std::string& text) {
  const std::string dumped = Json(text).dump(-1, ' ', false, Json::error_handler_t::replace);
  return Json::parse(dumped).get<std::string>();
}

double micros(int64_t ns, int64_t begin) { return static_cast<double>(ns - begin) * 1e-3; }

// A GPU's streams are tracks of a process of their own, whose number no process of the system has.
int32_t gpu_process(int32_t device) { return 1'000'000'000 + device; }

Json metadata(const char* what, int32_t process, int64_t thread, const std::string& name) {
  return {{"name", what}, {"ph", "M"}, {"pid", process}, {"tid", thread}, {"args", {{"name", name}}}};
}

Json event_json(const TraceEvent& e, int32_t process, int64_t begin) {
  Json arguments = Json::object();
  if (e.detail[0]) arguments["detail"] = utf8(e.detail);
  if (e.flops > 0) arguments["flops"] = e.flops;
  if (e.bytes > 0) arguments["bytes"] = e.bytes;
  if (e.workspace_bytes > 0) arguments["workspace_bytes"] = e.workspace_bytes;
  if (e.correlation > 0) arguments["correlation"] = e.correlation;
  return {{"name", utf8(e.name)},
          {"cat", name_of(e.kind)},
          {"ph", "X"},
          {"ts", micros(e.begin_ns, begin)},
          {"dur", micros(e.end_ns, e.begin_ns)},
          {"pid", e.device >= 0 ? gpu_process(e.device) : process},
          {"tid", e.thread},
          {"args", arguments}};
}

}  // namespace

Json timeline_json(const Profile& profile) {
  Json all = Json::array();
  std::set<std::pair<int32_t, int64_t>> tracks;
  std::set<int32_t> devices;
  std::map<int32_t, std::string> processes;
  for (const Lane& lane : profile.lanes) {
    processes.emplace(lane.process, lane.name);
    for (const TraceEvent& e : lane.events) {
      if (e.kind == EventKind::kMemory) continue;
      all.push_back(event_json(e, lane.process, profile.begin_ns));
      if (e.device >= 0) devices.insert(e.device);
      tracks.insert({e.device >= 0 ? gpu_process(e.device) : lane.process, e.thread});
    }
    for (const MemoryChange& change : memory_changes(lane.events))
      all.push_back({{"name", change.device >= 0 ? "GPU memory" : "allocated"},
                     {"ph", "C"},
                     {"ts", micros(change.ns, profile.begin_ns)},
                     {"pid", change.device >= 0 ? gpu_process(change.device) : lane.process},
                     {"args", {{"bytes", change.total}}}});
  }
  const int32_t first = profile.lanes.empty() ? 1 : profile.lanes.front().process;
  for (const Side& side : profile.sides)
    for (const MemorySample& sample : side.memory.samples)
      all.push_back(
          {{"name", "resident set"}, {"ph", "C"}, {"ts", micros(sample.ns, profile.begin_ns)}, {"pid", first}, {"args", {{"bytes", sample.bytes}}}});
  std::stable_sort(all.begin(), all.end(), [](const Json& a, const Json& b) { return a.at("ts").get<double>() < b.at("ts").get<double>(); });
  Json events = Json::array();
  for (const auto& [process, name] : processes) events.push_back(metadata("process_name", process, 0, utf8(name)));
  for (const int32_t device : devices) events.push_back(metadata("process_name", gpu_process(device), 0, "GPU " + std::to_string(device)));
  for (const auto& [process, thread] : tracks)
    events.push_back(metadata("thread_name", process, thread,
                              (process >= gpu_process(0) ? "stream "
                               : thread == process       ? "main thread "
                                                         : "thread ") +
                                  std::to_string(thread)));
  for (Json& event : all) events.push_back(std::move(event));
  return {{"fattn_timeline", 1}, {"complete", profile.interrupted.empty()}, {"displayTimeUnit", "ms"}, {"traceEvents", events}};
}

}  // namespace fattn::lab::profile
