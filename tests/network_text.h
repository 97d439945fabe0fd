// A small network and a batch of random tokens for it.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gpt2/train/network.h"
#include "gpt2_files.h"

namespace fattn::gpt2 {

class Beginning {
 public:
  explicit Beginning(const Config& c) : config(c), path_((folder_.path() / "model").string()) {
    save_model(path_, tensors_of(c), fill_at_random(c, DType::kF32, 7), {{"config.json", to_json(c, DType::kF32)}}, {});
  }
  Network network(const NetworkOptions& options, const Compute& compute = {}) const {
    return {config, Weights::open(path_, config), options, compute};
  }
  const std::string& folder() const { return path_; }
  const Config config;

 private:
  test::TemporaryFolder folder_;
  std::string path_;
};

constexpr int64_t kSequences = 3, kSeqlen = 21;

// Random tokens; with documents, a new one begins at two places of each sequence, and a row in eight has no target.
struct Text {
  explicit Text(const Config& config, bool documents, unsigned seed = 1) {
    std::mt19937 random(seed);
    int32_t position = 0, document = 0;
    for (int64_t i = 0; i < kSequences * kSeqlen; ++i) {
      if (i % kSeqlen == 0) position = document = 0;
      if (documents && (i % kSeqlen == 4 || i % kSeqlen == 15)) position = 0, ++document;
      ids.push_back(static_cast<int32_t>(random() % static_cast<unsigned>(config.vocab_size)));
      targets.push_back(documents && random() % 8 == 0 ? -1 : static_cast<int32_t>(random() % static_cast<unsigned>(config.vocab_size)));
      positions.push_back(position++);
      numbers.push_back(document);
    }
    batch = {kSequences, kSeqlen, ids.data(), targets.data(), positions.data(), documents ? numbers.data() : nullptr, 0};
    for (const int32_t target : targets) batch.target_count += target >= 0;
  }
  std::vector<int32_t> ids, targets, positions, numbers;
  Batch batch;
};

inline NetworkOptions options_of(DType dtype = DType::kF32) {
  NetworkOptions o;
  o.dtype = dtype;
  o.sequences = kSequences;
  o.seqlen = kSeqlen;
  o.seed = 5;
  return o;
}

}  // namespace fattn::gpt2
