// A folder that a command writes: new, or without files.
#pragma once

#include <memory>
#include <string>

#include "files/whole_file.h"

namespace fattn::gpt2 {

// The folder is made if it is not there, and goes again if nothing was put into it.
class NewFolder {
 public:
  // Throws Error: it has files, is none, or cannot be made.
  explicit NewFolder(const std::string& path);
  ~NewFolder();
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const std::string& path() const { return path_; }
  std::unique_ptr<files::WholeFile> file(const std::string& name) const;
  std::string folder(const std::string& name) const;  // one in it, made if it is not there

 private:
  std::string path_;
  bool made_ = false;
};

}  // namespace fattn::gpt2
