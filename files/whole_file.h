// Writes a file that is there whole or not at all: a temporary file in the same folder, fsync, rename.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

#include "files/interrupt.h"

namespace fattn::files {

// Until publish() returns, a file of that name keeps its old content. A symbolic link is followed; what exists and is no
// regular file, or may not be written, is refused at once, before any work is done for it.
// Every function throws std::runtime_error with the name and the reason.
class WholeFile {
 public:
  explicit WholeFile(const std::string& path);
  ~WholeFile();  // removes the temporary file if publish() was not reached
  WholeFile(const WholeFile&) = delete;
  WholeFile& operator=(const WholeFile&) = delete;

  void write(const void* data, size_t bytes);
  void publish();

 private:
  [[noreturn]] void fail(const char* what, int error) const;

  std::string shown_;      // the path as given, printable
  std::string target_;     // links resolved
  std::string temporary_;  // in the same folder
  int fd_ = -1;
  std::optional<TemporaryFile> guard_;
};

}  // namespace fattn::files
