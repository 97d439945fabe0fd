// The folder of a profile.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "cli/output.h"
#include "lab/profile/profile.h"

namespace fattn::cli {

// Records of the comparison and its baseline, where there was one.
using NamedRecords = std::vector<std::pair<std::string, nlohmann::ordered_json>>;

class ProfileFolder {
 public:
  // Makes it where it is not there. Throws std::runtime_error if it cannot be written, or holds what no profile left there.
  explicit ProfileFolder(std::string path);

  const std::string& path() const { return path_; }
  std::string file(const std::string& name) const { return path_ + "/" + name; }
  // Every file whole, profile.json last. Returns the JSON of that.
  nlohmann::ordered_json write(lab::profile::Profile profile, const NamedRecords& records) const;

 private:
  std::string path_;
};

// What was found, in the terminal.
void print_profile(Output& out, const lab::profile::Profile& profile, const std::string& folder);

}  // namespace fattn::cli
