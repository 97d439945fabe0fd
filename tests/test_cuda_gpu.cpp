// The CUDA backend on a real GPU: what the table of cases does not show. Without a GPU every test is skipped.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "fattn/attention.hpp"
#include "fattn/device.hpp"
#include "fattn/plan.hpp"
#include "gpu_fixture.h"
#include "gpu_problem.h"
#include "temporary_folder.h"
#include "testing/cases.h"
#include "testing/device_mirror.h"
#include "testing/run.h"

namespace fattn {
namespace {

using test::CudaGpu;
using test::DeviceForward;
using test::float_of_bf16;
using test::halves;
using test::on_cuda;
using test::shape;
using testing::Case;
using testing::CaseInputs;
using testing::make_inputs;
using testing::Outputs;
using testing::run_passes;

TEST_F(CudaGpu, ForwardHasTheSameBitsEveryRun) {
  const Case c = shape(DType::kBF16, 2, 700, 900, 4, 2, 128, true);
  CaseInputs in = make_inputs(c);
  Case forward_only = c;
  forward_only.backward = false;
  const Outputs first = run_passes(forward_only, in, on_cuda(c));
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(testing::same_bits(first, run_passes(forward_only, in, on_cuda(c))));
}

TEST_F(CudaGpu, DeterministicBackwardHasTheSameBitsEveryRun) {
  for (const Algorithm algorithm : {Algorithm::kV2, Algorithm::kV3}) {
    if (algorithm == Algorithm::kV3 && !test::has_v3(cuda::info(0))) continue;
    for (const int64_t headdim : {64, 128, 256}) {
      const Case c = shape(DType::kBF16, 2, 700, 900, 4, 2, headdim, headdim == 128);
      CaseInputs in = make_inputs(c);
      Options options = on_cuda(c);
      options.deterministic = true;
      options.algorithm = algorithm;
      const Outputs first = run_passes(c, in, options);  // throws if the algorithm refuses either pass
      for (int i = 0; i < 5; ++i) EXPECT_TRUE(testing::same_bits(first, run_passes(c, in, options))) << headdim;
    }
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

// In device memory nobody can refuse them: nothing is read by them, and what such a batch entry gets is NaN.
TEST_F(CudaGpu, LengthsOutOfRangeGiveNan) {
  struct Of {
    DType dtype;
    Algorithm algorithm;
    int64_t seqlen_k = 200;
    double p_dropout = 0;
    int64_t seqlen_q = 130;
  };
  for (const auto& [dtype, algorithm, seqlen_k, p_dropout, seqlen_q] :
       {Of{DType::kBF16, Algorithm::kV2}, Of{DType::kBF16, Algorithm::kAuto}, Of{DType::kF32, Algorithm::kAuto},
        Of{DType::kBF16, Algorithm::kStandard}, Of{DType::kF32, Algorithm::kStandard}, Of{DType::kF16, Algorithm::kStandard, 200, 0.3},
        Of{DType::kBF16, Algorithm::kStandard, 0}, Of{DType::kBF16, Algorithm::kV2, 0}, Of{DType::kBF16, Algorithm::kAuto, 0},
        Of{DType::kBF16, Algorithm::kStandard, 200, 0, 0}}) {
    const Case c = shape(dtype, 4, seqlen_q, seqlen_k, 2, 1, 64, false);
    DeviceForward d(c), dout(c), gradients(c);
    const int32_t lengths[] = {static_cast<int32_t>(seqlen_k), -1, static_cast<int32_t>(seqlen_k) + 1, 0};
    const int64_t state[] = {7, 0};
    cuda::Buffer memory(0, sizeof lengths), of_dropout(0, sizeof state);
    memory.copy_from(lengths, sizeof lengths);
    of_dropout.copy_from(state, sizeof state);
    d.t.scores.seqused_k = Tensor(nullptr, DType::kI32, {4}).on(Device::kCuda, 0, memory.get());
    Options options = on_cuda(c);
    options.algorithm = algorithm;
    options.p_dropout = p_dropout;
    if (p_dropout > 0) d.t.scores.dropout_state = Tensor(nullptr, DType::kI64, {2}).on(Device::kCuda, 0, of_dropout.get());
    SCOPED_TRACE(std::string(name_of(dtype)) + " " + name_of(algorithm) + " seqlens " + std::to_string(seqlen_q) + " " + std::to_string(seqlen_k));
    forward(d.t, options);
    backward({d.t.q, d.t.k, d.t.v, d.t.o, d.t.lse, dout.t.o, gradients.t.q, gradients.t.k, gradients.t.v, d.t.scores, {}}, options);
    const auto expect = [&](const Tensor& tensor, const char* name) {
      const std::vector<float> all = test::numbers(tensor);
      for (size_t i = 0; i < all.size(); ++i) {
        const size_t n = i / (all.size() / static_cast<size_t>(c.batch));
        ASSERT_TRUE(n == 0 ? std::isfinite(all[i]) : n == 3 ? all[i] == 0 : std::isnan(all[i])) << name << " of entry " << n << " has " << all[i];
      }
    };
    expect(d.t.o, "o");
    expect(gradients.t.q, "dq");
    expect(gradients.t.k, "dk");
    expect(gradients.t.v, "dv");
  }
}

// The same of packed sequences, some of them beside ones that are out of range, and one whose offsets are.
TEST_F(CudaGpu, LengthsOfPackedSequencesOutOfRangeGiveNan) {
  constexpr int64_t kRows = 500, kMost = 130;
  const int32_t offsets[] = {0, 100, 230, 230, 330, 300, 400, 480}, lengths[] = {100, 131, 1, 0, 5, -1, 30};
  // Rows up to these: numbers, NaN, no keys, NaN (offsets 330 to 300), NaN, numbers, and NaN behind the last because offsets are out of range. Of
  // keys those that sequences in range use, one of them without queries; all others are NaN, for what is out of range may mean any.
  enum class Has { kNumbers, kNan, kZeros };
  const std::pair<int64_t, Has> of_queries[] = {{100, Has::kNumbers}, {230, Has::kNan},     {300, Has::kZeros},
                                                {400, Has::kNan},     {480, Has::kNumbers}, {500, Has::kNan}},
                                of_keys[] = {{100, Has::kNumbers}, {230, Has::kNan},     {231, Has::kZeros},
                                             {400, Has::kNan},     {430, Has::kNumbers}, {500, Has::kNan}};
  for (const auto& [algorithm, dtype] : {std::pair{Algorithm::kV2, DType::kBF16}, {Algorithm::kAuto, DType::kBF16}, {Algorithm::kAuto, DType::kF32}})
    for (const bool deterministic : {false, true})
      for (const int64_t headdim : {64, 128}) {
        const Case c = shape(dtype, 1, kRows, kRows, 2, 1, headdim, false);
        DeviceForward d(c), dout(c), gradients(c);
        for (DeviceForward* of : {&d, &dout, &gradients}) of->pack();
        cuda::Buffer of_offsets(0, sizeof offsets), of_lengths(0, sizeof lengths);
        of_offsets.copy_from(offsets, sizeof offsets);
        of_lengths.copy_from(lengths, sizeof lengths);
        d.t.scores.cu_seqlens_q = d.t.scores.cu_seqlens_k = Tensor(nullptr, DType::kI32, {8}).on(Device::kCuda, 0, of_offsets.get());
        d.t.scores.seqused_k = Tensor(nullptr, DType::kI32, {7}).on(Device::kCuda, 0, of_lengths.get());
        Options options = on_cuda(c);
        options.algorithm = algorithm;
        options.max_seqlen_q = options.max_seqlen_k = kMost;
        options.deterministic = deterministic;
        forward(d.t, options);
        backward({d.t.q, d.t.k, d.t.v, d.t.o, d.t.lse, dout.t.o, gradients.t.q, gradients.t.k, gradients.t.v, d.t.scores, {}}, options);
        const auto expect = [&](const Tensor& tensor, std::span<const std::pair<int64_t, Has>> parts, const char* name) {
          const std::vector<float> all = test::numbers(tensor);
          const auto in_row = static_cast<int64_t>(all.size()) / kRows;
          for (int64_t i = 0, part = 0; i < static_cast<int64_t>(all.size()); ++i) {
            while (i / in_row >= parts[static_cast<size_t>(part)].first) ++part;
            const Has has = parts[static_cast<size_t>(part)].second;
            const float x = all[static_cast<size_t>(i)];
            ASSERT_TRUE(has == Has::kNan     ? std::isnan(x)
                        : has == Has::kZeros ? x == 0
                                             : std::isfinite(x))
                << name << " has " << x << " in row " << i / in_row << ", headdim " << headdim;
          }
        };
        expect(d.t.o, of_queries, "o");
        expect(gradients.t.q, of_queries, "dq");
        expect(gradients.t.k, of_keys, "dk");
        expect(gradients.t.v, of_keys, "dv");
        const std::vector<float> lse = test::numbers(d.t.lse);
        for (const int64_t row : {0, 450}) EXPECT_TRUE(std::isfinite(lse[static_cast<size_t>(row)])) << row;
        for (const int64_t row : {150, 320, 350}) EXPECT_TRUE(std::isnan(lse[static_cast<size_t>(row)])) << row;
        EXPECT_EQ(lse[250], -INFINITY);
      }
}

// Packed sequences whose offsets nobody can refuse: what rows get.
enum class Got { kNumber, kNothing, kNan };
struct PackedRows {
  std::vector<int32_t> offsets;
  std::vector<std::pair<int64_t, Got>> until;  // rows up to this one
  bool overlap = false;                        // sequences that are in range have rows of others that are not, whose o is NaN
};
constexpr int64_t kTotalRows = 400, kMostRows = 130;

void expect_rows(const Tensor& tensor, const PackedRows& rows, const char* name) {
  const int64_t in_row = tensor.size() / kTotalRows;
  const std::vector<float> all = test::numbers(tensor);
  size_t part = 0;
  for (int64_t row = 0; row < kTotalRows; ++row) {
    while (row >= rows.until[part].first) ++part;
    const Got got = rows.until[part].second;
    for (int64_t i = row * in_row; i < (row + 1) * in_row; ++i) {
      const float x = all[static_cast<size_t>(i)];
      ASSERT_TRUE(got == Got::kNan ? std::isnan(x) : got == Got::kNothing ? x == 0 : std::isfinite(x)) << name << " has " << x << " in row " << row;
    }
  }
}

TEST_F(CudaGpu, OffsetsOutOfRangeGiveNanAndReadNothing) {
  const PackedRows all[] = {
      {{0, 100, 100, 230, 300, 390}, {{390, Got::kNumber}, {400, Got::kNothing}}},
      {{0, 100, 90, 220, 300, 390}, {{90, Got::kNumber}, {100, Got::kNan}, {390, Got::kNumber}, {400, Got::kNan}}, true},
      {{0, 100, 300, 350, 420, 420}, {{100, Got::kNumber}, {300, Got::kNan}, {350, Got::kNumber}, {400, Got::kNan}}},
      {{0, -5, 100, 200, 300, 400}, {{100, Got::kNan}, {400, Got::kNumber}}},
      {{5, 100, 100, 200, 300, 300}, {{100, Got::kNan}, {300, Got::kNumber}, {400, Got::kNan}}},
      {{0, 100, 200, 2147483647, -2147483647 - 1, 100}, {{400, Got::kNan}}},
      // Sequences in range that together have more tiles, at headdim 256, than the tensors' rows could have.
      {{0, 130, 0, 130, 0, 130, 0, 130, 0, 130, 0, 130, 0, 130, 0, 130}, {{400, Got::kNan}}},
  };
  for (const auto& [algorithm, dtype] : {std::pair{Algorithm::kV2, DType::kBF16}, {Algorithm::kAuto, DType::kBF16}, {Algorithm::kAuto, DType::kF32}})
    for (const bool deterministic : {false, true})
      for (const bool documents : {false, true})
        for (const PackedRows& rows : all) {
          const int64_t headdim = rows.offsets.size() <= 8 ? 64 : dtype == DType::kF32 ? 192 : 256;
          const Case c = shape(dtype, 1, kTotalRows, kTotalRows, 2, 1, headdim, false);
          DeviceForward d(c), dout(c), gradients(c);
          for (DeviceForward* of : {&d, &dout, &gradients}) of->pack();
          const size_t bytes = rows.offsets.size() * sizeof(int32_t);
          cuda::Buffer memory(0, bytes), ids(0, kTotalRows * sizeof(int32_t));
          memory.copy_from(rows.offsets.data(), bytes);
          ids.fill(1);  // of one document
          if (documents) d.t.scores.document_q = d.t.scores.document_k = Tensor(nullptr, DType::kI32, {kTotalRows}).on(Device::kCuda, 0, ids.get());
          d.t.scores.cu_seqlens_q = d.t.scores.cu_seqlens_k =
              Tensor(nullptr, DType::kI32, {static_cast<int64_t>(rows.offsets.size())}).on(Device::kCuda, 0, memory.get());
          Options options = on_cuda(c);
          options.algorithm = algorithm;
          options.max_seqlen_q = options.max_seqlen_k = kMostRows;
          options.deterministic = deterministic;
          forward(d.t, options);
          backward({d.t.q, d.t.k, d.t.v, d.t.o, d.t.lse, dout.t.o, gradients.t.q, gradients.t.k, gradients.t.v, d.t.scores, {}}, options);
          if (!rows.overlap || !documents) expect_rows(d.t.o, rows, "o");
          if (rows.overlap) continue;
          expect_rows(gradients.t.q, rows, "dq");
          expect_rows(gradients.t.k, rows, "dk");
          expect_rows(gradients.t.v, rows, "dv");
        }
}

// What a caller who asks is told of lists in device memory: a code and an index, or an error.
TEST_F(CudaGpu, ListsOutOfRangeAreToldOf) {
  struct Lists {
    std::vector<int32_t> of_q, of_k, used;
    int32_t code, index;
  };
  std::vector<int32_t> many_q, many_k;  // more than the kernel has threads
  for (int32_t n = 0; n <= 300; ++n) many_q.push_back(n), many_k.push_back(n == 290 ? 0 : n);
  const Lists all[] = {
      {{0, 100, 230, 400}, {0, 130, 130, 200}, {130, 0, 70}, FATTN_LISTS_GOOD, 0},
      {{1, 100, 230, 400}, {0, 130, 130, 200}, {130, 0, 70}, FATTN_LIST_CU_SEQLENS_Q, 0},
      {{0, 100, 230, 400}, {200, 130, 0, -5}, {70, 0, 130}, FATTN_LISTS_GOOD, 0},  // with numbers of used keys in any order
      {{0, 100, 231, 400}, {0, 130, 129, 200}, {171, 0, 70}, FATTN_LIST_SEQUSED_K, 0},
      {{0, 100, 231, 400}, {0, 130, 331, 200}, {130, 0, 70}, FATTN_LIST_SEQUSED_K, 2},
      {{0, 100, 231, 400}, {0, 401, 129, 200}, {130, 0, 70}, FATTN_LIST_CU_SEQLENS_K, 1},
      {{0, 100, 231, 400}, {0, 130, 129, 200}, {}, FATTN_LIST_CU_SEQLENS_K, 1},
      {{0, 100, 230, 401}, {0, 130, 129, 200}, {}, FATTN_LIST_CU_SEQLENS_K, 1},
      {{0, 100, 230, 401}, {0, 130, 130, 200}, {130, 0, -1}, FATTN_LIST_CU_SEQLENS_Q, 2},
      {{0, 100, 230, 400}, {0, 130, 130, 200}, {130, 0, -1}, FATTN_LIST_SEQUSED_K, 2},
      {many_q, many_k, {}, FATTN_LIST_CU_SEQLENS_K, 289},
      {{}, {}, {400, 0, 399, 400}, FATTN_LISTS_GOOD, 0},
      {{}, {}, {400, 0, 401, -1}, FATTN_LIST_SEQUSED_K, 2},
  };
  for (const DType dtype : {DType::kBF16, DType::kF32})
    for (const Lists& lists : all) {
      SCOPED_TRACE("code " + std::to_string(lists.code) + ", index " + std::to_string(lists.index));
      const bool packed = !lists.of_q.empty();
      const Case c = shape(dtype, packed ? 1 : 4, 400, 400, 2, 1, 64, false);
      DeviceForward d(c);
      Options options = on_cuda(c);
      test::DeviceLists memory(8192);
      const auto put = [&](const std::vector<int32_t>& list, size_t offset) { return list.empty() ? Tensor() : memory.put(list, offset); };
      if (packed) {
        d.pack();
        options.max_seqlen_q = options.max_seqlen_k = 170;
      }
      d.t.scores.cu_seqlens_q = put(lists.of_q, 0);
      d.t.scores.cu_seqlens_k = put(lists.of_k, 2048);
      d.t.scores.seqused_k = put(lists.used, 4096);
      d.t.scores.status = put({-1, -1}, 6144);
      forward(d.t, options);
      int32_t status[2];
      check(fattn_cuda_copy(0, FATTN_COPY_TO_HOST, status, d.t.scores.status.data(), sizeof status, nullptr));
      EXPECT_EQ(status[0], lists.code);
      EXPECT_EQ(status[1], lists.index);
      options.check = Check::kSync;
      try {
        forward(d.t, options);
        EXPECT_EQ(lists.code, FATTN_LISTS_GOOD);
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::kInvalidArgument) << e.what();
        EXPECT_NE(lists.code, FATTN_LISTS_GOOD) << e.what();
      }
    }
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

// Seconds of host time that a call of `execute` takes, the best of some rounds.
template <class Execute>
double host_time(const cuda::Stream& stream, const Execute& execute) {
  double best = 1;
  execute();
  for (int round = 0; round < 20; ++round) {
    stream.synchronize();
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < 100; ++i) execute();
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / 100);
  }
  stream.synchronize();
  return best;
}

// The host's part of a call; bounds with room, as other programs may run.
TEST_F(CudaGpu, ExecuteReturnsQuickly) {
  const Case c = shape(DType::kBF16, 1, 64, 64, 1, 1, 64, false);
  DeviceForward d(c), gradients(c), more(c);
  const BackwardTensors b{d.t.q, d.t.k, d.t.v, d.t.o, d.t.lse, more.t.o, gradients.t.q, gradients.t.k, gradients.t.v};
  const Plan plan(d.t, on_cuda(c)), backward_plan(b, on_cuda(c));
  cuda::Buffer workspace(0, std::max(plan.workspace_bytes(), backward_plan.workspace_bytes()));
  const cuda::Stream stream(0);
  const double forward = host_time(stream, [&] { plan.execute(d.t, workspace.get(), workspace.bytes(), stream.get()); });
  const double backward = host_time(stream, [&] { backward_plan.execute(b, workspace.get(), workspace.bytes(), stream.get()); });
  RecordProperty("execute_us", std::to_string(forward * 1e6));
  RecordProperty("execute_backward_us", std::to_string(backward * 1e6));
  std::printf("execute: forward %.2f us of host time, backward (three kernels) %.2f us\n", forward * 1e6, backward * 1e6);
  EXPECT_LT(forward, 20e-6);
  EXPECT_LT(backward, 60e-6);
}

}  // namespace
}  // namespace fattn
