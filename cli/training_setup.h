// What a training run is, of its flags, of the folder that it goes on in, and of its data: checked before anything is computed.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cli/training_flags.h"
#include "gpt2/data/loader.h"
#include "gpt2/group/launch.h"
#include "gpt2/group/share.h"
#include "gpt2/model/model.h"
#include "gpt2/train/checkpoint.h"
#include "gpt2/train/run_folder.h"

namespace fattn::cli {

struct TrainingSetup {
  std::unique_ptr<gpt2::RunFolder> folder;  // none with --memory
  gpt2::RunDescription run;
  std::optional<gpt2::Checkpoint> from;  // the checkpoint to go on from
  std::unique_ptr<gpt2::Loader> loader;  // of the data, at its place; none with --memory
  gpt2::FileTexts texts;                 // the tokenizer's files, for checkpoints
  std::string changed;                   // that the run ends at another step than it was begun with, or is on another device, in words
  gpt2::Launch launch;                   // which of the run's processes this is
  gpt2::Share share;                     // and what it has of sequences and batches
  std::optional<int> named_gpu;          // of one of several processes: --device cuda:INDEX

  bool leads() const { return launch.rank == 0; }  // it writes the run's folder, and speaks
  // Of several processes each has the GPU of its number on its machine, unless --device names one.
  std::optional<int> gpu() const;

  gpt2::Compute compute(int threads) const;
  gpt2::NetworkOptions network() const;
  gpt2::LoaderOptions loading() const;
  gpt2::Weights weights() const;
};

// Throws gpt2::Error, or CLI::ValidationError for flags that do not go together.
TrainingSetup set_up_training(const TrainingFlags& flags, const gpt2::Launch& launch = {});

}  // namespace fattn::cli
