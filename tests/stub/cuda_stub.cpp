// A libcuda for tests, never installed: the functions that fattn binds, on memory of the host, as strict about contexts,
// ranges and forks as the real one is, and failing when it is told to (cuda_stub.h). Two variants lack functions: one that fattn cannot do
// without (STUB_INCOMPLETE), those that it can (STUB_OLD).
#include "cuda_stub.h"

#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#define STUB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

using Result = int;
constexpr Result kInvalidValue = 1, kOutOfMemory = 2, kNotInitialized = 3, kInvalidDevice = 101, kInvalidImage = 200, kInvalidContext = 201,
                 kInvalidHandle = 400, kCaptureUnsupported = 900;

struct Context {
  int device = 0;
  int retained = 0;
  Result broken = 0;
};
struct Allocation {
  size_t bytes = 0;
  int device = 0;
};
struct Graph {
  std::vector<std::function<void()>> work;
};
struct Stream {
  int device = 0;
  bool capturing = false;
  Graph captured = {};
};
struct Event {
  int device = 0;
  bool recorded = false;
  std::chrono::steady_clock::time_point at = {};
};
struct Module {
  int device = 0;
};
struct Function {
  std::string name;
};
struct Kernel {
  void (*run)(const void*) = nullptr;
  size_t bytes = 0;
};
struct Fault {
  Result status = 0;
  int times = 0;
};

constexpr int kMaxDevices = 8;

struct State {
  std::mutex mutex;
  int64_t early_launches = 0;
  std::map<std::string, int64_t> settings{{"version", 13000}, {"devices", 2},     {"capability", 90}, {"memory", int64_t{1} << 30},
                                          {"registers", 64},  {"local_bytes", 0}, {"break", 0}};
  std::map<std::string, Fault> faults;
  std::map<std::string, int64_t> calls;
  std::map<std::string, Kernel> kernels;
  Context contexts[kMaxDevices];
  std::map<uintptr_t, Allocation> memory;
  std::set<void*> host_memory;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::set<Graph*> graphs;
  std::set<Module*> modules;
  std::map<std::string, std::unique_ptr<Function>> functions;
  Stream defaults[kMaxDevices];
  pid_t initialized = 0;

  State() {
    for (int i = 0; i < kMaxDevices; ++i) contexts[i].device = defaults[i].device = i;
    const char* variable = std::getenv("STUB_CUDA");
    std::istringstream words(variable ? variable : "");
    for (std::string word; std::getline(words, word, ',');) {
      const size_t equals = word.find('=');
      if (equals == std::string::npos) continue;
      const std::string name = word.substr(0, equals);
      const long long value = std::atoll(word.c_str() + equals + 1);
      if (settings.count(name))
        settings[name] = value;
      else
        faults[name] = {static_cast<Result>(value), -1};
    }
  }
};
State& state() {
  static State& s = *new State;
  return s;
}

thread_local std::vector<Context*> current;

Context* current_context() { return current.empty() ? nullptr : current.back(); }

// Every function starts here, holding the mutex: faults, forks, and, where one is needed, the context.
enum class Needs { kNothing, kInit, kContext };
Result enter(State& s, const char* function, Needs needs) {
  ++s.calls[function];
  if (const auto found = s.faults.find(function); found != s.faults.end() && found->second.times != 0) {
    if (found->second.times > 0) --found->second.times;
    return found->second.status;
  }
  if (needs == Needs::kNothing) return 0;
  if (s.initialized != getpid()) return kNotInitialized;
  if (needs == Needs::kInit) return 0;
  const Context* context = current_context();
  return !context || context->retained == 0 ? kInvalidContext : context->broken;
}
#define ENTER(needs)              \
  State& s = state();             \
  std::unique_lock lock(s.mutex); \
  if (const Result bad = enter(s, __func__, needs)) return bad

// The stream, if it exists and is the current device's; null is its default stream.
Stream* stream_of(State& s, void* handle) {
  const int device = current_context()->device;
  if (!handle) return &s.defaults[device];
  auto* stream = static_cast<Stream*>(handle);
  return s.streams.count(stream) && stream->device == device ? stream : nullptr;
}

