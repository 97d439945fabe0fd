// The files of a checkpoint: their names, and sizes and checksums.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "gpt2/train/network.h"

namespace fattn::gpt2 {

inline constexpr const char* kCheckpointFile = "checkpoint.json";
inline constexpr const char* kOptimizerFile = "optimizer.safetensors";

std::string hex_word(uint64_t word);
// Throws Error if it is none.
uint64_t word_of(const nlohmann::json& hex, const char* what);

// {"bytes": N, "xxh64": "0123456789abcdef"} of a file. Throws FileError.
nlohmann::ordered_json file_seal(const std::string& path);
// Throws Error if the file is another one than the seal says.
void check_seal(const std::string& path, const nlohmann::json& seal);

// "first_moment.h.0.ln_1.weight": how optimizer.safetensors calls a parameter's numbers.
std::string array_name(Flat which, const Parameter& parameter);

}  // namespace fattn::gpt2
