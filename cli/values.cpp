// The description of each validator is what help says; CLI11 hands it over behind a ':' of the type's name.
#include "cli/values.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include "cli/nearest.h"
#include "cli/sanitize.h"
#include "cli/words.h"

namespace fattn::cli {
namespace {

constexpr double kTooManyBytes = 0x1p63;  // an int64_t cannot hold them

std::string in_quotes(const std::string& text) { return "'" + printable(text, 40) + "'"; }

// "1 or more", "from 0 to 5".
template <class T>
std::string range_words(T least, T most, bool ends) {
  return ends ? fmt::format("from {} to {}", least, most) : fmt::format("{} or more", least);
}

// Small letters without '-', '_', ' ' and the module of a name: "torch.bfloat16" is "bfloat16".
std::string plain(const std::string& name) {
  std::string text;
  for (const char c : name.substr(name.rfind('.') == std::string::npos ? 0 : name.rfind('.') + 1))
    if (c != '-' && c != '_' && c != ' ') text += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return text;
}

}  // namespace

CLI::Validator whole_number(int64_t least, int64_t most) {
  const std::string range = range_words(least, most, most < kNoEnd);
  return CLI::Validator(
      [least, most, range](const std::string& text) -> std::string {
        int64_t value = 0;
        const std::from_chars_result read = std::from_chars(text.data(), text.data() + text.size(), value);
        if (read.ptr != text.data() + text.size() || text.empty() || (read.ec != std::errc() && read.ec != std::errc::result_out_of_range))
          return fmt::format("{} is no whole number; allowed: {}", in_quotes(text), range);
        if (read.ec == std::errc::result_out_of_range || value < least || value > most)
          return fmt::format("{} is not in range; allowed: {}", printable(text, 40), range);
        return "";
      },
      "a whole number" + std::string(most < kNoEnd ? " " : ", ") + range);
}

CLI::Validator number(double least, double most) {
  const bool ends = std::isfinite(most);
  const std::string range = range_words(least, most, ends);
  return CLI::Validator(
      [least, most, range](const std::string& text) -> std::string {
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        if (text.empty() || *end != '\0') return fmt::format("{} is no number; allowed: {}", in_quotes(text), range);
        if (!(value >= least && value <= most)) return fmt::format("{} is not in range; allowed: {}", printable(text, 40), range);
        return "";
      },
      "a number" + std::string(ends ? " " : ", ") + range);
}

CLI::Validator byte_size(uint64_t least, const std::string& allowed) {
  return CLI::Validator(
      [least, allowed](std::string& text) -> std::string {
        const std::string wanted = "; allowed: " + allowed + ", with a unit, as 512MiB or 16GiB";
        char* end = nullptr;
        const double number = std::strtod(text.c_str(), &end);
        std::string unit;
        for (const char* c = end; *c != '\0'; ++c)
          if (*c != ' ') unit += static_cast<char>(std::tolower(static_cast<unsigned char>(*c)));
        if (end == text.c_str() || !std::isfinite(number)) return in_quotes(text) + " is no size" + wanted;
        double bytes = number;
        if (!unit.empty() && unit != "b") {
          const size_t power = std::string("kmgtpe").find(unit[0]);
          const std::string rest = unit.substr(1);
          if (power == std::string::npos || (!rest.empty() && rest != "b" && rest != "i" && rest != "ib"))
            return in_quotes(text) + " has a unit that is not known" + wanted;
          bytes *= std::pow(rest.rfind('i', 0) == 0 ? 1024.0 : 1000.0, static_cast<double>(power + 1));
        }
        const std::string given = printable(text, 40) + (unit.empty() && number > 0 ? " bytes" : "");
        if (!(bytes >= static_cast<double>(least))) return given + " is not in range" + wanted;
        if (!(bytes < kTooManyBytes)) return given + " is too much; allowed: less than 8EiB";
        // What is little is not 0, which may mean something else.
        text = std::to_string(bytes > 0 ? std::max<int64_t>(std::llround(bytes), 1) : 0);
        return "";
      },
      "");
}

CLI::Validator one_of(std::vector<std::string> names, std::vector<std::pair<std::string, std::string>> also) {
  const std::string words = any_of(names);
  return CLI::Validator(
      [names = std::move(names), also = std::move(also), words](std::string& text) -> std::string {
        const std::string given = plain(text);
        std::vector<std::string> known;
        for (const std::string& name : names) {
          if (plain(name) == given) return text = name, "";
          known.push_back(name);
        }
        for (const auto& [other, name] : also) {
          if (other == given) return text = name, "";
          known.push_back(other);
        }
        std::string meant = nearest(text.size() > 100 ? "" : given, known);
        for (const auto& [other, name] : also)
          if (meant == other) meant = name;
        return fmt::format("{} is not known; allowed: {}{}", in_quotes(text), words, meant.empty() ? "" : "; did you mean '" + meant + "'?");
      },
      words);
}

CLI::Validator one_dtype_of(std::vector<std::string> names) {
  std::vector<std::pair<std::string, std::string>> also;
  for (const auto& [other, name] : std::initializer_list<std::pair<const char*, const char*>>{{"float", "fp32"},
                                                                                              {"float32", "fp32"},
                                                                                              {"f32", "fp32"},
                                                                                              {"single", "fp32"},
                                                                                              {"half", "fp16"},
                                                                                              {"float16", "fp16"},
                                                                                              {"f16", "fp16"},
                                                                                              {"bfloat16", "bf16"},
                                                                                              {"bfloat", "bf16"},
                                                                                              {"double", "fp64"},
                                                                                              {"float64", "fp64"},
                                                                                              {"f64", "fp64"}})
    if (std::find(names.begin(), names.end(), name) != names.end()) also.emplace_back(other, name);
  return one_of(std::move(names), std::move(also));
}

CLI::Validator svg_name() {
  return CLI::Validator(
      [](const std::string& text) -> std::string {
        return text.ends_with(".svg") ? "" : in_quotes(text) + " is not the name of an .svg file; figures are SVG, which browsers show";
      },
      "");
}

CLI::Validator in_words(const std::string& words) {
  return CLI::Validator([](const std::string&) { return std::string(); }, words);
}

}  // namespace fattn::cli
