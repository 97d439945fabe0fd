// SVG text: elements, attributes, numbers of fixed precision. The same calls give the same bytes.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace fattn::lab::chart {

// At most two decimals, no zeros behind them, never "-0" or what is no number.
std::string coordinate(double value);

struct Place {
  double x = 0, y = 0;
};

class Svg {
 public:
  using Attributes = std::initializer_list<std::pair<const char*, std::string>>;

  // <name ...>, until close(); <name .../>; <name ...>text</name>. Attributes and text are escaped.
  void open(const char* name, Attributes attributes);
  void close();
  void empty(const char* name, Attributes attributes);
  void text(const char* name, Attributes attributes, std::string_view text);
  // An element whose content is a <title>: what a pointer that rests on it is told, and a screen reader.
  void titled(const char* name, Attributes attributes, std::string_view title);
  // A style sheet of ours; nothing is escaped.
  void style(std::string_view sheet);

  const std::string& whole() const { return whole_; }

 private:
  void begin(const char* name, Attributes attributes);

  std::string whole_;
  std::vector<const char*> open_;
};

std::string path_through(const std::vector<Place>& places, bool closed = false);

}  // namespace fattn::lab::chart
