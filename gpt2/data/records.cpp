// Other keys of an object are left alone: sets of data have names, sources and scores beside their texts.
#include "gpt2/data/records.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "files/json.h"
#include "files/printable.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

using Json = nlohmann::json;

const std::string& text_of(const Json& object, const char* key, const char* where) {
  const auto at = object.find(key);
  if (at == object.end()) throw Error(std::string(where) + " has no \"" + key + "\"");
  if (!at->is_string()) throw Error(std::string("\"") + key + "\" of " + where + " is " + files::kind_of(*at) + "; it must be text");
  return at->get_ref<const std::string&>();
}

// "User" and "Assistant", whatever a set of data calls them.
std::string speaker_of(const std::string& role) {
  if (role == "human") return "User";
  if (role == "gpt" || role == "model" || role == "bot") return "Assistant";
  std::string name = role;
  if (!name.empty() && name[0] >= 'a' && name[0] <= 'z') name[0] = static_cast<char>(name[0] - 'a' + 'A');
  return name;
}

std::string dialogue(const Json& object) {
  const bool messages = object.contains("messages");
  const char* const list = messages ? "messages" : "conversations";
  const auto at = object.find(list);
  if (at == object.end()) throw Error("the object has no \"messages\"");
  if (!at->is_array() || at->empty())
    throw Error(std::string("\"") + list + "\" is " + (at->is_array() ? "empty" : files::kind_of(*at)) + "; it must be a list of messages");
  std::string text;
  for (const Json& message : *at) {
    if (!message.is_object()) throw Error(std::string("a message is ") + files::kind_of(message) + "; it must be an object");
    const std::string& role = text_of(message, messages ? "role" : "from", "a message");
    const std::string& content = text_of(message, messages ? "content" : "value", "a message");
    text += (text.empty() ? "" : "\n\n") + speaker_of(role) + ": " + content;
  }
  return text;
}

}  // namespace

std::vector<LineOfPart> lines_of(const TextPart& part) {
  std::vector<LineOfPart> lines;
  uint64_t number = part.line;
  for (size_t begin = 0; begin < part.bytes.size(); ++number) {
    const size_t end = std::min(part.bytes.find('\n', begin), part.bytes.size());
    const std::string_view line = std::string_view(part.bytes).substr(begin, end - begin);
    begin = end + 1;
    if (line.find_first_not_of(" \t\r") != std::string_view::npos) lines.push_back({number, line});
  }
  return lines;
}

std::vector<RecordPart> parse_record(std::string_view line, TextFormat format) {
  Json object;
  try {
    object = files::parse_json(line);
  } catch (const files::JsonError& e) {
    throw Error(e.what());
  }
  if (!object.is_object()) throw Error(std::string("the line is ") + files::kind_of(object) + "; it must be an object");
  if (format == TextFormat::kDialogue) return {{dialogue(object), true}};
  if (format == TextFormat::kLines) return {{text_of(object, "text", "the object"), true}};
  std::vector<RecordPart> parts = {{text_of(object, "prompt", "the object"), false}, {text_of(object, "completion", "the object"), true}};
  if (parts[1].text.empty()) throw Error("\"completion\" of the object is empty, so that there is nothing to learn");
  return parts;
}

}  // namespace fattn::gpt2
