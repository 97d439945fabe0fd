// Which part of a step's work a process has: ranks that follow each other share sequences, groups of such ranks share batches.
#pragma once

#include <cstdint>

#include "gpt2/group/launch.h"

namespace fattn::gpt2 {

struct Share {
  int context_rank = 0, context_ranks = 1;  // of the processes that have rows of the same sequences
  int data_rank = 0, data_ranks = 1;        // of the groups of them, which take batches in turns

  int rank_of(int context) const { return data_rank * context_ranks + context; }  // in the run
};

// `context`: processes that share a sequence. Throws Error where they do not divide those of the run.
Share share_of(const Launch& launch, int64_t context);

}  // namespace fattn::gpt2
