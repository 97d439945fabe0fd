// Reads the header as a stream of JSON events, so that nothing is built that the format does not allow: depth, duplicate
// keys and types are refused where they appear.
#include "files/safetensors/header.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "files/printable.h"
#include "files/safetensors/dtype.h"

namespace fattn::files::safetensors {
namespace {

using Json = nlohmann::json;

std::string show(std::string_view name) { return "'" + printable(name, 80) + "'"; }

std::string list(const std::vector<int64_t>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

// One event at a time; `where_` says what the next one may be.
class HeaderReader : public nlohmann::json_sax<Json> {
 public:
  Header take() { return std::move(header_); }

  bool start_object(size_t) override {
    switch (where_) {
      case Where::kStart: return enter(Where::kTop);
      case Where::kTensorValue:
        header_.tensors.push_back({name_, "", {}, 0, 0});
        has_dtype_ = has_shape_ = has_offsets_ = false;
        return enter(Where::kTensor);
      case Where::kMetadataValue: return enter(Where::kMetadata);
      default: return wrong("an object");
    }
  }

  bool end_object() override {
    if (where_ == Where::kTop) return enter(Where::kEnd);
    if (where_ == Where::kTensor && !(has_dtype_ && has_shape_ && has_offsets_))
      throw FormatError("tensor " + show(name_) + " lacks " +
                        (!has_dtype_   ? "dtype"
                         : !has_shape_ ? "shape"
                                       : "data_offsets") +
                        "; every tensor has dtype, shape and data_offsets");
    return enter(Where::kTop);
  }

  bool key(std::string& key) override {
    if (where_ == Where::kTop) {
      if (!names_.insert(key).second) throw FormatError("the header has the key " + show(key) + " twice; every name may appear once");
      name_ = key;
      return enter(key == "__metadata__" ? Where::kMetadataValue : Where::kTensorValue);
    }
    if (where_ == Where::kMetadata) {
      if (header_.metadata.count(key)) throw FormatError("__metadata__ has the key " + show(key) + " twice; every key may appear once");
      metadata_key_ = key;
      return enter(Where::kMetadataText);
    }
    const auto part = [&](const char* name, bool& seen, Where next) {
      if (key != name) return false;
      if (seen) throw FormatError("tensor " + show(name_) + " has the key " + show(key) + " twice");
      seen = true;
      return enter(next);
    };
    if (part("dtype", has_dtype_, Where::kDType) || part("shape", has_shape_, Where::kShapeValue) ||
        part("data_offsets", has_offsets_, Where::kOffsetsValue))
      return true;
    throw FormatError("tensor " + show(name_) + " has the key " + show(key) + "; allowed: dtype, shape, data_offsets");
  }

  bool start_array(size_t) override {
    if (where_ == Where::kShapeValue) return enter(Where::kShape);
    if (where_ == Where::kOffsetsValue) {
      offsets_ = 0;
      return enter(Where::kOffsets);
    }
    return wrong("an array");
  }

  bool end_array() override {
    if (where_ == Where::kOffsets && offsets_ != 2)
      throw FormatError("data_offsets of tensor " + show(name_) + " has " + std::to_string(offsets_) + " numbers; it has two: begin and end");
    return enter(Where::kTensor);
  }

  bool string(std::string& value) override {
    if (where_ == Where::kDType) {
      if (bits_of(value) == 0)
        throw FormatError("tensor " + show(name_) + " has the dtype " + show(value) + ", which the format does not know; allowed: " + known_dtypes());
      header_.tensors.back().dtype = value;
      return enter(Where::kTensor);
    }
    if (where_ == Where::kMetadataText) {
      header_.metadata.emplace(metadata_key_, value);
      return enter(Where::kMetadata);
    }
    return wrong("text");
  }

  bool number_unsigned(uint64_t value) override {
    if (where_ == Where::kShape) {
      std::vector<int64_t>& shape = header_.tensors.back().shape;
      if (value > static_cast<uint64_t>(INT64_MAX)) return wrong("the number " + std::to_string(value) + ", which is above 2^63 - 1,");
      if (shape.size() == kMaxDimensions)
        throw FormatError("tensor " + show(name_) + " has more than " + std::to_string(kMaxDimensions) + " dimensions");
      shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (where_ == Where::kOffsets) {
      TensorEntry& tensor = header_.tensors.back();
      if (offsets_ < 2) (offsets_ == 0 ? tensor.begin : tensor.end) = value;
      ++offsets_;
      return true;
    }
    return wrong("a number");
  }
  bool number_integer(int64_t value) override { return wrong("the number " + std::to_string(value)); }
  bool number_float(double, const std::string& text) override { return wrong("the number " + printable(text, 40)); }
  bool null() override { return wrong("null"); }
  bool boolean(bool) override { return wrong("true or false"); }
  bool binary(Json::binary_t&) override { return wrong("binary data"); }

  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    throw FormatError("the header is no valid JSON: it breaks off or is malformed at its byte " + std::to_string(position));
  }

 private:
  // What the reader is inside of, or waits for the value of.
  enum class Where {
    kStart,
    kTop,
    kTensorValue,
    kTensor,
    kDType,
    kShapeValue,
    kShape,
    kOffsetsValue,
    kOffsets,
    kMetadataValue,
    kMetadata,
    kMetadataText,
    kEnd
  };

  bool enter(Where where) {
    where_ = where;
    return true;
  }

  [[noreturn]] bool wrong(const std::string& found) const {
    switch (where_) {
      case Where::kTensorValue:
        throw FormatError("the value of " + show(name_) + " is " + found + "; it must be an object with dtype, shape and data_offsets");
      case Where::kDType: throw FormatError("dtype of tensor " + show(name_) + " is " + found + "; it must be text such as \"F32\"");
      case Where::kShapeValue:
      case Where::kShape:
        throw FormatError("shape of tensor " + show(name_) + " is or holds " + found + "; it must be an array of whole numbers from 0 to 2^63 - 1");
      case Where::kOffsetsValue:
      case Where::kOffsets:
        throw FormatError("data_offsets of tensor " + show(name_) + " is or holds " + found +
                          "; it must be two whole numbers, begin and end in bytes");
      case Where::kMetadataValue: throw FormatError("__metadata__ is " + found + "; it must be an object whose values are text");
      case Where::kMetadataText: throw FormatError("__metadata__ holds " + found + " under " + show(metadata_key_) + "; its values must be text");
      default: throw FormatError("the header is " + found + "; it must be one JSON object of tensors");
    }
  }

  static std::string known_dtypes() {
    std::string text;
    for (const DTypeName& known : kDTypes) text += (text.empty() ? "" : ", ") + std::string(known.name);
    return text;
  }

  Header header_;
  Where where_ = Where::kStart;
  std::set<std::string> names_;
  std::string name_, metadata_key_;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  uint64_t offsets_ = 0;
};

// The bytes that dtype and shape ask for; refused if they do not fit 64 bits or fill no whole bytes.
uint64_t bytes_of(const TensorEntry& tensor) {
  uint64_t bits = bits_of(tensor.dtype);
  for (int64_t n : tensor.shape)
    if (__builtin_mul_overflow(bits, static_cast<uint64_t>(n), &bits))
      throw FormatError("the shape " + list(tensor.shape) + " of tensor " + show(tensor.name) + " has more bits than 64-bit numbers count");
  if (bits % 8 != 0)
    throw FormatError("the shape " + list(tensor.shape) + " of tensor " + show(tensor.name) + " with dtype " + tensor.dtype +
                      " fills no whole bytes");
  return bits / 8;
}

// In the order of the data, every range begins where the one before ended, and the last ends with the file.
void check_ranges(std::vector<TensorEntry>& tensors, uint64_t data_bytes) {
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.begin != b.begin ? a.begin < b.begin : a.end < b.end; });
  uint64_t filled = 0;
  for (const TensorEntry& t : tensors) {
    const std::string range = "data_offsets [" + std::to_string(t.begin) + ", " + std::to_string(t.end) + "] of tensor " + show(t.name);
    if (t.end < t.begin) throw FormatError(range + " end before they begin");
    if (t.end > data_bytes)
      throw FormatError(range + " reach beyond the file, which holds " + std::to_string(data_bytes) +
                        " bytes of data; it was cut, or its header is wrong");
    if (t.end - t.begin != bytes_of(t))
      throw FormatError(range + " hold " + std::to_string(t.end - t.begin) + " bytes, but " + t.dtype + " with shape " + list(t.shape) + " needs " +
                        std::to_string(bytes_of(t)));
    if (t.begin < filled) throw FormatError(range + " overlap the tensor before, which ends at " + std::to_string(filled));
    if (t.begin > filled) throw FormatError(range + " leave a hole: the tensor before ends at " + std::to_string(filled));
    filled = t.end;
  }
  if (filled != data_bytes)
    throw FormatError("the tensors fill " + std::to_string(filled) + " bytes, but the file holds " + std::to_string(data_bytes) + " bytes of data");
}

}  // namespace

Header parse_header(std::string_view json, uint64_t data_bytes) {
  if (json.empty() || json.front() != '{') throw FormatError("the header does not begin with '{'; a safetensors header is one JSON object");
  // The parser takes a zero byte for the end of its input; what follows one would go unread.
  if (json.find('\0') != std::string_view::npos) throw FormatError("the header is no valid JSON: it holds a zero byte; padding is spaces");
  HeaderReader reader;
  Json::sax_parse(json.begin(), json.end(), &reader);  // every failure is thrown by the reader
  Header header = reader.take();
  check_ranges(header.tensors, data_bytes);
  return header;
}

}  // namespace fattn::files::safetensors
