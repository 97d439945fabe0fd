// A status file (docs/RECORD.md, "Status files") as who watches reads it: it may be anybody's, so nothing in it is taken for granted.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace fattn::cli {

struct StatusReading {
  std::string command, state, now;  // now: empty where nothing is said
  int64_t step = 0, of = 1;
  std::optional<double> seconds_left;
  int64_t updated = 0;  // seconds since 1970
  int64_t pid = 0;

  bool running() const { return state == "running"; }
};

// Throws std::runtime_error, in printable characters: not to be read, or no status file, and why.
StatusReading read_status(const std::string& path);

// The status file of the folder that was written last; throws std::runtime_error if there is none.
std::string status_file_in(const std::string& folder);

// What the process was told by --status, if that is its status file; else empty.
std::string status_file_of(int64_t pid);

}  // namespace fattn::cli
