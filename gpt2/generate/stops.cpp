// The longest end of the text that begins a stop string waits for what comes.
#include "gpt2/generate/stops.h"

#include <algorithm>

namespace fattn::gpt2 {

bool Stops::feed(std::string_view part, std::string& to) {
  waiting_ += part;
  size_t first = std::string::npos;
  for (const std::string& stop : strings_)
    if (!stop.empty()) first = std::min(first, waiting_.find(stop));
  if (first != std::string::npos) {
    to.append(waiting_, 0, first);
    waiting_.clear();
    return true;
  }
  size_t held = 0;
  for (const std::string& stop : strings_)
    for (size_t n = std::min(stop.size() - (stop.empty() ? 0 : 1), waiting_.size()); n > held; --n)
      if (waiting_.compare(waiting_.size() - n, n, stop, 0, n) == 0) held = n;
  to.append(waiting_, 0, waiting_.size() - held);
  waiting_.erase(0, waiting_.size() - held);
  return false;
}

void Stops::finish(std::string& to) {
  to += waiting_;
  waiting_.clear();
}

}  // namespace fattn::gpt2
