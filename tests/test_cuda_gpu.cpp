// The CUDA backend on a real GPU: what the table of cases does not show. Without a GPU every test is skipped.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fattn/attention.hpp"
#include "fattn/device.hpp"
#include "fattn/plan.hpp"
#include "temporary_folder.h"
#include "testing/cases.h"
#include "testing/device_mirror.h"
#include "testing/run.h"

namespace fattn {
namespace {

using testing::Case;
using testing::CaseInputs;
using testing::make_inputs;
using testing::Outputs;
using testing::run_passes;

class CudaGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string reason;
    if (cuda::count(&reason) == 0) GTEST_SKIP() << reason;
  }
};

Case shape(DType dtype, int64_t batch, int64_t seqlen_q, int64_t seqlen_k, int64_t nheads, int64_t nheads_k, int64_t headdim, bool causal) {
  Case c;
  c.name = "gpu";
  c.dtype = dtype;
  c.batch = batch;
  c.seqlen_q = seqlen_q;
  c.seqlen_k = seqlen_k;
  c.nheads = nheads;
  c.nheads_k = nheads_k;
  c.headdim = c.headdim_v = headdim;
  c.causal = causal;
  c.seed = 7;
  return c;
}

Options on_cuda(const Case& c) {
  Options options;
  options.causal = c.causal;
  options.backend = Backend::kCuda;
  return options;
}

// Contiguous tensors of a forward problem in device memory, `skew` elements into their allocations.
struct DeviceForward {
  std::vector<cuda::Buffer> memory;
  ForwardTensors t;

  explicit DeviceForward(const Case& c, int64_t skew = 0) {
    const auto make = [&](DType dtype, std::initializer_list<int64_t> dims) {
      const Tensor view(nullptr, dtype, dims);
      const size_t bytes = static_cast<size_t>(view.size() + skew) * size_of(dtype);
      memory.emplace_back(0, bytes);
      memory.back().fill(0x3c);  // small finite numbers in fp16 and bf16
      return view.on(Device::kCuda, 0, static_cast<char*>(memory.back().get()) + static_cast<size_t>(skew) * size_of(dtype));
    };
    t.q = make(c.dtype, {c.batch, c.seqlen_q, c.nheads, c.headdim});
    t.k = make(c.dtype, {c.batch, c.seqlen_k, c.nheads_k, c.headdim});
    t.v = make(c.dtype, {c.batch, c.seqlen_k, c.nheads_k, c.headdim_v});
    t.o = make(c.dtype, {c.batch, c.seqlen_q, c.nheads, c.headdim_v});
    t.lse = make(DType::kF32, {c.batch, c.nheads, c.seqlen_q});
  }
};

std::vector<uint16_t> halves(const Tensor& tensor, int64_t first, int64_t count) {
  std::vector<uint16_t> host(static_cast<size_t>(count));
  check(fattn_cuda_copy(0, FATTN_COPY_TO_HOST, host.data(), static_cast<const uint16_t*>(tensor.data()) + first, 2 * host.size(), nullptr));
  return host;
}

float float_of_bf16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

TEST_F(CudaGpu, ForwardHasTheSameBitsEveryRun) {
  const Case c = shape(DType::kBF16, 2, 700, 900, 4, 2, 128, true);
  CaseInputs in = make_inputs(c);
  Case forward_only = c;
  forward_only.backward = false;
  const Outputs first = run_passes(forward_only, in, on_cuda(c));
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(testing::same_bits(first, run_passes(forward_only, in, on_cuda(c))));
}

