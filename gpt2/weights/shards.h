// Which files a model's weights lie in.
#pragma once

#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace fattn::gpt2 {

// "weight_map" of model.safetensors.index.json: the file of each tensor. Files are names in the same folder. Throws Error.
std::map<std::string, std::string> parse_shard_index(std::string_view json);

struct WeightFiles {
  std::vector<std::string> paths;
  std::map<std::string, std::string> shard_of;  // the path of each tensor's file; empty if there is one file without an index
};

// Of a folder: model.safetensors, else its index; or of one of these files. Throws Error.
WeightFiles find_weights(const std::string& path);

}  // namespace fattn::gpt2
