// Which task is of which batch entry. Entries of packed sequences are unequal: those of the most work are taken first, so that none is left to the
// end.
#pragma once

#include <algorithm>
#include <cstdint>

#include "problem/problem.h"

namespace fattn::core {

class Entries {
 public:
  struct Task {
    int64_t entry, index;  // a batch entry, and which of its tasks
  };

  // Entries of `each` tasks.
  Entries(int64_t batch, int64_t each) : each_(each), tasks_(batch * each) {}

  // Entry n has tasks_of(n) of them, each of work_of(n). `order` and `ends` are memory for `batch` numbers each.
  template <class Tasks, class Work>
  Entries(int64_t batch, int64_t* order, int64_t* ends, const Tasks& tasks_of, const Work& work_of) : batch_(batch), order_(order), ends_(ends) {
    for (int64_t n = 0; n < batch; ++n) order[n] = n;
    std::sort(order, order + batch, [&](int64_t a, int64_t b) {
      const auto of_a = work_of(a), of_b = work_of(b);
      return of_a != of_b ? of_a > of_b : a < b;
    });
    for (int64_t i = 0; i < batch; ++i) ends[i] = tasks_ += tasks_of(order[i]);
  }

  int64_t tasks() const { return tasks_; }
  Task task(int64_t i) const {
    if (!order_) return {i / each_, i % each_};
    const int64_t* end = std::upper_bound(ends_, ends_ + batch_, i);
    return {order_[end - ends_], i - (end == ends_ ? 0 : end[-1])};
  }

 private:
  int64_t each_ = 0, batch_ = 0, tasks_ = 0;
  const int64_t *order_ = nullptr, *ends_ = nullptr;
};

}  // namespace fattn::core
