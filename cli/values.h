// What the value of a flag may be: checked, understood under other names, and said in words, which `--help` prints.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "cli/parser.h"

namespace fattn::cli {

// Sizes end far above what any machine holds; words do not name such an end.
inline constexpr int64_t kNoEnd = int64_t{1} << 48;

CLI::Validator whole_number(int64_t least, int64_t most = kNoEnd);
CLI::Validator number(double least, double most = std::numeric_limits<double>::infinity());

// Bytes with a unit, 16GiB or 512MB, or without one, which are bytes; for transform(), which puts their number in the place of what was given.
// `least` is what is allowed, in words for people: "1MiB or more".
CLI::Validator byte_size(uint64_t least, const std::string& allowed);

// One of these names, in any case, with or without '-' and '_'; or what others call one of them: {"half", "fp16"}. For transform(), which puts the
// name in the place of what was given.
CLI::Validator one_of(std::vector<std::string> names, std::vector<std::pair<std::string, std::string>> also = {});
// Of what torch, NumPy and C call dtypes.
CLI::Validator one_dtype_of(std::vector<std::string> names);

// The name of a file that is drawn as SVG; other programs go by a name's end.
CLI::Validator svg_name();

// In words alone, for help: what another validator checks.
CLI::Validator in_words(const std::string& words);

}  // namespace fattn::cli
