#include "lab/chart/look.h"

#include <fmt/format.h>

#include <cmath>

namespace fattn::lab::chart {
namespace {

struct Colour {
  const char *light, *dark;
};

// After Okabe and Ito, with 3 : 1 of contrast at least to white and to the dark ground.
constexpr Colour kColours[kLooks] = {{"#0067a8", "#5cb8f0"}, {"#c44f00", "#ff9a57"}, {"#007a58", "#35cf9f"}, {"#a33c86", "#eba0d2"},
                                     {"#7a5c00", "#e8c840"}, {"#5b50c8", "#b3abff"}, {"#8a1f2d", "#ff8f9b"}, {"#4d5560", "#c3c9d2"}};
constexpr const char* kDashes[kLooks] = {"", "8 3", "2 3", "9 3 2 3", "12 4", "5 2 1 2 1 2", "4 2", "1 2"};

}  // namespace

int look_of(int look) { return ((look % kLooks) + kLooks) % kLooks; }

std::string colour_class(int look) { return look < 0 ? "cr" : fmt::format("c{}", look_of(look)); }

std::string dashes_of(int look) { return look < 0 ? "5 4" : kDashes[look_of(look)]; }

void draw_marker(Svg& svg, int look, Place p, const std::string& title) {
  const std::string fill = "m " + colour_class(look);
  const auto shape = [&](const std::vector<Place>& offsets) {
    std::vector<Place> places;
    for (const Place& o : offsets) places.push_back({p.x + o.x, p.y + o.y});
    svg.titled("path", {{"class", fill}, {"d", path_through(places, true)}}, title);
  };
  switch (look_of(look)) {
    case 0: svg.titled("circle", {{"class", fill}, {"cx", coordinate(p.x)}, {"cy", coordinate(p.y)}, {"r", "4"}}, title); break;
    case 1: shape({{-3.7, -3.7}, {3.7, -3.7}, {3.7, 3.7}, {-3.7, 3.7}}); break;
    case 2: shape({{0, -5}, {4.6, 3.6}, {-4.6, 3.6}}); break;
    case 3: shape({{0, -5.4}, {5.4, 0}, {0, 5.4}, {-5.4, 0}}); break;
    case 4: shape({{0, 5}, {4.6, -3.6}, {-4.6, -3.6}}); break;
    case 5:
      shape({{-1.6, -5},
             {1.6, -5},
             {1.6, -1.6},
             {5, -1.6},
             {5, 1.6},
             {1.6, 1.6},
             {1.6, 5},
             {-1.6, 5},
             {-1.6, 1.6},
             {-5, 1.6},
             {-5, -1.6},
             {-1.6, -1.6}});
      break;
    case 6: shape({{-5, 0}, {3.6, -4.6}, {3.6, 4.6}}); break;
    default: shape({{5, 0}, {-3.6, -4.6}, {-3.6, 4.6}}); break;
  }
}

std::string style_sheet() {
  std::string sheet =
      "\n.fc{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Noto Sans','Liberation Sans','Noto Sans CJK TC','Noto Sans TC','PingFang TC',"
      "'Microsoft JhengHei','Hiragino Sans','Microsoft YaHei',sans-serif;font-size:13px}\n"
      ".fc .ground{fill:#fff}.fc text{fill:#1c2128}.fc .t{font-size:17px;font-weight:600}.fc .p{font-size:14px;font-weight:600}\n"
      ".fc .s{font-size:12px}.fc .s,.fc .q{fill:#4a525c}.fc .g{stroke:#d8dce1;stroke-width:1}.fc .a{stroke:#6b737d;stroke-width:1}\n"
      ".fc .l{fill:none;stroke-width:2.2;stroke-linejoin:round}.fc .r{fill:none;stroke-width:1.5}.fc .b{stroke:none;fill-opacity:.2}\n"
      ".fc .m{stroke:#fff;stroke-width:1}.fc .v{font-size:11px}.fc .cr{stroke:#5d6570;fill:#5d6570}\n";
  const auto colours = [&](const char* indent, const char* Colour::*scheme) {
    for (int i = 0; i < kLooks; ++i)
      sheet += fmt::format("{0}.fc .c{1}{{fill:{2}}}.fc .l.c{1},.fc .r.c{1}{{fill:none;stroke:{2}}}\n", indent, i, kColours[i].*scheme);
    sheet += fmt::format("{}.fc .l.cr,.fc .r.cr{{fill:none}}\n", indent);
  };
  colours("", &Colour::light);
  sheet +=
      "@media (prefers-color-scheme:dark){\n"
      " .fc .ground{fill:#14181d}.fc text{fill:#e8ebef}.fc .s,.fc .q{fill:#b4bbc4}.fc .g{stroke:#363d46}.fc .a{stroke:#959da8}\n"
      " .fc .m{stroke:#14181d}.fc .cr{stroke:#a9b1bb;fill:#a9b1bb}\n";
  colours(" ", &Colour::dark);
  return sheet + "}\n";
}

}  // namespace fattn::lab::chart
