// The C ABI: struct sizes, status codes, this thread's last message. No exception leaves a function here.
#include "fattn/fattn.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "attention.h"
#include "device/libraries.h"
#include "shared/env.h"
#include "shared/text.h"

struct fattn_plan {
  fattn::core::Plan plan;
};

namespace {

using fattn::Error;
using fattn::ErrorCode;
using fattn::core::text;

// A plain array: a destructor would keep the library loaded until every thread that saw an error has ended.
thread_local char last_error[2048] = "";

fattn_status fail(fattn_status status, const char* message) noexcept {
  const size_t n = std::min(std::strlen(message), sizeof last_error - 1);
  std::memcpy(last_error, message, n);
  last_error[n] = '\0';
  return status;
}

template <class Body>
fattn_status guarded(const Body& body) noexcept {
  try {
    body();
    return FATTN_OK;
  } catch (const Error& e) {
    return fail(static_cast<fattn_status>(e.code()), e.what());
  } catch (const std::bad_alloc&) {
    return fail(FATTN_ERROR_OUT_OF_MEMORY, "out of memory; use a smaller problem or free memory");
  } catch (const std::exception& e) {
    return fail(FATTN_ERROR_INTERNAL, e.what());
  } catch (...) {
    return fail(FATTN_ERROR_INTERNAL, "an exception of unknown type");
  }
}

template <class T>
T& checked(T* pointer, const char* name) {
  if (!pointer) throw Error(ErrorCode::kInvalidArgument, text(name, " is a null pointer"));
  return *pointer;
}

// A struct that begins with its size: the size must be one that this library knows.
template <class T>
T& sized(T* pointer, const char* name) {
  checked(pointer, name);
  if (pointer->struct_size != sizeof(T))
    throw Error(ErrorCode::kAbi, text(name, ".struct_size is ", pointer->struct_size, "; this library knows ", sizeof(T), " (ABI version ",
                                      FATTN_ABI_VERSION, "). Set it to sizeof and build against this library's fattn.h"));
  return *pointer;
}

template <size_t N>
void copy(char (&to)[N], const std::string& from) {
  const size_t n = std::min(from.size(), N - 1);
  std::memcpy(to, from.data(), n);
  to[n] = '\0';
}

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};

}  // namespace

