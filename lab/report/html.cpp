// One self-contained page: no script, no network, light and dark, narrow and wide.
#include <fmt/format.h>

#include "lab/chart/look.h"
#include "lab/report/page.h"
#include "lab/text.h"

namespace fattn::lab::report {
namespace {

constexpr const char* kStyle = R"(
:root{color-scheme:light dark;--ground:#fff;--text:#1c2128;--soft:#4a525c;--line:#d8dce1;--box:#f5f7f9;--link:#0067a8;--strong:#007a58}
@media (prefers-color-scheme:dark){:root{--ground:#14181d;--text:#e8ebef;--soft:#b4bbc4;--line:#363d46;--box:#1d232a;--link:#5cb8f0;--strong:#35cf9f}}
*{box-sizing:border-box}
html{scroll-padding-top:1rem}
body{margin:0;background:var(--ground);color:var(--text);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans","Noto Sans CJK TC","PingFang TC","Microsoft JhengHei",sans-serif}
header,nav,main{max-width:74rem;margin:0 auto;padding:0 1rem}
header{padding-top:1.5rem}
h1{font-size:1.8rem;line-height:1.25;margin:0 0 .3rem}
h2{font-size:1.35rem;margin:2.4rem 0 .6rem;padding-top:.6rem;border-top:1px solid var(--line)}
p,li{max-width:48rem}
li{margin:.35rem 0}
a{color:var(--link)}
a:focus-visible,summary:focus-visible,div:focus-visible,pre:focus-visible{outline:3px solid var(--link);outline-offset:2px}
.sub{color:var(--soft);margin:0;max-width:60rem}
.skip{position:absolute;left:-100rem}
.skip:focus{left:1rem;top:.5rem;background:var(--ground);padding:.5rem}
nav ul{display:flex;flex-wrap:wrap;gap:.2rem 1.1rem;list-style:none;padding:0;margin:1rem 0 0}
nav li{margin:0}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(14rem,1fr));gap:.8rem;list-style:none;padding:0;margin:1rem 0}
.cards li{margin:0;background:var(--box);border:1px solid var(--line);border-radius:.6rem;padding:.8rem 1rem;max-width:none}
.cards .big{display:block;font-size:2rem;font-weight:700;line-height:1.2}
.cards .good{color:var(--strong)}
.note{color:var(--soft);font-size:.88rem;margin:.4rem 0}
.cards .what{display:block;font-weight:600}
.cards .detail{display:block;color:var(--soft);font-size:.88rem}
figure{margin:1.2rem 0}
.panels{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:.8rem}
.panels svg{display:block;width:100%;max-width:36rem;height:auto}
figcaption,caption{font-weight:600;text-align:left;margin-bottom:.5rem;max-width:60rem}
.scroll{overflow-x:auto;margin:1rem 0}
table{border-collapse:collapse;font-size:.9rem}
th,td{padding:.3rem .7rem;border-bottom:1px solid var(--line);text-align:left;vertical-align:top}
th{color:var(--soft);font-weight:600}
thead th{vertical-align:bottom}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}
tbody tr:hover{background:var(--box)}
details{margin:.6rem 0}
summary{cursor:pointer;color:var(--link)}
pre{background:var(--box);border:1px solid var(--line);border-radius:.4rem;padding:.6rem .8rem;overflow-x:auto;font-size:.82rem;white-space:pre-wrap;overflow-wrap:anywhere}
code{background:var(--box);border-radius:.2rem;padding:0 .2rem;font-size:.9em;overflow-wrap:anywhere}
@media print{nav,.skip{display:none}details>*{display:block}}
@media (max-width:30rem){h1{font-size:1.45rem}.cards .big{font-size:1.7rem}th,td{padding:.3rem .45rem}}
)";

// Text with its marks.
std::string inline_html(std::string_view text) {
  std::string out, piece;
  bool bold = false, code = false;
  const auto flush = [&] {
    out += escape_xml(piece);
    piece.clear();
  };
  for (const char c : text) {
    if (c != kBold && c != kCode) {
      piece += c;
      continue;
    }
    flush();
    bool& open = c == kBold ? bold : code;
    const char* name = c == kBold ? "strong" : "code";
    out += fmt::format("<{}{}>", open ? "/" : "", name);
    open = !open;
  }
  flush();
  return out;
}

std::string table_html(const PageTable& table, const std::string& label) {
  std::string out = fmt::format("<div class=\"scroll\" tabindex=\"0\" role=\"region\" aria-label=\"{}\">\n<table>\n", escape_xml(label));
  if (!table.caption.empty()) out += "<caption>" + inline_html(table.caption) + "</caption>\n";
  const auto is_number = [&](size_t i) { return i < table.numeric.size() && table.numeric[i]; };
  out += "<thead><tr>";
  for (size_t i = 0; i < table.heads.size(); ++i)
    out += fmt::format("<th scope=\"col\"{}>{}</th>", is_number(i) ? " class=\"n\"" : "", inline_html(table.heads[i]));
  out += "</tr></thead>\n<tbody>\n";
  for (const std::vector<std::string>& row : table.rows) {
    out += "<tr>";
    for (size_t i = 0; i < table.heads.size(); ++i) {
      const std::string cell = i < row.size() ? inline_html(row[i]) : "";
      out += i == 0 ? fmt::format("<th scope=\"row\">{}</th>", cell) : fmt::format("<td{}>{}</td>", is_number(i) ? " class=\"n\"" : "", cell);
    }
    out += "</tr>\n";
  }
  return out + "</tbody>\n</table>\n</div>\n";
}

// A panel each, so that they stand below each other where the page is narrow.
std::string figure_html(const PageFigure& figure, const std::string& id, const std::string& language) {
  const std::string sheet = "<style>" + chart::style_sheet() + "</style>";
  std::string out = "<figure>\n<figcaption>" + inline_html(figure.caption) + "</figcaption>\n<div class=\"panels\">\n";
  for (size_t i = 0; i < figure.chart.panels.size(); ++i) {
    chart::Figure one = figure.chart;
    one.panels = {figure.chart.panels[i]};
    one.columns = 1;
    one.title = one.panels[0].title;
    one.panels[0].title.clear();
    one.note.clear();
    one.id = fmt::format("{}-{}", id, i + 1);
    one.language = language;
    std::string svg = chart::to_svg(one);
    // The sheet of all of them is in the page's head.
    if (const size_t at = svg.find(sheet); at != std::string::npos) svg.erase(at, sheet.size());
    out += svg + "\n";
  }
  out += "</div>\n";
  if (!figure.chart.note.empty()) out += "<p class=\"note\">" + escape_xml(figure.chart.note) + "</p>\n";
  return out + "</figure>\n";
}

std::string block_html(const Page& page, const Block& block, int& figures) {
  switch (block.kind) {
    case Block::Kind::kText: return "<p>" + inline_html(block.text) + "</p>\n";
    case Block::Kind::kBullets: {
      std::string out = "<ul>\n";
      for (const std::string& item : block.items) out += "<li>" + inline_html(item) + "</li>\n";
      return out + "</ul>\n";
    }
    case Block::Kind::kCards: {
      std::string out = "<ul class=\"cards\">\n";
      for (const Card& card : block.cards)
        out += fmt::format("<li><span class=\"big{}\">{}</span><span class=\"what\">{}</span><span class=\"detail\">{}</span></li>\n",
                           card.good ? " good" : "", inline_html(card.figure), inline_html(card.what), inline_html(card.detail));
      return out + "</ul>\n";
    }
    case Block::Kind::kTable: {
      const std::string label = block.table.caption.empty() ? page.open_table : clean(block.table.caption);
      if (!block.folded) return table_html(block.table, label);
      PageTable plain = block.table;
      plain.caption.clear();
      return "<details><summary>" + inline_html(block.table.caption) + "</summary>\n" + table_html(plain, label) + "</details>\n";
    }
    case Block::Kind::kFigure: return figure_html(block.figure, fmt::format("f{}", ++figures), page.language);
    case Block::Kind::kCommands: {
      std::string out = "<details><summary>" + inline_html(block.text) + "</summary>\n<pre tabindex=\"0\">";
      for (size_t i = 0; i < block.items.size(); ++i) out += (i ? "\n" : "") + escape_xml(clean(block.items[i]));
      return out + "</pre>\n</details>\n";
    }
  }
  return "";
}

}  // namespace

std::string clean(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == kBold || c == kCode) continue;
    out += c == '\n' || c == '\t' || c == '\r' ? ' ' : byte < 0x20 || byte == 0x7F ? '?' : c;
  }
  return out;
}

