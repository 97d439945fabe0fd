#include "device/cgroup.h"

#include <algorithm>
#include <string_view>
#include <vector>

#include "device/text_file.h"

namespace fattn::core {
namespace {

bool contains(std::string_view list, std::string_view item) {
  for (std::string_view part : split(list, ','))
    if (part == item) return true;
  return false;
}

// mountinfo writes space, tab, newline and backslash as \ooo.
std::string unescaped(std::string_view field) {
  std::string out;
  for (size_t i = 0; i < field.size(); ++i) {
    const auto octal = [&](size_t at) { return at < field.size() && field[at] >= '0' && field[at] <= '7'; };
    if (field[i] == '\\' && octal(i + 1) && octal(i + 2) && octal(i + 3)) {
      out += static_cast<char>((field[i + 1] - '0') * 64 + (field[i + 2] - '0') * 8 + (field[i + 3] - '0'));
      i += 3;
    } else {
      out += field[i];
    }
  }
  return out;
}

struct Mount {
  std::string group, point;  // the group that is mounted, and where
};

// Mounts of a v1 controller, or of the v2 hierarchy if `controller` is empty (proc(5), "mountinfo").
std::vector<Mount> mounts_of(const std::string& root, std::string_view controller) {
  std::vector<Mount> mounts;
  const std::string table = read_text(root + "/proc/self/mountinfo");
  for (std::string_view line : split(table, '\n')) {
    const size_t dash = line.find(" - ");
    if (dash == std::string_view::npos) continue;
    const auto front = split(line.substr(0, dash), ' ');
    const auto back = split(line.substr(dash + 3), ' ');  // type, source, super options
    if (front.size() < 5 || back.empty()) continue;
    const bool match = controller.empty() ? back[0] == "cgroup2" : back[0] == "cgroup" && back.size() >= 3 && contains(back[2], controller);
    if (match) mounts.push_back({unescaped(front[3]), unescaped(front[4])});
  }
  return mounts;
}

// The group of this process in the hierarchy of a v1 controller, or of v2 if `controller` is empty; empty if it has none.
std::string group_of(const std::string& root, std::string_view controller) {
  const std::string table = read_text(root + "/proc/self/cgroup");
  for (std::string_view line : split(table, '\n')) {
    const auto fields = split(line, ':');  // number, controllers, group; the group may contain colons
    if (fields.size() < 3) continue;
    const bool match = controller.empty() ? fields[0] == "0" && fields[1].empty() : contains(fields[1], controller);
    if (match) return std::string(line.substr(fields[0].size() + fields[1].size() + 2));
  }
  return "";
}

// Folders of the group and of its visible ancestors, innermost first.
std::vector<std::string> group_folders(const std::string& root, std::string_view controller) {
  std::vector<std::string> folders;
  const std::string group = group_of(root, controller);
  if (group.empty()) return folders;
  for (const Mount& mount : mounts_of(root, controller)) {
    // In a container the mount often shows only the container's own group, while /proc names it from the host's root.
    std::string below = group;
    if (mount.group != "/" && (group + "/").compare(0, mount.group.size() + 1, mount.group + "/") == 0) below = group.substr(mount.group.size());
    if (below.find("/..") != std::string::npos) below.clear();  // a group outside of this namespace
    while (!below.empty() && below.back() == '/') below.pop_back();
    for (;; below.resize(below.rfind('/'))) {
      folders.push_back(root + mount.point + below);
      if (below.find('/') == std::string::npos) break;
    }
  }
  return folders;
}

double ratio(std::optional<int64_t> quota, std::optional<int64_t> period) {
  if (!quota || !period || *quota <= 0 || *period <= 0) return std::numeric_limits<double>::infinity();
  return static_cast<double>(*quota) / static_cast<double>(*period);
}

// Value of the line "key value" of memory.stat; 0 if there is none.
int64_t stat_value(const std::string& path, std::string_view key) {
  const std::string table = read_text(path);
  for (std::string_view line : split(table, '\n')) {
    const size_t space = line.find(' ');
    if (space != std::string_view::npos && line.substr(0, space) == key) return std::max<int64_t>(0, parse_int(line.substr(space)).value_or(0));
  }
  return 0;
}

void limit_memory(CgroupMemory& memory, const std::string& folder, const char* limit_file, const char* usage_file, const char* cache_key) {
  const auto limit = parse_int(read_text(folder + "/" + limit_file));  // "max" is no number
  if (!limit || *limit < 0) return;
  const int64_t usage = std::max<int64_t>(0, parse_int(read_text(folder + "/" + usage_file)).value_or(0));
  const int64_t needed = usage - std::min(usage, stat_value(folder + "/memory.stat", cache_key));
  memory.limit = std::min(memory.limit, *limit);
  memory.free = std::min(memory.free, std::max<int64_t>(0, *limit - needed));
}

}  // namespace

double cgroup_cpus(const std::string& root) {
  double cpus = std::numeric_limits<double>::infinity();
  for (const std::string& folder : group_folders(root, "")) {
    const std::string line = read_text(folder + "/cpu.max");  // "max 100000" or "150000 100000"
    const auto fields = split(trimmed(line), ' ');
    if (fields.size() == 2) cpus = std::min(cpus, ratio(parse_int(fields[0]), parse_int(fields[1])));
  }
  for (const std::string& folder : group_folders(root, "cpu"))  // quota -1: none
    cpus = std::min(cpus, ratio(parse_int(read_text(folder + "/cpu.cfs_quota_us")), parse_int(read_text(folder + "/cpu.cfs_period_us"))));
  return cpus;
}

CgroupMemory cgroup_memory(const std::string& root) {
  CgroupMemory memory;
  for (const std::string& folder : group_folders(root, "")) limit_memory(memory, folder, "memory.max", "memory.current", "inactive_file");
  for (const std::string& folder : group_folders(root, "memory"))
    limit_memory(memory, folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file");
  return memory;
}

}  // namespace fattn::core
