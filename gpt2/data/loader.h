// Batches of token files, in an order that depends on the seed alone; the next ones are read while a step computes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpt2/data/batch.h"

namespace fattn::gpt2 {

struct LoaderOptions {
  int64_t sequences = 1, seqlen = 1024;
  bool shuffle = true;
  uint64_t seed = 0;
  int64_t vocab_size = 0;       // ids beyond it: Error, with file and place
  int64_t rank = 0, ranks = 1;  // of a batch of `ranks * sequences` rows this one has its own
};

// Of the next batch: what a checkpoint keeps.
struct LoaderPosition {
  int64_t epoch = 0, batch = 0;  // batch in the epoch
};

class Loader {
 public:
  // `paths`: token files, or folders of them. Throws Error: none there, damaged, another vocabulary, less data than one sequence.
  Loader(const std::vector<std::string>& paths, const LoaderOptions& options, LoaderPosition from = {});
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  const Batch& next();              // valid until the next call
  LoaderPosition position() const;  // of the batch that the next call of next() gives
  int64_t batches_an_epoch() const;
  int64_t tokens() const;  // in all files
  // A word that depends on names, sizes and checksums of the files: whether a checkpoint was made with the same data.
  uint64_t fingerprint() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fattn::gpt2
