// Compiled GPU kernels: what is kept on disk, and having kernels ready before they are needed.
#pragma once

#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "fattn/types.hpp"

namespace fattn::cache {

// (entry, index, count), for each kernel that is ready.
using Visit = std::function<void(const fattn_cache_entry&, int32_t, int32_t)>;

namespace detail {

// Calls `run(visit, context)` with a C function that calls `visit`, and throws what `visit` threw. After an exception it is not
// called again.
template <class Run>
void visited(const Visit& visit, const Run& run) {
  struct Context {
    const Visit* visit;
    std::exception_ptr error;
  } context{&visit, nullptr};
  const fattn_cache_visit call = [](void* raw, const fattn_cache_entry* entry, int32_t index, int32_t count) {
    auto& c = *static_cast<Context*>(raw);
    if (c.error || !*c.visit) return;
    try {
      (*c.visit)(*entry, index, count);
    } catch (...) {
      c.error = std::current_exception();
    }
  };
  const fattn_status status = run(call, static_cast<void*>(&context));
  if (context.error) std::rethrow_exception(context.error);
  check(status);
}

}  // namespace detail

inline fattn_cache_info info() {
  fattn_cache_info info{};
  info.struct_size = sizeof info;
  check(fattn_cache_query(&info));
  return info;
}

inline std::vector<fattn_cache_entry> list() {
  std::vector<fattn_cache_entry> all;
  detail::visited([&](const fattn_cache_entry& entry, int32_t, int32_t) { all.push_back(entry); },
                  [](fattn_cache_visit call, void* context) { return fattn_cache_list(call, context); });
  return all;
}

struct Cleared {
  int64_t entries = 0, bytes = 0;
};
inline Cleared clear() {
  Cleared cleared;
  check(fattn_cache_clear(&cleared.entries, &cleared.bytes));
  return cleared;
}

// `problem` null: the built-in list. `arch` 0: the one of CUDA device 0. Throws Error(kCompile), Error(kUnsupported).
inline void warm(const fattn_problem* problem, int32_t arch, const Visit& visit = nullptr) {
  detail::visited(visit, [&](fattn_cache_visit call, void* context) { return fattn_cache_warm(problem, arch, call, context); });
}

// `problems` empty: the built-in list.
inline void pack(const std::string& path, const std::vector<fattn_problem>& problems, const std::vector<int32_t>& archs,
                 const Visit& visit = nullptr) {
  detail::visited(visit, [&](fattn_cache_visit call, void* context) {
    return fattn_cache_pack(path.c_str(), problems.data(), static_cast<int32_t>(problems.size()), archs.data(), static_cast<int32_t>(archs.size()),
                            call, context);
  });
}

inline void use_pack(const std::string& path) { check(fattn_cache_use_pack(path.c_str())); }

}  // namespace fattn::cache
