// Text as it comes, up to the first of some strings that end it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace fattn::gpt2 {

class Stops {
 public:
  explicit Stops(std::vector<std::string> strings) : strings_(std::move(strings)) {}

  // Appends to `to` what no stop string can begin in any more. True: one was found; nothing follows it, nor is it in the text.
  bool feed(std::string_view part, std::string& to);
  // What was held back.
  void finish(std::string& to);

 private:
  std::vector<std::string> strings_;
  std::string waiting_;
};

}  // namespace fattn::gpt2
