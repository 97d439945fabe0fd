// Merge, rotary embeddings and append on a GPU: problems of any kind against float64.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "append_problems.h"
#include "gpu_fixture.h"

namespace fattn {
namespace {

using namespace test;

class RowsOnGpu : public CudaGpu {};

TEST_F(RowsOnGpu, MergesAsTheReferenceInFloat64) {
  for (uint64_t seed = 0; seed < 200; ++seed) {
    const Merge m = random_merge(seed), wide = m.wide();
    wide.forward();
    wide.backward();
    DeviceTensors device;
    std::vector<MergePart> parts, gradients;
    for (const Part& part : m.parts) {
      parts.push_back({device.put(part.o), device.put(part.lse), {}, {}});
      gradients.push_back({parts.back().o, parts.back().lse, device.put(part.dout), device.put(part.dlse)});
    }
    merge(parts, device.put(m.o), device.put(m.lse));
    merge_backward(gradients, device.put(m.dout), device.put(m.dlse));
    device.fetch();
    const std::string what = "seed " + std::to_string(seed);
    expect_close(m.o, wide.o, 5, "o, " + what);
    if (m.lse.view()) expect_close(m.lse, wide.lse, 0.1, "lse, " + what);
    const double terms = std::sqrt(static_cast<double>(m.dout.shape().back()));
    for (size_t i = 0; i < m.parts.size(); ++i) {
      if (m.parts[i].dout.view()) expect_close(m.parts[i].dout, wide.parts[i].dout, 1, "dout of part " + std::to_string(i) + ", " + what);
      if (m.parts[i].dlse.view()) expect_close(m.parts[i].dlse, wide.parts[i].dlse, 5 * terms, "dlse of part " + std::to_string(i) + ", " + what);
    }
    if (HasFatalFailure()) return;
  }
}

TEST_F(RowsOnGpu, TheResultMayBeAPart) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Merge m = random_merge(seed);
    m.o = m.parts.back().o;
    m.lse = m.parts.back().lse;
    Merge apart = m;
    apart.o = m.o.copy(), apart.lse = m.lse.copy();
    DeviceTensors device;
    const auto on_device = [&](const Merge& of) {
      std::vector<MergePart> parts;
      for (const Part& part : of.parts) parts.push_back({device.put(part.o), device.put(part.lse), {}, {}});
      return parts;
    };
    const std::vector<MergePart> first = on_device(apart), second = on_device(m);
    merge(first, device.put(apart.o), device.put(apart.lse));
    device.fetch();
    const RowTensor o = apart.o.copy(), lse = apart.lse.copy();
    merge(second, second.back().o, second.back().lse);
    device.fetch();
    EXPECT_TRUE(m.o.same_bits(o)) << seed;
    EXPECT_TRUE(m.lse.same_bits(lse)) << seed;
  }
}

TEST_F(RowsOnGpu, TurnsAsTheReferenceInFloat64) {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const Rotary r = random_rotary(seed), wide = r.wide();
    wide.run();
    DeviceTensors device;
    RotaryOptions options = r.options;
    options.offsets = device.put(r.offsets);
    options.cu_seqlens = device.put(r.cu_seqlens);
    const Tensor cos = device.put(r.cos), sin = device.put(r.sin);
    rotary(device.put(r.x), cos, sin, device.put(r.y), options);
    const RowTensor in_place = r.x.copy();
    const Tensor there = device.put(in_place);
    rotary(there, cos, sin, there, options);
    device.fetch();
    expect_close(r.y, wide.y, 3, "seed " + std::to_string(seed));
    expect_close(in_place, wide.y, 3, "in place, seed " + std::to_string(seed));
    if (HasFatalFailure()) return;
  }
}

TEST_F(RowsOnGpu, AppendsAsPlainIndexing) {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    const Append a = random_append(seed), expected = a.wide();
    append_by_indexing(expected);
    DeviceTensors device;
    a.run([&](const RowTensor& t) { return device.put(t); });
    device.fetch();
    expect_appended(a, expected, "seed " + std::to_string(seed));
    if (HasFatalFailure()) return;
  }
}