float float_of_f16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  if (exponent == 31) return std::nanf("");  // none is expected
  const float magnitude = std::ldexp(static_cast<float>(exponent == 0 ? fraction : fraction + 1024), std::max(exponent, 1) - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

// Inf and NaN anywhere give NaN.
std::vector<float> numbers(const Tensor& tensor) {
  if (tensor.dtype() == DType::kF32) {
    std::vector<float> host(static_cast<size_t>(tensor.size()));
    check(fattn_cuda_copy(0, FATTN_COPY_TO_HOST, host.data(), tensor.data(), 4 * host.size(), nullptr));
    return host;
  }
  const auto to_float = tensor.dtype() == DType::kF16 ? float_of_f16 : float_of_bf16;
  const std::vector<uint16_t> bits = halves(tensor, 0, tensor.size());
  std::vector<float> out(bits.size());
  std::transform(bits.begin(), bits.end(), out.begin(), to_float);
  return out;
}

// Numbers of either sign up to about 2, none of them like its neighbours.
void fill_with_noise(const Tensor& tensor, uint32_t seed) {
  std::vector<uint16_t> host(static_cast<size_t>(tensor.size()));
  const uint32_t largest = 0x4000, smallest = tensor.dtype() == DType::kF16 ? 0x2c00 : 0x3d80;
  uint32_t state = seed * 2654435761u + 1;
  for (uint16_t& value : host) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<uint16_t>((state & 0x8000) | (smallest + (state >> 16) % (largest - smallest)));
  }
  check(fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, tensor.data(), host.data(), 2 * host.size(), nullptr));
}

// The largest difference over the largest magnitude; NaN if there is one.
double difference(const Tensor& a, const Tensor& b) {
  const std::vector<float> x = numbers(a), y = numbers(b);
  double most = 0, magnitude = 0;
  for (size_t i = 0; i < x.size(); ++i) {
    const double d = std::abs(static_cast<double>(x[i]) - static_cast<double>(y[i]));
    if (!std::isfinite(d)) return std::nan("");
    most = std::max(most, d);
    magnitude = std::max(magnitude, std::abs(static_cast<double>(y[i])));
  }
  return most / magnitude;
}

// Hopper's kernels against v2's where a multiprocessor computes many tiles of many blocks one after the other, which the table of cases is too small
// for: rings of stages go round, tiles are joined, warpgroups skip blocks; with a scale of 2 weights leave their window.
TEST_F(CudaGpu, V3AgreesWithV2OverManyTiles) {
  for (const int64_t headdim : {64, 96, 128, 192, 256})
    for (const bool causal : {false, true}) {
      const Case c = shape(headdim == 96 ? DType::kF16 : DType::kBF16, 3, 1030, 1300, 24, 8, headdim, causal);
      DeviceForward d(c);
      uint32_t seed = 1;
      for (const Tensor& t : {d.t.q, d.t.k, d.t.v}) fill_with_noise(t, seed++);
      DeviceForward other(c);
      ForwardTensors v2 = d.t;
      v2.o = other.t.o, v2.lse = other.t.lse;
      for (const double scale : {1 / std::sqrt(static_cast<double>(headdim)), 2.0}) {
        Options options = on_cuda(c);
        options.softmax_scale = scale;
        options.algorithm = Algorithm::kV3;
        if (!supported(describe(d.t, options))) GTEST_SKIP() << "no kernels of v3 for this device";
        forward(d.t, options);
        options.algorithm = Algorithm::kV2;
        forward(v2, options);
        EXPECT_LT(difference(d.t.o, v2.o), 0.02) << headdim << " " << causal << " " << scale;
        EXPECT_LT(difference(d.t.lse, v2.lse), 1e-5) << headdim << " " << causal << " " << scale;
      }
    }
}

