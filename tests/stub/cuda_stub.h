// How a test drives the stub of libcuda (cuda_stub.cpp): faults, counts and kernels that are host functions.
//
// The library under test opens the stub through FATTN_CUDA_DRIVER = FATTN_STUB_CUDA_PATH. Programs that a test only starts are
// driven by the variable STUB_CUDA instead: "devices=0", "cuInit=999", "version=11040,cuMemAlloc_v2=2". A name is a
// setting (below) or a function of the driver, which then always returns that status.
#pragma once

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

namespace fattn::test {

// Settings and their values at first: version 13000, devices 2, capability 90, memory (bytes a device) 1 GiB, registers 64 and
// local_bytes 0 (of every kernel), break 0 (the status that the next launch breaks the device with, seen by what waits for it).
class CudaStub {
 public:
  explicit CudaStub(const char* path) : library_(dlopen(path, RTLD_NOW | RTLD_LOCAL)) {}
  explicit operator bool() const { return library_ != nullptr; }

  void set(const char* setting, int64_t value) const { at<void(const char*, int64_t)>("stub_set")(setting, value); }
  // The next `times` calls of the function return the status; -1: every call.
  void fault(const char* function, int status, int times = -1) const { at<void(const char*, int, int)>("stub_fault")(function, status, times); }
  int64_t calls(const char* function) const { return at<int64_t(const char*)>("stub_calls")(function); }
  // What is alive: "allocations", "host allocations", "bytes", "streams", "events", "graphs", "modules", "contexts" (retained primary contexts). And
  // how many there have been: "early launches", of kernels that may come up before the one before them has ended.
  int64_t alive(const char* what) const { return at<int64_t(const char*)>("stub_alive")(what); }
  // Launches of the kernel `name` call `run` with the kernel's one argument, a struct of `bytes` bytes (none if 0).
  void kernel(const char* name, void (*run)(const void* argument), size_t bytes) const {
    at<void(const char*, void (*)(const void*), size_t)>("stub_kernel")(name, run, bytes);
  }

 private:
  template <class Function>
  Function* at(const char* symbol) const {
    return reinterpret_cast<Function*>(dlsym(library_, symbol));
  }
  void* library_;  // stays open, as the library under test keeps it open
};

// An image that the stub's cuModuleLoadDataEx takes begins with this, or is ELF as real cubins are. Any other is refused.
inline constexpr char kStubCubinMagic[] = "fattn stub cubin\n";

}  // namespace fattn::test
