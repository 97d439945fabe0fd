// The C ABI's CUDA devices: memory, copies, streams, events, graphs. Each function is one thing that the driver does.
#include <bit>
#include <cstdint>
#include <string>

#include "api/guard.h"
#include "backend/cuda/peak.h"
#include "device/cuda_device.h"
#include "fattn/fattn.h"

namespace {

using fattn::Error;
using fattn::ErrorCode;
using namespace fattn::core;

CUdeviceptr address(const void* pointer) { return static_cast<CUdeviceptr>(reinterpret_cast<uintptr_t>(pointer)); }
void* pointer(CUdeviceptr address) { return std::bit_cast<void*>(static_cast<uintptr_t>(address)); }
CUstream stream_of(void* stream) { return static_cast<CUstream>(stream); }

const char* what_of(int32_t direction) {
  switch (direction) {
    case FATTN_COPY_TO_DEVICE: return "copying to the device";
    case FATTN_COPY_TO_HOST: return "copying to the host";
    case FATTN_COPY_ON_DEVICE: return "copying on the device";
    default:
      throw Error(ErrorCode::kInvalidArgument, text("copy direction ", direction, "; allowed: ", FATTN_COPY_TO_DEVICE, " (to device), ",
                                                    FATTN_COPY_TO_HOST, " (to host), ", FATTN_COPY_ON_DEVICE, " (on device)"));
  }
}

fattn_status copy_memory(int32_t index, int32_t direction, void* to, const void* from, size_t bytes, void* stream, bool wait) {
  return guarded([&] {
    CudaDevice& device = cuda_device(index);
    const CudaCurrent scope = device.current();
    const CudaDriver& driver = cuda_driver();
    const char* const what = what_of(direction);
    if (bytes == 0) return;
    not_null(to, "to");
    not_null(from, "from");
    device.check(direction == FATTN_COPY_TO_DEVICE ? driver.memcpyHtoDAsync(address(to), from, bytes, stream_of(stream))
                 : direction == FATTN_COPY_TO_HOST ? driver.memcpyDtoHAsync(to, address(from), bytes, stream_of(stream))
                                                   : driver.memcpyDtoDAsync(address(to), address(from), bytes, stream_of(stream)),
                 what);
    if (wait) device.check(driver.streamSynchronize(stream_of(stream)), "waiting for a copy");
  });
}

// Runs `body(device, driver)` with the device's context current.
template <class Body>
fattn_status on_device(int32_t index, const Body& body) {
  return guarded([&] {
    CudaDevice& device = cuda_device(index);
    const CudaCurrent scope = device.current();
    body(device, cuda_driver());
  });
}

}  // namespace

extern "C" {

fattn_status fattn_cuda_count(int32_t* count, char* reason, size_t reason_size) {
  return guarded([&] {
    std::string why;
    checked(count, "count") = cuda_device_count(&why);
    if (reason && reason_size > 0) copy(reason, reason_size, why);
  });
}

fattn_status fattn_cuda_query(int32_t device, fattn_cuda_info* info) {
  return guarded([&] {
    fattn_cuda_info& out = sized(info, "info");
    const CudaDeviceInfo& found = cuda_device(device).info();
    out.index = found.index;
    out.capability_major = found.major;
    out.capability_minor = found.minor;
    out.multiprocessors = found.multiprocessors;
    out.clock_khz = found.clock_khz;
    out.memory_clock_khz = found.memory_clock_khz;
    out.memory_bus_bits = found.memory_bus_bits;
    out.shared_per_block = found.shared_per_block_optin;
    out.shared_per_multiprocessor = found.shared_per_multiprocessor;
    out.registers_per_multiprocessor = found.registers_per_multiprocessor;
    out.driver_version = cuda_driver().version;
    out.memory_bytes = found.memory_bytes;
    out.l2_bytes = found.l2_bytes;
    copy(out.name, found.name);
    copy(out.pci_bus_id, found.pci_bus_id);
    copy(out.uuid, found.uuid);
  });
}

fattn_status fattn_cuda_peak(int32_t device, int32_t what, double* per_second) {
  return guarded([&] {
    checked(per_second, "per_second") = 0;
    if (what < FATTN_PEAK_MATRIX || what > FATTN_PEAK_ROUND_TRIP)
      throw Error(ErrorCode::kInvalidArgument, text("what is ", what,
                                                    "; allowed: matrix (1), FMA (2), read (3), exp (4), shared (5), L2 (6), copy (7), launch (8), "
                                                    "round trip (9)"));
    *per_second = fattn::core::measure_cuda_peak(cuda_device(device), static_cast<fattn::core::CudaPeak>(what));
  });
}

fattn_status fattn_cuda_memory(int32_t device, size_t* free_bytes, size_t* total_bytes) {
  return guarded([&] { cuda_device(device).memory(checked(free_bytes, "free_bytes"), checked(total_bytes, "total_bytes")); });
}

fattn_status fattn_cuda_synchronize(int32_t device) {
  return on_device(device, [](CudaDevice& d, const CudaDriver& driver) { d.check(driver.ctxSynchronize(), "waiting for the device"); });
}

fattn_status fattn_cuda_malloc(int32_t device, size_t bytes, void** out) {
  return guarded([&] {
    checked(out, "pointer") = nullptr;
    *out = pointer(cuda_device(device).alloc(bytes));
  });
}

fattn_status fattn_cuda_free(int32_t device, void* memory) {
  return guarded([&] { cuda_device(device).free(address(memory)); });
}

fattn_status fattn_cuda_host_malloc(int32_t device, size_t bytes, void** out) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    checked(out, "pointer") = nullptr;
    if (bytes > 0) d.check(driver.memHostAlloc(out, bytes, 0), text("allocating ", bytes, " bytes of the host's memory").c_str());
  });
}