TEST_F(RowsOnGpu, OffsetsOfAnyKindGiveASequenceAllOrNothing) {
  for (uint64_t seed = 0; seed < 1000; ++seed) {
    const Append a = any_offsets(seed);
    DeviceTensors device;
    a.run([&](const RowTensor& t) { return device.put(t); });
    device.fetch();
    expect_all_or_nothing(a, "seed " + std::to_string(seed));
    if (HasFatalFailure()) return;
  }
}

// Lengths that a graph's launches change: what is appended goes behind what was.
TEST_F(RowsOnGpu, StepsOfAGraphAppend) {
  const RowTensor k(DType::kBF16, {2, 1, 2, 64}), v(DType::kBF16, {2, 1, 2, 64}), k_cache(DType::kBF16, {4, 16, 2, 64}),
      v_cache(DType::kBF16, {4, 16, 2, 64}), table(DType::kI32, {2, 2}), lengths = list(DType::kI32, {14, 3}), used = list(DType::kI32, {0, 0});
  k.fill_normal(1, 1), v.fill_normal(1, 2);
  table.fill([](int64_t i) { return static_cast<double>(3 - i); });
  DeviceTensors device;
  const cuda::Stream stream(0);
  AppendOptions step;
  step.stream = stream.get();
  step.block_table = device.put(table);
  step.cache_seqlens = device.put(lengths);
  step.seqused_k = device.put(used);
  const Tensor k_there = device.put(k), v_there = device.put(v), to_k = device.put(k_cache), to_v = device.put(v_cache);
  append(k_there, v_there, to_k, to_v, step);
  stream.synchronize();
  const cuda::Graph graph(stream, [&] {
    append(k_there, v_there, to_k, to_v, step);
    check(fattn_cuda_copy_async(0, FATTN_COPY_ON_DEVICE, step.cache_seqlens.data(), step.seqused_k.data(), 8, stream.get()));
  });
  for (int i = 0; i < 3; ++i) graph.launch(stream.get());
  stream.synchronize();
  device.fetch();
  EXPECT_EQ(used.at(0), 17);
  EXPECT_EQ(used.at(1), 6);
  for (const int64_t row : {3 * 16 + 14, 3 * 16 + 15, 2 * 16 + 0})
    for (int64_t i = 0; i < 128; ++i) EXPECT_EQ(k_cache.at(row * 128 + i), k.at(i));
  for (int64_t row = 16 + 3; row < 16 + 6; ++row)
    for (int64_t i = 0; i < 128; ++i) EXPECT_EQ(v_cache.at(row * 128 + i), v.at(128 + i));
}

TEST_F(RowsOnGpu, ACallMayBeCaptured) {
  const RowTensor o(DType::kF32, {1, 3, 2, 64}), l(DType::kF32, {1, 2, 3}), o2(DType::kF16, {1, 3, 2, 64}), l2(DType::kF32, {1, 2, 3}),
      result(DType::kBF16, {1, 3, 2, 64});
  o.fill_normal(1, 1), l.fill_normal(1, 2), o2.fill_normal(1, 3), l2.fill_normal(1, 4);
  const RowTensor expected = result.empty_wide(), a = o.wide(), b = l.wide(), c = o2.wide(), d = l2.wide();
  merge({{a.view(), b.view(), {}, {}}, {c.view(), d.view(), {}, {}}}, expected.view());
  DeviceTensors device;
  const std::vector<MergePart> parts{{device.put(o), device.put(l), {}, {}}, {device.put(o2), device.put(l2), {}, {}}};
  const Tensor to = device.put(result);
  const cuda::Stream stream(0);
  RowOptions options;
  options.stream = stream.get();
  merge(parts, to, {}, options);
  stream.synchronize();
  const cuda::Graph graph(stream, [&] { merge(parts, to, {}, options); });
  graph.launch(stream.get());
  stream.synchronize();
  device.fetch();
  expect_close(result, expected, 5, "o");
}

}  // namespace
}  // namespace fattn
