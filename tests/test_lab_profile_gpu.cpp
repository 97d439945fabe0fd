// CUPTI through a stub: what becomes of its records and counters, and of everything that it can refuse. And the names of the metrics, where NVIDIA's
// own library of them is at hand.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "fattn/system.hpp"
#include "lab/profile/cupti_here.h"
#include "lab/profile/gpu_counters.h"
#include "lab/profile/gpu_trace.h"
#include "lab/profile/operations.h"
#include "lab/profile/recorder.h"
#include "lab/profile/trace_file.h"
#include "stub/cupti_stub.h"

namespace fattn::lab::profile {
namespace {

void collect(const TraceEvent* events, size_t count, void* to) {
  auto& all = *static_cast<std::vector<TraceEvent>*>(to);
  all.insert(all.end(), events, events + count);
}

class CuptiStub : public testing::Test {
 protected:
  void SetUp() override {
    ASSERT_TRUE(cupti) << cupti.reason;
    state() = test::CuptiStubState();
    record_to(collect, &events);
  }
  void TearDown() override {
    stop_gpu_trace();
    record_to(nullptr, nullptr);
  }
  static test::CuptiStubState& state() {
    static void* const library = dlopen(FATTN_STUB_CUPTI_PATH, RTLD_NOW);
    return *reinterpret_cast<test::CuptiStubState* (*)()>(dlsym(library, "stub_state"))();
  }
  std::vector<Counter> count(int* runs = nullptr) const {
    static void* const driver = dlopen(FATTN_STUB_CUDA_PATH, RTLD_NOW);
    EXPECT_EQ(reinterpret_cast<int (*)(unsigned)>(dlsym(driver, "cuInit"))(0), 0);
    return count_on_gpu(cupti, 0, FATTN_STUB_CUDA_PATH, [runs] {
      if (runs) ++*runs;
    });
  }
  static const Counter& named(const std::vector<Counter>& counters, const std::string& name) {
    return *std::find_if(counters.begin(), counters.end(), [&](const Counter& c) { return c.name == name; });
  }
  static void expect_numbers_or_reasons(const std::vector<Counter>& counters) {
    EXPECT_EQ(counters.size(), gpu_metrics().size() + 2);
    for (const Counter& c : counters) EXPECT_NE(c.value.has_value(), !c.reason.empty()) << c.name << ": " << c.reason;
  }
  const Cupti cupti = open_cupti({FATTN_STUB_CUPTI_PATH});
  std::vector<TraceEvent> events;
};

TEST_F(CuptiStub, SmallRecordsBecomeEventsOnOurClock) {
  ASSERT_EQ(start_gpu_trace(cupti, {true, true}), "");
  EXPECT_EQ(state().enabled, 5);
  const int64_t before = now_ns();
  flush_gpu_trace();
  const int64_t after = now_ns();
  stop_gpu_trace();
  EXPECT_EQ(state().enabled, 0);
  flush_events();
  std::map<EventKind, TraceEvent> by;
  for (const TraceEvent& e : events) {
    EXPECT_TRUE(is_sound(e)) << e.name;
    if (!by.count(e.kind)) by[e.kind] = e;
  }
  const TraceEvent& kernel = by.at(EventKind::kKernel);
  EXPECT_STREQ(kernel.name, "void kernel<64>(float*)");
  EXPECT_NE(std::string(kernel.detail).find("grid 132x1x1, block 384x1x1, 168 registers, 200 KiB shared"), std::string::npos) << kernel.detail;
  EXPECT_EQ(kernel.device, 0);
  EXPECT_EQ(kernel.thread, 7);
  EXPECT_EQ(kernel.end_ns - kernel.begin_ns, 2000);
  constexpr int64_t kNear = 1'000'000;  // the clocks are compared to microseconds; 5 ms apart they are not
  EXPECT_GT(kernel.end_ns, before - kNear);
  EXPECT_LT(kernel.end_ns, after + kNear);
  EXPECT_EQ(by.at(EventKind::kDriver).thread, 42);
  EXPECT_EQ(by.at(EventKind::kDriver).device, -1);
  EXPECT_STREQ(by.at(EventKind::kDriver).name, "cuLaunchKernelEx");
  EXPECT_EQ(by.at(EventKind::kDriver).correlation, kernel.correlation);
  EXPECT_STREQ(by.at(EventKind::kCopy).name, "copy host to device");
  EXPECT_EQ(by.at(EventKind::kCopy).bytes, 4096);
  EXPECT_EQ(by.at(EventKind::kSet).bytes, 64);
  EXPECT_EQ(by.at(EventKind::kMemory).bytes, 1 << 20);
}

TEST_F(CuptiStub, SmallRefusedTracesSayWhy) {
  state().enable_kernels_result = 39;
  const std::string held = start_gpu_trace(cupti, {true, true});
  EXPECT_NE(held.find("another profiler in this process holds CUPTI"), std::string::npos) << held;
  EXPECT_EQ(state().enabled, 0);
  state() = test::CuptiStubState();
  state().register_result = 999;
  EXPECT_NE(start_gpu_trace(cupti, {true, true}).find("cuptiActivityRegisterCallbacks failed: CUPTI_ERROR_STUBBORN"), std::string::npos);
  // Without the rest there are kernels all the same.
  state() = test::CuptiStubState();
  state().enable_result = 27;
  EXPECT_NE(start_gpu_trace(cupti, {true, false}), "");
  EXPECT_EQ(state().enabled, 1);
}

TEST_F(CuptiStub, SmallCountersAreNumbersOfOneCall) {
  int runs = 0;
  const std::vector<Counter> counters = count(&runs);
  expect_numbers_or_reasons(counters);
  EXPECT_EQ(runs, 3);
  EXPECT_EQ(state().open_sessions, 0);
  EXPECT_DOUBLE_EQ(*named(counters, "gpu_time").value, 100e-9);
  EXPECT_DOUBLE_EQ(*named(counters, "dram_bytes").value, 200 + 300);
  EXPECT_DOUBLE_EQ(*named(counters, "l2_bytes").value, 400 + 500 - 600 - 700);
  EXPECT_DOUBLE_EQ(*named(counters, "l2_hit_share").value, 8);
}

TEST_F(CuptiStub, SmallAChipWithoutClustersHasL2BytesAllTheSame) {
  state().unknown_metric = "l1tex__m_xbar2l1tex_read_bytes_mem_dshared.sum";
  const std::vector<Counter> counters = count();
  expect_numbers_or_reasons(counters);
  EXPECT_EQ(named(counters, "cluster_read_bytes").reason, "this chip has no such counter");
  EXPECT_TRUE(named(counters, "l2_bytes").value);
}

TEST_F(CuptiStub, SmallWhatIsRefusedIsAReason) {
  const auto reason = [&](const char* name) {
    const std::vector<Counter> counters = count();
    expect_numbers_or_reasons(counters);
    EXPECT_EQ(state().open_sessions, 0);
    return named(counters, name).reason;
  };
  state().profiler_result = 35;
  EXPECT_NE(reason("dram_bytes").find("ERR_NVGPUCTRPERM"), std::string::npos);
  state() = test::CuptiStubState();
  state().availability_result = 26;
  EXPECT_NE(reason("l2_bytes").find("another program has the counters"), std::string::npos);
  state() = test::CuptiStubState();
  state().push_result = 999;
  EXPECT_NE(reason("occupancy").find("cuptiRangeProfilerPushRange failed"), std::string::npos);
  state() = test::CuptiStubState();
  state().passes = -1;
  EXPECT_NE(reason("occupancy").find("not done after 400 passes"), std::string::npos);
  state() = test::CuptiStubState();
  state().cut_short = true;
  EXPECT_EQ(reason("occupancy"), "the profiler gave no number for it");
}

TEST(Cupti, SmallThatIsNotHereOrIncompleteSaysSo) {
  const Cupti none = open_cupti({"/nonexistent/libcupti.so.13"});
  EXPECT_FALSE(none);
  EXPECT_NE(none.reason.find("pip install nvidia-cuda-cupti"), std::string::npos);
  EXPECT_EQ(start_gpu_trace(none, {true, true}), none.reason);
  for (const Counter& c : count_on_gpu(none, 0, "", [] {})) EXPECT_FALSE(c.reason.empty());
  const Cupti old = open_cupti({FATTN_STUB_CUPTI_INCOMPLETE_PATH});
  EXPECT_TRUE(old);
  EXPECT_NE(old.no_counters.find("cuptiRangeProfilerSetConfig"), std::string::npos);
}

// Parameters of libnvperf_host, as its header of 12.x and 13.x has them (nvperf_host.h, nvperf_cuda_host.h).
struct InitializeHost {
  size_t size = sizeof(InitializeHost);
  void* priv = nullptr;
};
struct ScratchSize {
  size_t size = sizeof(ScratchSize);
  void* priv = nullptr;
  const char* chip = nullptr;
  const uint8_t* availability = nullptr;
  size_t bytes = 0;
};
struct Evaluator {
  size_t size = offsetof(Evaluator, end);
  void* priv = nullptr;
  uint8_t* scratch = nullptr;
  size_t scratch_bytes = 0;
  const char* chip = nullptr;
  const uint8_t* availability = nullptr;
  const uint8_t* data = nullptr;
  size_t data_bytes = 0;
  void* evaluator = nullptr;
  char end = 0;
};
struct Convert {
  size_t size = sizeof(Convert);
  void *priv = nullptr, *evaluator = nullptr;
  const char* metric = nullptr;
  void* request = nullptr;
  size_t request_bytes = 0;
};

// Where FATTN_TEST_NVPERF says, or beside the CUPTI of this machine.
void* nvperf() {
  const char* const given = std::getenv("FATTN_TEST_NVPERF");
  if (given) return dlopen(given, RTLD_NOW);
  for (const std::string& path : cupti_candidates(toolkit_libraries()))
    if (const size_t slash = path.rfind('/'); slash != std::string::npos)
      if (void* const library = dlopen((path.substr(0, slash) + "/libnvperf_host.so").c_str(), RTLD_NOW)) return library;
  return nullptr;
}

TEST(Cupti, MetricsAreKnownOnEveryChip) {
  void* const library = nvperf();
  if (!library) GTEST_SKIP() << "libnvperf_host is not here (pip install nvidia-cuda-cupti has it; FATTN_TEST_NVPERF names the file)";
  const auto find = [&]<class P>(int (*&function)(P*), const char* symbol) {
    function = reinterpret_cast<int (*)(P*)>(dlsym(library, symbol));
    ASSERT_NE(function, nullptr) << symbol;
  };
  int (*initialize)(InitializeHost*) = nullptr;
  int (*scratch_size)(ScratchSize*) = nullptr;
  int (*make)(Evaluator*) = nullptr;
  int (*convert)(Convert*) = nullptr;
  find(initialize, "NVPW_InitializeHost");
  find(scratch_size, "NVPW_CUDA_MetricsEvaluator_CalculateScratchBufferSize");
  find(make, "NVPW_CUDA_MetricsEvaluator_Initialize");
  find(convert, "NVPW_MetricsEvaluator_ConvertMetricNameToMetricEvalRequest");
  InitializeHost host;
  ASSERT_EQ(initialize(&host), 0);
  int asked = 0;
  for (const char* chip : {"GA100", "GH100", "GB100", "AD102"}) {
    ScratchSize size;
    size.chip = chip;
    ASSERT_EQ(scratch_size(&size), 0) << chip;
    std::vector<uint8_t> scratch(size.bytes + 64);
    Evaluator evaluator;
    evaluator.chip = chip, evaluator.scratch = scratch.data(), evaluator.scratch_bytes = size.bytes;
    ASSERT_EQ(make(&evaluator), 0) << chip;
    const auto knows = [&](const char* metric) {
      alignas(8) char request[64] = {};
      Convert c;
      c.evaluator = evaluator.evaluator, c.metric = metric, c.request = request, c.request_bytes = 12;
      return convert(&c) == 0;
    };
    const bool hopper = std::strncmp(chip, "GH", 2) == 0, clusters = hopper || std::strncmp(chip, "GB", 2) == 0;
    for (const GpuMetric& m : gpu_metrics()) {
      ++asked;
      const bool may_lack = (!clusters && std::strstr(m.metric, "dshared")) || (!hopper && std::strstr(m.metric, "gmma"));
      EXPECT_TRUE(knows(m.metric) || may_lack) << chip << " does not know " << m.metric;
    }
    EXPECT_FALSE(knows("dram__bytes_dreamt.sum"));
  }
  EXPECT_EQ(asked, 4 * static_cast<int>(gpu_metrics().size()));
}

}  // namespace
}  // namespace fattn::lab::profile

// LeakSanitizer, in builds that have it, crashed here now and then: threads of CUPTI end while it looks at their memory. It does not look.
extern "C" const char* __lsan_default_options();
extern "C" const char* __lsan_default_options() { return "detect_leaks=0"; }
