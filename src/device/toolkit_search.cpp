#include "device/toolkit_search.h"

#include <glob.h>
#include <link.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string_view>

#include "device/cuda_driver.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

using Strings = std::vector<std::string>;

void add(Strings& to, const std::string& item) {
  if (std::find(to.begin(), to.end(), item) == to.end()) to.push_back(item);
}

// What a variable of other programs says, if it is an absolute path: a relative one would mean the working directory.
std::string folder_in(const char* variable) {
  const char* value = std::getenv(variable);
  return value && value[0] == '/' ? value : "";
}

// The highest version first: python3.13 before python3.9.
void add_matches(Strings& to, const std::string& pattern) {
  glob_t found{};
  Strings matches;
  if (glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found) == 0) matches.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  globfree(&found);
  std::sort(matches.begin(), matches.end(), [](const std::string& a, const std::string& b) { return strverscmp(a.c_str(), b.c_str()) > 0; });
  for (const std::string& match : matches) add(to, match);
}

// The package folders of the Python below this prefix (sys.prefix); Debian's python3 has those of pip in /usr/local.
void add_packages_of(Strings& to, const std::string& prefix) {
  for (const char* folder : {"/lib/python3*/site-packages", "/lib64/python3*/site-packages", "/lib/python3*/dist-packages"}) {
    add_matches(to, prefix + folder);
    if (prefix == "/usr") add_matches(to, std::string("/usr/local") + folder);
  }
}

// The packages beside what is loaded into this process: in the folders that a library came from (this one, torch), and below the
// prefix of a libpython, for programs that have Python inside.
void add_packages_of_loaded(Strings& to) {
  Strings loaded;
  const auto visit = [](dl_phdr_info* object, size_t, void* names) {
    if (object->dlpi_name && object->dlpi_name[0] == '/') static_cast<Strings*>(names)->emplace_back(object->dlpi_name);
    return 0;
  };
  dl_iterate_phdr(visit, &loaded);
  for (const std::string& name : loaded) {
    for (const std::string_view mark : {"/site-packages/", "/dist-packages/"})
      if (const size_t at = name.find(mark); at != std::string::npos) add(to, name.substr(0, at + mark.size() - 1));
    if (name.find("/libpython3") == std::string::npos) continue;
    if (const size_t lib = name.rfind("/lib", name.rfind('/') - 1); lib != std::string::npos) add_packages_of(to, name.substr(0, lib));
  }
}

// The name that this program was started by, as an absolute path; empty if that cannot be told.
std::string started_as() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string name;
  std::getline(file, name, '\0');
  if (name.find('/') != std::string::npos) return name[0] == '/' ? name : "";
  const char* value = std::getenv("PATH");
  std::istringstream folders(value ? value : "");
  for (std::string folder; std::getline(folders, folder, ':');)
    if (std::string path = folder + "/" + name; path[0] == '/' && access(path.c_str(), X_OK) == 0) return path;
  return "";
}

// Those of the Python that this process is, found as Python itself finds sys.prefix: an environment's bin/python is a link to
// the interpreter, and pyvenv.cfg above it says that it is one.
void add_packages_of_this_python(Strings& to) {
  const auto prefix_of = [](const std::string& program) {
    const size_t bin = program.rfind("/bin/python");
    return bin != std::string::npos && program.find('/', bin + 5) == std::string::npos ? program.substr(0, bin) : "";
  };
  char program[4096];
  const ssize_t n = readlink("/proc/self/exe", program, sizeof program);
  const std::string base = prefix_of(std::string(program, n > 0 ? static_cast<size_t>(n) : 0));
  if (base.empty()) return;
  const std::string environment = prefix_of(started_as());
  if (!environment.empty() && access((environment + "/pyvenv.cfg").c_str(), R_OK) == 0) add_packages_of(to, environment);
  add_packages_of(to, base);
}

// What `pip install --user` fills. Only this user's own: with sudo HOME may be another's.
void add_packages_of_the_user(Strings& to) {
  if (const char* off = std::getenv("PYTHONNOUSERSITE"); off && *off) return;
  std::string base = folder_in("PYTHONUSERBASE");
  if (base.empty() && !folder_in("HOME").empty()) base = folder_in("HOME") + "/.local";
  if (base.empty()) return;
  Strings found;
  add_packages_of(found, base);
  for (const std::string& folder : found)
    if (struct stat info{}; stat(folder.c_str(), &info) == 0 && info.st_uid == geteuid()) add(to, folder);
}

}  // namespace

std::vector<std::string> package_folders() {
  Strings folders;
  add_packages_of_loaded(folders);
  add_packages_of_this_python(folders);
  for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"})
    if (const std::string prefix = folder_in(variable); !prefix.empty()) add_packages_of(folders, prefix);
  add_packages_of_the_user(folders);
  return folders;
}

std::vector<int> toolkit_majors() { return cuda_driver() && cuda_driver().version < 13000 ? std::vector<int>{12, 13} : std::vector<int>{13, 12}; }

std::vector<std::string> toolkit_candidates(const char* library, std::initializer_list<const char*> wheels) {
  return toolkit_candidates(library, wheels, toolkit_majors());
}

std::vector<std::string> toolkit_candidates(const char* library, std::initializer_list<const char*> wheels, const std::vector<int>& versions) {
  Strings folders;
  for (const char* variable : {"CUDA_HOME", "CUDA_PATH"})
    if (const std::string folder = folder_in(variable); !folder.empty()) add(folders, folder + "/lib64");
  for (const std::string& packages : package_folders())
    for (const char* wheel : wheels) add(folders, packages + wheel);
  add(folders, "/usr/local/cuda/lib64");
  add_matches(folders, "/usr/local/cuda-1[2-9]*/lib64");
  add(folders, "/opt/cuda/lib64");
  if (const std::string folder = folder_in("CONDA_PREFIX"); !folder.empty()) add(folders, folder + "/lib");
  Strings names;
  for (const int version : versions) {
    const std::string name = text(library, ".so.", version);
    add(names, name);  // the loader's own folders
    for (const std::string& folder : folders)
      if (const std::string path = text(folder, "/", name); access(path.c_str(), R_OK) == 0) add(names, path);
  }
  return names;
}

}  // namespace fattn::core
