// What the planner decides for tensors on a GPU, with made-up devices: backend, level, architecture, and the reasons why not.
#include <gtest/gtest.h>

#include <string>

#include "fattn/problem.hpp"
#include "plan/architectures.h"
#include "plan/plan.h"

namespace fattn::core {
namespace {

CudaDeviceInfo gpu;
const CudaDeviceInfo& the_gpu(int) { return gpu; }

Plan plan_on(int capability, DType dtype, Options options = {}, bool on_gpu = true) {
  gpu = CudaDeviceInfo();
  gpu.name = "made-up";
  gpu.major = capability / 10;
  gpu.minor = capability % 10;
  Tensor x(nullptr, dtype, {1, 64, 2, 64});
  if (on_gpu) x = x.on(Device::kCuda, 0, nullptr);
  return make_plan(validate(describe(ForwardTensors{x, x, x, x, {}, {}}, options)), cpu_info(), the_gpu);
}

std::string reason_of(int capability, DType dtype, Options options = {}, bool on_gpu = true) {
  try {
    plan_on(capability, dtype, options, on_gpu);
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kUnsupported);
    return e.what();
  }
  return {};
}

void expect_contains(const std::string& text, const std::string& part) { EXPECT_NE(text.find(part), std::string::npos) << text; }

// Jetson boards (7.2, 8.7, 10.1, 11.0) share no machine code with anything.
TEST(CudaPlanSmall, ArchitectureIsTheNewestOfTheSameMajorVersion) {
  const struct {
    int capability, arch, level;
  } cases[] = {{75, 75, 75}, {80, 80, 80}, {86, 86, 80}, {87, 87, 80}, {89, 89, 80}, {90, 90, 80}, {100, 100, 80}, {103, 100, 80}, {121, 120, 80}};
  for (const auto& c : cases) {
    const Plan plan = plan_on(c.capability, DType::kF16);
    EXPECT_EQ(plan.backend, Backend::kCuda);
    EXPECT_EQ(plan.cuda.arch, c.arch) << c.capability;
    EXPECT_EQ(plan.cuda.level, c.level) << c.capability;
  }
}

TEST(CudaPlanSmall, UnknownDevicesAreRefused) {
  for (const int capability : {50, 61, 70, 72, 88, 101, 110, 130})
    expect_contains(reason_of(capability, DType::kF16), "the kernels are for capability 7.5");
}

TEST(CudaPlanSmall, LevelCanBeLoweredButNotRaised) {
  Options options;
  options.cuda_level = 75;
  EXPECT_EQ(plan_on(90, DType::kF16, options).cuda.level, 75);
  EXPECT_EQ(plan_on(90, DType::kF16, options).cuda.arch, 90);
  options.cuda_level = 80;
  expect_contains(reason_of(75, DType::kF16, options), "cuda_level is 80");
}

TEST(CudaPlanSmall, AlgorithmV3IsForHopperAlone) {
  Options options;
  options.algorithm = Algorithm::kV3;
  EXPECT_EQ(reason_of(90, DType::kF16, options), "");
  for (const int capability : {80, 89, 100, 120}) expect_contains(reason_of(capability, DType::kF16, options), "compute capability 9.0");
  expect_contains(reason_of(90, DType::kF16, options, false), "backend cpu has standard, v1 and v2");
  options.cuda_level = 80;
  expect_contains(reason_of(90, DType::kF16, options), "cuda_level is 80, which is of algorithm v2");
  options = {};
  options.backend = Backend::kReference;
  options.algorithm = Algorithm::kV3;
  expect_contains(reason_of(90, DType::kF16, options, false), "backend reference has algorithm standard only");
}

TEST(CudaPlanSmall, BackendAndDeviceMustFit) {
  Options options;
  options.backend = Backend::kCpu;
  expect_contains(reason_of(90, DType::kBF16, options), "backend cpu computes in host memory");
  options.backend = Backend::kReference;
  expect_contains(reason_of(90, DType::kBF16, options), "backend reference computes in host memory");
  options.backend = Backend::kCuda;
  expect_contains(reason_of(90, DType::kBF16, options, false), "tensors are on the CPU");
  options.algorithm = Algorithm::kStandard;
  EXPECT_EQ(reason_of(90, DType::kBF16, options), "") << "whether there is cuBLASLt the backend says";
  options.cuda_level = 80;
  expect_contains(reason_of(90, DType::kBF16, options), "cuda_level is 80, which is of algorithm v2");
}

TEST(CudaPlanSmall, TensorsOnTheCpuNeverAskForADevice) {
  const auto no_gpu = [](int) -> const CudaDeviceInfo& { throw Error(ErrorCode::kInternal, "asked for a device"); };
  const Tensor x(nullptr, DType::kF32, {1, 64, 2, 64});
  EXPECT_EQ(make_plan(validate(describe(ForwardTensors{x, x, x, x, {}, {}}, {})), cpu_info(), no_gpu).backend, Backend::kCpu);
}

}  // namespace
}  // namespace fattn::core
