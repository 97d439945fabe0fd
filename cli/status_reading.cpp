#include "cli/status_reading.h"

#include <fmt/format.h>

#include <cmath>
#include <cstdio>
#include <ctime>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string_view>
#include <system_error>
#include <vector>

#include "cli/sanitize.h"
#include "files/input_file.h"
#include "files/json.h"
#include "lab/record_file.h"
#include "measure/process_state.h"

namespace fattn::cli {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMostStatusBytes = 64 << 10;  // a true one has some 300

int64_t whole(const lab::JsonPart& status, const char* key, int64_t least) {
  const double number = status.number(key);
  if (!(number >= static_cast<double>(least)) || number > 9e15 || number != std::floor(number))
    status.fail(key, fmt::format("a whole number, {} or more,", least));
  return static_cast<int64_t>(number);
}

// "2026-11-28T03:57:25Z"
int64_t seconds_of(const lab::JsonPart& status, const char* key) {
  std::tm time{};
  char end = 0, more = 0;
  const std::string text = status.text(key);
  if (text.size() != 20 ||
      std::sscanf(text.c_str(), "%4d-%2d-%2dT%2d:%2d:%2d%c%c", &time.tm_year, &time.tm_mon, &time.tm_mday, &time.tm_hour, &time.tm_min, &time.tm_sec,
                  &end, &more) != 7 ||
      end != 'Z')
    status.fail(key, "a time like 2026-11-28T03:57:25Z");
  time.tm_year -= 1900;
  time.tm_mon -= 1;
  return static_cast<int64_t>(timegm(&time));
}

}  // namespace

StatusReading read_status(const std::string& path) {
  const std::string content = files::read_whole(path, kMostStatusBytes);
  try {
    const lab::Json json = files::parse_json(content);
    const lab::JsonPart status(json, "");
    if (whole(status, "fattn_status", 0) != 1) status.fail("fattn_status", "1");
    StatusReading reading;
    reading.command = status.text("command");
    reading.state = status.text("state");
    if (reading.state != "running" && reading.state != "done" && reading.state != "interrupted" && reading.state != "failed")
      status.fail("state", "running, done, interrupted or failed");
    reading.step = whole(status, "step", 0);
    reading.of = whole(status, "of", 1);
    reading.now = status.text("now", "");
    reading.seconds_left = status.maybe("seconds_left");
    if (reading.seconds_left && *reading.seconds_left < 0) status.fail("seconds_left", "a number, 0 or more,");
    reading.updated = seconds_of(status, "updated_at");
    reading.pid = whole(status, "pid", 1);
    return reading;
  } catch (const std::exception& error) {
    throw std::runtime_error(
        fmt::format("'{}' is no status file, which long commands write with --status FILE: {}", printable(path, 300), printable(error.what(), 300)));
  }
}

std::string status_file_in(const std::string& folder) {
  std::error_code error;
  std::string newest;
  int64_t updated = 0;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    if (at->path().extension() != ".json") continue;
    try {
      const int64_t now = read_status(at->path().string()).updated;
      if (newest.empty() || now > updated) newest = at->path().string(), updated = now;
    } catch (const std::exception&) {  // another kind of file
    }
  }
  if (error) throw std::runtime_error("'" + printable(folder, 300) + "' cannot be listed: " + error.message());
  if (newest.empty())
    throw std::runtime_error("there is no status file in '" + printable(folder, 300) +
                             "'; long commands write one with --status FILE: fattn sweep ... --status DIR/status.json");
  return newest;
}

std::string status_file_of(int64_t pid) {
  const std::vector<std::string> words = measure::command_line_of(pid);
  std::string path;
  for (size_t i = 1; i < words.size(); ++i) {
    constexpr std::string_view kJoined = "--status=";
    if (words[i] == "--status" && i + 1 < words.size()) path = words[i + 1];
    if (words[i].starts_with(kJoined)) path = words[i].substr(kJoined.size());
  }
  if (path.empty()) return {};
  if (path.front() != '/') path = measure::working_folder_of(pid) + "/" + path;
  try {
    return read_status(path).pid == pid ? path : std::string();
  } catch (const std::exception&) {  // another program's flag
    return {};
  }
}

}  // namespace fattn::cli