// Whether [address, address + bytes) lies in one allocation.
bool inside(const State& s, unsigned long long address, size_t bytes) {
  auto after = s.memory.upper_bound(address);
  if (after == s.memory.begin()) return false;
  const auto& [start, allocation] = *--after;
  return address - start <= allocation.bytes && bytes <= allocation.bytes - (address - start);
}

void* at(unsigned long long address) { return reinterpret_cast<void*>(static_cast<uintptr_t>(address)); }

// Done at once, or kept for the graph if the stream is being captured. The lock is given up, because kernels call back.
Result enqueue(State& s, std::unique_lock<std::mutex>& lock, void* handle, std::function<void()> work) {
  Stream* stream = stream_of(s, handle);
  if (!stream) return kInvalidHandle;
  if (stream->capturing) {
    stream->captured.work.push_back(std::move(work));
    return 0;
  }
  lock.unlock();
  work();
  return 0;
}

bool capturing(const State& s) {
  for (const Stream* stream : s.streams)
    if (stream->capturing && stream->device == current_context()->device) return true;
  return false;
}

// `to_check` and `from_check`: what of it must be memory of a device, 0 where it is the host's.
Result copy(State& s, std::unique_lock<std::mutex>& lock, void* to, const void* from, size_t bytes, void* stream, unsigned long long to_check,
            unsigned long long from_check) {
  if ((to_check && !inside(s, to_check, bytes)) || (from_check && !inside(s, from_check, bytes)) || !to || !from) return kInvalidValue;
  return enqueue(s, lock, stream, [to, from, bytes] { std::memcpy(to, from, bytes); });
}

// What is given to the caller by an address is alive until it is destroyed.
template <class T>
Result give(std::set<T*>& alive, T made, T** to) {
  *to = new T(std::move(made));
  alive.insert(*to);
  return 0;
}
template <class T>
Result destroy(std::set<T*>& alive, T* one, Result otherwise = kInvalidHandle) {
  if (alive.erase(one) == 0) return otherwise;
  delete one;
  return 0;
}

// A launch while "break" is set succeeds and breaks the device: what waits for it next sees the status.
Result launch(State& s, std::unique_lock<std::mutex>& lock, void* stream, Function* function, void** parameters) {
  if (!function) return kInvalidHandle;
  if (int64_t& status = s.settings["break"]; status != 0) {
    current_context()->broken = static_cast<Result>(status);
    status = 0;
    return 0;
  }
  const auto found = s.kernels.find(function->name);
  if (found == s.kernels.end()) return enqueue(s, lock, stream, [] {});
  const Kernel kernel = found->second;
  std::string argument;
  if (kernel.bytes > 0) argument.assign(static_cast<const char*>(parameters[0]), kernel.bytes);
  return enqueue(s, lock, stream, [kernel, argument] { kernel.run(argument.data()); });
}

}  // namespace

// --- what tests call ---

STUB_EXPORT void stub_set(const char* setting, int64_t value) {
  const std::lock_guard lock(state().mutex);
  state().settings[setting] = value;
}
STUB_EXPORT void stub_fault(const char* function, int status, int times) {
  const std::lock_guard lock(state().mutex);
  state().faults[function] = {status, times};
}
STUB_EXPORT int64_t stub_calls(const char* function) {
  const std::lock_guard lock(state().mutex);
  return state().calls[function];
}
STUB_EXPORT int64_t stub_alive(const char* what) {
  State& s = state();
  const std::lock_guard lock(s.mutex);
  const std::string name = what;
  int64_t total = 0;
  if (name == "allocations") return static_cast<int64_t>(s.memory.size());
  if (name == "host allocations") return static_cast<int64_t>(s.host_memory.size());
  if (name == "streams") return static_cast<int64_t>(s.streams.size());
  if (name == "events") return static_cast<int64_t>(s.events.size());
  if (name == "graphs") return static_cast<int64_t>(s.graphs.size());
  if (name == "modules") return static_cast<int64_t>(s.modules.size());
  if (name == "early launches") return s.early_launches;
  if (name == "contexts")
    for (const Context& c : s.contexts) total += c.retained;
  else if (name == "bytes")
    for (const auto& [address, allocation] : s.memory) total += static_cast<int64_t>(allocation.bytes);
  else
    return -1;
  return total;
}
STUB_EXPORT void stub_kernel(const char* name, void (*run)(const void*), size_t bytes) {
  const std::lock_guard lock(state().mutex);
  state().kernels[name] = {run, bytes};
}

