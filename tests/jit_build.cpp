// Builds one kernel, as a process of its own: what the tests of run-time compilation start many of.
//   jit_build ENTRY ARCH[a] SOURCE   prints "ORIGIN SHA256-of-the-image registers SECONDS"; 1 and the message if it fails
//   jit_build --candidates           prints where NVRTC is looked for, a line each
//   jit_build --architectures        prints NVRTC's path and what it compiles for; 1 and the reason if there is no NVRTC
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fattn/error.hpp"
#include "jit/jit.h"
#include "jit/nvrtc.h"
#include "jit/nvrtc_search.h"
#include "jit/sha256.h"

int main(int argc, char** argv) {
  using namespace fattn::core::jit;
  try {
    if (argc == 2 && std::strcmp(argv[1], "--candidates") == 0) {
      for (const std::string& name : nvrtc_candidates()) std::printf("%s\n", name.c_str());
      return 0;
    }
    if (argc == 2 && std::strcmp(argv[1], "--architectures") == 0) {
      const Nvrtc& found = nvrtc();
      std::printf("%s", found ? found.path.c_str() : found.reason.c_str());
      for (const int arch : found.architectures) std::printf(" %d", arch);
      std::printf("\n");
      return found ? 0 : 1;
    }
    if (argc != 4) return 2;
    Request request;
    request.entry = argv[1];
    request.arch = std::atoi(argv[2]);
    request.arch_specific = std::strchr(argv[2], 'a') != nullptr;
    request.source = argv[3];
    const auto start = std::chrono::steady_clock::now();
    const Cubin cubin = build(request);
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    std::printf("%s %s %d %.6f\n", name_of(cubin.origin), hex(sha256(cubin.image)).c_str(), cubin.resources.registers, seconds);
    return 0;
  } catch (const fattn::Error& error) {
    std::printf("%s\n", error.what());
    return 1;
  }
}
