// A shard's name must not lead out of the folder.
#include "gpt2/weights/shards.h"

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <system_error>

#include "files/input_file.h"
#include "files/json.h"
#include "files/printable.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

namespace fs = std::filesystem;
using files::printable;

constexpr uint64_t kMostIndexBytes = uint64_t{1} << 28;
constexpr size_t kMostShards = 4096;

bool ends_with(const std::string& text, std::string_view end) {
  return text.size() >= end.size() && std::string_view(text).substr(text.size() - end.size()) == end;
}

WeightFiles read_index(const fs::path& path) {
  WeightFiles found;
  try {
    for (auto& [tensor, file] : parse_shard_index(files::read_whole(path.string(), kMostIndexBytes)))
      found.shard_of.emplace(tensor, (path.parent_path() / file).string());
  } catch (const files::FileError& e) {
    throw Error(e.what());
  } catch (const std::runtime_error& e) {
    throw Error("'" + printable(path.string()) + "': " + e.what());
  }
  for (const auto& [tensor, file] : found.shard_of) found.paths.push_back(file);
  std::sort(found.paths.begin(), found.paths.end());
  found.paths.erase(std::unique(found.paths.begin(), found.paths.end()), found.paths.end());
  if (found.paths.size() > kMostShards)
    throw Error("'" + printable(path.string()) + "' names " + std::to_string(found.paths.size()) + " files; at most " + std::to_string(kMostShards) +
                " are allowed");
  return found;
}

}  // namespace

std::map<std::string, std::string> parse_shard_index(std::string_view json) {
  const nlohmann::json root = files::parse_json(json);
  const auto at = root.is_object() ? root.find("weight_map") : root.end();
  if (!root.is_object() || at == root.end() || !at->is_object() || at->empty())
    throw Error("the index has no weight_map; it must be an object of tensors and the files that hold them");
  std::map<std::string, std::string> files;
  for (const auto& [tensor, file] : at->items()) {
    const std::string name = file.is_string() ? file.get<std::string>() : "";
    if (name.empty() || name.find('/') != std::string::npos || name[0] == '.')
      throw Error("the index says that the tensor '" + printable(tensor, 80) + "' is in " +
                  (file.is_string() ? "'" + printable(name, 80) + "'" : std::string(files::kind_of(file))) +
                  "; it must be the name of a file in its folder");
    files.emplace(tensor, name);
  }
  return files;
}

WeightFiles find_weights(const std::string& path) {
  std::error_code ignored;
  const fs::path given(path);
  if (!fs::is_directory(given, ignored)) {
    if (ends_with(path, ".index.json")) return read_index(given);
    return {{path}, {}};
  }
  const fs::path one = given / "model.safetensors", index = given / "model.safetensors.index.json";
  if (fs::exists(one, ignored)) return {{one.string()}, {}};
  if (fs::exists(index, ignored)) return read_index(index);
  throw Error("'" + printable(path) + "' has no weights; put model.safetensors there, or model.safetensors.index.json and the files that it names");
}

}  // namespace fattn::gpt2
