// In which order the tasks of a key head add to the rows of dq that they share: that of their keys, whoever computes them and whenever. So there is
// one dq, and not a part of it for each task. All tasks walk over the rows from the last to the first and, at each tile of rows, over the heads:
// under a causal mask the first keys have the most rows, begin first, and are ahead of those behind them from the start. A task waits only for tasks
// that were taken before it, so one at least never waits. Internal to each translation unit, which has its own flags.
#pragma once

#include "backend/cpu/kernels.h"

namespace fattn::core {

// Documents cut the tasks' tiles of rows in different places.
static inline bool same_tiles(const BackwardTask& task) { return task.inputs.document_q == nullptr; }

// How far a walk is that has done all rows from `row` on, and for heads up to `head` only, those from there to the end of the tile before.
static inline int64_t walked(const BackwardTask& task, int64_t row, int64_t head) { return (task.seqlen_q - row) * task.group + head + 1; }

// This task is about to compute the tile [row, row_end) of a head, and has done with all before.
static inline void say_begun(const BackwardTask& task, int64_t row, int64_t row_end, int64_t head) {
  if (!task.walked || (head > 0 && !same_tiles(task))) return;
  const int64_t done = head > 0 ? walked(task, row, head - 1) : walked(task, row_end, task.group - 1);
  __atomic_store_n(task.walked + task.turn, done, __ATOMIC_RELEASE);
}

// Returns once the keys before this task's have added what they have for the tile that begins at `row`.
static inline void await_turn(const BackwardTask& task, int64_t row, int64_t head) {
  if (!task.walked) return;
  const int64_t needed = walked(task, row, same_tiles(task) ? head : task.group - 1);
  for (int64_t i = task.turn - 1; i >= 0; --i)
    for (int64_t times = 0; __atomic_load_n(task.walked + i, __ATOMIC_ACQUIRE) < needed; ++times) task.pause(times);
}

}  // namespace fattn::core
