// Folders without files count as empty: what was interrupted leaves them.
#include "gpt2/new_folder.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <vector>

#include "files/printable.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

namespace fs = std::filesystem;

bool has_files(const std::string& folder) {
  std::error_code error;
  for (fs::recursive_directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    std::error_code ignored;
    if (at->is_symlink(ignored) || !at->is_directory(ignored)) return true;
  }
  return static_cast<bool>(error);  // what cannot be read may have some
}

void remove_if_empty(const fs::path& folder) {
  std::error_code ignored;
  std::vector<fs::path> inner;
  for (fs::directory_iterator at(folder, ignored), end; at != end; at.increment(ignored))
    if (at->is_directory(ignored) && !at->is_symlink(ignored)) inner.push_back(at->path());
  for (const fs::path& path : inner) remove_if_empty(path);
  fs::remove(folder, ignored);  // nothing happens to one that has files
}

}  // namespace

NewFolder::NewFolder(const std::string& path) : path_(path) {
  const std::string shown = files::printable(path);
  std::error_code error;
  if (fs::exists(path_, error)) {
    if (!fs::is_directory(path_, error)) throw Error("'" + shown + "' is no folder; give a folder that is new or empty");
    if (has_files(path_)) throw Error("the folder '" + shown + "' is not empty; give one that is new or empty, nothing is overwritten");
    return;
  }
  made_ = fs::create_directory(path_, error);
  if (!made_) throw Error("the folder '" + shown + "' cannot be made: " + error.message());
}

NewFolder::~NewFolder() {
  if (made_) remove_if_empty(path_);
}

std::unique_ptr<files::WholeFile> NewFolder::file(const std::string& name) const { return std::make_unique<files::WholeFile>(path_ + "/" + name); }

std::string NewFolder::folder(const std::string& name) const {
  const std::string path = path_ + "/" + name;
  std::error_code error;
  fs::create_directory(path, error);
  if (error) throw Error("the folder '" + files::printable(path) + "' cannot be made: " + error.message());
  return path;
}

}  // namespace fattn::gpt2
