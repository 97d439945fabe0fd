// Plans that were made lately, for calls that repeat a problem, as those of a model do: making one costs as much as executing a small one.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <utility>

#include "fattn/plan.hpp"

namespace fattn::torch {

struct KnownPlan {
  fattn_problem problem;  // without addresses, which no plan depends on
  Plan plan;
  size_t workspace_bytes;
};

// The whole problem is the key, byte by byte, so no option can be forgotten in it. A thread has its own cache, which needs no lock and is as
// good in a forked child: a plan holds no thread and no memory of a device.
class PlanCache {
 public:
  static PlanCache& of_this_thread() {
    static thread_local PlanCache cache;
    return cache;
  }

  // Throws Error where no plan can be made. What is returned lives until the next call.
  const KnownPlan& get(fattn_problem problem) {
    for_each_tensor([&](const TensorRow& row) { (problem.*row.described).data = nullptr; });
    auto place = std::find_if(plans_.begin(), plans_.end(),
                              [&](const auto& known) { return known && std::memcmp(&known->problem, &problem, sizeof problem) == 0; });
    if (place == plans_.end()) {
      Plan plan(problem);
      const size_t bytes = plan.workspace_bytes();
      *--place = std::make_unique<KnownPlan>(KnownPlan{problem, std::move(plan), bytes});  // instead of the one that was used longest ago
    }
    std::rotate(plans_.begin(), place, place + 1);
    return *plans_.front();
  }

 private:
  std::array<std::unique_ptr<KnownPlan>, 16> plans_;  // both passes of some shapes, the last used first
};

}  // namespace fattn::torch
