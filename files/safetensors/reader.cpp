// Memory is taken only for what the file holds.
#include "files/safetensors/reader.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <stdexcept>

namespace fattn::files::safetensors {
namespace {

constexpr uint64_t kLengthBytes = 8;  // the header's length, little-endian, begins the file

}  // namespace

void FreeDeleter::operator()(void* p) const { std::free(p); }

Bytes allocate(uint64_t bytes) {
  if (bytes > SIZE_MAX / 2) throw std::bad_alloc();
  void* p = std::aligned_alloc(64, (std::max<uint64_t>(bytes, 1) + 63) / 64 * 64);
  if (!p) throw std::bad_alloc();
  return Bytes(static_cast<std::byte*>(p));
}

Reader::Reader(const std::string& path) try : file_(path) {
  const uint64_t size = file_.size();
  try {
    if (size < kLengthBytes)
      throw FormatError("it has " + std::to_string(size) + " bytes; a safetensors file begins with 8 bytes that hold its header's length");
    uint8_t length_bytes[kLengthBytes];
    file_.read_at(0, length_bytes, kLengthBytes);
    uint64_t length = 0;
    for (uint64_t i = kLengthBytes; i-- > 0;) length = length << 8 | length_bytes[i];
    const uint64_t most = std::min(kMaxHeaderBytes, size - kLengthBytes);
    if (length < 2 || length > most)
      throw FormatError("its first 8 bytes claim a header of " + std::to_string(length) + " bytes; in this file of " + std::to_string(size) +
                        " bytes 2 to " + std::to_string(most) + " are possible. It was cut or is no safetensors file");
    std::string json(length, '\0');
    file_.read_at(kLengthBytes, json.data(), length);
    data_offset_ = kLengthBytes + length;
    header_ = parse_header(json, size - data_offset_);
  } catch (const FormatError& e) {
    throw FormatError("'" + file_.shown() + "' is no valid safetensors file: " + e.what());
  }
} catch (const FileError& e) {
  throw FormatError(e.what());
}

const TensorEntry* Reader::find(const std::string& name) const {
  for (const TensorEntry& tensor : header_.tensors)
    if (tensor.name == name) return &tensor;
  return nullptr;
}

Bytes Reader::read(const TensorEntry& tensor) const {
  Bytes data = allocate(tensor.end - tensor.begin);
  read_part(tensor, 0, data.get(), tensor.end - tensor.begin);
  return data;
}

void Reader::read_part(const TensorEntry& tensor, uint64_t offset, void* to, uint64_t bytes) const {
  if (offset > tensor.end - tensor.begin || bytes > tensor.end - tensor.begin - offset) throw std::out_of_range("a part beyond its tensor");
  try {
    file_.read_at(data_offset_ + tensor.begin + offset, to, bytes);
  } catch (const FileError& e) {
    throw FormatError(e.what());
  }
}

}  // namespace fattn::files::safetensors
