// Checkpoints: a folder each, which is a model's folder (config.json, model.safetensors, the tokenizer) with what training goes on from
// (optimizer.safetensors, checkpoint.json). It is made beside and renamed, so that one that has its name is whole.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "gpt2/config.h"
#include "gpt2/train/network.h"
#include "gpt2/train/options.h"
#include "gpt2/train/state.h"

namespace fattn::gpt2 {

// The arrays of a network, or of a test.
struct Arrays {
  const std::vector<Parameter>* parameters = nullptr;
  int64_t flat_size = 0;
  std::function<const float*(Flat)> flat;  // valid until the next call
};

struct Checkpoint {
  std::string path;
  Config config;
  TrainOptions options;
  TrainState state;
  uint64_t data = 0;  // Loader::fingerprint()
};

using FileTexts = std::vector<std::pair<std::string, std::string>>;  // names and contents

// Writes `out`/step-00001000 and returns its path. One of that name is replaced. Of `texts` (a tokenizer's) each is a file in it. Throws
// std::runtime_error where it cannot be written; nothing half-written stays then.
std::string write_checkpoint(const std::string& out, const Checkpoint& checkpoint, const Arrays& arrays, const FileTexts& texts);

struct FoundCheckpoint {
  std::string path;
  int64_t step = 0;
};
// By step, the last one at the end.
std::vector<FoundCheckpoint> find_checkpoints(const std::string& out);
// Removes what an interrupted write or removal left.
void remove_unfinished(const std::string& out);
// Removes all but the last `keep`; 0: none.
void remove_old(const std::string& out, int64_t keep);

// Checks that the files have the sizes and checksums that checkpoint.json says. Throws Error with the file's name.
Checkpoint read_checkpoint(const std::string& path);
// Moments and masters, in the places of the parameters. Throws Error where a tensor is missing or of another size.
void restore_arrays(const Checkpoint& checkpoint, const Arrays& arrays, const std::function<void(Flat, const float*)>& restore);

}  // namespace fattn::gpt2
