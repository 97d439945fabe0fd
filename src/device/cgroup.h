// Limits of the control group (v1, v2 or both) that this process runs in: CPU quota and memory.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace fattn::core {

// `root` stands before every path that is read, "" for the running system. The limits of the group and of all its
// ancestors that are visible apply, so the smallest counts. What is missing or unreadable limits nothing.

// CPUs that the quota allows, such as 1.5; infinity without a quota.
double cgroup_cpus(const std::string& root);

struct CgroupMemory {
  static constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();
  int64_t limit = kUnlimited;
  int64_t free = kUnlimited;  // limit - usage; file cache that the kernel can drop at once counts as free
};
CgroupMemory cgroup_memory(const std::string& root);

}  // namespace fattn::core
