// A shared library opened at run time.
#pragma once

#include <string>

namespace fattn::core {

class DynamicLibrary {
 public:
  // `name` is an absolute path, or a bare file name that the loader looks up in its own directories. A relative path is
  // refused, so that the working directory never decides what is loaded. Check with operator bool; reason() says why not.
  explicit DynamicLibrary(const std::string& name);
  ~DynamicLibrary();
  DynamicLibrary(const DynamicLibrary&) = delete;
  DynamicLibrary& operator=(const DynamicLibrary&) = delete;

  explicit operator bool() const { return handle_ != nullptr; }
  const std::string& reason() const { return reason_; }

  // Null if the library has no such function.
  template <class Function>
  Function function(const char* symbol) const {
    return reinterpret_cast<Function>(address(symbol));
  }
  // The file that `symbol` was found in; empty if there is none.
  std::string file_of(const char* symbol) const;

  // The library stays loaded for the life of the process: other code may hold its functions, or its threads may run.
  void keep() && { handle_ = nullptr; }

 private:
  void* address(const char* symbol) const;

  void* handle_ = nullptr;
  std::string reason_;
};

}  // namespace fattn::core