fattn_status fattn_cuda_host_free(int32_t device, void* memory) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    if (memory) d.check(driver.memFreeHost(memory), "freeing memory of the host");
  });
}

fattn_status fattn_cuda_copy(int32_t device, int32_t direction, void* to, const void* from, size_t bytes, void* stream) {
  return copy_memory(device, direction, to, from, bytes, stream, true);
}

fattn_status fattn_cuda_copy_async(int32_t device, int32_t direction, void* to, const void* from, size_t bytes, void* stream) {
  return copy_memory(device, direction, to, from, bytes, stream, false);
}

fattn_status fattn_cuda_memset(int32_t device, void* to, int32_t byte, size_t bytes, void* stream) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    if (byte < 0 || byte > 255) throw Error(ErrorCode::kInvalidArgument, text("byte is ", byte, "; allowed: 0 to 255"));
    if (bytes == 0) return;
    not_null(to, "to");
    d.check(driver.memsetD8Async(address(to), static_cast<unsigned char>(byte), bytes, stream_of(stream)), "setting memory");
  });
}

fattn_status fattn_cuda_stream_create(int32_t device, void** stream) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    checked(stream, "stream") = nullptr;
    CUstream made = nullptr;
    d.check(driver.streamCreate(&made, kCudaStreamNonBlocking), "creating a stream");
    *stream = made;
  });
}

fattn_status fattn_cuda_stream_synchronize(int32_t device, void* stream) {
  return on_device(device,
                   [&](CudaDevice& d, const CudaDriver& driver) { d.check(driver.streamSynchronize(stream_of(stream)), "waiting for a stream"); });
}

fattn_status fattn_cuda_stream_destroy(int32_t device, void* stream) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    if (stream) d.check(driver.streamDestroy(stream_of(stream)), "destroying a stream");
  });
}

fattn_status fattn_cuda_event_create(int32_t device, void** event) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    checked(event, "event") = nullptr;
    CUevent made = nullptr;
    d.check(driver.eventCreate(&made, 0), "creating an event");
    *event = made;
  });
}

fattn_status fattn_cuda_event_record(int32_t device, void* event, void* stream) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    not_null(event, "event");
    d.check(driver.eventRecord(static_cast<CUevent>(event), stream_of(stream)), "recording an event");
  });
}

fattn_status fattn_cuda_event_elapsed(int32_t device, void* start, void* end, double* seconds) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    not_null(start, "start");
    not_null(end, "end");
    not_null(seconds, "seconds");
    d.check(driver.eventSynchronize(static_cast<CUevent>(end)), "waiting for an event");
    float milliseconds = 0;
    d.check(driver.eventElapsedTime(&milliseconds, static_cast<CUevent>(start), static_cast<CUevent>(end)), "asking for the time between events");
    *seconds = milliseconds * 1e-3;
  });
}

fattn_status fattn_cuda_event_destroy(int32_t device, void* event) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    if (event) d.check(driver.eventDestroy(static_cast<CUevent>(event)), "destroying an event");
  });
}

fattn_status fattn_cuda_graph_begin(int32_t device, void* stream) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    not_null(stream, "stream");
    d.check(driver.streamBeginCapture(stream_of(stream), CUstreamCaptureMode::kThreadLocal), "beginning the capture of a graph");
  });
}

fattn_status fattn_cuda_graph_end(int32_t device, void* stream, void** graph) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    not_null(stream, "stream");
    checked(graph, "graph") = nullptr;
    CUgraph captured = nullptr;
    d.check(driver.streamEndCapture(stream_of(stream), &captured), "ending the capture of a graph");
    CUgraphExec executable = nullptr;
    const CUresult status = driver.graphInstantiate(&executable, captured, 0);
    const CUresult destroyed = driver.graphDestroy(captured);
    d.check(status, "making a captured graph executable");
    d.check(destroyed, "destroying the captured graph");
    *graph = executable;
  });
}

fattn_status fattn_cuda_graph_launch(int32_t device, void* graph, void* stream) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    not_null(graph, "graph");
    d.check(driver.graphLaunch(static_cast<CUgraphExec>(graph), stream_of(stream)), "launching a graph");
  });
}

fattn_status fattn_cuda_graph_destroy(int32_t device, void* graph) {
  return on_device(device, [&](CudaDevice& d, const CudaDriver& driver) {
    if (graph) d.check(driver.graphExecDestroy(static_cast<CUgraphExec>(graph)), "destroying a graph");
  });
}

}  // extern "C"
