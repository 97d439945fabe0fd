#include "gpt2/model_folder.h"

#include <filesystem>
#include <system_error>
#include <vector>

#include "files/printable.h"
#include "gpt2/error.h"
#include "gpt2/train/checkpoint.h"

namespace fattn::gpt2 {

void require_model_folder(const std::string& folder) {
  namespace fs = std::filesystem;
  std::error_code error;
  const std::string shown = "'" + files::printable(folder) + "'";
  constexpr const char* kWanted = "; give a model's folder, which has config.json and model.safetensors";
  const auto type_of = [&](const fs::path& path) {
    const fs::file_type type = fs::status(path, error).type();
    if (type == fs::file_type::none) throw Error("'" + files::printable(path.string()) + "' cannot be looked at: " + error.message() + kWanted);
    return type;
  };
  const fs::file_type type = type_of(folder);
  if (type == fs::file_type::not_found) throw Error("there is no folder " + shown + kWanted);
  if (type != fs::file_type::directory) throw Error(shown + " is no folder" + kWanted);
  if (type_of(fs::path(folder) / "config.json") != fs::file_type::not_found) return;
  if (type_of(fs::path(folder) / "training.json") == fs::file_type::not_found) throw Error(shown + " has no config.json" + kWanted);
  if (fs::directory_iterator(folder, error); error) throw Error(shown + " cannot be looked at: " + error.message() + kWanted);
  const std::vector<FoundCheckpoint> checkpoints = find_checkpoints(folder);
  if (checkpoints.empty()) throw Error(shown + " is a training run that has no checkpoint yet" + kWanted);
  throw Error(shown + " is a training run; give one of its checkpoints: '" + files::printable(checkpoints.back().path) + "'");
}

}  // namespace fattn::gpt2
