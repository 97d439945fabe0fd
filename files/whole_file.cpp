// The order matters: data to disk, then the new name, then the folder.
#include "files/whole_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <cstring>
#include <stdexcept>

#include "files/printable.h"

namespace fattn::files {
namespace {

// The folder's part of a path with its last slash; "" for a bare name.
std::string folder_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "" : path.substr(0, slash + 1);
}

}  // namespace

WholeFile::WholeFile(const std::string& path) : shown_(printable(path)), target_(path) {
  if (path.empty()) throw std::runtime_error("the output's file name is empty; give a name, or - for stdout where that is allowed");
  struct stat status {};
  const bool exists = stat(path.c_str(), &status) == 0;
  if (exists) {
    if (!S_ISREG(status.st_mode)) throw std::runtime_error("'" + shown_ + "' is no regular file; give the name of a file to write");
    if (access(path.c_str(), W_OK) != 0) fail("may not be overwritten", errno);
    char resolved[PATH_MAX];
    if (!realpath(path.c_str(), resolved)) fail("cannot be resolved", errno);
    target_ = resolved;
  } else if (errno != ENOENT) {
    fail("cannot be written", errno);
  }
  const std::string folder = folder_of(target_);
  const std::string name = target_.substr(folder.size()).substr(0, 200);  // names end at 255 bytes
  if (name.empty()) throw std::runtime_error("'" + shown_ + "' names a folder; give the name of a file to write");

  const SignalsBlocked blocked;
  for (int attempt = 0; fd_ < 0; ++attempt) {
    temporary_ = folder;
    for (const std::string& part : {name, std::to_string(getpid()), std::to_string(attempt), std::string("tmp")}) temporary_ += "." + part;
    fd_ = open(temporary_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd_ < 0 && (errno != EEXIST || attempt == 100)) fail("cannot be created in its folder", errno);
  }
  try {
    guard_.emplace(temporary_);
  } catch (...) {
    unlink(temporary_.c_str());
    close(fd_);
    throw;
  }
  if (exists) {
    const int ignored = fchmod(fd_, status.st_mode & 0777);  // a replaced file keeps its mode where the system allows it
    static_cast<void>(ignored);
  }
}

WholeFile::~WholeFile() {
  if (fd_ >= 0) close(fd_);
}

void WholeFile::write(const void* data, size_t bytes) {
  const char* at = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t n = ::write(fd_, at, std::min<size_t>(bytes, size_t{1} << 30));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) fail("cannot be written", errno);
    at += n;
    bytes -= static_cast<size_t>(n);
  }
}

void WholeFile::publish() {
  if (fsync(fd_) != 0) fail("cannot be written to disk", errno);
  const int closed = close(fd_);
  fd_ = -1;
  if (closed != 0) fail("cannot be closed", errno);
  const SignalsBlocked blocked;
  if (rename(temporary_.c_str(), target_.c_str()) != 0) fail("cannot be put in place", errno);
  guard_->release();
  // The name itself to disk, where the file system can: the content is safe already, so a failure is none.
  const std::string folder = folder_of(target_);
  const int directory = open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (directory >= 0) {
    fsync(directory);
    close(directory);
  }
}

void WholeFile::fail(const char* what, int error) const { throw std::runtime_error("'" + shown_ + "' " + what + ": " + std::strerror(error)); }

}  // namespace fattn::files
