#include "lab/chart/text_size.h"

#include <algorithm>
#include <cstddef>

namespace fattn::lab::chart {
namespace {

size_t bytes_of(char first) {
  const auto byte = static_cast<unsigned char>(first);
  return byte < 0xC0 ? 1 : byte < 0xE0 ? 2 : byte < 0xF0 ? 3 : 4;
}

// Characters from U+2E80 are as wide as high: Chinese, Japanese, Korean.
bool is_wide(std::string_view character) {
  return character.size() >= 4 ||
         (character.size() == 3 && static_cast<unsigned char>(character[0]) * 256U + static_cast<unsigned char>(character[1]) >= 0xE2BAU);
}

double ems_of(std::string_view character) {
  if (is_wide(character)) return 1;
  const char c = character[0];
  if (c == 'i' || c == 'l' || c == '.' || c == ',' || c == ':' || c == ' ' || c == '\'' || c == '|' || c == 'j' || c == 't' || c == 'f' || c == '(' ||
      c == ')')
    return 0.36;
  if ((c >= 'A' && c <= 'Z') || c == 'm' || c == 'w' || c == '%') return c == 'M' || c == 'W' || c == 'm' || c == '%' ? 0.92 : 0.7;
  return 0.6;
}

std::string_view first_of(std::string_view text) { return text.substr(0, std::min(bytes_of(text[0]), text.size())); }

}  // namespace

double width_of_text(std::string_view text, double font_size) {
  double ems = 0;
  while (!text.empty()) {
    const std::string_view character = first_of(text);
    ems += ems_of(character);
    text.remove_prefix(character.size());
  }
  return ems * font_size;
}

std::vector<std::string> lines_of_text(std::string_view text, double font_size, double width) {
  std::vector<std::string> lines(1);
  std::string word;
  const auto put = [&] {
    if (word.empty()) return;
    std::string& line = lines.back();
    if (!line.empty() && width_of_text(line + word, font_size) > width) {
      line.erase(line.find_last_not_of(' ') + 1);
      lines.emplace_back();
      word.erase(0, std::min(word.find_first_not_of(' '), word.size()));
    }
    lines.back() += word;
    word.clear();
  };
  while (!text.empty()) {
    const std::string_view character = first_of(text);
    if (character == "\n") {
      put();
      lines.emplace_back();
    } else {
      if (character == " " || is_wide(character)) put();
      word += character;
    }
    text.remove_prefix(character.size());
  }
  put();
  return lines;
}

std::string cut_to_width(std::string_view text, double font_size, double width) {
  if (width_of_text(text, font_size) <= width) return std::string(text);
  const double room = width - width_of_text("...", font_size);
  std::string kept;
  while (!text.empty()) {
    const std::string_view character = first_of(text);
    if (width_of_text(kept + std::string(character), font_size) > room) break;
    kept += character;
    text.remove_prefix(character.size());
  }
  return kept + "...";
}

}  // namespace fattn::lab::chart
