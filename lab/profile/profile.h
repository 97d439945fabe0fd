// All that `fattn profile` finds, and what is made of it: a record (docs/profile.schema.json), a timeline, a page.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "lab/memory/traffic.h"
#include "lab/profile/counters.h"
#include "lab/profile/memory_track.h"
#include "lab/profile/operations.h"
#include "lab/report/page.h"
#include "measure/record.h"

namespace fattn::lab::profile {

// One pass of one side, or all of a program.
struct PassProfile {
  std::string pass;    // "fwd", "bwd"; of a program "all"
  int64_t calls = 0;   // that were recorded; of a program: of the library
  double seconds = 0;  // from the first to the last, or all of the program
  int threads = 1;     // of the CPU's plan
  std::string reason;  // why there is nothing
  std::vector<Operation> operations;
  std::vector<Counter> counters;
  std::optional<Traffic> traffic;  // the model
};

struct Side {
  std::string name;  // "standard", "fattn"; of a program its own
  std::vector<PassProfile> passes;
  MemoryTrack memory;
};

// A process or a side, for the timeline.
struct Lane {
  std::string name;
  int32_t process = 0;
  std::vector<TraceEvent> events;
};

struct ProgramRun {
  std::vector<std::string> command;
  int exit_code = 0;
  int signal = 0;     // that ended it
  int processes = 0;  // that left a trace
};

struct Finding {
  std::string topic, text;  // "what binds", "forward: ..."
};

struct Tool {                       // nsys, ncu
  std::string name, status, words;  // status: "ran", "absent", "failed", "not asked"
  std::vector<std::string> files;
};

struct Profile {
  std::vector<std::string> flags;  // what repeats it
  std::optional<measure::ProblemSpec> spec;
  std::optional<ProgramRun> program;
  bool grad = true, cuda = false;
  std::string device = "cpu", device_name;
  std::vector<measure::Row> rows;  // checked and timed, without a profiler beside
  std::vector<Side> sides;
  std::vector<Lane> lanes;
  std::vector<Finding> verdict;
  std::vector<Tool> tools;
  std::vector<std::string> notes;  // what could not be had, and why
  nlohmann::ordered_json environment, gpu = nullptr;
  std::string interrupted;  // what was measured until then; empty: it is whole
  int64_t begin_ns = 0;
  SortBy sort = SortBy::kTime;
  size_t top = 20;
};

// Sentences, each from a number of the profile.
std::vector<Finding> verdict_of(const Profile& profile);

nlohmann::ordered_json to_json(const Profile& profile, const std::vector<std::string>& files);
nlohmann::ordered_json counters_json(const Profile& profile);
nlohmann::ordered_json memory_json(const Profile& profile);
nlohmann::ordered_json operations_json(const Profile& profile);
// A line of comma-separated values; no field is a formula for a spreadsheet.
std::string csv_line(const std::vector<std::string>& fields);
std::string operations_csv(const Profile& profile);
// Chrome's trace format, which Perfetto opens too (docs/timeline.schema.json).
nlohmann::ordered_json timeline_json(const Profile& profile);

report::Page page_of(const Profile& profile, const std::vector<std::pair<std::string, std::string>>& files);

// The time of the row of this side and pass; 0 where there is none.
double seconds_of(const Profile& profile, const std::string& side, const std::string& pass);

}  // namespace fattn::lab::profile
