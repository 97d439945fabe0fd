// Tables: what is in them, and what each cell looks like. cli/output.h prints them.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace fattn::cli {

// What a cell says of itself, in colour where there are colours.
enum class Mood { kPlain, kGood, kBad, kUnsure, kTitle };

struct Cell {
  std::string text;   // for people
  std::string exact;  // for programs, without a unit; empty: `text` is both
  Mood mood = Mood::kPlain;

  Cell() = default;
  Cell(const char* t) : text(t) {}             // NOLINT(google-explicit-constructor): a row is a list of texts and cells
  Cell(std::string t) : text(std::move(t)) {}  // NOLINT(google-explicit-constructor)
  Cell(std::string t, std::string e) : text(std::move(t)), exact(std::move(e)) {}
  Cell in(Mood m) const {
    Cell cell = *this;
    cell.mood = m;
    return cell;
  }
};

struct Column {
  std::string name;
  std::string unit;       // of exact cells
  bool left = false;      // text, aligned to the left; else a number, to the right
  bool key = false;       // says what a row is about: never left out
  bool optional = false;  // not there where all of its cells are empty
  int rank = 0;           // 0: not left out while anything else can be; the higher, the sooner it is where lines are narrow
  size_t least = 0;       // text: as narrow as this it is wrapped before columns are left out; 0: it is wrapped last of all

  static Column text(std::string name) {
    Column column{std::move(name)};
    column.left = true;
    return column;
  }
  static Column number(std::string name, std::string unit = "") { return Column{std::move(name), std::move(unit)}; }
  Column as_key() const {
    return with([](Column& c) { c.key = true; });
  }
  Column if_any() const {
    return with([](Column& c) { c.optional = true; });
  }
  Column ranked(int r) const {
    return with([r](Column& c) { c.rank = r; });
  }
  Column wrapping(size_t l) const {
    return with([l](Column& c) { c.least = l; });
  }

  bool operator==(const Column&) const = default;

 private:
  template <class Change>
  Column with(Change change) const {
    Column column = *this;
    change(column);
    return column;
  }

 public:
  explicit Column(std::string n, std::string u = "") : name(std::move(n)), unit(std::move(u)) {}
};

class Table {
 public:
  struct Row {
    std::vector<Cell> cells;
    std::vector<std::string> notes;  // printed under it: why cells are empty
  };

  // An empty title is not printed. Without headings a table is a list for people; programs get the headings in any case.
  explicit Table(std::vector<Column> columns, std::string title = "") : columns_(std::move(columns)), title_(std::move(title)) {}
  Table& without_headings() {
    headings_ = false;
    return *this;
  }

  void add(std::vector<Cell> cells);  // missing cells are empty
  void note(std::string text);        // of the row that was added last

  const std::string& title() const { return title_; }
  const std::vector<Column>& columns() const { return columns_; }
  const std::vector<Row>& rows() const { return rows_; }
  bool headings() const { return headings_; }
  bool shown(size_t column) const;  // not an optional one without anything in it

 private:
  std::vector<Column> columns_;
  std::string title_;
  std::vector<Row> rows_;
  bool headings_ = true;
};

std::string seconds_text(double seconds);   // "12.34 ms", "5.678 us", "1.234 s"
std::string bytes_text(double bytes);       // MiB; from 1 TiB on larger units
std::string giga_text(double rate);         // in units of 1e9, without the unit
std::string percent_text(double fraction);  // "87 %"
std::string short_text(double value);       // two digits: "1.2e-07"

// The same as cells that have all digits for programs: in seconds, bytes, units of 1e9, shares of 1.
Cell seconds_cell(double seconds);
Cell bytes_cell(double bytes);
Cell giga_cell(double rate);
Cell percent_cell(double fraction);
Cell short_cell(double value);
Cell count_cell(int64_t count);
// How many times as fast: "2.13x", good or bad; "1.01x (undecided)" where the intervals overlap.
Cell times_cell(double ratio, bool undecided);

}  // namespace fattn::cli
