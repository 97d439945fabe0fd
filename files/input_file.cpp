// O_NONBLOCK, because opening a pipe would wait for its writer.
#include "files/input_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "files/printable.h"

namespace fattn::files {

InputFile::InputFile(const std::string& path) : shown_(printable(path)) {
  fd_ = open(path.c_str(), O_RDONLY | O_NONBLOCK | O_CLOEXEC);
  if (fd_ < 0) throw FileError("cannot open '" + shown_ + "': " + std::strerror(errno));
  struct stat status {};
  if (fstat(fd_, &status) != 0 || !S_ISREG(status.st_mode)) {
    close(fd_);
    throw FileError("'" + shown_ + "' is " + (S_ISDIR(status.st_mode) ? "a folder" : "no regular file") + "; give a file");
  }
  size_ = static_cast<uint64_t>(status.st_size);
  identity_ = {static_cast<uint64_t>(status.st_dev), static_cast<uint64_t>(status.st_ino)};
}

InputFile::~InputFile() { close(fd_); }

void InputFile::read_at(uint64_t offset, void* to, uint64_t bytes) const {
  char* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t n = pread(fd_, at, std::min<uint64_t>(bytes, uint64_t{1} << 30), static_cast<off_t>(offset));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw FileError("cannot read '" + shown_ + "': " + std::strerror(errno));
    if (n == 0) throw FileError("'" + shown_ + "' became shorter while it was read");
    at += n;
    offset += static_cast<uint64_t>(n);
    bytes -= static_cast<uint64_t>(n);
  }
}

std::string read_whole(const std::string& path, uint64_t most_bytes) {
  const InputFile file(path);
  if (file.size() > most_bytes)
    throw FileError("'" + file.shown() + "' has " + std::to_string(file.size()) + " bytes; at most " + std::to_string(most_bytes) +
                    " are allowed here");
  std::string text(file.size(), '\0');
  file.read_at(0, text.data(), text.size());
  return text;
}

}  // namespace fattn::files
