// Clock and power of a GPU in a record, on a stub of NVML: which readings count, and what is said where there are none. Needs no GPU.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "in_child.h"
#include "measure/environment.h"
#include "measure/gpu_sensors.h"
#include "measure/metered_sampler.h"
#include "measure/record.h"
#include "stub/nvml_stub.h"

namespace fattn::measure {
namespace {

using namespace std::chrono_literals;

constexpr const char* kStub = FATTN_STUB_NVML_PATH;

// The stub's numbers, as at first.
test::NvmlStubState& stub() {
  static void* const library = dlopen(kStub, RTLD_NOW | RTLD_LOCAL);
  auto* state = reinterpret_cast<test::NvmlStubState* (*)()>(dlsym(library, "stub_state"))();
  *state = {};
  return *state;
}

const Nvml& stubbed() {
  static const Nvml library = open_nvml({"/nowhere/libnvidia-ml.so.1", kStub});
  return library;
}

fattn_cuda_info gpu_at(const char* address) {
  fattn_cuda_info info{};
  std::strcpy(info.pci_bus_id, address);
  return info;
}
const fattn_cuda_info kGpu = gpu_at("0000:60:00.0");

TEST(GpuSensors, ReadTheDeviceAtThePciAddress) {
  stub();
  const GpuSensors sensors(kGpu, stubbed());
  EXPECT_EQ(sensors.problem(), "");
  EXPECT_EQ(sensors.read(), (GpuReading{1500, 600}));
  EXPECT_TRUE(sensors.power_is_instant());
  EXPECT_EQ(sensors.power_limit_w(), 700);
}

TEST(GpuSensors, TakeWhatThereIs) {
  test::NvmlStubState& state = stub();
  state.instant_mw = state.limit_mw = -1;
  const GpuSensors old(kGpu, stubbed());
  EXPECT_FALSE(old.power_is_instant());
  EXPECT_EQ(old.read(), (GpuReading{1500, 400}));
  EXPECT_FALSE(old.power_limit_w());

  state.average_mw = -1;
  const GpuSensors no_power(kGpu, stubbed());
  EXPECT_EQ(no_power.problem(), "");
  EXPECT_EQ(no_power.read(), (GpuReading{1500, std::nullopt}));
}

TEST(GpuSensors, SayWhatHoldsTheClockBack) {
  test::NvmlStubState& state = stub();
  const GpuSensors sensors(kGpu, stubbed());
  EXPECT_EQ(sensors.read().held_back, 0u) << "an idle GPU is not held back";
  state.reasons = 0x1 | 0x2 | 0x40 | kPowerCap;
  EXPECT_EQ(sensors.read().held_back, 0x40 | kPowerCap);
  EXPECT_EQ(median_of({{1500, 600, kPowerCap}, {1400, 600, 0}, {1400, 600, 0x20}}).held_back, 0x20 | kPowerCap);
  Row row;
  row.gpu.held_back = 0x20 | kPowerCap;
  EXPECT_EQ(to_json(row)["held_back_by"].dump(), "[\"power_cap\",\"thermal\"]");
}

TEST(GpuSensors, SayWhyThereAreNoReadings) {
  test::NvmlStubState& state = stub();
  const auto problem = [](const char* address, const std::vector<std::string>& libraries) {
    const Nvml library = open_nvml(libraries);
    const GpuSensors sensors(gpu_at(address), library);
    EXPECT_EQ(sensors.read(), GpuReading());
    EXPECT_FALSE(sensors.power_limit_w());
    return sensors.problem();
  };
  EXPECT_NE(problem("0000:60:00.0", {"/nowhere/libnvidia-ml.so.1"}).find("no usable NVML"), std::string::npos);
  EXPECT_NE(problem("0000:60:00.0", {FATTN_STUB_NVML_INCOMPLETE_PATH}).find("has no function nvmlDeviceGetClockInfo"), std::string::npos);
  EXPECT_NE(problem("0000:61:00.0", {kStub}).find("no device 0000:61:00.0: Not Found"), std::string::npos);
  state.clock_mhz = state.instant_mw = state.average_mw = -1;
  EXPECT_NE(problem("0000:60:00.0", {kStub}).find("neither clock nor power"), std::string::npos);
  state.init = 999;
  EXPECT_NE(problem("0000:60:00.0", {kStub}).find("nvmlInit failed: Stubborn"), std::string::npos);
}

TEST(GpuSensors, EnvironmentHasThemOrTheReason) {
  stub();  // which is found by its soname from now on
  const auto of_gpu = [](size_t index) {
    return test::in_child({{"FATTN_CUDA_DRIVER", FATTN_STUB_CUDA_PATH}}, [index] {
      const nlohmann::ordered_json gpu = environment()["gpus"][index];
      return gpu["power_limit_w"].dump() + " " + gpu["power_reading"].dump() + " " + gpu["sensors_problem"].dump();
    });
  };
  EXPECT_EQ(of_gpu(0), "700.0 \"instant\" null");
  EXPECT_EQ(of_gpu(1), "null null \"NVML finds no device 0000:61:00.0: Not Found\"");
}

TEST(GpuWatch, KeepsWhatIsMeasuredWhileItLastsAndNothingElse) {
  test::NvmlStubState& state = stub();
  const GpuSensors sensors(kGpu, stubbed());
  {
    GpuWatch watch(sensors, GpuWatch::Clock::now() - 1s);
    std::this_thread::sleep_for(15ms);
    EXPECT_TRUE(watch.stop().empty()) << "a number from before was taken for one of now";
  }
  {
    GpuWatch watch(sensors, GpuWatch::Clock::now());
    std::this_thread::sleep_for(GpuWatch::kSurelyMeasured + 50ms);
    EXPECT_GE(watch.stop().size(), 1u);
  }
  state.every_ms = 5;
  {
    GpuWatch watch(sensors, GpuWatch::Clock::now() + 1h);
    std::this_thread::sleep_for(50ms);
    EXPECT_TRUE(watch.stop().empty()) << "what ran before was not left out";
  }
  GpuWatch watch(sensors, GpuWatch::Clock::now());
  std::this_thread::sleep_for(100ms);
  EXPECT_TRUE(watch.found());
  const std::vector<GpuReading> readings = watch.stop();
  ASSERT_GE(readings.size(), 3u);
  EXPECT_EQ(readings.front().sm_clock_mhz, 1500);
  EXPECT_NEAR(*readings.front().power_w, 600, 0.01);
}

// A contestant whose calls last so long.
struct Fake {
  double call;
  int calls = 0, most_calls = 1 << 30;  // then it fails
  std::vector<double> operator()(int samples, int warmup) {
    calls += samples + warmup;
    if (calls > most_calls) throw std::runtime_error("no more");
    std::this_thread::sleep_for(std::chrono::duration<double>(call * (samples + warmup)));
    return std::vector<double>(static_cast<size_t>(samples), call);
  }
};
constexpr int kCallsInTurns = 1 + 1 + 10;  // to warm up, to bring the data back, and the samples

std::vector<Samples> in_turns(MeteredSampler& metered) {
  SamplingOptions options;
  options.repeats = 10;
  options.min_seconds = 0;
  options.warmup = 0;
  return sample_in_turns(
      {std::ref(metered)}, options, [](size_t, const std::exception& e) { ADD_FAILURE() << e.what(); }, [](size_t, bool) {},
      [&](size_t, bool last) { metered.end_turn(last); });
}

TEST(MeteredSampler, ShortCallsAreWatchedBehindTheirSamplesOnly) {
  stub().every_ms = 40;
  const GpuSensors sensors(kGpu, stubbed());
  Fake fake{1e-4};
  MeteredSampler metered(std::ref(fake), &sensors);
  const auto start = std::chrono::steady_clock::now();
  const std::vector<Samples> samples = in_turns(metered);
  EXPECT_LT(std::chrono::steady_clock::now() - start, 1s);
  EXPECT_EQ(samples[0].seconds.size(), 10u) << "what is repeated for the readings is no sample";
  EXPECT_GT(fake.calls, kCallsInTurns);
  EXPECT_EQ(metered.median().sm_clock_mhz, 1500);
  EXPECT_NEAR(*metered.median().power_w, 600, 0.01);
}

TEST(MeteredSampler, LongCallsAreNotRepeated) {
  stub().every_ms = 1;
  const GpuSensors sensors(kGpu, stubbed());
  Fake fake{0.03};
  MeteredSampler metered(std::ref(fake), &sensors);
  in_turns(metered);
  EXPECT_EQ(fake.calls, kCallsInTurns);
  EXPECT_EQ(metered.median().sm_clock_mhz, 1500);
}

TEST(MeteredSampler, WhatFailsWhileItIsWatchedKeepsItsSamples) {
  stub().every_ms = 1000;
  const GpuSensors sensors(kGpu, stubbed());
  Fake fake{1e-4};
  fake.most_calls = kCallsInTurns;
  MeteredSampler metered(std::ref(fake), &sensors);
  EXPECT_EQ(in_turns(metered)[0].seconds.size(), 10u);
  EXPECT_GT(fake.calls, kCallsInTurns);
  EXPECT_EQ(metered.median(), GpuReading());
}

TEST(MeteredSampler, IsThePlainSamplerWithoutSensors) {
  Fake fake{1e-4};
  MeteredSampler metered(std::ref(fake), nullptr);
  in_turns(metered);
  EXPECT_EQ(fake.calls, kCallsInTurns);
  EXPECT_EQ(metered.median(), GpuReading());
}

TEST(Record, HasClockAndPowerOrNull) {
  Row row;
  row.cost = cost_of(row.spec, Pass::kForward);
  EXPECT_TRUE(to_json(row)["sm_clock_mhz"].is_null());
  EXPECT_TRUE(to_json(row)["power_w"].is_null());
  row.gpu = median_of({{1400, 500}, {1500, std::nullopt}, {1600, 700}});
  EXPECT_EQ(to_json(row)["sm_clock_mhz"], 1500);
  EXPECT_EQ(to_json(row)["power_w"], 600);
  row.fail({Status::kFailed, "died"});
  EXPECT_TRUE(to_json(row)["sm_clock_mhz"].is_null());
}

}  // namespace
}  // namespace fattn::measure