// The gradients of many tiles, where rings of stages go round and several query heads share a key head; dq is summed in any order.
TEST_F(CudaGpu, V3BackwardAgreesWithV2OverManyTiles) {
  for (const auto& [headdim, headdim_v] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}, {64, 128}})
    for (const bool causal : {false, true})
      for (const auto& [seqlen_q, seqlen_k] : {std::pair{1030, 1300}, {1300, 1030}, {1024, 1024}}) {
        Case c = shape(headdim == 96 ? DType::kF16 : DType::kBF16, 2, seqlen_q, seqlen_k, 12, 4, headdim, causal);
        c.headdim_v = headdim_v;
        const DeviceForward d(c), more(c), v3(c), v2(c);  // q, k, v, o; dout in the place of o; dq, dk, dv in the places of q, k, v
        uint32_t seed = 1;
        for (const Tensor& t : {d.t.q, d.t.k, d.t.v, more.t.o}) fill_with_noise(t, seed++);
        Options options = on_cuda(c);
        options.algorithm = Algorithm::kV3;
        if (!supported(describe(d.t, options))) GTEST_SKIP() << "no kernels of v3 for this device";
        options.algorithm = Algorithm::kV2;
        forward(d.t, options);
        const auto gradients = [&](const DeviceForward& to) {
          backward({d.t.q, d.t.k, d.t.v, d.t.o, d.t.lse, more.t.o, to.t.q, to.t.k, to.t.v}, options);
        };
        gradients(v2);
        options.algorithm = Algorithm::kV3;
        for (const bool deterministic : {false, true}) {
          for (const Tensor& t : {v3.t.q, v3.t.k, v3.t.v}) check(fattn_cuda_memset(0, t.data(), 0xff, 2 * static_cast<size_t>(t.size()), nullptr));
          options.deterministic = deterministic;
          gradients(v3);
          const std::string where = std::to_string(headdim) + "/" + std::to_string(headdim_v) + (causal ? " causal " : " ") +
                                    std::to_string(seqlen_q) + (deterministic ? " deterministic" : "");
          EXPECT_LT(difference(v3.t.q, v2.t.q), 0.02) << where;
          EXPECT_LT(difference(v3.t.k, v2.t.k), 0.02) << where;
          EXPECT_LT(difference(v3.t.v, v2.t.v), 0.02) << where;
        }
      }
}

TEST_F(CudaGpu, DeterministicBackwardHasTheSameBitsEveryRun) {
  for (const Algorithm algorithm : {Algorithm::kV2, Algorithm::kV3})
    for (const int64_t headdim : {64, 128, 256}) {
      const Case c = shape(DType::kBF16, 2, 700, 900, 4, 2, headdim, headdim == 128);
      CaseInputs in = make_inputs(c);
      Options options = on_cuda(c);
      options.deterministic = true;
      options.algorithm = algorithm;
      if (!supported(describe(DeviceForward(c).t, options))) continue;  // no v3 for this device
      const Outputs first = run_passes(c, in, options);
      for (int i = 0; i < 5; ++i) EXPECT_TRUE(testing::same_bits(first, run_passes(c, in, options))) << headdim;
    }
}

// Pointers that no 16-byte copy can take give the same numbers through v2's slower path.
TEST_F(CudaGpu, MisalignedPointersGiveTheSameNumbers) {
  const Case c = shape(DType::kF16, 1, 130, 150, 2, 1, 64, true);
  DeviceForward aligned(c), skewed(c, 3);
  std::vector<uint16_t> values(static_cast<size_t>(aligned.t.q.size()));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<uint16_t>(0x3000 + (i * 2654435761u >> 20) % 0x0a00);
  const auto fill = [&](const Tensor& to) {
    check(fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, to.data(), values.data(), 2 * std::min(values.size(), static_cast<size_t>(to.size())), nullptr));
  };
  for (DeviceForward* d : {&aligned, &skewed})
    for (const Tensor* t : {&d->t.q, &d->t.k, &d->t.v}) fill(*t);
  Options options = on_cuda(c);
  options.algorithm = Algorithm::kV2;
  forward(aligned.t, options);
  forward(skewed.t, options);
  const std::vector<uint16_t> a = halves(aligned.t.o, 0, aligned.t.o.size()), b = halves(skewed.t.o, 0, skewed.t.o.size());
  EXPECT_EQ(a, b);
}

