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
#include "lab/report/catalogue.inc"
#undef FATTN_TEXT
};
static_assert(kSentences.size() == static_cast<size_t>(Text::kCount));

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
  return out;
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
std::string bytes_text(double bytes) { return with_unit(bytes, {{1073741824, "GiB"}, {1048576, "MiB"}, {1024, "KiB"}}); }
std::string rate_text(double rate) { return with_unit(rate, {{1e12, "TFLOP/s"}, {1e9, "GFLOP/s"}, {1e6, "MFLOP/s"}}); }
std::string count_text(double value) { return fmt::format("{:.0f}", value); }

}  // namespace fattn::lab::report
