// The kernels that are loaded into the devices of this process, found by a small key: what a launch asks first.
#pragma once

#include <atomic>
#include <bit>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <vector>

#include "device/cuda_device.h"
#include "jit/jit.h"

namespace fattn::core::jit {

// What tells one specialisation from another: 64 bytes, compared as bytes. A backend has a struct of its own, whose first
// member tells it from the other backends' kernels, and moves it in and out with key_of_pod() and pod_of_key().
struct KernelKey {
  uint64_t words[8] = {};
  bool operator==(const KernelKey&) const = default;
};
static_assert(sizeof(KernelKey) == 64 && std::has_unique_object_representations_v<KernelKey>);

template <class Pod>
KernelKey key_of_pod(const Pod& pod) {
  static_assert(std::is_trivially_copyable_v<Pod> && std::has_unique_object_representations_v<Pod>, "no padding, no floating-point members");
  static_assert(sizeof(Pod) == sizeof(KernelKey), "fill it up to 64 bytes with a reserved array");
  return std::bit_cast<KernelKey>(pod);
}
template <class Pod>
Pod pod_of_key(const KernelKey& key) {
  static_assert(std::is_trivially_copyable_v<Pod> && sizeof(Pod) == sizeof(KernelKey));
  return std::bit_cast<Pod>(key);
}

// A kernel in a device's primary context, there until the process ends. Its limit of dynamic shared memory is already what the
// device allows, so a launch may ask for any size.
struct Loaded {
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  int registers = 0, local_bytes = 0;  // of a thread
  int shared_bytes = 0;                // static
  int max_threads = 0;                 // of a block
  std::string name;                    // Request::entry
  Origin origin = Origin::kNvrtc;
  double load_seconds = 0;  // from the miss to the loaded kernel, compilation included
};

class KernelTable {
 public:
  KernelTable();
  ~KernelTable();
  KernelTable(const KernelTable&) = delete;
  KernelTable& operator=(const KernelTable&) = delete;

  // The kernel of this key on this device. If it is there: no lock, no allocation. If not: make(key) is built (jit.h) and
  // loaded; a cubin that the driver refuses is asked for from the next source. Throws what build() and CudaDevice throw,
  // kCompile if the driver refuses them all, kUnsupported if there are too many kernels; nothing is remembered then.
  // The reference is good as long as the table.
  const Loaded& get(CudaDevice& device, const KernelKey& key, Request (*make)(const KernelKey&)) {
    const Slot* slot = find(*now_.load(std::memory_order_acquire), hash(key, device.index()), key, device.index());
    return slot ? slot->loaded : miss(device, key, make);
  }
  size_t size() const;

  static constexpr size_t kMaxKernels = 4096;  // a process that needs more has a defect, and would fill the device's memory

 private:
  struct Slot {
    uint64_t hash;
    int device;
    KernelKey key;
    Loaded loaded;
  };
  // A hash table with open addressing that only grows: readers need no lock. The next size is another one; the old ones stay,
  // because somebody may be reading them.
  struct Snapshot {
    explicit Snapshot(size_t size) : mask(size - 1), slots(new std::atomic<const Slot*>[size]) {
      for (size_t i = 0; i < size; ++i) slots[i].store(nullptr, std::memory_order_relaxed);
    }
    size_t mask;
    std::unique_ptr<std::atomic<const Slot*>[]> slots;
  };

  static uint64_t hash(const KernelKey& key, int device) {
    uint64_t h = 0x9e3779b97f4a7c15u + static_cast<uint64_t>(device);
    for (const uint64_t word : key.words) h = std::rotl((h ^ word) * 0xff51afd7ed558ccdu, 31);
    return h ^ (h >> 29);
  }
  static const Slot* find(const Snapshot& in, uint64_t hash, const KernelKey& key, int device) {
    for (size_t i = hash;; ++i) {
      const Slot* slot = in.slots[i & in.mask].load(std::memory_order_acquire);
      if (!slot || (slot->hash == hash && slot->device == device && slot->key == key)) return slot;
    }
  }
  static void put(const Snapshot& in, const Slot* slot);
  const Loaded& miss(CudaDevice& device, const KernelKey& key, Request (*make)(const KernelKey&));

  std::atomic<const Snapshot*> now_;
  mutable std::mutex mutex_;  // of the rest
  std::vector<std::unique_ptr<const Snapshot>> snapshots_;
  std::vector<std::unique_ptr<const Slot>> slots_;
};

// The table of this process.
KernelTable& kernel_table();

}  // namespace fattn::core::jit
