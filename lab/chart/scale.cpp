#include "lab/chart/scale.h"

#include <algorithm>
#include <cmath>

namespace fattn::lab::chart {
namespace {

constexpr double kRoom = 0.04;       // of the length, beyond the outermost values
constexpr double kNoExtent = 1e-12;  // relative: a single value

// A step of at least `least` that is a round number.
double round_step(double least, Unit unit) {
  if (unit == Unit::kBytes) return std::exp2(std::ceil(std::log2(least) - 1e-9));
  const double power = std::pow(10.0, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (least <= factor * power * (1 + 1e-9)) return factor * power;
  return 10 * power;
}

std::vector<double> multiples(double low, double high, size_t most, Unit unit) {
  std::vector<double> values;
  const double step = round_step((high - low) / static_cast<double>(std::max<size_t>(most, 2)), unit);
  for (double k = std::ceil(low / step - 1e-9); k * step <= high + 1e-9 * step; ++k) values.push_back(k * step);
  return values;
}

// Powers of `base` from low to high; every n-th where there are too many.
std::vector<double> powers(double base, double low, double high, size_t most) {
  const auto first = static_cast<int64_t>(std::ceil(std::log(low) / std::log(base) - 1e-9));
  const auto last = static_cast<int64_t>(std::floor(std::log(high) / std::log(base) + 1e-9));
  std::vector<double> values;
  const int64_t each = std::max<int64_t>(1, (last - first + static_cast<int64_t>(most)) / static_cast<int64_t>(most));
  for (int64_t e = first; e <= last; e += each) values.push_back(std::pow(base, static_cast<double>(e)));
  return values;
}

std::vector<double> between_powers_of_ten(double low, double high) {
  std::vector<double> values;
  for (double power = std::pow(10.0, std::floor(std::log10(low))); power <= high; power *= 10)
    for (const double factor : {1.0, 2.0, 5.0})
      if (const double value = factor * power; value >= low * (1 - 1e-9) && value <= high * (1 + 1e-9)) values.push_back(value);
  return values;
}

}  // namespace

void Extent::cover(double value) {
  if (!std::isfinite(value)) return;
  low = std::min(low, value);
  high = std::max(high, value);
}

Scale::Scale(ScaleKind kind, Extent values, bool from_zero, double begin, double end)
    : kind_(kind), low_(values.low), high_(values.high), begin_(begin), end_(end) {
  if (values.empty() || (logarithmic() && !(values.low > 0))) low_ = 1, high_ = 10;
  if (logarithmic()) {
    if (high_ / low_ < 1.5) low_ /= 1.5, high_ *= 1.5;
    const double room = std::pow(high_ / low_, kRoom);
    low_ /= room, high_ *= room;
    return;
  }
  const bool begins_at_zero = from_zero && low_ >= 0;
  if (begins_at_zero) low_ = 0;
  if (high_ - low_ <= kNoExtent * std::max(std::fabs(low_), std::fabs(high_))) high_ = low_ + std::max(1.0, std::fabs(low_));
  const double room = kRoom * (high_ - low_);
  if (!begins_at_zero) low_ -= room;
  high_ += room;
}

Scale::Scale(size_t categories, double begin, double end)
    : kind_(ScaleKind::kBand), low_(-0.5), high_(static_cast<double>(std::max<size_t>(categories, 1)) - 0.5), begin_(begin), end_(end) {}

bool Scale::takes(double value) const { return std::isfinite(value) && (!logarithmic() || value > 0); }

double Scale::from(double value) const { return logarithmic() ? std::log(value) : value; }

double Scale::at(double value) const { return begin_ + (from(value) - from(low_)) / (from(high_) - from(low_)) * (end_ - begin_); }

double Scale::band_width() const { return std::fabs(end_ - begin_) / (high_ - low_); }

std::vector<Tick> Scale::ticks(Unit unit, size_t most) const {
  most = std::max<size_t>(most, 2);
  std::vector<double> values;
  if (kind_ == ScaleKind::kLog2) values = powers(2, low_, high_, most);
  if (kind_ == ScaleKind::kLog10) {
    values = powers(10, low_, high_, most);
    if (std::vector<double> more = between_powers_of_ten(low_, high_); more.size() <= most || values.size() < 2)
      if (more.size() >= 2) values = std::move(more);
  }
  if (values.size() < 2) values = multiples(low_, high_, most, unit);
  std::vector<Tick> ticks;
  for (const double value : values) {
    // 0.1 + 0.2 is no round number; where it should be 0, it is.
    const double shown = std::fabs(value) < 1e-9 * (high_ - low_) ? 0 : value;
    ticks.push_back({shown, text_of(unit, shown, 4)});
  }
  return ticks;
}

}  // namespace fattn::lab::chart