std::string to_html(const Page& page) {
  std::string out = fmt::format(
      "<!DOCTYPE html>\n<html lang=\"{}\">\n<head>\n<meta charset=\"utf-8\">\n<meta name=\"viewport\" "
      "content=\"width=device-width,initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<title>{}</title>\n<style>{}{}</style>\n</head>\n<body>\n"
      "<a class=\"skip\" href=\"#{}\">{}</a>\n<header>\n<h1>{}</h1>\n<p class=\"sub\">{}</p>\n</header>\n<nav aria-label=\"{}\">\n<ul>\n",
      escape_xml(page.language), escape_xml(clean(page.title)), kStyle, chart::style_sheet(),
      page.sections.empty() ? "top" : escape_xml(page.sections[0].id), escape_xml(page.skip), inline_html(page.title), inline_html(page.subtitle),
      escape_xml(page.contents));
  for (const Section& section : page.sections)
    out += fmt::format("<li><a href=\"#{}\">{}</a></li>\n", escape_xml(section.id), inline_html(section.title));
  out += "</ul>\n</nav>\n<main>\n";
  int figures = 0;
  for (const Section& section : page.sections) {
    out += fmt::format("<section aria-labelledby=\"{0}\">\n<h2 id=\"{0}\">{1}</h2>\n", escape_xml(section.id), inline_html(section.title));
    for (const Block& block : section.blocks) out += block_html(page, block, figures);
    out += "</section>\n";
  }
  return out + "</main>\n</body>\n</html>\n";
}

}  // namespace fattn::lab::report