// --- the driver ---

STUB_EXPORT Result cuInit(unsigned) {
  ENTER(Needs::kNothing);
  if (s.initialized != 0 && s.initialized != getpid()) return kNotInitialized;
  s.initialized = getpid();
  return 0;
}
STUB_EXPORT Result cuDriverGetVersion(int* version) {
  ENTER(Needs::kNothing);
  *version = static_cast<int>(s.settings["version"]);
  return 0;
}
STUB_EXPORT Result cuGetErrorName(Result status, const char** name) {
  switch (status) {
    case kInvalidValue: *name = "CUDA_ERROR_INVALID_VALUE"; return 0;
    case kOutOfMemory: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return 0;
    case 700: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; return 0;
    default: *name = nullptr; return kInvalidValue;
  }
}
STUB_EXPORT Result cuGetErrorString(Result status, const char** text) {
  *text = status == 700 ? "an illegal memory access was encountered" : nullptr;
  return status == 700 ? 0 : kInvalidValue;
}

STUB_EXPORT Result cuDeviceGetCount(int* count) {
  ENTER(Needs::kInit);
  *count = static_cast<int>(s.settings["devices"]);
  return 0;
}
STUB_EXPORT Result cuDeviceGet(int* device, int index) {
  ENTER(Needs::kInit);
  if (index < 0 || index >= s.settings["devices"]) return kInvalidDevice;
  *device = index;
  return 0;
}
STUB_EXPORT Result cuDeviceGetName(char* name, int bytes, int device) {
  ENTER(Needs::kInit);
  const std::string text = "Stub GPU " + std::to_string(device);
  if (bytes <= static_cast<int>(text.size())) return kInvalidValue;
  std::memcpy(name, text.c_str(), text.size() + 1);
  return 0;
}
STUB_EXPORT Result cuDeviceGetAttribute(int* value, int attribute, int device) {
  ENTER(Needs::kInit);
  const int capability = static_cast<int>(s.settings["capability"]);
  switch (attribute) {
    case 8: *value = 48 << 10; return 0;
    case 13: *value = 1980000; return 0;
    case 16: *value = 132; return 0;
    case 33: *value = 0x60 + device; return 0;
    case 36: *value = 3201000; return 0;
    case 37: *value = 6144; return 0;
    case 38: *value = 50 << 20; return 0;
    case 39: *value = 2048; return 0;
    case 75: *value = capability / 10; return 0;
    case 76: *value = capability % 10; return 0;
    case 81: *value = 228 << 10; return 0;
    case 82: *value = 65536; return 0;
    case 97: *value = 227 << 10; return 0;
    default: *value = 0; return 0;
  }
}
STUB_EXPORT Result cuDeviceTotalMem_v2(size_t* bytes, int) {
  ENTER(Needs::kInit);
  *bytes = static_cast<size_t>(s.settings["memory"]);
  return 0;
}
#ifndef STUB_OLD
STUB_EXPORT Result cuDeviceGetUuid_v2(unsigned char* uuid, int device) {
  ENTER(Needs::kInit);
  for (int i = 0; i < 16; ++i) uuid[i] = static_cast<unsigned char>(16 * device + i);
  return 0;
}
#endif

STUB_EXPORT Result cuDevicePrimaryCtxRetain(Context** context, int device) {
  std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the real one is slow, too: other threads come in meanwhile
  ENTER(Needs::kInit);
  if (device < 0 || device >= kMaxDevices) return kInvalidDevice;
  ++s.contexts[device].retained;
  *context = &s.contexts[device];
  return 0;
}
STUB_EXPORT Result cuCtxPushCurrent_v2(Context* context) {
  ENTER(Needs::kInit);
  current.push_back(context);
  return 0;
}
STUB_EXPORT Result cuCtxPopCurrent_v2(Context** context) {
  ENTER(Needs::kInit);
  if (current.empty()) return kInvalidContext;
  *context = current.back();
  current.pop_back();
  return 0;
}
STUB_EXPORT Result cuCtxGetCurrent(Context** context) {
  ENTER(Needs::kInit);
  *context = current_context();
  return 0;
}
STUB_EXPORT Result cuCtxSynchronize() {
  ENTER(Needs::kContext);
  return capturing(s) ? kCaptureUnsupported : 0;
}

