// The header of a safetensors file: a JSON object that says what lies where.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "files/input_file.h"

namespace fattn::files::safetensors {

// what() says what was found and what is allowed, in printable characters.
class FormatError : public FileError {
 public:
  using FileError::FileError;
};

inline constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
inline constexpr size_t kMaxDimensions = 64;

struct TensorEntry {
  std::string name;   // any UTF-8; print it through printable() only
  std::string dtype;  // a name from dtype.h
  std::vector<int64_t> shape;
  uint64_t begin = 0, end = 0;  // bytes, counted from the first one after the header
};

struct Header {
  std::vector<TensorEntry> tensors;  // in the order of their data
  std::map<std::string, std::string> metadata;
};

// The JSON of a header in a file that holds data_bytes of tensors after it. Checks everything that the format demands: no
// unknown dtype, no duplicate name or key, shapes whose size is that of their range, ranges that fill the data from
// the first byte to the last without holes or overlaps. Throws FormatError. Memory stays proportional to the text's length.
Header parse_header(std::string_view json, uint64_t data_bytes);

}  // namespace fattn::files::safetensors
