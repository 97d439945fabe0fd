#include "files/json_text.h"

#include <algorithm>
#include <cstddef>

namespace fattn::files {
namespace {

using nlohmann::ordered_json;

constexpr size_t kLongestLine = 5000;  // rows of `fattn sweep` with the samples of their turns take 4,200

std::string plain(const ordered_json& value) { return value.dump(-1, ' ', false, ordered_json::error_handler_t::replace); }

// With a space behind each comma and colon.
void append_line(const ordered_json& value, std::string& text) {
  if (!value.is_structured()) {
    text += plain(value);
    return;
  }
  const bool object = value.is_object();
  const size_t begin = text.size() + 1;
  text += object ? '{' : '[';
  for (const auto& [key, item] : value.items()) {
    if (text.size() > begin) text += ", ";
    if (object) text += plain(key) + ": ";
    append_line(item, text);
  }
  text += object ? '}' : ']';
}

void append(const ordered_json& value, size_t indent, std::string& text);

void append_element(const ordered_json& value, size_t indent, std::string& text) {
  const size_t begin = text.size();
  append_line(value, text);
  if (text.size() - begin <= kLongestLine || !value.is_structured()) return;
  text.resize(begin);
  append(value, indent, text);
}

void append(const ordered_json& value, size_t indent, std::string& text) {
  if (!value.is_structured() || value.empty()) {
    text += plain(value);
    return;
  }
  const bool object = value.is_object();
  if (!object && std::none_of(value.begin(), value.end(), [](const ordered_json& item) { return item.is_structured(); })) {
    const size_t begin = text.size();
    append_line(value, text);
    if (text.size() - begin <= kLongestLine) return;
    text.resize(begin);
  }
  text += object ? '{' : '[';
  bool first = true;
  for (const auto& [key, item] : value.items()) {
    text += first ? "\n" : ",\n";
    first = false;
    text.append(indent + 2, ' ');
    if (object) {
      text += plain(key) + ": ";
      append(item, indent + 2, text);
    } else {
      append_element(item, indent + 2, text);
    }
  }
  text += '\n';
  text.append(indent, ' ');
  text += object ? '}' : ']';
}

}  // namespace

std::string json_text(const ordered_json& value) {
  std::string text;
  append(value, 0, text);
  return text + "\n";
}

}  // namespace fattn::files
