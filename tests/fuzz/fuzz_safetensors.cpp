// Fuzzes the safetensors reader: any bytes as a file give tensors that lie inside it, or a FormatError in printable text.
#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "files/printable.h"
#include "files/safetensors/dtype.h"
#include "files/safetensors/reader.h"

namespace {

using namespace fattn::files;

// A file in memory, opened by its name like any other.
class MemoryFile {
 public:
  MemoryFile(const uint8_t* data, size_t size) : fd_(memfd_create("fuzz", MFD_CLOEXEC)) {
    if (fd_ < 0 || write(fd_, data, size) != static_cast<ssize_t>(size)) std::abort();
  }
  ~MemoryFile() { close(fd_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

void require(bool condition) {
  if (!condition) std::abort();
}

void check_accepted(const safetensors::Reader& reader, size_t size) {
  uint64_t filled = 0;
  for (const safetensors::TensorEntry& tensor : reader.header().tensors) {
    uint64_t bits = safetensors::bits_of(tensor.dtype);
    require(bits != 0);
    for (int64_t n : tensor.shape) bits *= static_cast<uint64_t>(n);
    require(tensor.begin == filled && tensor.end - tensor.begin == bits / 8 && tensor.end <= size);
    filled = tensor.end;
    require(reader.find(tensor.name) == &tensor);
    const safetensors::Bytes data = reader.read(tensor);
    uint8_t sum = 0;
    for (uint64_t i = 0; i < bits / 8; ++i) sum = static_cast<uint8_t>(sum + static_cast<uint8_t>(data[i]));
    volatile uint8_t use = sum;  // every byte is there to be read
    static_cast<void>(use);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const MemoryFile file(data, size);
  try {
    const safetensors::Reader reader(file.path());
    check_accepted(reader, size);
  } catch (const safetensors::FormatError& error) {
    const std::string message = error.what();
    require(!message.empty() && message.size() < 5000 && printable(message, 5000) == message);
  }
  // Text of every kind must become printable, and stay so.
  const std::string text = printable({reinterpret_cast<const char*>(data), size});
  require(printable(text, text.size()) == text);
  return 0;
}
