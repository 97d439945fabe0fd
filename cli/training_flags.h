// The flags of `fattn gpt2 train`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cli/output.h"
#include "cli/parser.h"
#include "cli/training_group.h"
#include "gpt2/train/options.h"

namespace fattn::cli {

struct TrainingFlags {
  // What is trained: a model's folder or a config.json; or sizes.
  std::string model, preset, tokenizer, positions = "learned";
  int64_t n_layer = 0, n_head = 0, n_embd = 0, n_kv_head = 0, n_positions = 0;

  std::vector<std::string> data, validation;
  std::string out;
  bool resume = false, memory = false;

  gpt2::TrainOptions options;
  std::string dtype = "fp32", schedule = "cosine";  // those of the options by name
  int64_t steps = 0;                                // 0: by epochs
  double epochs = 1;
  int threads = 0;
  uint64_t memory_limit = 0;

  int64_t every = 500, keep = 2, eval_every = 0, eval_batches = 0;
  std::string tensorboard, figure, status, track, json;
  GroupFlags group;
  OutputFlags output;

  void add_to(CLI::App& command);
  // Whether the user gave it: "--seqlen".
  bool given(const std::string& flag) const;
  // With what was given by name, for a run of so many processes that share batches.
  gpt2::TrainOptions chosen(int data_ranks) const;

 private:
  const CLI::App* command_ = nullptr;
};

}  // namespace fattn::cli