STUB_EXPORT Result cuMemGetInfo_v2(size_t* free, size_t* total) {
  ENTER(Needs::kContext);
  *total = *free = static_cast<size_t>(s.settings["memory"]);
  for (const auto& [address, allocation] : s.memory)
    if (allocation.device == current_context()->device) *free -= allocation.bytes;
  return 0;
}
STUB_EXPORT Result cuMemAlloc_v2(unsigned long long* pointer, size_t bytes) {
  ENTER(Needs::kContext);
  if (bytes == 0) return kInvalidValue;
  if (capturing(s)) return kCaptureUnsupported;
  const int device = current_context()->device;
  size_t used = 0;
  for (const auto& [address, allocation] : s.memory)
    if (allocation.device == device) used += allocation.bytes;
  const size_t all = static_cast<size_t>(s.settings["memory"]);
  if (bytes > all - used) return kOutOfMemory;
  void* memory = std::aligned_alloc(512, (bytes + 511) / 512 * 512);
  if (!memory) return kOutOfMemory;
  s.memory[reinterpret_cast<uintptr_t>(memory)] = {bytes, device};
  *pointer = reinterpret_cast<uintptr_t>(memory);
  return 0;
}
STUB_EXPORT Result cuMemFree_v2(unsigned long long pointer) {
  ENTER(Needs::kContext);
  if (capturing(s)) return kCaptureUnsupported;
  if (s.memory.erase(pointer) == 0) return kInvalidValue;
  std::free(at(pointer));
  return 0;
}

STUB_EXPORT Result cuMemHostAlloc(void** pointer, size_t bytes, unsigned) {
  ENTER(Needs::kContext);
  if (bytes == 0) return kInvalidValue;
  if (capturing(s)) return kCaptureUnsupported;
  *pointer = std::malloc(bytes);
  if (!*pointer) return kOutOfMemory;
  s.host_memory.insert(*pointer);
  return 0;
}
STUB_EXPORT Result cuMemFreeHost(void* pointer) {
  ENTER(Needs::kContext);
  if (capturing(s)) return kCaptureUnsupported;
  if (s.host_memory.erase(pointer) == 0) return kInvalidValue;
  std::free(pointer);
  return 0;
}

STUB_EXPORT Result cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void* stream) {
  ENTER(Needs::kContext);
  return copy(s, lock, at(to), from, bytes, stream, to, 0);
}
STUB_EXPORT Result cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void* stream) {
  ENTER(Needs::kContext);
  return copy(s, lock, to, at(from), bytes, stream, 0, from);
}
STUB_EXPORT Result cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void* stream) {
  ENTER(Needs::kContext);
  return copy(s, lock, at(to), at(from), bytes, stream, to, from);
}
STUB_EXPORT Result cuMemsetD8Async(unsigned long long to, unsigned char value, size_t count, void* stream) {
  ENTER(Needs::kContext);
  if (!inside(s, to, count)) return kInvalidValue;
  return enqueue(s, lock, stream, [=] { std::memset(at(to), value, count); });
}
STUB_EXPORT Result cuPointerGetAttribute(void* value, int attribute, unsigned long long pointer) {
  ENTER(Needs::kContext);
  if (!inside(s, pointer, 0)) return kInvalidValue;
  const int device = std::prev(s.memory.upper_bound(pointer))->second.device;
  const int answer = attribute == 2 ? 2 : attribute == 9 ? device : 0;  // memory type: device; ordinal; nothing is managed
  std::memcpy(value, &answer, 4);
  return 0;
}

