// The C ABI's compiled kernels: listing, warming, packing.
#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "api/guard.h"
#include "backend/cuda/requests.h"
#include "device/cuda_device.h"
#include "fattn/fattn.h"
#include "jit/build_entry.h"
#include "jit/disk_cache.h"
#include "jit/nvrtc.h"
#include "jit/pack.h"
#include "jit/planned.h"
#include "plan/architectures.h"

namespace {

using fattn::Error;
using fattn::ErrorCode;
using namespace fattn::core;

static_assert(static_cast<int32_t>(jit::Origin::kDisk) == FATTN_FROM_DISK && static_cast<int32_t>(jit::Origin::kPack) == FATTN_FROM_PACK &&
              static_cast<int32_t>(jit::Origin::kNvrtc) == FATTN_FROM_COMPILER);

fattn_cache_entry described(const jit::Entry& entry, jit::Origin origin) {
  fattn_cache_entry to{};
  to.struct_size = sizeof to;
  to.origin = static_cast<int32_t>(origin);
  to.arch = entry.arch;
  to.arch_specific = entry.arch_specific ? 1 : 0;
  to.nvrtc_major = entry.version.major;
  to.nvrtc_minor = entry.version.minor;
  to.registers = entry.resources.registers;
  to.stack_bytes = entry.resources.stack_bytes;
  to.spill_bytes = entry.resources.spill_store_bytes + entry.resources.spill_load_bytes;
  to.shared_bytes = entry.resources.shared_bytes;
  to.bytes = static_cast<int64_t>(entry.image.size());
  to.compile_seconds = entry.seconds;
  copy(to.name, entry.name);
  copy(to.description, entry.description);
  copy(to.key, jit::hex(entry.key));
  return to;
}

std::vector<jit::Request> requests(const fattn_problem* problem, int32_t arch) {
  if (arch < 0)
    throw Error(ErrorCode::kInvalidArgument, text("architecture ", arch, "; allowed: 75, 80, 90, ..., or 0 for the one of CUDA device 0"));
  const int capability = arch > 0 ? arch : cuda_device(0).info().capability();
  const Architecture* known = architecture_for(capability);
  if (!known)
    throw Error(ErrorCode::kUnsupported, text("there are no kernels for architecture ", capability, "; allowed: ", known_architectures(),
                                              " and later minor versions of the same major one, but for Jetson boards"));
  const int target = known->capability;
  std::vector<jit::Request> all = problem ? requests_for(validate(sized(problem, "problem")), target) : jit::planned_requests(target);
  if (all.empty() && !problem) throw Error(ErrorCode::kInternal, text("the list of kernels has none for architecture ", target));
  return all;
}

// Those that there are kernels for and the NVRTC at hand compiles for, but for Jetson boards, which have systems of their own.
std::vector<int32_t> compiled_architectures() {
  const jit::Nvrtc& nvrtc = jit::nvrtc();
  if (!nvrtc) throw Error(ErrorCode::kUnsupported, nvrtc.reason);
  std::vector<int32_t> all;
  for (const Architecture& a : kArchitectures)
    if (!is_alone(a.capability) && std::find(nvrtc.architectures.begin(), nvrtc.architectures.end(), a.capability) != nvrtc.architectures.end())
      all.push_back(a.capability);
  return all;
}

template <class Each>
void build_all(const std::vector<jit::Request>& all, fattn_cache_visit visit, void* context, const Each& each) {
  const auto count = static_cast<int32_t>(all.size());
  for (int32_t i = 0; i < count; ++i) {
    jit::Built built = jit::build_entry(all[static_cast<size_t>(i)]);
    const fattn_cache_entry entry = described(built.entry, built.origin);
    if (visit) visit(context, &entry, i, count);
    each(std::move(built));
  }
}

}  // namespace

