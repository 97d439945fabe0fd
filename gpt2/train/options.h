// What a training run is: everything that its numbers depend on, as its files keep it.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "gpt2/config.h"
#include "gpt2/train/schedule.h"

namespace fattn::gpt2 {

struct TrainOptions {
  DType dtype = DType::kF32;
  std::string algorithm = "auto";
  std::string device = "cpu";
  int64_t sequences = 8, seqlen = 1024;
  int64_t accumulate = 1;  // batches a step
  Schedule schedule;       // its `steps` are the run's
  double weight_decay = 0.1, clip = 1, beta1 = 0.9, beta2 = 0.95, epsilon = 1e-8, dropout = 0;
  bool shuffle = true;
  bool checkpoint_activations = false;
  bool deterministic = false;
  uint64_t seed = 0;

  bool operator==(const TrainOptions&) const = default;
};

nlohmann::ordered_json to_json(const TrainOptions& options);
// The flag of a member of it: "--weight-decay".
std::string flag_of(const std::string& key);
// Each option as its flag and its value.
std::vector<std::pair<std::string, std::string>> flags_of(const TrainOptions& options);
// Throws Error where a key is missing or its value is none.
TrainOptions options_from(const nlohmann::json& json);

// What differs, by the name of the flag: {"--seqlen", "512", "1024"}: what was, what is.
struct Difference {
  std::string flag, was, is;
};
std::vector<Difference> differences(const TrainOptions& was, const TrainOptions& is);

const char* curve_name(Curve curve);  // "cosine", "linear", "constant"
Curve curve_named(const std::string& name);

}  // namespace fattn::gpt2
