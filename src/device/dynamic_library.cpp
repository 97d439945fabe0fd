#include "device/dynamic_library.h"

#include <dlfcn.h>

namespace fattn::core {

DynamicLibrary::DynamicLibrary(const std::string& name) {
  if (name.find('/') != std::string::npos && name.front() != '/') {
    reason_ = "a relative path is not opened; give an absolute path or a bare file name";
    return;
  }
  handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (!handle_) {
    const char* error = dlerror();
    reason_ = error ? error : "dlopen gave no reason";
  }
}

DynamicLibrary::~DynamicLibrary() {
  if (handle_) dlclose(handle_);
}

void* DynamicLibrary::address(const char* symbol) const { return handle_ ? dlsym(handle_, symbol) : nullptr; }

std::string DynamicLibrary::file_of(const char* symbol) const {
  Dl_info info{};
  const void* found = address(symbol);
  return found && dladdr(found, &info) && info.dli_fname ? info.dli_fname : "";
}

}  // namespace fattn::core
