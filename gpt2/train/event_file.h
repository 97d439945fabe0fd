// An event file that TensorBoard reads: scalars by step. Each record is framed by its length and masked CRC-32C checksums.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace fattn::gpt2 {

// Castagnoli's polynomial.
uint32_t crc32c(const void* data, size_t bytes);

class EventFile {
 public:
  // A new file in the folder, which is made if it is not there. Of other files in it TensorBoard leaves out what came after step `after`. Throws
  // std::runtime_error.
  EventFile(const std::string& folder, int64_t after);
  ~EventFile();
  EventFile(const EventFile&) = delete;
  EventFile& operator=(const EventFile&) = delete;

  // What is no number is left out.
  void scalar(const std::string& tag, int64_t step, double value);
  void flush();
  const std::string& path() const { return path_; }

 private:
  void record(const std::string& event);

  std::string path_;
  std::FILE* file_ = nullptr;
};

}  // namespace fattn::gpt2
