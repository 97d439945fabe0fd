// A report as it is before it is HTML or Markdown: sections of paragraphs, lists, cards, tables and figures.
#pragma once

#include <string>
#include <vector>

#include "lab/chart/chart.h"

namespace fattn::lab::report {

// Text of a report: what kBold and kCode enclose is emphasised or code; everything else is shown as it is, whatever is in it. clean() is what makes
// text from records free of these marks.
inline constexpr char kBold = '\x01', kCode = '\x02';
std::string clean(std::string_view text);

struct Card {
  bool good = true;
  std::string figure, what, detail;  // "9.4x", "as fast forward", "6 problems, 5.35 to 9.91"
};

struct PageTable {
  std::string caption;
  std::vector<std::string> heads;
  std::vector<bool> numeric;  // of each column
  std::vector<std::vector<std::string>> rows;
};

struct PageFigure {
  std::string name;     // of its file: figures/NAME.svg
  chart::Figure chart;  // its title is the caption
  std::string caption;
};

struct Block {
  enum class Kind { kText, kBullets, kCards, kTable, kFigure, kCommands };
  Kind kind = Kind::kText;
  std::string text = {};                // of kText; of kCommands what they repeat
  std::vector<std::string> items = {};  // of kBullets; of kCommands: one line each
  std::vector<Card> cards = {};
  PageTable table = {};
  PageFigure figure = {};
  bool folded = false;  // a table that is opened by who wants it

  static Block paragraph(std::string t) { return {Kind::kText, std::move(t)}; }
  static Block bullets(std::vector<std::string> all) { return {Kind::kBullets, "", std::move(all)}; }
  static Block of(std::vector<Card> all) {
    Block block{Kind::kCards};
    block.cards = std::move(all);
    return block;
  }
  static Block of(PageTable t, bool fold = false) {
    Block block{Kind::kTable};
    block.table = std::move(t);
    block.folded = fold;
    return block;
  }
  static Block of(PageFigure f) {
    Block block{Kind::kFigure};
    block.figure = std::move(f);
    return block;
  }
  static Block commands(std::string what, std::vector<std::string> lines) { return {Kind::kCommands, std::move(what), std::move(lines)}; }
};

struct Section {
  std::string id, title;
  std::vector<Block> blocks;
};

struct Page {
  std::string language, title, subtitle;
  std::string contents, skip, open_table;  // words of the page itself: "Contents", "Skip to the contents", "as a table"
  std::vector<Section> sections;
};

std::string to_html(const Page& page);
std::string to_markdown(const Page& page);

}  // namespace fattn::lab::report
