// What a cubin depends on, as a key: the request, the options, every byte of the headers that it reaches. The version of
// NVRTC is a part beside the hash, so that a machine without NVRTC can ask for any version.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "jit/jit.h"
#include "jit/sha256.h"
#include "jit/sources.h"

namespace fattn::core::jit {

struct NvrtcVersion {
  int major = 0, minor = 0;
  bool operator==(const NvrtcVersion&) const = default;
};

// Options of NVRTC for this request, in order: those that its cubin depends on, and all that this version is given.
std::vector<std::string> options_of(const Request& request);
std::vector<std::string> options_of(const Request& request, NvrtcVersion version);

// Throws Error(kCompile) if the request is out of bounds, or as reachable() does.
void check_request(const Request& request);
Digest key_of(const Request& request, Sources sources);

// "3f...e1-13.0.cubin": the name of an entry of the disk cache, and back.
std::string entry_file_name(const Digest& key, NvrtcVersion version);
struct EntryName {
  std::string key_hex;
  NvrtcVersion version;
};
std::optional<EntryName> parse_entry_file_name(std::string_view name);

inline constexpr size_t kMaxSourceBytes = 64 << 10;  // of Request::source
inline constexpr size_t kMaxEntryBytes = 120;        // of Request::entry

}  // namespace fattn::core::jit
