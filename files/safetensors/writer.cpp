// The header is padded with spaces so that the data begins at a multiple of 8, and wider elements come first.
#include "files/safetensors/writer.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "files/safetensors/dtype.h"
#include "files/safetensors/header.h"

namespace fattn::files::safetensors {
namespace {

uint64_t bytes_of(const TensorSource& tensor) {
  uint64_t bits = bits_of(tensor.dtype);
  if (bits == 0) throw std::invalid_argument("safetensors knows no dtype '" + tensor.dtype + "'");
  for (int64_t n : tensor.shape)
    if (n < 0 || __builtin_mul_overflow(bits, static_cast<uint64_t>(n), &bits)) throw std::invalid_argument("a shape that no file can hold");
  return bits / 8;
}

}  // namespace

void write_unpublished(WholeFile& file, std::vector<TensorSource> tensors, const std::map<std::string, std::string>& metadata) {
  std::stable_sort(tensors.begin(), tensors.end(), [](const TensorSource& a, const TensorSource& b) { return bits_of(a.dtype) > bits_of(b.dtype); });
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  uint64_t offset = 0;
  for (const TensorSource& t : tensors) {
    if (t.name == "__metadata__" || header.contains(t.name)) throw std::invalid_argument("a tensor cannot be named '" + t.name + "' here");
    const uint64_t end = offset + bytes_of(t);
    header[t.name] = {{"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {offset, end}}};
    offset = end;
  }
  std::string json = header.dump();
  json.resize((json.size() + 7) / 8 * 8, ' ');
  if (json.size() > kMaxHeaderBytes) throw std::invalid_argument("the header would be longer than the format allows");

  uint8_t length[8];
  for (int i = 0; i < 8; ++i) length[i] = static_cast<uint8_t>(json.size() >> (8 * i));
  file.write(length, sizeof length);
  file.write(json.data(), json.size());
  for (const TensorSource& t : tensors) t.write(file);
}

void write(WholeFile& file, std::vector<TensorData> tensors, const std::map<std::string, std::string>& metadata) {
  std::vector<TensorSource> sources;
  for (TensorData& t : tensors) {
    sources.push_back({std::move(t.name), std::move(t.dtype), std::move(t.shape), {}});
    const uint64_t bytes = bytes_of(sources.back());
    sources.back().write = [data = t.data, bytes](WholeFile& out) { out.write(data, bytes); };
  }
  write_unpublished(file, std::move(sources), metadata);
  file.publish();
}

}  // namespace fattn::files::safetensors
