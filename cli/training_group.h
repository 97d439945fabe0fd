// The processes of a training run: flags, how they come together, and what all must have alike.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "cli/parser.h"
#include "gpt2/group/group.h"

namespace fattn::cli {

struct TrainingFlags;
struct TrainingSetup;

struct GroupFlags {
  std::string rendezvous;
  double timeout = 20, start_timeout = 300;
  uint64_t bucket = 25 << 20;
  int64_t context_parallel = 1;

  void add_to(CLI::App& command);
};

// Returns when all processes are there; null where `launch` says that there is one.
std::unique_ptr<gpt2::Group> join_group(const GroupFlags& flags, const gpt2::Launch& launch);

gpt2::Facts facts_of(const TrainingFlags& flags, const TrainingSetup& setup);

}  // namespace fattn::cli
