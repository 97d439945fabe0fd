#include "jit/key.h"

#include <algorithm>
#include <charconv>

#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::jit {
namespace {

// Changes when the meaning of an entry changes: how sources are compiled, what is kept of them.
constexpr std::string_view kScheme = "fattn kernel 1";
constexpr std::string_view kSuffix = ".cubin";

bool is_identifier(std::string_view name) {
  const auto word = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; };
  return !name.empty() && !(name[0] >= '0' && name[0] <= '9') && std::all_of(name.begin(), name.end(), word);
}

}  // namespace

std::string target_name(int arch, bool arch_specific) { return text("sm_", arch, arch_specific ? "a" : ""); }

std::vector<std::string> options_of(const Request& request) {
  return {"--std=c++20", "--device-as-default-execution-space", "--ptxas-options=-v",
          "--gpu-architecture=" + target_name(request.arch, request.arch_specific)};
}

std::vector<std::string> options_of(const Request& request, NvrtcVersion version) {
  std::vector<std::string> options = options_of(request);
  // Where there is a GPU, NVRTC since 12.9 keeps cubins of its own, and of one that it finds there its log does not say what ptxas did.
  if (version.major > 12 || (version.major == 12 && version.minor >= 9)) options.emplace_back("--no-cache");
  return options;
}

void check_request(const Request& request) {
  if (!is_identifier(request.entry) || request.entry.size() > kMaxEntryBytes)
    throw Error(ErrorCode::kCompile, text("a kernel's entry is named '", request.entry.substr(0, kMaxEntryBytes),
                                          "'; allowed: a C identifier of 1 to ", kMaxEntryBytes, " characters"));
  if (request.source.empty() || request.source.size() > kMaxSourceBytes)
    throw Error(ErrorCode::kCompile, text("the source of kernel ", request.entry, " has ", request.source.size(), " bytes; allowed: 1 to ",
                                          kMaxSourceBytes, "; put code into a header of kernels/"));
  if (request.arch < 50 || request.arch > 999)
    throw Error(ErrorCode::kCompile,
                text("kernel ", request.entry, " is asked for architecture ", request.arch, "; allowed: 75 for sm_75, 90, 120, ..."));
}

Digest key_of(const Request& request, Sources sources) {
  check_request(request);
  Sha256 hash;
  hash.add_field(kScheme);
  for (const std::string& option : options_of(request)) hash.add_field(option);
  hash.add_field("source");
  hash.add_field(request.entry);
  hash.add_field(request.source);
  for (const Source& header : reachable(request.source, sources)) {
    hash.add_field(header.path);
    hash.add_field(header.text);
  }
  return hash.finish();
}

std::string entry_file_name(const Digest& key, NvrtcVersion version) { return text(hex(key), "-", version.major, ".", version.minor, kSuffix); }

std::optional<EntryName> parse_entry_file_name(std::string_view name) {
  constexpr size_t kHex = 2 * sizeof(Digest);
  if (name.size() < kHex + kSuffix.size() + 4 || name[kHex] != '-' || name.substr(name.size() - kSuffix.size()) != kSuffix) return std::nullopt;
  EntryName found{std::string(name.substr(0, kHex)), {}};
  if (found.key_hex.find_first_not_of("0123456789abcdef") != std::string::npos) return std::nullopt;
  const char* const end = name.data() + name.size() - kSuffix.size();
  const auto major = std::from_chars(name.data() + kHex + 1, end, found.version.major);
  if (major.ec != std::errc() || major.ptr == end || *major.ptr != '.') return std::nullopt;
  const auto minor = std::from_chars(major.ptr + 1, end, found.version.minor);
  if (minor.ec != std::errc() || minor.ptr != end) return std::nullopt;
  return found;
}

}  // namespace fattn::core::jit