TEST_F(CudaGpu, ACallCanBeCapturedInAGraph) {
  const Case c = shape(DType::kBF16, 2, 512, 512, 4, 4, 64, true);
  DeviceForward d(c);
  const Plan plan(d.t, on_cuda(c));
  const cuda::Stream stream(0);
  cuda::Buffer workspace(0, plan.workspace_bytes());
  plan.execute(d.t, workspace.get(), workspace.bytes(), stream.get());
  stream.synchronize();
  const std::vector<uint16_t> direct = halves(d.t.o, 0, d.t.o.size());
  const cuda::Graph graph(stream, [&] { plan.execute(d.t, workspace.get(), workspace.bytes(), stream.get()); });
  check(fattn_cuda_memset(0, d.t.o.data(), 0xff, 2 * static_cast<size_t>(d.t.o.size()), stream.get()));
  for (int i = 0; i < 3; ++i) graph.launch(stream.get());
  stream.synchronize();
  EXPECT_EQ(halves(d.t.o, 0, d.t.o.size()), direct);
}

TEST_F(CudaGpu, ABackwardCallCanBeCapturedInAGraph) {
  const Case c = shape(DType::kBF16, 1, 512, 512, 4, 4, 128, false);
  DeviceForward d(c), gradients(c), more(c);
  forward(d.t, on_cuda(c));
  const BackwardTensors b{d.t.q, d.t.k, d.t.v, d.t.o, d.t.lse, more.t.o, gradients.t.q, gradients.t.k, gradients.t.v};
  const Plan plan(b, on_cuda(c));
  const cuda::Stream stream(0);
  cuda::Buffer workspace(0, plan.workspace_bytes());
  cuda::synchronize(0);
  const cuda::Graph graph(stream, [&] { plan.execute(b, workspace.get(), workspace.bytes(), stream.get()); });
  graph.launch(stream.get());
  stream.synchronize();
  const std::vector<uint16_t> captured = halves(gradients.t.k, 0, gradients.t.k.size());
  check(fattn_cuda_memset(0, gradients.t.k.data(), 0xff, 2 * static_cast<size_t>(gradients.t.k.size()), stream.get()));
  plan.execute(b, workspace.get(), workspace.bytes(), stream.get());
  stream.synchronize();
  EXPECT_EQ(halves(gradients.t.k, 0, gradients.t.k.size()), captured);
}

TEST_F(CudaGpu, SeveralThreadsAtOnce) {
  const Case c = shape(DType::kBF16, 1, 300, 300, 2, 2, 64, true);
  DeviceForward alone(c);
  forward(alone.t, on_cuda(c));
  const std::vector<uint16_t> expected = halves(alone.t.o, 0, alone.t.o.size());
  std::vector<std::thread> threads;
  std::vector<int> same(4, 0);
  for (size_t i = 0; i < same.size(); ++i)
    threads.emplace_back([&, i] {
      DeviceForward own(c);
      const Plan plan(own.t, on_cuda(c));
      const cuda::Stream stream(0);
      cuda::Buffer workspace(0, plan.workspace_bytes());
      cuda::synchronize(0);
      for (int run = 0; run < 50; ++run) plan.execute(own.t, workspace.get(), workspace.bytes(), stream.get());
      stream.synchronize();
      same[i] = halves(own.t.o, 0, own.t.o.size()) == expected;
    });
  for (std::thread& thread : threads) thread.join();
  for (const int s : same) EXPECT_EQ(s, 1);
}

