// A name that goes on as it was begun, else Levenshtein's distance; the texts are a few words long.
#include "cli/nearest.h"

#include <algorithm>

namespace fattn::cli {
namespace {

size_t distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row[b.size()];
}

}  // namespace

std::string nearest(const std::string& given, const std::vector<std::string>& known) {
  constexpr size_t kFew = 4;  // letters that say little of how a name goes on
  std::string best;
  if (given.size() >= kFew)
    for (const std::string& name : known)
      if (name.starts_with(given) && (best.empty() || name.size() < best.size())) best = name;
  if (!best.empty()) return best;
  const size_t dashes = std::min(given.find_first_not_of('-'), given.size());  // of a flag; every flag has them, so they say nothing
  size_t best_distance = std::min<size_t>((given.size() - dashes) / 3 + 1, 3);
  for (const std::string& name : known)
    if (given.size() <= 100 && distance(given, name) <= best_distance) best_distance = distance(given, name), best = name;
  return best;
}

}  // namespace fattn::cli
