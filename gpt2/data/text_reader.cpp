// Long documents are cut where white space follows something else: a piece of GPT-2's splitter begins there whatever comes behind.
#include <algorithm>
#include <optional>
#include <string_view>

#include "files/input_file.h"
#include "gpt2/data/texts.h"
#include "gpt2/error.h"
#include "gpt2/tokenizer/character_classes.h"
#include "gpt2/tokenizer/utf8.h"

namespace fattn::gpt2 {
namespace {

constexpr std::string_view kDivider = "<|endoftext|>";
constexpr uint64_t kReadAtOnce = 1 << 20, kLinesAtOnce = 1 << 18, kLongestLine = uint64_t{1} << 30;

// Whether the character that ends before `at` is one, and no white space.
bool solid_before(std::string_view text, size_t at) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(text.data());
  if (bytes[at - 1] < 0x80) return CharacterClasses::instance().of(bytes[at - 1]) != kSpace;
  size_t begin = at - 1;
  while (begin > 0 && at - begin < 4 && (bytes[begin] & 0xc0) == 0x80) --begin;
  if (!is_utf8(text.substr(begin, at - begin))) return false;
  return CharacterClasses::instance().of(code_point_at(bytes + begin).value) != kSpace;
}

// The last place in (0, most] where a text may be cut, before a newline if there is one; 0 if there is none.
size_t place_to_cut(std::string_view text, size_t most) {
  for (const char blank : {'\n', ' '})
    for (size_t at = std::min(most, text.size() - 1); at > 0; --at)
      if (text[at] == blank && solid_before(text, at)) return at;
  return 0;
}

}  // namespace

struct TextReader::State {
  const TextFiles& texts;
  const uint64_t part_bytes;
  size_t file_index = 0;
  std::optional<files::InputFile> file;
  uint64_t offset = 0;
  std::string buffer;
  size_t at = 0;  // in the buffer
  uint64_t line = 1;
  bool line_begins = true;  // at `at`

  State(const TextFiles& t, uint64_t part) : texts(t), part_bytes(part) {}

  const TextFile& text() const { return texts.files[file_index]; }
  std::string_view rest() const { return std::string_view(buffer).substr(at); }
  bool at_end() const { return offset == file->size(); }

  void open() {
    file.emplace(text().path);
    offset = 0;
    buffer.clear();
    at = 0;
    line = 1;
    line_begins = true;
    read_more();
    if (rest().substr(0, 3) == "\xef\xbb\xbf") at = 3;  // what some editors begin UTF-8 with
  }
  void close() {
    file.reset();
    ++file_index;
  }
  void read_more() {
    buffer.erase(0, at);
    at = 0;
    const uint64_t count = std::min(file->size() - offset, kReadAtOnce);
    const size_t before = buffer.size();
    buffer.resize(before + count);
    file->read_at(offset, buffer.data() + before, count);
    offset += count;
  }
  TextPart part(size_t bytes, bool ends) const { return {file_index, line, buffer.substr(at, bytes), ends}; }
  void skip(size_t bytes) {
    if (bytes == 0) return;
    at += bytes;
    line_begins = buffer[at - 1] == '\n';
  }

  TextPart next_lines();
  TextPart next_text();
  size_t divider(size_t& line_bytes) const;
};

// As many whole lines as fit, at least one.
TextPart TextReader::State::next_lines() {
  size_t end = 0;
  while (rest().size() < kLinesAtOnce || (end = rest().rfind('\n') + 1) == 0) {
    if (at_end()) {
      end = rest().size();
      break;
    }
    if (rest().size() > kLongestLine)
      throw Error("line " + std::to_string(line) + " of '" + file->shown() + "' is longer than " + std::to_string(kLongestLine) +
                  " bytes; divide it");
    read_more();
  }
  TextPart lines = part(end, false);
  skip(end);
  line += static_cast<uint64_t>(std::count(lines.bytes.begin(), lines.bytes.end(), '\n'));
  return lines;
}

// Where a line that divides documents begins in the rest, and its bytes; npos if there is none. One that is cut at the end of the buffer is none yet.
size_t TextReader::State::divider(size_t& line_bytes) const {
  const std::string_view text = rest();
  for (size_t found = 0; (found = text.find(kDivider, found)) != std::string_view::npos; found += kDivider.size()) {
    if (found == 0 ? !line_begins : text[found - 1] != '\n') continue;
    const std::string_view behind = text.substr(found + kDivider.size(), 2);
    if (behind.empty() || behind == "\r")  // the end of the file: the buffer reaches further than the place that matters elsewhere
      line_bytes = kDivider.size() + behind.size();
    else if (behind[0] == '\n')
      line_bytes = kDivider.size() + 1;
    else if (behind == "\r\n")
      line_bytes = kDivider.size() + 2;
    else
      continue;
    return found;
  }
  return std::string_view::npos;
}

TextPart TextReader::State::next_text() {
  for (uint64_t want = part_bytes == 0 ? ~uint64_t{0} >> 1 : part_bytes;; want *= 2) {
    while (!at_end() && rest().size() < want + 2 * kDivider.size()) read_more();
    size_t line_bytes = 0;
    const size_t found = text().format == TextFormat::kText ? divider(line_bytes) : std::string_view::npos;
    if (found <= want) {
      TextPart document = part(found, true);
      skip(found + line_bytes);
      return document;
    }
    if (at_end() && rest().size() <= want) {
      TextPart document = part(rest().size(), true);
      skip(rest().size());
      return document;
    }
    if (const size_t cut = place_to_cut(rest(), std::min<uint64_t>(want, found))) {
      TextPart document = part(cut, false);
      skip(cut);
      return document;
    }
  }
}

TextReader::TextReader(const TextFiles& texts, uint64_t part_bytes) : state_(std::make_unique<State>(texts, part_bytes)) {}
TextReader::~TextReader() = default;

std::vector<TextPart> TextReader::next(uint64_t bytes) {
  State& s = *state_;
  std::vector<TextPart> parts;
  uint64_t have = 0;
  try {
    while (have < bytes && s.file_index < s.texts.files.size()) {
      if (!s.file) s.open();
      if (s.at_end() && s.rest().empty()) {
        s.close();
        continue;
      }
      parts.push_back(holds_lines(s.text().format) ? s.next_lines() : s.next_text());
      have += parts.back().bytes.size();
    }
  } catch (const files::FileError& e) {
    throw Error(e.what());
  }
  return parts;
}

}  // namespace fattn::gpt2