STUB_EXPORT Result cuStreamCreate(Stream** stream, unsigned) {
  ENTER(Needs::kContext);
  return give(s.streams, Stream{current_context()->device}, stream);
}
STUB_EXPORT Result cuStreamDestroy_v2(Stream* stream) {
  ENTER(Needs::kContext);
  return destroy(s.streams, stream);
}
STUB_EXPORT Result cuStreamSynchronize(void* stream) {
  ENTER(Needs::kContext);
  const Stream* found = stream_of(s, stream);
  return !found ? kInvalidHandle : found->capturing ? kCaptureUnsupported : 0;
}
STUB_EXPORT Result cuStreamWaitEvent(void* stream, Event* event, unsigned) {
  ENTER(Needs::kContext);
  return s.events.count(event) && stream_of(s, stream) ? 0 : kInvalidHandle;
}
#ifndef STUB_OLD
STUB_EXPORT Result cuStreamBeginCapture_v2(void* stream, int) {
  ENTER(Needs::kContext);
  Stream* found = stream_of(s, stream);
  if (!found) return kInvalidHandle;
  if (!stream || found->capturing) return kCaptureUnsupported;
  found->capturing = true;
  return 0;
}
STUB_EXPORT Result cuStreamIsCapturing(void* stream, int* status) {
  ENTER(Needs::kContext);
  const Stream* found = stream_of(s, stream);
  if (!found) return kInvalidHandle;
  *status = found->capturing ? 1 : 0;
  return 0;
}
STUB_EXPORT Result cuStreamEndCapture(void* stream, Graph** graph) {
  ENTER(Needs::kContext);
  Stream* found = stream_of(s, stream);
  if (!found || !found->capturing) return kInvalidValue;
  found->capturing = false;
  return give(s.graphs, std::exchange(found->captured, {}), graph);
}
STUB_EXPORT Result cuGraphInstantiateWithFlags(Graph** executable, Graph* graph, unsigned long long) {
  ENTER(Needs::kContext);
  if (!s.graphs.count(graph)) return kInvalidValue;
  return give(s.graphs, *graph, executable);
}
STUB_EXPORT Result cuGraphLaunch(Graph* executable, void* stream) {
  ENTER(Needs::kContext);
  if (!s.graphs.count(executable)) return kInvalidValue;
  const std::vector<std::function<void()>> work = executable->work;
  return enqueue(s, lock, stream, [work] {
    for (const auto& step : work) step();
  });
}
STUB_EXPORT Result cuGraphDestroy(Graph* graph) {
  ENTER(Needs::kContext);
  return destroy(s.graphs, graph, kInvalidValue);
}
STUB_EXPORT Result cuGraphExecDestroy(Graph* executable) {
  ENTER(Needs::kContext);
  return destroy(s.graphs, executable, kInvalidValue);
}
#endif

STUB_EXPORT Result cuEventCreate(Event** event, unsigned) {
  ENTER(Needs::kContext);
  return give(s.events, Event{current_context()->device}, event);
}
STUB_EXPORT Result cuEventRecord(Event* event, void* stream) {
  ENTER(Needs::kContext);
  if (!s.events.count(event) || !stream_of(s, stream) || event->device != current_context()->device) return kInvalidHandle;
  event->recorded = true;
  event->at = std::chrono::steady_clock::now();
  return 0;
}
STUB_EXPORT Result cuEventQuery(Event* event) {
  ENTER(Needs::kContext);
  return s.events.count(event) ? 0 : kInvalidHandle;
}
STUB_EXPORT Result cuEventSynchronize(Event* event) {
  ENTER(Needs::kContext);
  return s.events.count(event) ? 0 : kInvalidHandle;
}
STUB_EXPORT Result cuEventElapsedTime(float* milliseconds, Event* start, Event* end) {
  ENTER(Needs::kContext);
  if (!s.events.count(start) || !s.events.count(end) || !start->recorded || !end->recorded) return kInvalidHandle;
  *milliseconds = std::chrono::duration<float, std::milli>(end->at - start->at).count();
  return 0;
}
STUB_EXPORT Result cuEventDestroy_v2(Event* event) {
  ENTER(Needs::kContext);
  return destroy(s.events, event);
}

