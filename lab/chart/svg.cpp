#include "lab/chart/svg.h"

#include <fmt/format.h>

#include <cmath>

#include "lab/text.h"

namespace fattn::lab::chart {

std::string coordinate(double value) {
  if (!std::isfinite(value)) value = 0;
  std::string text = fmt::format("{:.2f}", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text == "-0" ? "0" : text;
}

void Svg::begin(const char* name, Attributes attributes) {
  whole_.append(open_.size(), ' ');
  whole_ += fmt::format("<{}", name);
  for (const auto& [key, value] : attributes)
    if (!value.empty()) whole_ += fmt::format(" {}=\"{}\"", key, escape_xml(value));
}

void Svg::open(const char* name, Attributes attributes) {
  begin(name, attributes);
  whole_ += ">\n";
  open_.push_back(name);
}

void Svg::close() {
  const char* name = open_.back();
  open_.pop_back();
  whole_.append(open_.size(), ' ');
  whole_ += fmt::format("</{}>\n", name);
}

void Svg::empty(const char* name, Attributes attributes) {
  begin(name, attributes);
  whole_ += "/>\n";
}

void Svg::text(const char* name, Attributes attributes, std::string_view text) {
  begin(name, attributes);
  whole_ += fmt::format(">{}</{}>\n", escape_xml(text), name);
}

void Svg::titled(const char* name, Attributes attributes, std::string_view title) {
  begin(name, attributes);
  whole_ += fmt::format("><title>{}</title></{}>\n", escape_xml(title), name);
}

void Svg::style(std::string_view sheet) { whole_ += fmt::format("<style>{}</style>\n", sheet); }

std::string path_through(const std::vector<Place>& places, bool closed) {
  std::string path;
  for (size_t i = 0; i < places.size(); ++i) path += fmt::format("{}{} {}", i == 0 ? "M" : "L", coordinate(places[i].x), coordinate(places[i].y));
  return closed ? path + "Z" : path;
}

}  // namespace fattn::lab::chart
