// Compiled kernels in a folder of the user's own. The folder is private (0700) and its owner is checked, links are refused,
// entries appear whole (rename) and are checked when they are read; many processes may use it at once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "jit/entry.h"

namespace fattn::core::jit {

// A file descriptor that closes itself.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor();
  Descriptor(Descriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Descriptor& operator=(Descriptor&& other) noexcept;
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

struct CacheItem {
  std::string file;
  int64_t bytes = 0;
  int64_t last_used = 0;       // seconds since 1970; set when the entry is loaded, at most once a minute
  std::optional<Entry> entry;  // nothing: damaged, and `why`
  std::string why;
};

struct CacheUse {
  int64_t entries = 0, bytes = 0;  // everything that the size limit counts
};

class DiskCache {
 public:
  static constexpr int64_t kLimitBytes = int64_t{256} << 20;
  static constexpr int64_t kLimitFiles = 8192;
  // `folder` is absolute; empty, with a reason: there is none. Nothing is touched until the first call.
  explicit DiskCache(std::string folder, std::string reason = "", int64_t limit_bytes = kLimitBytes);

  const std::string& folder() const { return folder_; }
  int64_t limit_bytes() const { return limit_bytes_; }
  // Why the folder cannot be used; empty if it can. It is made if it is not there.
  std::string problem() const;

  // Nothing if it is not there, damaged (it is removed then), cannot be read now, or is not ours. `version` absent: any NVRTC's, the newest first.
  std::optional<Entry> load(const Digest& key, std::optional<NvrtcVersion> version) const;
  // False, and why, if it could not be written: no error for the caller, who has the entry. Makes room by removing what was
  // used longest ago.
  bool store(const Entry& entry, std::string& why) const;
  void remove(const Digest& key) const;  // of every NVRTC

  std::vector<CacheItem> list() const;  // the last used first
  CacheUse use() const;
  CacheUse clear() const;  // what was removed, logs and left-over temporary files too

  // Small files beside the entries: the log of a failed compilation, the NVRTC that was found last.
  bool write_text(const std::string& name, std::string_view text, std::string& why) const;
  std::string read_text(const std::string& name) const;  // empty if it is not there or not ours

  // Held by one process a key at a time, so that many that need the same kernel compile it once. Waits for at most
  // `seconds`; an empty descriptor (a file system without locks, the time is over) is no error: compiling twice is harmless.
  Descriptor lock(const Digest& key, double seconds) const;

 private:
  Descriptor open_folder(bool make, std::string& why) const;
  bool publish(int folder, const std::string& name, std::string_view bytes, std::string& why) const;
  void evict(int folder) const;

  std::string folder_, reason_;
  int64_t limit_bytes_;
};

// FATTN_CACHE_DIR, or fattn in the user's cache folder (XDG_CACHE_HOME, ~/.cache); `kernels` in it.
DiskCache default_disk_cache();

}  // namespace fattn::core::jit
