// Looked for by the program's own place: PREFIX/bin/fattn beside PREFIX/bin/python3, or, as pip installs it,
// PREFIX/lib/python3.N/site-packages/fattn/bin/fattn.
#include "cli/pythons.h"

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <sstream>

namespace fattn::cli {
namespace {

namespace fs = std::filesystem;

bool runs(const fs::path& path) {
  std::error_code error;
  return fs::is_regular_file(path, error) && access(path.c_str(), X_OK) == 0;
}

fs::path in_folder(const fs::path& folder) {
  for (const char* name : {"python3", "python"})
    if (runs(folder / name)) return folder / name;
  return {};
}

// The bin folder of the installation whose packages the program is among; empty if it is in none.
fs::path folder_of_packages(const fs::path& program) {
  for (fs::path folder = program.parent_path(); folder.has_relative_path(); folder = folder.parent_path()) {
    const std::string name = folder.filename().string();
    if (name == "site-packages" || name == "dist-packages") return folder.parent_path().parent_path().parent_path() / "bin";
  }
  return {};
}

fs::path in_path(const std::string& name, const std::string& path) {
  std::istringstream folders(path);
  for (std::string folder; std::getline(folders, folder, ':');)
    if (!folder.empty() && runs(fs::path(folder) / name)) return fs::path(folder) / name;
  return {};
}

}  // namespace

std::vector<std::string> usual_pythons(const std::string& program, const std::string& path) {
  std::vector<std::string> pythons;
  const fs::path self(program);
  fs::path beside = in_folder(self.parent_path());
  if (beside.empty())
    if (const fs::path folder = folder_of_packages(self); !folder.empty()) beside = in_folder(folder);
  if (!beside.empty()) pythons.push_back(beside.string());
  // A virtual environment's Python is a link to another installation's, and what can be imported goes by where the link is.
  const auto same = [](const fs::path& a, const fs::path& b) {
    std::error_code error;
    return !a.empty() && !b.empty() && fs::equivalent(a.parent_path(), b.parent_path(), error) && fs::equivalent(a, b, error);
  };
  const fs::path python3 = in_path("python3", path), python = in_path("python", path);
  if (!same(python3, beside)) pythons.emplace_back("python3");
  if (!python.empty() && !same(python, beside) && !same(python, python3)) pythons.emplace_back("python");
  return pythons;
}

std::vector<std::string> usual_pythons() {
  std::error_code error;
  const char* const path = std::getenv("PATH");
  return usual_pythons(fs::read_symlink("/proc/self/exe", error).string(), path ? path : "/usr/bin:/bin");
}

}  // namespace fattn::cli
