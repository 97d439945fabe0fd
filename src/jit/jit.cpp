// Disk cache, pack, NVRTC: the first that has the kernel gives it.
#include "jit/jit.h"

#include <pthread.h>

#include <atomic>
#include <mutex>
#include <optional>
#include <utility>

#include "fattn/error.hpp"
#include "jit/build_entry.h"
#include "jit/compile.h"
#include "jit/disk_cache.h"
#include "jit/nvrtc.h"
#include "jit/pack.h"
#include "shared/text.h"

namespace fattn::core::jit {
namespace {

constexpr double kWaitForOthersSeconds = kCompileSeconds;

// One compilation a key at a time. Two keys that share a lock wait for each other; NVRTC does most of its work under a lock of
// its own anyway.
struct Locks {
  std::mutex of[64];
  std::atomic<int> compiling{0};
  bool broken_by_fork = false;
};
std::atomic<Locks*> locks_now{nullptr};

// A fork may come while other threads compile. They do not exist in the child, but what they had locked stays locked: ours is made
// anew, NVRTC's cannot be.
void after_fork_in_child() {
  const Locks* before = locks_now.load();
  auto* fresh = new Locks;
  fresh->broken_by_fork = before->broken_by_fork || before->compiling.load() > 0;
  locks_now.store(fresh);
}

Locks& locks() {
  static const bool made = [] {
    locks_now.store(new Locks);
    pthread_atfork(nullptr, nullptr, after_fork_in_child);
    return true;
  }();
  (void)made;
  return *locks_now.load();
}

// Where the log is, or the log itself: what a message ends with.
std::string keep_log(const DiskCache& cache, const Request& request, const Digest& key, const Compiled& failed) {
  std::string options, why;
  for (const std::string& option : options_of(request, failed.entry.version)) options += option + " ";
  const std::string name = text("failed-", request.entry, "-", hex(key).substr(0, 16), ".log");
  const std::string content = text("// NVRTC ", failed.entry.version.major, ".", failed.entry.version.minor, " ", options, "\n// ", failed.problem,
                                   "\n\n", failed.entry.log, "\n// The source:\n", request.source, "\n");
  if (cache.write_text(name, content, why)) return text("source and log: ", cache.folder(), "/", name);
  return text("the log could not be kept (", why, "); it begins: ", failed.entry.log.substr(0, 800));
}

Entry compile_or_throw(const DiskCache& cache, const Request& request, const Digest& key, const std::vector<Source>& headers) {
  if (locks().broken_by_fork)
    throw Error(ErrorCode::kCompile, text("kernel ", request.entry,
                                          " cannot be compiled in this process: it was forked while NVRTC compiled in its parent; "
                                          "start processes with exec (multiprocessing: method spawn)"));
  const Nvrtc& compiler = nvrtc();
  if (!compiler)
    throw Error(ErrorCode::kCompile, text("kernel ", request.entry, " for ", target_name(request.arch, request.arch_specific),
                                          " is in no cache and no pack, and there is ", compiler.reason));
  locks().compiling.fetch_add(1);
  Compiled made;
  try {
    made = compile(compiler, request, key, headers);
  } catch (...) {
    locks().compiling.fetch_sub(1);
    throw;
  }
  locks().compiling.fetch_sub(1);
  if (!made.problem.empty())
    throw Error(ErrorCode::kCompile,
                text("NVRTC ", compiler.version.major, ".", compiler.version.minor, " (", compiler.path, ") did not compile kernel ", request.entry,
                     " for ", target_name(request.arch, request.arch_specific), ": ", made.problem, "; ", keep_log(cache, request, key, made)));
  return std::move(made.entry);
}

}  // namespace

const char* name_of(Origin origin) {
  switch (origin) {
    case Origin::kDisk: return "disk cache";
    case Origin::kPack: return "pack";
    case Origin::kNvrtc: return "NVRTC";
  }
  return "unknown";
}

Built build_entry(const Request& request, Origin first) {
  const Digest key = key_of(request, request.sources());
  const DiskCache cache = default_disk_cache();
  const std::lock_guard lock(locks().of[key[0] % 64]);
  const auto from_disk = [&] { return first == Origin::kDisk ? cache.load(key, nvrtc_version(cache)) : std::nullopt; };
  if (auto entry = from_disk()) return {std::move(*entry), Origin::kDisk};
  if (first <= Origin::kPack)
    if (auto entry = find_in_packs(key)) return {std::move(*entry), Origin::kPack};
  // Another process may be at it: its result is worth waiting for.
  const Descriptor others = cache.lock(key, kWaitForOthersSeconds);
  if (auto entry = from_disk()) return {std::move(*entry), Origin::kDisk};
  Entry made = compile_or_throw(cache, request, key, reachable(request.source, request.sources()));
  std::string ignored;  // a cache that cannot be written costs time, nothing else; `fattn cache path` says why
  cache.store(made, ignored);
  return {std::move(made), Origin::kNvrtc};
}

Cubin build(const Request& request, Origin first) {
  auto [entry, origin] = build_entry(request, first);
  return {std::move(entry.image), std::move(entry.log), entry.resources, origin, entry.seconds};
}

void forget(const Request& request) { default_disk_cache().remove(key_of(request, request.sources())); }

}  // namespace fattn::core::jit
