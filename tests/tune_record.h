// What the searches for tiles (tune_*.cpp) share: lists in their flags, and their records.
#pragma once

#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "fattn/fattn.h"
#include "files/json_text.h"

namespace fattn::test {

inline std::vector<int> numbers_in(const std::string& text) {
  std::vector<int> all;
  std::istringstream in(text);
  for (std::string one; std::getline(in, one, ',');) all.push_back(std::atoi(one.c_str()));
  return all;
}

// Without problems as yet.
inline nlohmann::ordered_json record_of_search(const char* command, const std::string& gpu, int rounds, const char* dtype = "bf16") {
  char date[32];
  const std::time_t now = std::time(nullptr);
  std::strftime(date, sizeof date, "%Y-%m-%dT%H:%M:%SZ", std::gmtime(&now));
  return {{"command", command},
          {"date", date},
          {"gpu", gpu},
          {"library_version", fattn_version()},
          {"dtype", dtype},
          {"rounds", rounds},
          {"problems", nlohmann::ordered_json::array()}};
}

inline void write_whole(const std::string& path, const nlohmann::ordered_json& record) {
  const std::string temporary = path + ".new";
  {
    std::ofstream out(temporary);
    out << files::json_text(record);
    out.flush();
    if (!out) throw std::runtime_error("cannot write " + temporary);
  }
  std::filesystem::rename(temporary, path);
}

}  // namespace fattn::test
