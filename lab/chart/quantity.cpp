#include "lab/chart/quantity.h"

#include <fmt/format.h>

#include <cmath>

namespace fattn::lab::chart {
namespace {

// Without an exponent where a reader expects none, and without zeros that say nothing.
std::string number(double value, int digits) {
  const double size = std::fabs(value);
  if (value == 0) return "0";
  if (size >= 1e7 || size < 1e-4) return fmt::format("{:.{}g}", value, digits);
  const int whole = static_cast<int>(std::floor(std::log10(size))) + 1;
  std::string text = fmt::format("{:.{}f}", value, std::max(0, digits - whole));
  if (text.find('.') == std::string::npos) return text;
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

struct Prefix {
  double factor;
  const char* text;
};

template <size_t N>
std::string scaled(double value, int digits, const Prefix (&prefixes)[N]) {
  if (value == 0) return "0";
  const Prefix* chosen = &prefixes[0];
  // What would be rounded up to the next unit is written in it.
  for (const Prefix& prefix : prefixes)
    if (std::fabs(value) >= prefix.factor * (1 - 0.5 * std::pow(10.0, -digits))) chosen = &prefix;
  return number(value / chosen->factor, digits) + chosen->text;
}

constexpr Prefix kTimes[] = {{1e-9, " ns"}, {1e-6, " us"}, {1e-3, " ms"}, {1, " s"}};
constexpr Prefix kBytes[] = {{1, " B"},
                             {1024.0, " KiB"},
                             {1024.0 * 1024, " MiB"},
                             {1024.0 * 1024 * 1024, " GiB"},
                             {1024.0 * 1024 * 1024 * 1024, " TiB"},
                             {1024.0 * 1024 * 1024 * 1024 * 1024, " PiB"}};
constexpr Prefix kRates[] = {{1, ""}, {1e3, " k"}, {1e6, " M"}, {1e9, " G"}, {1e12, " T"}, {1e15, " P"}};

}  // namespace

std::string text_of(Unit unit, double value, int digits) {
  if (!std::isfinite(value)) return "-";
  switch (unit) {
    case Unit::kPlain: return number(value, value == std::floor(value) ? 15 : digits);
    case Unit::kTime: return scaled(value, digits, kTimes);
    case Unit::kBytes: return scaled(value, digits < 4 ? 4 : digits, kBytes);  // 1023 KiB is none of three digits
    case Unit::kRate: return scaled(value, digits, kRates);
    case Unit::kTimes: return number(value, digits) + "x";
    case Unit::kShare: return number(100 * value, digits) + " %";
  }
  return "-";
}

}  // namespace fattn::lab::chart
