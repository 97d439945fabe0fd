// Batches of token files, in an order that depends on the seed alone; the next ones are read while a step computes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "gpt2/data/batch.h"
#include "gpt2/data/token_set.h"

namespace fattn::gpt2 {

struct LoaderOptions {
  int64_t sequences = 1, seqlen = 1024;
  bool shuffle = true;
  uint64_t seed = 0;
  int64_t vocab_size = 0;       // ids beyond it: Error, with file and place
  int64_t rank = 0, ranks = 1;  // of `ranks` batches that follow each other this one has its own
};

// Of the next batch: what a checkpoint keeps.
struct LoaderPosition {
  int64_t epoch = 0, batch = 0;  // batch in the epoch; of several ranks the first one's
};

// Rows of `seqlen` tokens follow each other in the stream of all files: documents are packed, a long one goes on in the next row, where its positions
// begin at 0 again. A token's target is the next one of its document; prompts are no targets. An epoch has every token once: the last row, and the
// last batch, are filled up by padding, which has no targets. Ranks take turns: what they have together is what one process would have, batch by
// batch; where an epoch ends in between, those behind its end have a batch of padding.
class Loader {
 public:
  // `paths`: token files, or folders of them; of a folder that `fattn gpt2 tokenize` made those in `train`. Throws Error: none there, damaged,
  // another vocabulary, less data than one sequence.
  Loader(const std::vector<std::string>& paths, const LoaderOptions& options, LoaderPosition from = {});
  ~Loader();
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // Valid until the next call. Throws Error where a file turns out to be damaged.
  const Batch& next();
  LoaderPosition position() const;   // of the batch that the next call of next() gives
  int64_t batches_an_epoch() const;  // of all ranks
  int64_t tokens() const;            // in all files
  const TokenSet& data() const;      // whose ids are read by another thread: ask it for numbers alone
  // A word that depends on names, sizes and checksums of the files: whether a checkpoint was made with the same data.
  uint64_t fingerprint() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fattn::gpt2