// Tensors of more than 2^31 elements: the last head, which lies beyond, gets what a small problem of the same numbers gets. All rows of dout
// but those of the small problem are 0 in the large one, so that dk and dv are the same too.
TEST_F(CudaGpu, TensorsBeyondTwoToThe31Elements) {
  const Case large = shape(DType::kBF16, 1, 70144, 512, 250, 1, 128, false), small = shape(DType::kBF16, 1, 256, 512, 1, 1, 128, false);
  ASSERT_GT(large.seqlen_q * large.nheads * large.headdim, int64_t{1} << 31);
  const int64_t elements = large.seqlen_q * large.nheads * large.headdim;
  // q, o, dout, dq, two that are not used, and dq in fp32
  if (static_cast<int64_t>(cuda::memory(0).free_bytes) < (6 * 2 + 4) * elements + (int64_t{1} << 30))
    GTEST_SKIP() << "too little memory on the device";
  std::vector<uint16_t> numbers(static_cast<size_t>(small.seqlen_k * small.headdim));
  for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = static_cast<uint16_t>(0x3e00 + (i * 2654435761u >> 20) % 0x0180 + (i % 2 ? 0x8000 : 0));
  // The same 256 rows: all of the small problem's, and the last of the last head.
  const auto at = [&](const Case& c, int64_t row) { return ((c.seqlen_q - small.seqlen_q + row) * c.nheads + c.nheads - 1) * c.headdim; };
  const auto upload = [&](const Tensor& to, int64_t offset, int64_t from, int64_t count) {
    check(fattn_cuda_copy(0, FATTN_COPY_TO_DEVICE, static_cast<uint16_t*>(to.data()) + offset, numbers.data() + from, 2 * static_cast<size_t>(count),
                          nullptr));
  };
  struct Problem {
    const Case& c;
    DeviceForward forward, dout, gradients;
    explicit Problem(const Case& problem) : c(problem), forward(c), dout(c), gradients(c) {}
  };
  Problem l(large), s(small);
  for (Problem* p : {&l, &s}) {
    check(fattn_cuda_memset(0, p->dout.t.o.data(), 0, 2 * static_cast<size_t>(p->dout.t.o.size()), nullptr));
    for (const Tensor* t : {&p->forward.t.k, &p->forward.t.v}) upload(*t, 0, 0, t->size());
    for (int64_t row = 0; row < small.seqlen_q; ++row) {
      upload(p->forward.t.q, at(p->c, row), row * 128, 128);
      upload(p->dout.t.o, at(p->c, row), (row + small.seqlen_q) * 128, 128);
    }
    Options options = on_cuda(p->c);
    options.deterministic = true;
    options.algorithm = Algorithm::kV2;  // the same tile for any number of rows, and with it the same roundings
    const ForwardTensors& f = p->forward.t;
    const ForwardTensors& g = p->gradients.t;
    forward(f, options);
    backward({f.q, f.k, f.v, f.o, f.lse, p->dout.t.o, g.q, g.k, g.v}, options);
  }
  for (const int64_t row : {int64_t{0}, int64_t{100}, small.seqlen_q - 1}) {
    EXPECT_EQ(halves(l.forward.t.o, at(large, row), 128), halves(s.forward.t.o, at(small, row), 128)) << row;
    EXPECT_EQ(halves(l.gradients.t.q, at(large, row), 128), halves(s.gradients.t.q, at(small, row), 128)) << row;
  }
  EXPECT_EQ(halves(l.gradients.t.k, 0, s.gradients.t.k.size()), halves(s.gradients.t.k, 0, s.gradients.t.k.size()));
  EXPECT_EQ(halves(l.gradients.t.v, 0, s.gradients.t.v.size()), halves(s.gradients.t.v, 0, s.gradients.t.v.size()));
  // The kernel of choice, within four units in the last place.
  check(fattn_cuda_memset(0, l.forward.t.o.data(), 0xff, 2 * static_cast<size_t>(l.forward.t.o.size()), nullptr));
  forward(l.forward.t, on_cuda(large));
  for (const int64_t row : {int64_t{0}, int64_t{100}, small.seqlen_q - 1}) {
    const std::vector<uint16_t> got = halves(l.forward.t.o, at(large, row), 128), expected = halves(s.forward.t.o, at(small, row), 128);
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(float_of_bf16(got[i]), float_of_bf16(expected[i]), 0.004f) << row << " " << i;
  }
}

// How long the first forward and backward call of a process take, in an empty cache folder and then from it. Measured in processes of their own:
// this program again, with this variable.
constexpr const char* kMeasureFirstCall = "FATTN_TEST_MEASURE_FIRST_CALL";

