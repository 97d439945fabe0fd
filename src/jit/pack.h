// A pack file: compiled kernels in one file, for machines without NVRTC. Entries are found by the key alone, whatever NVRTC made
// them. Loaded from the installation or where a caller says, never from a place that others decide.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "jit/disk_cache.h"

namespace fattn::core::jit {

// Writes the file whole: temporary file, fsync, rename. Throws Error(kInvalidArgument) with the reason.
void write_pack(const std::string& path, std::vector<Entry> entries);

class Pack {
 public:
  // Reads the table of contents. Throws Error(kInvalidArgument) if there is no pack file or it is damaged.
  explicit Pack(const std::string& path);
  const std::string& path() const { return path_; }
  size_t size() const { return contents_.size(); }
  // Nothing if it is not there or damaged.
  std::optional<Entry> find(const Digest& key) const;
  std::vector<Entry> all() const;  // the undamaged ones

 private:
  struct Item {
    Digest key;
    uint64_t offset, bytes;
  };
  std::optional<Entry> read(const Item& item) const;

  std::string path_;
  Descriptor file_;
  std::vector<Item> contents_;  // sorted by key
};

// Packs that build() asks, after the disk cache and before NVRTC: those that were added, the last first, then the one of the
// installation (fattn/kernels.pack beside libfattn.so), if there is one and it is whole.
void add_pack(const std::string& path);  // throws as Pack does
std::optional<Entry> find_in_packs(const Digest& key);
std::string installed_pack_path();

}  // namespace fattn::core::jit
