// Text tables with aligned columns, and the units that all commands print.
#pragma once

#include <cstdio>
#include <string>
#include <vector>

namespace fattn::cli {

class Table {
 public:
  // Columns whose name begins with '<' are aligned to the left (without the sign); the others, numbers, to the right. One whose name begins
  // with '?' is left out where nothing is in it.
  explicit Table(std::vector<std::string> columns);
  void add(std::vector<std::string> cells);  // missing cells are empty
  // A line of free text under the last row: the reason why its cells are empty.
  void note(std::string text);
  void print(std::FILE* out) const;

 private:
  struct Line {
    std::vector<std::string> cells;
    std::string text;
  };
  std::vector<std::string> columns_;
  std::vector<bool> left_, optional_;
  std::vector<Line> lines_;
};

std::string seconds_text(double seconds);   // "12.34 ms", "5.678 us", "1.234 s"
std::string bytes_text(double bytes);       // MiB
std::string giga_text(double rate);         // in units of 1e9, without the unit
std::string percent_text(double fraction);  // "87 %"
std::string short_text(double value);       // two digits: "1.2e-07"

}  // namespace fattn::cli
