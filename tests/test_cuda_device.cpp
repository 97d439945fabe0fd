// The host side of CUDA on the stub of libcuda: what is missing, what fails, what stays as it was. Needs no GPU.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "device/cuda_device.h"
#include "device/cuda_driver.h"
#include "fattn/fattn.hpp"
#include "in_child.h"
#include "stub/cuda_stub.h"
#include "thrown.h"

namespace fattn::core {
namespace {

using test::CudaStub;
using test::error_thrown_by;
using test::in_child;

constexpr const char* kStub = FATTN_STUB_CUDA_PATH;

// The driver is opened once in a process: every test has a process of its own, and the parent never opens it. `settings` are
// the stub's (cuda_stub.h); `body` returns "" or what is wrong.
template <class Body>
std::string with_stub(const Body& body, const char* settings = nullptr, const char* path = kStub) {
  return in_child({{"FATTN_CUDA_DRIVER", path}, {"STUB_CUDA", settings}}, [&] {
    try {
      return std::string(body());
    } catch (const std::exception& e) {
      return std::string("exception: ") + e.what();
    }
  });
}

std::string reason() {
  std::string why;
  const int count = cuda_device_count(&why);
  return std::to_string(count) + " devices: " + why;
}

CUfunction load_kernel(CudaDevice& device, const char* name) {
  const CudaCurrent scope = device.current();
  CUmodule module = nullptr;
  CUfunction function = nullptr;
  device.check(cuda_driver().moduleLoadDataEx(&module, test::kStubCubinMagic, 0, nullptr, nullptr), "loading a kernel");
  device.check(cuda_driver().moduleGetFunction(&function, module, name), "finding a kernel");
  return function;
}

void launch(CudaDevice& device, CUfunction function, CUstream stream = nullptr, CudaLaunch shape = {}) {
  int argument = 0;
  void* parameters[] = {&argument};
  device.launch(function, shape, stream, parameters, "fattn_test");
}

void synchronize(CudaDevice& device) {
  const CudaCurrent scope = device.current();
  device.check(cuda_driver().ctxSynchronize(), "waiting for the device");
}

void expect_contains(const std::string& text, std::initializer_list<const char*> parts) {
  for (const char* part : parts) EXPECT_NE(text.find(part), std::string::npos) << "no '" << part << "' in: " << text;
}

TEST(CudaDriver, NoLibrarySaysWhatWasTried) {
  expect_contains(with_stub(reason, nullptr, "/nonexistent/libcuda.so.1"),
                  {"0 devices: no usable CUDA driver", "install NVIDIA's driver", "FATTN_CUDA_DRIVER", "/nonexistent/libcuda.so.1: "});
  expect_contains(with_stub(reason, nullptr, "./libcuda.so.1"), {"a relative path is not opened"});
  const std::string error = with_stub([] { return error_thrown_by([] { cuda_device(0); }); }, nullptr, "/nonexistent");
  expect_contains(error, {"unsupported: no usable CUDA driver"});
}

TEST(CudaDriver, MissingFunctions) {
  expect_contains(with_stub(reason, nullptr, FATTN_STUB_CUDA_INCOMPLETE_PATH), {"0 devices", "it has no function cuLaunchKernel,"});
  expect_contains(with_stub(reason, nullptr, "libm.so.6"), {"0 devices", "it has no function cuDriverGetVersion"});
}

// Plain calls work without what only some of them need, and what needs it says so.
TEST(CudaDriver, FunctionsThatPlainCallsDoWithout) {
  const std::string answer = with_stub(
      [] {
        CudaDevice& device = cuda_device(0);
        if (!device.info().uuid.empty()) return std::string("a name from nowhere");
        const CUfunction function = load_kernel(device, "plain");
        launch(device, function);
        synchronize(device);
        CudaLaunch with_cluster;
        with_cluster.grid_x = with_cluster.cluster_x = 2;
        const std::string cluster = error_thrown_by([&] { launch(device, function, nullptr, with_cluster); });
        return cluster + " | " + error_thrown_by([] { const cuda::Graph graph(cuda::Stream(0), [] {}); }) + " | " +
               (cuda_driver().tensorMapEncodeTiled ? "tensor maps" : "no tensor maps");
      },
      nullptr, FATTN_STUB_CUDA_OLD_PATH);
  expect_contains(answer, {"unsupported: the driver ", "(CUDA 13.0) has no function cuLaunchKernelEx: update the NVIDIA driver | ",
                           "has no function cuStreamBeginCapture_v2: update the NVIDIA driver | no tensor maps"});
}

TEST(CudaDriver, OldDriver) {
  expect_contains(with_stub(reason, "version=11040"), {"0 devices", "supports CUDA 11.4; fattn needs 12.0", "update the NVIDIA driver"});
  // An old driver that lacks functions, too, is called old.
  expect_contains(with_stub(reason, "version=11080", FATTN_STUB_CUDA_INCOMPLETE_PATH), {"supports CUDA 11.8; fattn needs 12.0"});
  expect_contains(with_stub(reason, "version=12000"), {"2 devices: "});
}

TEST(CudaDriver, StubOfTheToolkit) { expect_contains(with_stub(reason, "cuDriverGetVersion=34"), {"0 devices", "stub for linking"}); }

TEST(CudaDriver, EveryFunctionIsThere) {
  EXPECT_EQ(with_stub([] {
              const CudaDriver& d = cuda_driver();
              if (!d) return d.reason;
              if (d.version != 13000 || d.path != kStub) return "opened " + d.path;
              return std::string(d.tensorMapEncodeTiled ? "" : "no cuTensorMapEncodeTiled");
            }),
            "");
}

TEST(CudaDriver, OpenedOnceAndListed) {
  const std::string answer = with_stub([] {
    for (const fattn_library_info& library : libraries())
      if (std::string(library.name) == "CUDA driver") return std::string(library.loaded ? library.path : library.reason);
    return std::string("not listed");
  });
  EXPECT_EQ(answer, kStub);
  const std::string missing = with_stub(
      [] {
        for (const fattn_library_info& library : libraries())
          if (std::string(library.name) == "CUDA driver") return std::string(library.loaded ? "loaded" : library.reason);
        return std::string("not listed");
      },
      "version=11040");
  expect_contains(missing, {"update the NVIDIA driver"});
}

// Looking for the library must not initialise it: a process may do so and fork afterwards.
TEST(CudaDriver, LookingInitialisesNothing) {
  EXPECT_EQ(with_stub([] {
              libraries();
              return in_child({}, reason);
            }),
            "2 devices: ");
}

TEST(CudaDevice, NoDevice) {
  expect_contains(with_stub(reason, "devices=0"), {"0 devices: no usable CUDA device", "(100)", kStub});
  expect_contains(with_stub(reason, "cuInit=100"), {"0 devices: no usable CUDA device: cuInit", "(100)"});
  expect_contains(with_stub(reason, "cuInit=803"), {"(803)", "of different versions"});
  expect_contains(with_stub(reason, "cuInit=999"), {"(999)", "nvidia-smi"});
  expect_contains(with_stub([] { return error_thrown_by([] { cuda_device(0); }); }, "devices=0"), {"unsupported: no usable CUDA device"});
  expect_contains(with_stub([] { return error_thrown_by([] { cuda_device(2); }); }), {"invalid_argument: CUDA device 2; allowed: 0 to 1"});
  expect_contains(with_stub([] { return error_thrown_by([] { cuda_device(-1); }); }), {"invalid_argument: CUDA device -1; allowed: 0 to 1"});
}

TEST(CudaDevice, IsDescribed) {
  EXPECT_EQ(with_stub([] {
              const std::vector<fattn_cuda_info> all = cuda::devices();
              if (all.size() != 2) return std::string("not two");
              const fattn_cuda_info& i = all[1];
              std::string text = i.name;
              for (const int64_t n : {int64_t{i.index}, int64_t{i.capability_major}, int64_t{i.capability_minor}, int64_t{i.multiprocessors},
                                      int64_t{i.clock_khz}, int64_t{i.shared_per_block}, int64_t{i.driver_version}, i.memory_bytes, i.l2_bytes})
                text += " " + std::to_string(n);
              return text + " " + i.pci_bus_id + " " + i.uuid;
            }),
            "Stub GPU 1 1 9 0 132 1980000 232448 13000 1073741824 52428800 0000:61:00.0 GPU-10111213-1415-1617-1819-1a1b1c1d1e1f");
}

TEST(CudaDevice, OutOfMemorySaysAskedAndFree) {
  EXPECT_EQ(with_stub([] {
              const CudaStub stub(kStub);
              CudaDevice& device = cuda_device(1);
              const CUdeviceptr first = device.alloc(1000);
              const std::string error = error_thrown_by([&] { device.alloc(size_t{2} << 30); });
              // The library stays usable, and what is freed can be had again.
              device.free(first);
              device.free(device.alloc(size_t{1} << 30));
              device.free(0);
              return stub.alive("allocations") == 0 && device.alloc(0) == 0 ? error : std::string("memory is left over");
            }),
            "out_of_memory: cuda:1 (Stub GPU 1): no memory for 2147483648 bytes; 1073740824 of 1073741824 bytes are free; free GPU memory or use a "
            "smaller problem");
}

TEST(CudaDevice, AContextThatCannotBeMade) {
  expect_contains(with_stub([] { return error_thrown_by([] { cuda_device(0).alloc(1); }); }, "cuDevicePrimaryCtxRetain=2"),
                  {"out_of_memory: cuda:0 (Stub GPU 0): retaining the device's primary context failed", "CUDA_ERROR_OUT_OF_MEMORY (2)"});
  EXPECT_EQ(with_stub([] {
              CudaStub(kStub).fault("cuDevicePrimaryCtxRetain", 46, 1);
              const std::string error = error_thrown_by([] { cuda_device(0).alloc(1); });
              cuda_device(0).free(cuda_device(0).alloc(1));  // the next call tries again
              return error;
            }),
            "device: cuda:0 (Stub GPU 0): retaining the device's primary context failed: CUDA error (46); another process has the device for itself");
}

TEST(CudaDevice, LaunchesRun) {
  EXPECT_EQ(with_stub([] {
              static int seen = 0;
              CudaStub(kStub).kernel(
                  "twice", [](const void* argument) { std::memcpy(&seen, argument, sizeof seen); }, sizeof seen);
              CudaDevice& device = cuda_device(0);
              const CUfunction function = load_kernel(device, "twice");
              int argument = 42;
              void* parameters[] = {&argument};
              device.launch(function, CudaLaunch{}, nullptr, parameters, "twice");
              const int plain = std::exchange(seen, 0);
              CudaLaunch with_cluster;
              with_cluster.grid_x = with_cluster.cluster_x = 2;
              device.launch(function, with_cluster, nullptr, parameters, "twice");
              return std::to_string(plain) + " " + std::to_string(seen);
            }),
            "42 42");
}

TEST(CudaDevice, AFailedLaunchLeavesItUsable) {
  const auto body = [] {
    const CudaStub stub(kStub);
    CudaDevice& device = cuda_device(0);
    const CUfunction function = load_kernel(device, "fattn_test");
    stub.fault("cuLaunchKernel", 701, 1);
    CudaLaunch shape;
    shape.grid_x = 7;
    shape.block_x = 128;
    shape.shared_bytes = 1000;
    std::string errors = error_thrown_by([&] { launch(device, function, nullptr, shape); });
    launch(device, function);
    shape.block_x = 2048;  // the library's fault, not the caller's
    errors += "\n" + error_thrown_by([&] { launch(device, function, nullptr, shape); });
    // A stream of another device is the caller's.
    CUstream other = nullptr;
    {
      const CudaCurrent scope = cuda_device(1).current();
      cuda_check(cuda_driver().streamCreate(&other, 0), "creating a stream");
    }
    errors += "\n" + error_thrown_by([&] { launch(device, function, other); });
    launch(device, function);
    synchronize(device);
    return errors;
  };
  const std::string answer = with_stub(body);
  expect_contains(
      answer, {"device: cuda:0 (Stub GPU 0): launching fattn_test (grid 7 x 1 x 1, block 128 x 1 x 1, 1000 bytes of shared memory) failed: ", "(701)",
               "\ndevice: ", "block 2048 x 1 x 1", "CUDA_ERROR_INVALID_VALUE (1)", "\ninvalid_argument: ", "(400)", "belongs to another device"});
  EXPECT_EQ(answer.find("restart"), std::string::npos) << answer;
}

TEST(CudaDevice, AStickyErrorStays) {
  const auto body = [] {
    const CudaStub stub(kStub);
    CudaDevice& device = cuda_device(0);
    const CUfunction function = load_kernel(device, "fattn_test");
    const CUdeviceptr memory = device.alloc(16);
    stub.set("break", 700);
    launch(device, function);
    const std::string first = error_thrown_by([&] { synchronize(device); });
    // Every later call gives that same error, whatever it is, without asking the driver.
    const int64_t retained = stub.alive("contexts"), allocs = stub.calls("cuMemAlloc_v2");
    for (const std::string& later : {error_thrown_by([&] { device.alloc(1); }), error_thrown_by([&] { device.free(memory); }),
                                     error_thrown_by([&] { launch(device, function); }), error_thrown_by([&] { device.require_usable(); }),
                                     error_thrown_by([&] { cuda::synchronize(0); }), error_thrown_by([&] { cuda::Stream stream(0); }),
                                     error_thrown_by([&] { cuda::memory(0); }), error_thrown_by([&] { cuda::Buffer buffer(0, 8); })})
      if (later != first) return "first: " + first + "\nlater: " + later;
    if (stub.calls("cuMemAlloc_v2") != allocs || stub.alive("contexts") != retained) return std::string("the driver was asked again");
    // The other device works, and this one can still be described.
    cuda_device(1).free(cuda_device(1).alloc(8));
    if (std::string(cuda::info(0).name) != "Stub GPU 0" || cuda::count() != 2) return std::string("not described");
    return first;
  };
  EXPECT_EQ(
      with_stub(body),
      "device: cuda:0 (Stub GPU 0): waiting for the device failed: CUDA_ERROR_ILLEGAL_ADDRESS (700): an illegal memory access was encountered; this "
      "GPU does nothing more for this process: restart the process");
}

TEST(CudaDevice, WhichErrorsAreSticky) {
  for (const CUresult status : {214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911})
    EXPECT_TRUE(is_sticky(status)) << status;
  for (const CUresult status : {0, 1, 2, 3, 4, 100, 200, 201, 209, 218, 400, 500, 600, 701, 720, 801, 900, 908, 999}) EXPECT_FALSE(is_sticky(status));
}

TEST(CudaDevice, RefusedImages) {
  const auto load = [](const char* image) {
    return error_thrown_by([&] {
      CudaDevice& device = cuda_device(0);
      const CudaCurrent scope = device.current();
      CUmodule module = nullptr;
      device.check(cuda_driver().moduleLoadDataEx(&module, image, 0, nullptr, nullptr), "loading a kernel");
      device.check(cuda_driver().moduleUnload(module), "unloading a kernel");
    });
  };
  expect_contains(with_stub([&] { return load("nonsense"); }), {"compile: cuda:0 (Stub GPU 0): loading a kernel failed", "(200)"});
  EXPECT_EQ(with_stub([&] { return load("\177ELF and so on"); }), "nothing was thrown");
  for (const char* fault : {"cuModuleLoadDataEx=209", "cuModuleLoadDataEx=218", "cuModuleLoadDataEx=222"})
    expect_contains(with_stub([&] { return load(test::kStubCubinMagic); }, fault), {"compile: ", "the driver does not take this kernel"});
}

// Whatever is called, and whether it fails, the caller's current context stays.
TEST(CudaDevice, TheCallersContextStays) {
  EXPECT_EQ(with_stub([] {
              const CudaDriver& driver = cuda_driver();
              const CudaStub stub(kStub);
              CudaDevice& device = cuda_device(0);
              CUcontext own = nullptr, now = nullptr;
              const auto calls = [&] {
                cuda::Buffer a(0, 64), b(1, 64);
                cuda::Stream stream(1);
                a.fill(1);
                error_thrown_by([&] { device.alloc(size_t{1} << 40); });
                error_thrown_by([&] { launch(device, load_kernel(device, "fattn_test"), static_cast<CUstream>(stream.get())); });
                error_thrown_by([&] { device.require_on_device(b.get(), "q"); });
              };
              calls();  // with none current
              driver.ctxGetCurrent(&now);
              if (now) return std::string("a context was left current");
              for (CUcontext caller : {cuda_device(0).context(), cuda_device(1).context()}) {
                driver.ctxPushCurrent(caller);
                calls();
                driver.ctxPopCurrent(&own);
                if (own != caller) return std::string("another context was left current");
                driver.ctxGetCurrent(&now);
                if (now) return std::string("the stack of contexts was changed");
              }
              if (stub.alive("contexts") != 2) return std::string("a context was retained twice");
              return std::string(stub.alive("allocations") + stub.alive("streams") == 0 ? "" : "something was left over");
            }),
            "");
}

TEST(CudaDevice, WhereTensorsLie) {
  const std::string answer = with_stub([] {
    const cuda::Buffer here(0, 64), there(1, 64);
    const char host[16] = "";
    std::string errors;
    for (const void* pointer : {static_cast<const void*>(here.get()), static_cast<const void*>(there.get()), static_cast<const void*>(host)})
      errors += error_thrown_by([&] { cuda_device(0).require_on_device(pointer, "k"); }) + "\n";
    return errors;
  });
  EXPECT_EQ(answer.rfind("nothing was thrown\ninvalid_argument: k is at 0x", 0), 0u) << answer;
  expect_contains(answer, {"which is memory of cuda:1; its device is cuda:0", "which is memory of the host; its device is cuda:0"});
}

TEST(CudaDevice, AForkedChildGetsAnError) {
  const std::string answer = with_stub([] {
    cuda::Buffer buffer(0, 16);
    CudaDevice& device = cuda_device(0);
    return in_child({}, [&] {
      return error_thrown_by([&] { cuda_device(0); }) + "\n" + error_thrown_by([&] { device.alloc(1); }) + "\n" +
             error_thrown_by([&] { buffer.fill(0); }) + "\n" + reason();
    });
  });
  const std::string line =
      "device: this process was forked from one that had used CUDA, and a CUDA driver does not work across fork; start workers by spawn (Python: "
      "multiprocessing.set_start_method('spawn')), or fork before the first use of a GPU\n";
  EXPECT_EQ(answer, line + line + line + "0 devices: " + line.substr(8, line.size() - 9));
}

TEST(CudaDevice, AChildOfAProcessWithoutCuda) {
  // The parent asked and had none; the child hears the same, not that it was forked.
  expect_contains(with_stub(
                      [] {
                        reason();
                        return in_child({}, reason);
                      },
                      "devices=0"),
                  {"no usable CUDA device", "(100)"});
  expect_contains(with_stub(
                      [] {
                        reason();
                        return in_child({}, reason);
                      },
                      nullptr, "/nonexistent"),
                  {"no usable CUDA driver"});
  // The driver itself refuses a child whose parent used it through another library.
  expect_contains(with_stub(reason, "cuInit=3"), {"(3)", "forked"});
}

TEST(CudaDevice, SeveralThreadsAndDevices) {
  EXPECT_EQ(with_stub([] {
              const CudaStub stub(kStub);
              std::array<std::string, 8> wrong;
              std::vector<std::thread> threads;
              for (size_t t = 0; t < wrong.size(); ++t)
                threads.emplace_back([&wrong, t] {
                  try {
                    const int index = static_cast<int>(t % 2);
                    for (int i = 0; i < 50; ++i) {
                      CudaDevice& device = cuda_device(index);
                      cuda::Buffer buffer(index, 256);
                      const std::vector<unsigned char> sent(256, static_cast<unsigned char>(t));
                      std::vector<unsigned char> received(256);
                      buffer.copy_from(sent.data(), 256);
                      launch(device, load_kernel(device, "fattn_test"));
                      buffer.copy_to(received.data(), 256);
                      if (received != sent) wrong[t] = "other bytes";
                      CUcontext now = nullptr;
                      cuda_driver().ctxGetCurrent(&now);
                      if (now) wrong[t] = "a context was left current";
                    }
                  } catch (const std::exception& e) {
                    wrong[t] = e.what();
                  }
                });
              for (std::thread& thread : threads) thread.join();
              std::string all = std::accumulate(wrong.begin(), wrong.end(), std::string());
              if (stub.calls("cuInit") != 1) all += " initialised more than once";
              if (stub.alive("contexts") != 2) all += " not one context a device";
              return all;
            }),
            "");
}

// One thread breaks the device while others use it: each gets results until then, and the same error afterwards.
TEST(CudaDevice, AStickyErrorReachesAllThreads) {
  EXPECT_EQ(with_stub([] {
              const CudaStub stub(kStub);
              CudaDevice& device = cuda_device(0);
              const CUfunction function = load_kernel(device, "fattn_test");
              std::array<std::string, 4> last;
              std::vector<std::thread> threads;
              stub.set("break", 719);
              for (size_t t = 0; t < last.size(); ++t)
                threads.emplace_back([&, t] {
                  for (int i = 0; i < 20; ++i) {
                    error_thrown_by([&] { launch(device, function); });
                    last[t] = error_thrown_by([&] { synchronize(device); });
                  }
                });
              for (std::thread& thread : threads) thread.join();
              for (const std::string& l : last)
                if (l != last[0] || l.find("restart the process") == std::string::npos) return l;
              return std::string();
            }),
            "");
}

TEST(CudaApi, CopiesStreamsAndEvents) {
  EXPECT_EQ(with_stub([] {
              cuda::Stream stream(0);
              cuda::Buffer a(0, 16), b(0, 16);
              const char sent[] = "fifteen letters";
              char received[16] = "";
              cuda::Event start(0), end(0);
              start.record(stream.get());
              a.fill(0, stream.get());
              a.copy_from(sent, 16, stream.get());
              check(fattn_cuda_copy_async(0, FATTN_COPY_ON_DEVICE, b.get(), a.get(), 16, stream.get()));
              end.record(stream.get());
              stream.synchronize();
              const CudaStub stub(kStub);
              const int64_t waits = stub.calls("cuStreamSynchronize");
              b.copy_to(received, 8, stream.get(), 8);
              if (stub.calls("cuStreamSynchronize") != waits + 1) return std::string("the copy was not waited for");
              if (std::string(received) != "letters") return std::string(received);
              if (!(start.seconds_to(end) >= 0)) return std::string("time runs backwards");
              cuda::Buffer moved = std::move(a);
              a = std::move(moved);
              if (error_thrown_by([&] { a.copy_to(received, 16, nullptr, 1); }).find("stay inside it") == std::string::npos)
                return std::string("out of range");
              const cuda::Memory memory = cuda::memory(0);
              return std::to_string(memory.total_bytes - memory.free_bytes);
            }),
            "32");
}

TEST(CudaApi, Graphs) {
  EXPECT_EQ(
      with_stub([] {
        const CudaStub stub(kStub);
        static int runs = 0;
        stub.kernel(
            "count", [](const void*) { ++runs; }, 0);
        CudaDevice& device = cuda_device(0);
        const CUfunction function = load_kernel(device, "count");
        std::string seen;
        {
          cuda::Stream stream(0);
          const auto body = [&] { launch(device, function, static_cast<CUstream>(stream.get())); };
          cuda::Graph graph(stream, body);
          seen += std::to_string(runs) + " ";
          graph.launch(stream.get());
          graph.launch(stream.get());
          stream.synchronize();
          seen += std::to_string(runs) + " ";
          // What allocates cannot be captured; the stream is not left in capture.
          seen += error_thrown_by([&] { cuda::Graph bad(stream, [&] { device.alloc(1); }); });
          stream.synchronize();
          body();
          seen += " " + std::to_string(runs);
        }
        return stub.alive("graphs") + stub.alive("streams") == 0 ? seen : std::string("something was left over");
      }),
      "0 2 invalid_argument: cuda:0 (Stub GPU 0): allocating memory failed: CUDA error (900); this cannot be part of the capture of a CUDA graph: do "
      "it before or after 3");
}

TEST(CudaApi, BadArgumentsAreErrors) {
  EXPECT_EQ(with_stub([] {
              void* handle = nullptr;
              size_t bytes = 0;
              double peak = 0;
              char host[8] = "";
              cuda::Buffer buffer(0, 8);
              fattn_cuda_info unsized{};
              const std::pair<const char*, fattn_status> calls[] = {
                  {"count", fattn_cuda_count(nullptr, nullptr, 0)},
                  {"query", fattn_cuda_query(0, nullptr)},
                  {"memory", fattn_cuda_memory(0, &bytes, nullptr)},
                  {"malloc", fattn_cuda_malloc(0, 8, nullptr)},
                  {"device", fattn_cuda_malloc(7, 8, &handle)},
                  {"free twice", (fattn_cuda_malloc(0, 8, &handle), fattn_cuda_free(0, handle), fattn_cuda_free(0, handle))},
                  {"host malloc", fattn_cuda_host_malloc(0, 8, nullptr)},
                  {"host free", fattn_cuda_host_free(0, host)},
                  {"host free twice", (fattn_cuda_host_malloc(0, 8, &handle), fattn_cuda_host_free(0, handle), fattn_cuda_host_free(0, handle))},
                  {"direction", fattn_cuda_copy(0, 0, buffer.get(), host, 8, nullptr)},
                  {"to", fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, nullptr, host, 8, nullptr)},
                  {"from", fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, buffer.get(), nullptr, 8, nullptr)},
                  {"range", fattn_cuda_copy(0, FATTN_COPY_TO_HOST, host, buffer.get(), 9, nullptr)},
                  {"byte", fattn_cuda_memset(0, buffer.get(), 256, 8, nullptr)},
                  {"stream", fattn_cuda_stream_synchronize(0, host)},
                  {"event", fattn_cuda_event_record(0, nullptr, nullptr)},
                  {"graph", fattn_cuda_graph_launch(0, nullptr, nullptr)},
                  {"capture", fattn_cuda_graph_begin(0, nullptr)},
                  {"no peak", fattn_cuda_peak(0, FATTN_PEAK_MATRIX - 1, &peak)},
                  {"beyond the peaks", fattn_cuda_peak(0, FATTN_PEAK_ROUND_TRIP + 1, &peak)},
                  {"peak", fattn_cuda_peak(0, FATTN_PEAK_MATRIX, nullptr)},
              };
              std::string wrong;
              for (const auto& [name, status] : calls)
                if (status != FATTN_ERROR_INVALID_ARGUMENT) wrong += std::string(name) + " gave " + fattn_status_name(status) + "; ";
              fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, buffer.get(), nullptr, 8, nullptr);
              if (std::string(fattn_last_error()) != "from is a null pointer") wrong += fattn_last_error();
              if (fattn_cuda_query(0, &unsized) != FATTN_ERROR_ABI) wrong += "a struct without its size";
              if (fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, nullptr, nullptr, 0, nullptr) != FATTN_OK) wrong += "a copy of nothing";
              if (fattn_cuda_free(0, nullptr) != FATTN_OK || fattn_cuda_stream_destroy(0, nullptr) != FATTN_OK) wrong += "destroying nothing";
              cuda::HostBuffer pinned(0, 8), moved = std::move(pinned);
              if (!moved.get() || fattn_cuda_host_free(0, nullptr) != FATTN_OK) wrong += "memory of the host";
              buffer.copy_from(moved.get(), 8);
              cuda::Event event(0);
              event.record();
              event.wait();
              return wrong;
            }),
            "");
}

