// A regular file that is opened for reading: its size, and bytes at an offset. Nothing else is ever waited for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace fattn::files {

// what() names the file and the reason, in printable characters.
class FileError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// Which file a path leads to, to tell whether two paths lead to the same one.
struct FileIdentity {
  uint64_t device = 0, inode = 0;
  bool operator==(const FileIdentity& other) const { return device == other.device && inode == other.inode; }
};

class InputFile {
 public:
  // Throws FileError: missing, not allowed, a folder, a pipe.
  explicit InputFile(const std::string& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  uint64_t size() const { return size_; }
  int descriptor() const { return fd_; }
  const FileIdentity& identity() const { return identity_; }
  const std::string& shown() const { return shown_; }  // the path, printable
  // pread instead of mmap: a file that shrinks while it is read gives a FileError, not a bus error.
  void read_at(uint64_t offset, void* to, uint64_t bytes) const;

 private:
  std::string shown_;
  int fd_ = -1;
  uint64_t size_ = 0;
  FileIdentity identity_;
};

// The whole of a file that has at most so many bytes. Throws FileError.
std::string read_whole(const std::string& path, uint64_t most_bytes);

}  // namespace fattn::files
