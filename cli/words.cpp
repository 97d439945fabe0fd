// Widths are those of Unicode's East Asian Width; the ranges of marks are the common ones.
#include "cli/words.h"

#include <algorithm>
#include <cstdint>
#include <initializer_list>

namespace fattn::cli {
namespace {

constexpr std::string_view kNoBreak = "\u00a0";

struct Points {
  uint32_t first, last;
};

constexpr Points kNoWidth[] = {{0x300, 0x36f},   {0x483, 0x489},   {0x591, 0x5bd},   {0x610, 0x61a},   {0x64b, 0x65f},  {0x1ab0, 0x1aff},
                               {0x1dc0, 0x1dff}, {0x200b, 0x200f}, {0x20d0, 0x20ff}, {0xfe00, 0xfe0f}, {0xfe20, 0xfe2f}};
constexpr Points kDouble[] = {{0x1100, 0x115f}, {0x2e80, 0x303e},   {0x3041, 0x33ff},   {0x3400, 0x4dbf},  {0x4e00, 0x9fff},
                              {0xa000, 0xa4cf}, {0xac00, 0xd7a3},   {0xf900, 0xfaff},   {0xfe30, 0xfe6f},  {0xff00, 0xff60},
                              {0xffe0, 0xffe6}, {0x1f300, 0x1f64f}, {0x1f900, 0x1f9ff}, {0x20000, 0x3fffd}};

template <size_t N>
bool in(const Points (&ranges)[N], uint32_t point) {
  return std::any_of(std::begin(ranges), std::end(ranges), [&](const Points& range) { return range.first <= point && point <= range.last; });
}

// Bytes of the character that begins `text`, and its columns. What is no UTF-8 is a byte in a column; a colour's escape sequence takes none.
size_t character(std::string_view text, size_t& columns) {
  if (text.front() == '\x1b') {
    columns = 0;
    return std::min(text.find('m'), text.size() - 1) + 1;
  }
  const auto first = static_cast<uint8_t>(text.front());
  const size_t bytes = first < 0xc0 ? 1 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;
  columns = 1;
  if (bytes > text.size()) return 1;
  uint32_t point = bytes == 1 ? first : first & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) point = point << 6 | (static_cast<uint8_t>(text[i]) & 0x3fu);
  columns = in(kNoWidth, point) ? 0 : in(kDouble, point) ? 2 : 1;
  return bytes;
}

// Punctuation that begins no line, and that ends none.
constexpr std::string_view kNotFirst[] = {"，", "。", "、", "；", "：", "！", "？", "）", "」", "』", "》"}, kNotLast[] = {"（", "「", "『", "《"};

template <size_t N>
bool is_one_of(const std::string_view (&marks)[N], std::string_view character) {
  return std::find(std::begin(marks), std::end(marks), character) != std::end(marks);
}

// Where the word that begins at `at` ends: at a space, or where a line may end without one, beside a character of two columns.
size_t end_of_word(std::string_view text, size_t at) {
  bool wide = false;
  std::string_view before;
  while (at < text.size() && text[at] != ' ') {
    size_t columns = 0;
    const std::string_view now = text.substr(at, character(text.substr(at), columns));
    if (!before.empty() && (wide || columns == 2) && columns > 0 && !is_one_of(kNotFirst, now) && !is_one_of(kNotLast, before)) break;
    if (columns > 0) wide = columns == 2;
    before = now;
    at += now.size();
  }
  return at;
}

// How many bytes of a word that is wider than a line go on this line.
size_t piece_of(std::string_view word, size_t width) {
  size_t used = 0, end = 0, good = 0;
  while (end < word.size()) {
    size_t columns = 0;
    const size_t bytes = character(word.substr(end), columns);
    if (used + columns > width && end > 0) break;
    used += columns;
    end += bytes;
    if (word[end - 1] == '/' || word[end - 1] == ',') good = end;
  }
  return end < word.size() && good > end / 2 ? good : end;
}

}  // namespace

size_t display_width(std::string_view text) {
  size_t width = 0;
  for (size_t i = 0, columns = 0; i < text.size(); width += columns) i += character(text.substr(i), columns);
  return width;
}

std::vector<std::string> wrapped(std::string_view text, size_t first_width, size_t other_width) {
  std::vector<std::string> lines(1);
  size_t width = first_width;
  size_t used = 0;
  const auto next_line = [&] {
    lines.back().erase(lines.back().find_last_not_of(' ') + 1);
    lines.emplace_back();
    used = 0;
    width = other_width;
  };
  for (size_t at = 0; at < text.size();) {
    const size_t spaces = std::min(text.find_first_not_of(' ', at), text.size()) - at;
    const size_t end = end_of_word(text, at + spaces);
    std::string_view word = text.substr(at + spaces, end - at - spaces);
    at = end;
    if (word.empty()) break;
    size_t columns = display_width(word);
    if (used > 0 && used + spaces + columns > width)
      next_line();
    else if (!lines.back().empty())
      lines.back().append(spaces, ' '), used += spaces;
    while (columns > width) {
      const size_t bytes = piece_of(word, width);
      lines.back() += word.substr(0, bytes);
      word.remove_prefix(bytes);
      columns = display_width(word);
      if (!word.empty()) next_line();
    }
    lines.back() += word;
    used += columns;
  }
  for (std::string& line : lines)
    for (size_t at = 0; (at = line.find(kNoBreak, at)) != std::string::npos; ++at) line.replace(at, kNoBreak.size(), " ");
  return lines;
}

std::vector<std::string> wrapped(std::string_view text, size_t width) { return wrapped(text, width, width); }

std::string unbroken(std::string text) {
  for (size_t at = 0; (at = text.find(' ', at)) != std::string::npos; at += kNoBreak.size()) text.replace(at, 1, kNoBreak);
  return text;
}

std::string laid_out(std::string_view text, size_t width, size_t hanging) {
  std::string all;
  while (!text.empty()) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    const size_t indent = std::min({line.find_first_not_of(' '), line.size(), width / 2}), further = std::min(indent + hanging, width / 2);
    line.remove_prefix(std::min(line.find_first_not_of(' '), line.size()));
    size_t lead = indent;
    for (const std::string& one : wrapped(line, width - indent, width - further)) {
      if (!one.empty()) all.append(lead, ' ').append(one);
      all += '\n';
      lead = further;
    }
  }
  return all;
}

std::string any_of(const std::vector<std::string>& names, const char* word) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text.append(i + 1 == names.size() ? std::string(" ") + word + " " : ", ");
    text += names[i];
  }
  return text;
}

}  // namespace fattn::cli