TEST(CudaApi, WithoutADriverEveryCallSaysWhy) {
  EXPECT_EQ(with_stub(
                [] {
                  void* handle = nullptr;
                  int32_t count = 7;
                  char reason[64] = "";
                  if (fattn_cuda_count(&count, reason, sizeof reason) != FATTN_OK || count != 0) return std::string("counted");
                  if (std::string(reason).rfind("no usable CUDA driver", 0) != 0) return std::string(reason);
                  for (const fattn_status status :
                       {fattn_cuda_malloc(0, 8, &handle), fattn_cuda_free(0, &count), fattn_cuda_synchronize(0), fattn_cuda_stream_create(0, &handle),
                        fattn_cuda_event_create(0, &handle), fattn_cuda_graph_begin(0, &count), fattn_cuda_memset(0, &count, 0, 1, nullptr)})
                    if (status != FATTN_ERROR_UNSUPPORTED) return std::string(fattn_status_name(status));
                  return std::string();
                },
                nullptr, "/nonexistent"),
            "");
}

// A program that loads and unloads the library: no handler of it is left for fork to call, the driver and its contexts stay.
TEST(CudaApi, UnloadingTheLibrary) {
  EXPECT_EQ(with_stub([] {
              const CudaStub stub(kStub);
              for (int i = 0; i < 3; ++i) {
                void* library = dlopen(FATTN_LIBRARY_PATH, RTLD_NOW | RTLD_LOCAL);
                if (!library) return std::string(dlerror());
                const auto malloc = reinterpret_cast<decltype(&fattn_cuda_malloc)>(dlsym(library, "fattn_cuda_malloc"));
                const auto free = reinterpret_cast<decltype(&fattn_cuda_free)>(dlsym(library, "fattn_cuda_free"));
                void* memory = nullptr;
                if (!malloc || !free || malloc(0, 8, &memory) != FATTN_OK || free(0, memory) != FATTN_OK) return std::string("a call failed");
                if (dlclose(library) != 0 || dlopen(FATTN_LIBRARY_PATH, RTLD_NOW | RTLD_NOLOAD)) return std::string("still loaded");
                const std::string child = in_child({}, [] { return std::string("lives"); });
                if (child != "lives") return child;
              }
              CUcontext now = nullptr;
              reinterpret_cast<int (*)(CUcontext*)>(dlsym(dlopen(kStub, RTLD_NOW | RTLD_NOLOAD), "cuCtxGetCurrent"))(&now);
              return std::string(now || stub.alive("contexts") == 0 ? "a context was left current or released" : "");
            }),
            "");
}

}  // namespace
}  // namespace fattn::core
