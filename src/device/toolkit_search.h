// Where the libraries of a CUDA toolkit are looked for: the loader's folders, the toolkit's, and the packages of the Pythons that this process has to
// do with.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

namespace fattn::core {

// What to open for `library` ("libnvrtc"), best first: bare names for the loader, else absolute paths of files that are there. `wheels`: folders
// below those of Python's packages ("/nvidia/cu13/lib").
std::vector<std::string> toolkit_candidates(const char* library, std::initializer_list<const char*> wheels);
// The same of a library with versions of its own, best first: {2} for libnccl.so.2.
std::vector<std::string> toolkit_candidates(const char* library, std::initializer_list<const char*> wheels, const std::vector<int>& versions);

// The folders of Python's packages that are looked into.
std::vector<std::string> package_folders();

// Major versions of CUDA to look for, best first: cubins of a newer major than the driver's are refused by it.
std::vector<int> toolkit_majors();

}  // namespace fattn::core
