// Cases with their oracle, made once for all that computes them: the oracle takes longer than what it judges.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "testing/check.h"

namespace fattn::testing {

// Only cases of one dtype are kept: tests are in the order of dtypes.
class Prepared {
 public:
  static std::shared_ptr<const PreparedCase> of(const Case& c) {
    static Prepared all;
    const std::pair key(c.name, c.seed);
    {
      std::lock_guard lock(all.mutex_);
      if (all.dtype_ != c.dtype) all.cases_.clear();
      all.dtype_ = c.dtype;
      if (auto found = all.cases_.find(key); found != all.cases_.end()) return found->second;
    }
    auto made = std::make_shared<const PreparedCase>(c);
    std::lock_guard lock(all.mutex_);
    return all.cases_.emplace(key, std::move(made)).first->second;
  }

 private:
  std::mutex mutex_;
  DType dtype_ = DType::kF32;
  std::map<std::pair<std::string, uint64_t>, std::shared_ptr<const PreparedCase>> cases_;
};

}  // namespace fattn::testing
