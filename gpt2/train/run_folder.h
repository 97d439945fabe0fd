// The folder of a training run: training.json (what the run is), log.jsonl, checkpoints. One process at a time writes into it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "gpt2/config.h"
#include "gpt2/train/options.h"

namespace fattn::gpt2 {

// What a run began with: training.json.
struct RunDescription {
  Config config;
  TrainOptions options;
  std::string model;                          // the folder that the weights came from; empty: random ones of the seed
  std::vector<std::string> data, validation;  // paths
  uint64_t fingerprint = 0;                   // Loader::fingerprint() of the data
};

class RunFolder {
 public:
  // Makes the folder, or takes one that is empty; with `resume` also one of a run. Throws Error where it holds something else, is no folder, or
  // another process trains into it.
  RunFolder(const std::string& path, bool resume);
  // Of a process that writes nothing into it, beside the one that does: what that one has found is read, and nothing is made, locked or checked.
  static std::unique_ptr<RunFolder> for_reading(const std::string& path, bool resume);
  ~RunFolder();
  RunFolder(const RunFolder&) = delete;
  RunFolder& operator=(const RunFolder&) = delete;

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const;
  // What is there already; none: the run begins.
  const std::optional<RunDescription>& before() const { return before_; }
  void describe(const RunDescription& run) const;

 private:
  explicit RunFolder(const std::string& path) : path_(path) {}
  void lock();
  void read_description();

  const std::string path_;
  bool made_ = false;
  int lock_ = -1;
  std::optional<RunDescription> before_;
};

}  // namespace fattn::gpt2
