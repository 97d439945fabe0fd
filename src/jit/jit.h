// The run-time compilation engine: one translation unit of device code -> cubin, from the disk cache, a pack file or NVRTC.
// Knows no attention. Safe to call from several threads; a key is compiled by one thread (and, where the cache folder can
// be locked, by one process) at a time.
#pragma once

#include <cstdint>
#include <string>

#include "jit/sources.h"

namespace fattn::core::jit {

// One translation unit = one kernel. What is not said here (-std=c++20, everything is device code by default) is the same
// for all of them.
struct Request {
  std::string entry;  // the extern "C" name; letters, digits and _; also the name that `fattn cache list` shows
  // A few lines: a comment that says what is special about this one, constexpr values, the entry. Includes embedded headers by their path
  // from the root of the project, src/ left out: "kernels/v2/forward.h", "device_abi/attention_params.h"; <...> is refused.
  std::string source;
  int arch = 0;                            // 75, 80, 86, 89, 90, 100, 120, ...
  bool arch_specific = false;              // the suffix `a`: 90 -> sm_90a
  SourceTable sources = embedded_sources;  // where the headers are
};

std::string target_name(int arch, bool arch_specific);  // "sm_90a"

// What ptxas said about the entry.
struct Resources {
  int registers = 0;
  int stack_bytes = 0;                              // local memory of a thread, spills included
  int spill_store_bytes = 0, spill_load_bytes = 0;  // of a thread
  int shared_bytes = 0;                             // static; dynamic shared memory is the launch's
  int barriers = 0;
  bool known = false;     // false: the log had no such lines
  bool degraded = false;  // ptxas gave up something that the kernel is built on: wgmma serialised, setmaxnreg ignored (C75xx)
};
// `log` as ptxas -v prints it; a log with several functions gives the greatest of each value.
Resources parse_resources(const std::string& log);

// Where a cubin came from, in the order in which they are asked.
enum class Origin : int32_t { kDisk = 0, kPack = 1, kNvrtc = 2 };
const char* name_of(Origin origin);

struct Cubin {
  std::string image;  // an ELF file for cuModuleLoadData
  std::string log;    // NVRTC's and ptxas's messages of the compilation, whenever that was
  Resources resources;
  Origin origin = Origin::kNvrtc;
  double seconds = 0;  // of the compilation, whenever that was
};

// Throws Error(kCompile): source and log are kept in the cache folder, the path is in the message; or there is no NVRTC (and
// why) and no other source has the kernel; or the request is too large. `first` skips the sources before it: what the
// driver refuses from one is asked from the next. A cubin of NVRTC's is put into the disk cache; a cache that cannot be
// used is no error.
Cubin build(const Request& request, Origin first = Origin::kDisk);

// Drops what the disk cache holds for the request: the driver refused it.
void forget(const Request& request);

}  // namespace fattn::core::jit