extern "C" {

const char* fattn_version(void) { return FATTN_VERSION_STRING; }
uint32_t fattn_abi_version(void) { return FATTN_ABI_VERSION; }
const char* fattn_last_error(void) { return last_error; }

const char* fattn_status_name(fattn_status status) {
  switch (status) {
    case FATTN_OK: return "ok";
    case FATTN_ERROR_INVALID_ARGUMENT: return "invalid_argument";
    case FATTN_ERROR_UNSUPPORTED: return "unsupported";
    case FATTN_ERROR_OUT_OF_MEMORY: return "out_of_memory";
    case FATTN_ERROR_WORKSPACE: return "workspace";
    case FATTN_ERROR_ABI: return "abi";
    case FATTN_ERROR_INTERNAL: return "internal";
    default: return "unknown";
  }
}

fattn_status fattn_supported(const fattn_problem* problem, char* reason, size_t reason_size) {
  const fattn_status status = guarded([&] { fattn::core::prepare(sized(problem, "problem")); });
  if (reason && reason_size > 0) {
    const char* message = status == FATTN_OK ? "" : last_error;
    const size_t n = std::min(std::strlen(message), reason_size - 1);
    std::memcpy(reason, message, n);
    reason[n] = '\0';
  }
  return status;
}

fattn_status fattn_plan_create(const fattn_problem* problem, fattn_plan** plan) {
  return guarded([&] {
    checked(plan, "plan") = nullptr;
    *plan = new fattn_plan{fattn::core::prepare(sized(problem, "problem"))};
  });
}

fattn_status fattn_plan_query(const fattn_plan* plan, fattn_plan_info* info) {
  return guarded([&] {
    const fattn::core::Plan& p = checked(plan, "plan").plan;
    fattn_plan_info& i = sized(info, "info");
    i.backend = static_cast<int32_t>(p.backend);
    i.algorithm = static_cast<int32_t>(p.algorithm);
    i.cpu_isa = p.backend == fattn::Backend::kCpu ? static_cast<int32_t>(p.cpu.isa) : FATTN_ISA_AUTO;
    i.num_threads = p.backend == fattn::Backend::kCpu ? p.cpu.threads : 1;
    i.reserved = 0;
    i.workspace_bytes = p.workspace_bytes;
    i.flops = p.cost.flops;
    i.flops_nominal = p.cost.flops_nominal;
    i.bytes = p.cost.bytes;
    i.kernel = p.kernel.c_str();
    i.why = p.why.c_str();
  });
}

fattn_status fattn_plan_execute(const fattn_plan* plan, const fattn_buffers* buffers) {
  return guarded([&] { fattn::core::execute(checked(plan, "plan").plan, sized(buffers, "buffers")); });
}

void fattn_plan_destroy(fattn_plan* plan) { delete plan; }

fattn_status fattn_execute(const fattn_problem* problem) {
  return guarded([&] {
    const fattn::core::Plan plan = fattn::core::prepare(sized(problem, "problem"));
    const size_t bytes = (plan.workspace_bytes + 63) / 64 * 64;
    std::unique_ptr<void, FreeDeleter> workspace(bytes ? std::aligned_alloc(64, bytes) : nullptr);
    if (bytes && !workspace)
      throw Error(ErrorCode::kOutOfMemory, text("no memory for a workspace of ", bytes, " bytes; use a smaller problem or free memory"));
    const fattn_problem& p = *problem;
    fattn_buffers b{};
    b.struct_size = sizeof b;
    b.q = p.q.data;
    b.k = p.k.data;
    b.v = p.v.data;
    b.o = p.o.data;
    b.lse = p.lse.data;
    b.weights = p.weights.data;
    b.dout = p.dout.data;
    b.dq = p.dq.data;
    b.dk = p.dk.data;
    b.dv = p.dv.data;
    b.workspace = workspace.get();
    b.workspace_bytes = bytes;
    fattn::core::execute(plan, b);
  });
}

fattn_status fattn_query_cpu(fattn_cpu_info* info) {
  return guarded([&] {
    fattn_cpu_info& out = sized(info, "info");
    const fattn::core::CpuInfo cpu = fattn::core::cpu_info();
    out.logical_cpus = cpu.logical_cpus;
    out.usable_threads = cpu.usable_threads;
    out.isa_default = static_cast<int32_t>(cpu.isa_default);
    out.isas_available = cpu.isas_available;
    out.reserved = 0;
    out.l1d_bytes = cpu.l1d_bytes;
    out.l2_bytes = cpu.l2_bytes;
    out.l3_bytes = cpu.l3_bytes;
    fattn::core::memory_info(out.memory_bytes, out.memory_available_bytes);
    copy(out.vendor, cpu.vendor);
    copy(out.model, cpu.model);
  });
}

fattn_status fattn_query_library(int32_t index, fattn_library_info* info) {
  return guarded([&] {
    fattn_library_info& out = sized(info, "info");
    const auto all = fattn::core::library_status();
    if (index < 0 || static_cast<size_t>(index) >= all.size())
      throw Error(ErrorCode::kInvalidArgument, text("library index ", index, "; allowed: 0 to ", all.size() - 1));
    const auto& library = all[static_cast<size_t>(index)];
    out.loaded = library.reason.empty() ? 1 : 0;
    copy(out.name, library.name);
    copy(out.purpose, library.purpose);
    copy(out.path, library.path);
    copy(out.reason, library.reason);
  });
}

fattn_status fattn_query_environment(int32_t index, fattn_env_info* info) {
  return guarded([&] {
    fattn_env_info& out = sized(info, "info");
    constexpr int32_t count = static_cast<int32_t>(std::size(fattn::core::kEnvironment));
    if (index < 0 || index >= count)
      throw Error(ErrorCode::kInvalidArgument, text("environment variable index ", index, "; allowed: 0 to ", count - 1));
    const auto& variable = fattn::core::kEnvironment[index];
    const std::string value = fattn::core::env_value(variable);
    out.is_set = value.empty() ? 0 : 1;
    copy(out.name, variable.name);
    copy(out.meaning, variable.meaning);
    copy(out.value, value);
  });
}

}  // extern "C"
