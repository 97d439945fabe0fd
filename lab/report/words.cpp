#include "lab/report/words.h"

#include <fmt/format.h>

#include <array>
#include <cmath>

#include "lab/report/page.h"

namespace fattn::lab::report {
namespace {

struct Sentence {
  const char *english, *chinese;
};

constexpr std::array kSentences = {
#define FATTN_TEXT(name, english, chinese) Sentence{english, chinese},
    FATTN_REPORT_TEXTS(FATTN_TEXT)
#undef FATTN_TEXT
};
static_assert(kSentences.size() == static_cast<size_t>(Text::kCount));

enum class Kind { kOther, kLatin, kHan, kFullWidth };

// Of the character that begins at `at`, which is well-formed UTF-8 or counts as something else.
Kind kind_of(const std::string& text, size_t at) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0U; };
  if (byte(at) < 0x80)
    return (byte(at) >= '0' && byte(at) <= '9') || ((byte(at) | 0x20U) >= 'a' && (byte(at) | 0x20U) <= 'z') ? Kind::kLatin : Kind::kOther;
  if ((byte(at) & 0xF0U) != 0xE0) return Kind::kOther;
  const unsigned code = (byte(at) & 0x0FU) << 12U | (byte(at + 1) & 0x3FU) << 6U | (byte(at + 2) & 0x3FU);
  if (code >= 0x4E00 && code <= 0x9FFF) return Kind::kHan;
  return (code >= 0x3000 && code <= 0x303F) || (code >= 0xFF00 && code <= 0xFF60) ? Kind::kFullWidth : Kind::kOther;
}

// A space between Chinese and Latin characters, none beside full-width punctuation, whatever was filled in.
std::string with_chinese_spaces(const std::string& text) {
  std::string out, held;  // held: marks and spaces since the last character
  Kind last = Kind::kOther;
  for (size_t at = 0; at < text.size();) {
    if (text[at] == ' ' || text[at] == kBold || text[at] == kCode) {
      held += text[at++];
      continue;
    }
    const Kind kind = kind_of(text, at);
    const size_t length = kind == Kind::kHan || kind == Kind::kFullWidth ? 3 : 1;
    if (last == Kind::kFullWidth || kind == Kind::kFullWidth) {
      for (const char c : held)
        if (c != ' ') out += c;
    } else {
      const bool meet = (last == Kind::kHan && kind == Kind::kLatin) || (last == Kind::kLatin && kind == Kind::kHan);
      // Outside of what a mark encloses: before one that opens, which stands before Latin characters, and behind one that closes.
      if (meet && held.find(' ') == std::string::npos) held = last == Kind::kHan ? " " + held : held + " ";
      out += held;
    }
    held.clear();
    out.append(text, at, length);
    // The bytes that continue another character tell nothing.
    if (length == 3 || (static_cast<unsigned char>(text[at]) & 0xC0U) != 0x80) last = kind;
    at += length;
  }
  return out + held;
}

// Three digits, as many of them behind the point as that leaves.
std::string three_digits(double value) {
  const double size = std::abs(value);
  return fmt::format("{:.{}f}", value, size >= 99.95 ? 0 : size >= 9.995 ? 1 : 2);
}

std::string with_unit(double value, std::initializer_list<std::pair<double, const char*>> units) {
  for (const auto& [size, name] : units)
    if (std::abs(value) >= 0.9995 * size) return three_digits(value / size) + " " + name;
  const auto& [size, name] = *(units.end() - 1);
  return three_digits(value / size) + " " + name;
}

}  // namespace

const char* tag_of(Language language) { return language == Language::kEnglish ? "en" : "zh-TW"; }

std::string_view source_of(Text text, Language language) {
  const Sentence& sentence = kSentences[static_cast<size_t>(text)];
  return language == Language::kEnglish ? sentence.english : sentence.chinese;
}

std::string Words::operator()(Text text, std::initializer_list<std::string_view> values) const {
  const std::string_view source = source_of(text, language_);
  std::string out;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] == '*' && i + 1 < source.size() && source[i + 1] == '*') {
      out += kBold;
      ++i;
    } else if (source[i] == '`') {
      out += kCode;
    } else if (source[i] == '{' && i + 2 < source.size() && source[i + 2] == '}') {
      const auto which = static_cast<size_t>(source[i + 1] - '0');
      if (which < values.size()) out += *(values.begin() + which);
      i += 2;
    } else {
      out += source[i];
    }
  }
  return language_ == Language::kChinese ? with_chinese_spaces(out) : out;
}

std::string Words::then(const std::string& first, const std::string& second) const {
  return first + (language_ == Language::kEnglish ? " " : "") + second;
}

std::string Words::pass(std::string_view pass) const {
  if (pass == "fwd") return (*this)(Text::kForward);
  if (pass == "bwd") return (*this)(Text::kBackward);
  return pass == "fwdbwd" ? (*this)(Text::kBoth) : clean(pass);
}

std::string Words::contestant(std::string_view label) const {
  return label == "standard"                     ? (*this)(Text::kStandardAttention)
         : label.rfind("torch-standard", 0) == 0 ? (*this)(Text::kTorchStandard)
                                                 : clean(label);
}

std::string Words::device(std::string_view device) const {
  const size_t at = device.rfind(" (");
  if (at == std::string_view::npos || device.back() != ')') return clean(device);
  return (*this)(Text::kThreads, {clean(device.substr(0, at)), clean(device.substr(at + 2, device.size() - at - 3))});
}

std::string Words::list(const std::vector<std::string>& items) const {
  std::string out;
  for (const std::string& item : items) out += (out.empty() ? "" : (*this)(Text::kListComma)) + item;
  return out;
}

std::string times_text(double ratio) { return three_digits(ratio); }
std::string share_text(double fraction) {
  const double percent = 100 * fraction;
  return fmt::format("{:.{}f} %", percent, percent >= 9.95 ? 0 : percent >= 0.995 ? 1 : 2);
}
std::string seconds_text(double seconds) { return with_unit(seconds, {{1, "s"}, {1e-3, "ms"}, {1e-6, "µs"}}); }
std::string seconds_range(double low, double high) {
  const auto [size, name] = high >= 0.9995 ? std::pair{1.0, "s"} : high >= 0.9995e-3 ? std::pair{1e-3, "ms"} : std::pair{1e-6, "µs"};
  const double shown = high / size;
  const int digits = shown >= 99.95 ? 1 : shown >= 9.995 ? 2 : 3;
  return fmt::format("{:.{}f} – {:.{}f} {}", low / size, digits, shown, digits, name);
}
std::string bytes_text(double bytes) { return with_unit(bytes, {{1073741824, "GiB"}, {1048576, "MiB"}, {1024, "KiB"}}); }
std::string bandwidth_text(double rate) { return with_unit(rate, {{1e12, "TB/s"}, {1e9, "GB/s"}, {1e6, "MB/s"}}); }
std::string rate_text(double rate) { return with_unit(rate, {{1e12, "TFLOP/s"}, {1e9, "GFLOP/s"}, {1e6, "MFLOP/s"}}); }
std::string count_text(double value) { return fmt::format("{:.0f}", value); }

}  // namespace fattn::lab::report
