// A lock of the system's ends with its process, whatever ended that.
#include "gpt2/train/run_folder.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "files/input_file.h"
#include "files/json.h"
#include "files/printable.h"
#include "files/whole_file.h"
#include "gpt2/error.h"
#include "gpt2/train/checkpoint.h"
#include "gpt2/train/checkpoint_files.h"

namespace fattn::gpt2 {
namespace {

namespace fs = std::filesystem;
using files::printable;
using Json = nlohmann::ordered_json;

constexpr const char* kDescription = "training.json";
constexpr const char* kLock = ".lock";
constexpr uint64_t kMostDescription = 1 << 24;

std::vector<std::string> paths_of(const nlohmann::json& json, const char* key) {
  const auto at = json.find(key);
  if (at == json.end() || !at->is_array()) throw Error(std::string("'") + key + "' is no list of paths");
  std::vector<std::string> paths;
  for (const nlohmann::json& path : *at) {
    if (!path.is_string()) throw Error(std::string("'") + key + "' has something that is no path");
    paths.push_back(path.get<std::string>());
  }
  return paths;
}

RunDescription parse_description(const std::string& text) {
  const nlohmann::json json = files::parse_json(text);
  if (!json.is_object() || json.value("fattn_training", 0) != 1) throw Error("this is no training run of a version that is known");
  RunDescription run;
  if (!json.contains("config") || !json.contains("options") || !json.contains("fingerprint") || !json.contains("model") || !json["model"].is_string())
    throw Error("config, options, fingerprint or model is missing");
  run.config = parse_config(json["config"].dump());
  run.options = options_from(json["options"]);
  run.model = json["model"].get<std::string>();
  run.data = paths_of(json, "data");
  run.validation = paths_of(json, "validation");
  run.fingerprint = word_of(json["fingerprint"], "fingerprint");
  return run;
}

}  // namespace

RunFolder::RunFolder(const std::string& path, bool resume) : path_(path) {
  const std::string shown = printable(path);
  std::error_code error;
  if (!fs::exists(path_, error)) {
    if (!fs::create_directory(path_, error)) throw Error("the folder '" + shown + "' cannot be made: " + error.message());
    made_ = true;
  } else if (!fs::is_directory(path_, error)) {
    throw Error("'" + shown + "' is no folder; give a folder that is new or empty");
  }
  const bool described = fs::exists(file(kDescription), error);
  if (!described) {
    for (const auto& entry : fs::directory_iterator(path_, error))
      if (entry.path().filename() != kLock)
        throw Error("the folder '" + shown + "' holds something else than a training run ('" + printable(entry.path().filename().string(), 80) +
                    "'); give one that is new or empty");
  }
  if (described && !resume)
    throw Error("the folder '" + shown + "' holds a training run already; go on with it by --resume, or give a folder that is new or empty");
  lock();
  remove_unfinished(path_);
  if (described) read_description();
}

std::unique_ptr<RunFolder> RunFolder::for_reading(const std::string& path, bool resume) {
  std::unique_ptr<RunFolder> folder(new RunFolder(path));
  std::error_code error;
  if (resume && fs::exists(folder->file(kDescription), error)) folder->read_description();
  return folder;
}

void RunFolder::read_description() {
  try {
    before_ = parse_description(files::read_whole(file(kDescription), kMostDescription));
  } catch (const std::runtime_error& e) {
    throw Error("'" + printable(file(kDescription)) + "' cannot be used: " + e.what());
  }
}

RunFolder::~RunFolder() {
  std::error_code ignored;
  if (made_ && !fs::exists(file(kDescription), ignored)) {
    fs::remove(file(kLock), ignored);
    fs::remove(path_, ignored);
  }
  if (lock_ >= 0) close(lock_);
}

std::string RunFolder::file(const std::string& name) const { return (fs::path(path_) / name).string(); }

void RunFolder::lock() {
  lock_ = open(file(kLock).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);
  if (lock_ < 0) throw Error("the folder '" + printable(path_) + "' cannot be written to: " + std::strerror(errno));
  if (flock(lock_, LOCK_EX | LOCK_NB) == 0) return;
  const int reason = errno;
  close(lock_);
  lock_ = -1;
  if (reason == EWOULDBLOCK) throw Error("another process trains into '" + printable(path_) + "'; wait for its end, or give another folder");
  throw Error("the folder '" + printable(path_) + "' cannot be locked: " + std::strerror(reason));
}

void RunFolder::describe(const RunDescription& run) const {
  const Json json = {{"fattn_training", 1},
                     {"config", Json::parse(to_json(run.config, run.options.dtype))},
                     {"options", to_json(run.options)},
                     {"model", run.model},
                     {"data", run.data},
                     {"validation", run.validation},
                     {"fingerprint", hex_word(run.fingerprint)}};
  const std::string text = json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
  files::WholeFile to(file(kDescription));
  to.write(text.data(), text.size());
  to.publish();
}

}  // namespace fattn::gpt2