STUB_EXPORT Result cuModuleLoadDataEx(Module** module, const void* image, unsigned, void*, void**) {
  ENTER(Needs::kContext);
  const char* bytes = static_cast<const char*>(image);
  if (!bytes ||
      (std::strncmp(bytes, fattn::test::kStubCubinMagic, sizeof fattn::test::kStubCubinMagic - 1) != 0 && std::strncmp(bytes, "\177ELF", 4) != 0))
    return kInvalidImage;
  return give(s.modules, Module{current_context()->device}, module);
}
STUB_EXPORT Result cuModuleUnload(Module* module) {
  ENTER(Needs::kContext);
  return destroy(s.modules, module);
}
STUB_EXPORT Result cuModuleGetFunction(Function** function, Module* module, const char* name) {
  ENTER(Needs::kContext);
  if (!s.modules.count(module)) return kInvalidHandle;
  auto& known = s.functions[name];
  if (!known) known = std::make_unique<Function>(Function{name});
  *function = known.get();
  return 0;
}
STUB_EXPORT Result cuFuncGetAttribute(int* value, int attribute, Function* function) {
  ENTER(Needs::kContext);
  if (!function) return kInvalidHandle;
  *value = attribute == 0   ? 1024
           : attribute == 3 ? static_cast<int>(s.settings["local_bytes"])
           : attribute == 4 ? static_cast<int>(s.settings["registers"])
                            : 0;
  return 0;
}
STUB_EXPORT Result cuFuncSetAttribute(Function* function, int attribute, int value) {
  ENTER(Needs::kContext);
  if (!function) return kInvalidHandle;
  return attribute == 8 && value > (227 << 10) ? kInvalidValue : 0;
}
#ifndef STUB_INCOMPLETE
STUB_EXPORT Result cuLaunchKernel(Function* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned,
                                  void* stream, void** parameters, void**) {
  ENTER(Needs::kContext);
  if (gx == 0 || gy == 0 || gz == 0 || gy > 65535 || gz > 65535 || bx == 0 || by == 0 || bz == 0 || bx * by * bz > 1024) return kInvalidValue;
  return launch(s, lock, stream, function, parameters);
}
#endif
#ifndef STUB_OLD
STUB_EXPORT Result cuLaunchKernelEx(const void* config, Function* function, void** parameters, void**) {
  ENTER(Needs::kContext);
  void* stream = nullptr;  // after seven unsigned numbers and their padding
  std::memcpy(&stream, static_cast<const char*>(config) + 32, sizeof stream);
  const char* attributes = nullptr;
  uint32_t count = 0;
  std::memcpy(&attributes, static_cast<const char*>(config) + 40, sizeof attributes);
  std::memcpy(&count, static_cast<const char*>(config) + 48, sizeof count);
  for (; count > 0; --count, attributes += 72) {  // of 72 bytes: which, a word of padding, the value
    int32_t which_and_value[3];
    std::memcpy(which_and_value, attributes, sizeof which_and_value);
    if (which_and_value[0] == 6 && which_and_value[2] == 1) ++s.early_launches;
  }
  return launch(s, lock, stream, function, parameters);
}

// As strict as the driver's documentation; the map holds the address, by which a test knows it again.
STUB_EXPORT Result cuTensorMapEncodeTiled(uint64_t* map, int, uint32_t rank, void* address, const uint64_t* sizes, const uint64_t* strides,
                                          const uint32_t* box, const uint32_t* element_strides, int, int, int, int) {
  ENTER(Needs::kInit);
  if (rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(map) % 64 != 0 || reinterpret_cast<uintptr_t>(address) % 16 != 0) return kInvalidValue;
  for (uint32_t i = 0; i < rank; ++i) {
    if (sizes[i] < 1 || sizes[i] > (uint64_t{1} << 32) || box[i] < 1 || box[i] > 256 || element_strides[i] != 1) return kInvalidValue;
    if (i + 1 < rank && (strides[i] % 16 != 0 || strides[i] >= uint64_t{1} << 40)) return kInvalidValue;
  }
  std::memset(map, 0, 128);
  map[0] = reinterpret_cast<uintptr_t>(address);
  return 0;
}
#endif