// The line that such a process prints: milliseconds of the first forward and of the first backward call.
void measure_first_calls() {
  const Case c = shape(DType::kBF16, 1, 512, 512, 4, 4, 128, true);
  DeviceForward d(c), gradients(c), dout(c);
  cuda::synchronize(0);
  const auto timed = [](const auto& call) {
    const auto begin = std::chrono::steady_clock::now();
    call();
    cuda::synchronize(0);
    return 1e3 * std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  const double first = timed([&] { forward(d.t, on_cuda(c)); });
  const double second = timed([&] {
    backward({d.t.q, d.t.k, d.t.v, d.t.o, d.t.lse, dout.t.o, gradients.t.q, gradients.t.k, gradients.t.v}, on_cuda(c));
  });
  std::printf("first calls %.3f %.3f\n", first, second);
}

TEST_F(CudaGpu, FirstCallsCompileQuicklyAndLoadAtOnce) {
  if (std::getenv(kMeasureFirstCall)) return measure_first_calls();
  const test::TemporaryFolder folder;
  const std::string command = "env " + std::string(kMeasureFirstCall) + "=1 FATTN_CACHE_DIR='" + folder.path().string() + "' '" +
                              std::filesystem::read_symlink("/proc/self/exe").string() +
                              "' --gtest_filter=CudaGpu.FirstCallsCompileQuicklyAndLoadAtOnce";
  const auto measured = [&] {
    double first = INFINITY, second = INFINITY;
    std::FILE* child = popen(command.c_str(), "r");
    char line[256];
    while (child && std::fgets(line, sizeof line, child)) std::sscanf(line, "first calls %lf %lf", &first, &second);
    if (child) pclose(child);
    return std::pair(first, second);
  };
  const auto [compile_forward, compile_backward] = measured();
  double load_forward = INFINITY, load_backward = INFINITY;
  for (int i = 0; i < 5; ++i) {
    const auto [a, b] = measured();
    load_forward = std::min(load_forward, a);
    load_backward = std::min(load_backward, b);
  }
  std::printf("first call: forward %.0f ms, backward (three kernels) %.0f ms; from the cache %.2f ms and %.2f ms\n", compile_forward,
              compile_backward, load_forward, load_backward);
  // A kernel: 2 s to compile, 5 ms to load; backward has three.
  EXPECT_LE(compile_forward, 2000);
  EXPECT_LE(compile_backward, 3 * 2000);
  EXPECT_LE(load_forward, 5);
  EXPECT_LE(load_backward, 3 * 5);
}

TEST_F(CudaGpu, HostMemoryIsRefusedBeforeAnythingIsLaunched) {
  const Case c = shape(DType::kBF16, 1, 64, 64, 1, 1, 64, false);
  DeviceForward d(c);
  std::vector<uint16_t> host(64 * 64);
  ForwardTensors t = d.t;
  t.k = t.k.on(Device::kCuda, 0, host.data());
  try {
    forward(t, on_cuda(c));
    FAIL() << "host memory was taken";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument) << e.what();
    EXPECT_NE(std::string(e.what()).find("k"), std::string::npos);
  }
  forward(d.t, on_cuda(c));  // the device is usable still
}

// The host's part of a call; a bound with room, as other programs may run.
TEST_F(CudaGpu, ExecuteReturnsQuickly) {
  const Case c = shape(DType::kBF16, 1, 64, 64, 1, 1, 64, false);
  DeviceForward d(c);
  const Plan plan(d.t, on_cuda(c));
  cuda::Buffer workspace(0, plan.workspace_bytes());
  const cuda::Stream stream(0);
  plan.execute(d.t, workspace.get(), workspace.bytes(), stream.get());
  double best = 1;
  for (int round = 0; round < 20; ++round) {
    stream.synchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i) plan.execute(d.t, workspace.get(), workspace.bytes(), stream.get());
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / 100);
  }
  stream.synchronize();
  RecordProperty("execute_us", std::to_string(best * 1e6));
  std::printf("execute: %.2f us of host time\n", best * 1e6);
  EXPECT_LT(best, 20e-6);
}

}  // namespace
}  // namespace fattn
