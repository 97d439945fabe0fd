// How wide text will be, without a font at hand: a little generous, so that nothing runs into its neighbour.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fattn::lab::chart {

double width_of_text(std::string_view text, double font_size);

// Lines of at most this width, broken at blanks and between Chinese characters; a word that is wider stays whole.
std::vector<std::string> lines_of_text(std::string_view text, double font_size, double width);

// What fits, with "..." where something was left out.
std::string cut_to_width(std::string_view text, double font_size, double width);

}  // namespace fattn::lab::chart
