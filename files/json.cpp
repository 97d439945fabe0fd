// Builds the values as a stream of events, so that depth and keys are refused where they appear.
#include "files/json.h"

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "files/printable.h"

namespace fattn::files {
namespace {

using Json = nlohmann::json;

class Builder : public nlohmann::json_sax<Json> {
 public:
  Json take() { return std::move(root_); }

  bool null() override { return put(nullptr); }
  bool boolean(bool value) override { return put(value); }
  bool number_integer(int64_t value) override { return put(value); }
  bool number_unsigned(uint64_t value) override { return put(value); }
  bool number_float(double value, const std::string&) override { return put(value); }
  bool string(std::string& value) override { return put(std::move(value)); }
  bool binary(Json::binary_t&) override { throw JsonError("it holds binary data, which is no JSON"); }
  bool start_object(size_t) override { return open(Json::object()); }
  bool start_array(size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(std::string& name) override {
    const auto [at, added] = open_.back()->get_ref<Json::object_t&>().emplace(std::move(name), nullptr);
    if (!added) throw JsonError("the key '" + printable(at->first, 80) + "' appears twice in one object");
    value_ = &at->second;
    return true;
  }
  bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception&) override {
    throw JsonError("it is no valid JSON: it breaks off or is malformed at its byte " + std::to_string(position));
  }

 private:
  Json* place(Json&& value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (open_.back()->is_array()) {
      auto& array = open_.back()->get_ref<Json::array_t&>();
      array.push_back(std::move(value));
      return &array.back();
    }
    *value_ = std::move(value);
    return value_;
  }
  bool put(Json value) {
    place(std::move(value));
    return true;
  }
  bool open(Json value) {
    if (open_.size() == kMaxJsonDepth) throw JsonError("it is nested deeper than " + std::to_string(kMaxJsonDepth) + " levels");
    open_.push_back(place(std::move(value)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  Json root_;
  std::vector<Json*> open_;  // from the root to the innermost: their elements only grow while they are last
  Json* value_ = nullptr;    // of the key that was read last
};

}  // namespace

Json parse_json(std::string_view text) {
  // The parser takes a zero byte for the end of its input; what follows one would go unread.
  if (text.find('\0') != std::string_view::npos) throw JsonError("it is no valid JSON: it holds a zero byte");
  Builder builder;
  Json::sax_parse(text.begin(), text.end(), &builder);  // every failure is thrown by the builder
  return builder.take();
}

const char* kind_of(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null: return "null";
    case Json::value_t::object: return "an object";
    case Json::value_t::array: return "an array";
    case Json::value_t::string: return "text";
    case Json::value_t::boolean: return "true or false";
    default: return "a number";
  }
}

nlohmann::ordered_json number_or_null(double x) { return std::isfinite(x) ? nlohmann::ordered_json(x) : nlohmann::ordered_json(); }

}  // namespace fattn::files
