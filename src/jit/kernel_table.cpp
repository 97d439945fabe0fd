#include "jit/kernel_table.h"

#include <algorithm>
#include <bit>
#include <chrono>

#include "jit/nvrtc.h"
#include "shared/text.h"

namespace fattn::core::jit {
namespace {

constexpr size_t kFirstSize = 256;  // a power of two

// The driver does not want this image, but may want another.
bool refused(CUresult status) {
  constexpr CUresult kInvalidSource = 300, kSymbolNotFound = kCudaNotFound;
  for (const CUresult s : {kCudaInvalidValue, kCudaInvalidImage, kCudaNoBinaryForGpu, kCudaInvalidPtx, kCudaJitCompilerNotFound,
                           kCudaUnsupportedPtxVersion, kInvalidSource, kSymbolNotFound})
    if (status == s) return true;
  return false;
}

struct Module {
  const CudaDriver& driver;
  CUmodule handle = nullptr;
  ~Module() {
    if (handle) driver.moduleUnload(handle);
  }
};

// False, and why, if the driver refuses the image. Throws on every other error.
bool load(CudaDevice& device, const Request& request, const Cubin& cubin, Loaded& to, std::string& why) {
  const CudaDriver& driver = cuda_driver();
  const CudaCurrent scope = device.current();
  const std::string what = text("loading kernel ", request.entry, " (", target_name(request.arch, request.arch_specific), ", from ",
                                name_of(cubin.origin), ") into device ", device.index());
  char log[1024] = "";
  CUjit_option options[] = {CUjit_option::kErrorLog, CUjit_option::kErrorLogBytes};
  void* values[] = {log, std::bit_cast<void*>(uintptr_t{sizeof log})};
  Module module{driver};
  CUresult status = driver.moduleLoadDataEx(&module.handle, cubin.image.data(), 2, options, values);
  if (status == kCudaSuccess) status = driver.moduleGetFunction(&to.function, module.handle, request.entry.c_str());
  log[sizeof log - 1] = '\0';
  if (refused(status)) {
    why += text(why.empty() ? "" : "; ", "from ", name_of(cubin.origin), ": ", cuda_error_text(status), log[0] ? ": " : "", log);
    return false;
  }
  device.check(status, what.c_str());
  const auto attribute = [&](CUfunction_attribute which) {
    int value = 0;
    device.check(driver.funcGetAttribute(&value, which, to.function), what.c_str());
    return value;
  };
  to.registers = attribute(CUfunction_attribute::kRegisters);
  to.local_bytes = attribute(CUfunction_attribute::kLocalBytes);
  to.shared_bytes = attribute(CUfunction_attribute::kSharedBytes);
  to.max_threads = attribute(CUfunction_attribute::kMaxThreadsPerBlock);
  const int dynamic = device.info().shared_per_block_optin - to.shared_bytes;
  if (dynamic > 0) device.check(driver.funcSetAttribute(to.function, CUfunction_attribute::kMaxDynamicSharedBytes, dynamic), what.c_str());
  to.module = module.handle;
  to.name = request.entry;
  to.origin = cubin.origin;
  module.handle = nullptr;
  return true;
}

Loaded build_and_load(CudaDevice& device, const Request& request) {
  const auto start = std::chrono::steady_clock::now();
  Loaded loaded;
  std::string why;
  for (Origin first = Origin::kDisk;;) {
    const Cubin cubin = build(request, first);
    if (load(device, request, cubin, loaded, why)) break;
    if (cubin.origin == Origin::kNvrtc)
      throw Error(ErrorCode::kCompile, text("the driver (CUDA ", cuda_version_text(cuda_driver().version), ") refuses kernel ", request.entry,
                                            " for ", target_name(request.arch, request.arch_specific), " on device ", device.index(), " (",
                                            device.info().name, ", sm_", device.info().capability(), "): ", why,
                                            ". Use an NVRTC that is not newer than the driver (FATTN_NVRTC), or update the driver"));
    if (cubin.origin == Origin::kDisk) forget(request);
    first = static_cast<Origin>(static_cast<int32_t>(cubin.origin) + 1);
  }
  loaded.load_seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return loaded;
}

}  // namespace

KernelTable::KernelTable() {
  snapshots_.push_back(std::make_unique<const Snapshot>(kFirstSize));
  now_.store(snapshots_.back().get(), std::memory_order_release);
}
KernelTable::~KernelTable() = default;

void KernelTable::put(const Snapshot& in, const Slot* slot) {
  size_t i = slot->hash;
  while (in.slots[i & in.mask].load(std::memory_order_relaxed)) ++i;
  in.slots[i & in.mask].store(slot, std::memory_order_release);
}

const Loaded& KernelTable::miss(CudaDevice& device, const KernelKey& key, Request (*make)(const KernelKey&)) {
  device.require_usable();
  // Not under the lock: others find and build their kernels meanwhile; build() lets one thread a key compile.
  auto made = std::make_unique<Slot>(Slot{hash(key, device.index()), device.index(), key, build_and_load(device, make(key))});

  const std::lock_guard lock(mutex_);
  const Snapshot* snapshot = now_.load(std::memory_order_relaxed);
  if (const Slot* other = find(*snapshot, made->hash, key, device.index())) {  // another thread was faster
    const CudaCurrent scope = device.current();
    cuda_driver().moduleUnload(made->loaded.module);
    return other->loaded;
  }
  if (slots_.size() >= kMaxKernels) {
    const CudaCurrent scope = device.current();
    cuda_driver().moduleUnload(made->loaded.module);
    throw Error(ErrorCode::kUnsupported,
                text("this process has loaded ", slots_.size(), " kernels; no more are loaded: use fewer shapes and options in one process"));
  }
  slots_.reserve(slots_.size() + 1);
  if (2 * (slots_.size() + 1) > snapshot->mask) {
    auto larger = std::make_unique<const Snapshot>(2 * (snapshot->mask + 1));
    for (const auto& slot : slots_) put(*larger, slot.get());
    snapshots_.push_back(std::move(larger));
    snapshot = snapshots_.back().get();
    now_.store(snapshot, std::memory_order_release);
  }
  put(*snapshot, made.get());
  slots_.push_back(std::move(made));
  return slots_.back()->loaded;
}

size_t KernelTable::size() const {
  const std::lock_guard lock(mutex_);
  return slots_.size();
}

KernelTable& kernel_table() {
  static KernelTable& table = *new KernelTable;  // never destroyed: threads may outlive static destruction
  return table;
}

}  // namespace fattn::core::jit