extern "C" {

fattn_status fattn_supported_on(const fattn_problem* problem, int32_t arch, char* reason, size_t reason_size) {
  const fattn_status status = guarded([&] { requests(&checked(problem, "problem"), arch); });
  if (reason && reason_size > 0) copy(reason, reason_size, status == FATTN_OK ? "" : fattn_last_error());
  return status;
}

fattn_status fattn_cache_query(fattn_cache_info* info) {
  return guarded([&] {
    fattn_cache_info& out = sized(info, "info");
    const jit::DiskCache cache = jit::default_disk_cache();
    const std::string problem = cache.problem();
    const jit::CacheUse use = cache.use();
    out.usable = problem.empty() ? 1 : 0;
    out.entries = use.entries;
    out.bytes = use.bytes;
    out.limit_bytes = cache.limit_bytes();
    copy(out.path, cache.folder());
    copy(out.reason, problem);
    copy(out.pack, jit::installed_pack_path());
  });
}

fattn_status fattn_cache_list(fattn_cache_visit visit, void* context) {
  return guarded([&] {
    if (!visit) throw Error(ErrorCode::kInvalidArgument, "visit is a null pointer");
    const std::vector<jit::CacheItem> items = jit::default_disk_cache().list();
    for (size_t i = 0; i < items.size(); ++i) {
      fattn_cache_entry entry{};
      if (items[i].entry) entry = described(*items[i].entry, jit::Origin::kDisk);
      entry.struct_size = sizeof entry;
      entry.bytes = items[i].bytes;
      entry.last_used = items[i].last_used;
      if (!items[i].entry) copy(entry.key, items[i].file.substr(0, 64));
      copy(entry.damage, items[i].why);
      visit(context, &entry, static_cast<int32_t>(i), static_cast<int32_t>(items.size()));
    }
  });
}

fattn_status fattn_cache_clear(int64_t* entries, int64_t* bytes) {
  return guarded([&] {
    const jit::DiskCache cache = jit::default_disk_cache();
    if (const std::string why = cache.problem(); !why.empty()) throw Error(ErrorCode::kInvalidArgument, "nothing was removed: " + why);
    const jit::CacheUse gone = cache.clear();
    if (entries) *entries = gone.entries;
    if (bytes) *bytes = gone.bytes;
  });
}

fattn_status fattn_cache_warm(const fattn_problem* problem, int32_t arch, fattn_cache_visit visit, void* context) {
  return guarded([&] { build_all(requests(problem, arch), visit, context, [](const jit::Built&) {}); });
}

fattn_status fattn_cache_pack(const char* path, const fattn_problem* problems, int32_t nproblems, const int32_t* archs, int32_t narchs,
                              fattn_cache_visit visit, void* context) {
  return guarded([&] {
    const std::string to = &checked(path, "path");
    if (narchs < 0 || narchs > 64) throw Error(ErrorCode::kInvalidArgument, text("narchs is ", narchs, "; allowed: 0 to 64"));
    if (nproblems < 0 || nproblems > 4096) throw Error(ErrorCode::kInvalidArgument, text("nproblems is ", nproblems, "; allowed: 0 to 4096"));
    const std::vector<int32_t> for_archs = narchs == 0 ? compiled_architectures() : std::vector<int32_t>(&checked(archs, "archs"), archs + narchs);
    if (nproblems > 0) checked(problems, "problems");
    std::vector<jit::Request> all;
    const auto add = [&](std::vector<jit::Request> more) { all.insert(all.end(), std::move_iterator(more.begin()), std::move_iterator(more.end())); };
    for (const int32_t arch : for_archs) {
      if (nproblems == 0) add(requests(nullptr, arch));
      for (int32_t j = 0; j < nproblems; ++j) add(requests(problems + j, arch));
    }
    std::vector<jit::Entry> entries;
    build_all(all, visit, context, [&](jit::Built built) { entries.push_back(std::move(built.entry)); });
    jit::write_pack(to, std::move(entries));
  });
}

fattn_status fattn_cache_use_pack(const char* path) {
  return guarded([&] { jit::add_pack(&checked(path, "path")); });
}

}  // extern "C"
