// Merging results over parts of the keys, and its gradients: every instruction set and dtype against the reference in float64, that against attention
// over all keys and against finite differences.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "row_problems.h"

namespace fattn {
namespace {

using namespace test;

TEST(MergeSmall, EveryInstructionSetIsAsTheReferenceInFloat64) {
  for (uint64_t seed = 0; seed < 25; ++seed) {
    const Merge m = random_merge(seed), wide = m.wide();
    wide.forward();
    wide.backward();
    for (const Isa isa : isas_here()) {
      RowOptions options;
      options.cpu_isa = isa;
      const std::string what = std::string(name_of(isa)) + ", seed " + std::to_string(seed);
      m.forward(options);
      m.backward(options);
      expect_close(m.o, wide.o, 5, "o, " + what);
      if (m.lse.view()) expect_close(m.lse, wide.lse, 0.1, "lse, " + what);
      const double terms = std::sqrt(static_cast<double>(m.dout.shape().back()));
      for (size_t i = 0; i < m.parts.size(); ++i) {
        if (m.parts[i].dout.view()) expect_close(m.parts[i].dout, wide.parts[i].dout, 1, "dout of part " + std::to_string(i) + ", " + what);
        if (m.parts[i].dlse.view()) expect_close(m.parts[i].dlse, wide.parts[i].dlse, 5 * terms, "dlse of part " + std::to_string(i) + ", " + what);
      }
      if (HasFatalFailure()) return;
    }
    // Backend reference rounds once.
    RowOptions reference;
    reference.backend = Backend::kReference;
    m.forward(reference);
    expect_close(m.o, wide.o, 0, "the reference");
  }
}

// What it is for: keys in three parts, merged, are attention over all of them.
TEST(MergeSmall, PartsOfKeysBecomeAllOfThem) {
  const int64_t batch = 2, seqlen_q = 9, seqlen_k = 50, heads = 4, heads_k = 2, headdim = 16;
  const RowTensor q(DType::kF64, {batch, seqlen_q, heads, headdim}), k(DType::kF64, {batch, seqlen_k, heads_k, headdim}),
      v(DType::kF64, {batch, seqlen_k, heads_k, headdim});
  q.fill_normal(1, 1), k.fill_normal(1, 2), v.fill_normal(1, 3);
  const auto keys = [&](const RowTensor& t, int64_t begin, int64_t end) {
    const Tensor all = t.view();
    return Tensor(static_cast<double*>(all.data()) + begin * all.stride(1), DType::kF64, {batch, end - begin, heads_k, headdim},
                  {all.stride(0), all.stride(1), all.stride(2), 1});
  };
  Merge m;
  for (const auto& [begin, end] : {std::pair<int64_t, int64_t>{0, 7}, {7, 7}, {7, 31}, {31, 50}}) {
    m.parts.push_back({RowTensor(DType::kF64, q.shape()), RowTensor(DType::kF64, {batch, heads, seqlen_q}), {}, {}});
    forward({q.view(), keys(k, begin, end), keys(v, begin, end), m.parts.back().o.view(), m.parts.back().lse.view(), {}});
  }
  const RowTensor o(DType::kF64, q.shape()), lse(DType::kF64, {batch, heads, seqlen_q});
  forward({q.view(), k.view(), v.view(), o.view(), lse.view(), {}});
  m.o = RowTensor(DType::kF64, q.shape());
  m.lse = RowTensor(DType::kF64, {batch, heads, seqlen_q});
  m.forward();
  for (int64_t i = 0; i < o.size(); ++i) ASSERT_NEAR(m.o.at(i), o.at(i), 1e-14);
  for (int64_t i = 0; i < lse.size(); ++i) ASSERT_NEAR(m.lse.at(i), lse.at(i), 1e-14);
}

TEST(MergeSmall, GradientsOfTheReferenceAreDifferences) {
  Merge m;
  const std::vector<int64_t> shape{1, 3, 2, 4}, rows_shape{1, 2, 3};
  for (int i = 0; i < 3; ++i) {
    m.parts.push_back(
        {RowTensor(DType::kF64, shape), RowTensor(DType::kF64, rows_shape), RowTensor(DType::kF64, shape), RowTensor(DType::kF64, rows_shape)});
    m.parts.back().o.fill_normal(5, static_cast<uint64_t>(i));
    m.parts.back().lse.fill_normal(6, static_cast<uint64_t>(i));
  }
  m.o = RowTensor(DType::kF64, shape), m.dout = RowTensor(DType::kF64, shape);
  m.lse = RowTensor(DType::kF64, rows_shape), m.dlse = RowTensor(DType::kF64, rows_shape);
  m.dout.fill_normal(7, 0), m.dlse.fill_normal(7, 1);
  m.parts[1].lse.set(4, -kInf);  // head 1, row 1
  m.backward();
  const auto loss = [&] {
    m.forward();
    double sum = 0;
    for (int64_t i = 0; i < m.o.size(); ++i) sum += m.o.at(i) * m.dout.at(i);
    for (int64_t i = 0; i < m.lse.size(); ++i) sum += m.lse.at(i) * m.dlse.at(i);
    return sum;
  };
  const auto check = [&](const RowTensor& x, const RowTensor& dx) {
    for (int64_t i = 0; i < x.size(); ++i) {
      const double before = x.at(i), step = 1e-5;
      if (std::isinf(before)) {
        EXPECT_EQ(dx.at(i), 0);
        continue;
      }
      x.set(i, before + step);
      const double up = loss();
      x.set(i, before - step);
      const double down = loss();
      x.set(i, before);
      ASSERT_NEAR(dx.at(i), (up - down) / (2 * step), 1e-8) << i;
    }
  };
  for (const Part& part : m.parts) {
    check(part.o, part.dout);
    check(part.lse, part.dlse);
  }
}

// One row, whose parts have these lse, and o of 1, 2, 3, ...
Merge one_row(const std::vector<double>& parts_lse, DType dtype = DType::kF32) {
  const DType of_lse = dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  Merge m;
  const auto o = [&] { return RowTensor(dtype, {1, 1, 1, 5}); };
  const auto lse = [&] { return RowTensor(of_lse, {1, 1, 1}); };
  for (size_t i = 0; i < parts_lse.size(); ++i) {
    m.parts.push_back({o(), lse(), o(), lse()});
    m.parts[i].o.fill([&](int64_t) { return static_cast<double>(i + 1); });
    m.parts[i].lse.set(0, parts_lse[i]);
  }
  m.o = o(), m.dout = o(), m.lse = lse(), m.dlse = lse();
  m.dout.fill([](int64_t) { return 1.0; });
  m.dlse.set(0, 1);
  return m;
}

TEST(MergeSmall, WhatIsNoNumber) {
  std::vector<RowOptions> ways;
  for (const Isa isa : isas_here()) {
    RowOptions way;
    way.cpu_isa = isa;
    ways.push_back(way);
  }
  RowOptions reference;
  reference.backend = Backend::kReference;
  ways.push_back(reference);
  for (const RowOptions& way : ways) {
    SCOPED_TRACE(way.backend == Backend::kReference ? "reference" : name_of(way.cpu_isa));
    const auto expect = [&](const Merge& m, double o, double lse) {
      m.forward(way);
      const auto same = [](double a, double b) { return std::isnan(b) ? std::isnan(a) : a == b || std::abs(a - b) <= 1e-6 * std::abs(b); };
      for (int64_t i = 0; i < 5; ++i) EXPECT_TRUE(same(m.o.at(i), o)) << m.o.at(i) << ", not " << o;
      EXPECT_TRUE(same(m.lse.at(0), lse)) << m.lse.at(0) << ", not " << lse;
    };
    expect(one_row({0.5}), 1, 0.5);
    expect(one_row({-1e4, 1e4}), 2, 1e4);
    expect(one_row({1e4, -1e4, 1e4}), 2, 1e4 + std::log(2));
    expect(one_row({-3e38, 3e38}), 2, 3e38);
    expect(one_row({-kInf, -kInf}), 0, -kInf);
    expect(one_row({-kInf, -2, -kInf}), 2, -2);
    expect(one_row({1, kInf}), kNotANumber, kNotANumber);
    expect(one_row({kInf, -kInf}), kNotANumber, kNotANumber);
    expect(one_row({500, kNotANumber, 1}), kNotANumber, kNotANumber);
    expect(one_row({kNotANumber, -kInf}), kNotANumber, kNotANumber);
    Merge m = one_row({-kInf, 3});
    m.parts[0].o.fill([](int64_t) { return kNotANumber; });
    expect(m, 2, 3);
    m.backward(way);
    for (int64_t i = 0; i < 5; ++i) {
      EXPECT_EQ(m.parts[0].dout.at(i), 0);
      EXPECT_EQ(m.parts[1].dout.at(i), 1);
    }
    EXPECT_EQ(m.parts[0].dlse.at(0), 0);
    EXPECT_EQ(m.parts[1].dlse.at(0), 1);
    m = one_row({-1e4, 1e4});
    m.parts[0].o.fill([](int64_t) { return kNotANumber; });
    expect(m, kNotANumber, 1e4);
    m = one_row({-3e38, 3e38});  // further apart than fp32 has numbers
    m.parts[0].o.fill([](int64_t) { return kNotANumber; });
    expect(m, kNotANumber, 3e38);
    m = one_row({-kInf, -kInf});
    m.dout.fill([](int64_t) { return kNotANumber; });
    m.backward(way);
    for (const Part& part : m.parts) {
      EXPECT_EQ(part.dout.at(3), 0);
      EXPECT_EQ(part.dlse.at(0), 0);
    }
  }
}

TEST(MergeSmall, TheResultMayBeAPart) {
  for (uint64_t seed = 0; seed < 12; ++seed) {
    Merge apart = random_merge(seed), in_place = random_merge(seed);
    apart.o = apart.parts.back().o.copy();
    apart.lse = apart.parts.back().lse.copy();
    apart.forward();
    in_place.o = in_place.parts.back().o;
    in_place.lse = in_place.parts.back().lse;
    in_place.forward();
    EXPECT_TRUE(in_place.o.same_bits(apart.o)) << seed;
    EXPECT_TRUE(in_place.lse.same_bits(apart.lse)) << seed;
  }
}

// How rows are shared out changes no bit, and neither does who computes them.
TEST(MergeSmall, ThreadsChangeNoBit) {
  Merge m;
  for (int i = 0; i < 3; ++i) {
    m.parts.push_back({RowTensor(DType::kF16, {2, 301, 4, 64}), RowTensor(DType::kF32, {2, 4, 301}), RowTensor(DType::kF16, {2, 301, 4, 64}),
                       RowTensor(DType::kF32, {2, 4, 301})});
    m.parts.back().o.fill_normal(1, static_cast<uint64_t>(i));
    m.parts.back().lse.fill_normal(2, static_cast<uint64_t>(i));
  }
  m.o = RowTensor(DType::kF32, {2, 301, 4, 64}), m.lse = RowTensor(DType::kF32, {2, 4, 301}), m.dout = m.parts[0].o, m.dlse = m.parts[0].lse;
  RowOptions options;
  options.num_threads = 1;
  m.forward(options);
  m.backward(options);
  const RowTensor o = m.o.copy(), dlse = m.parts[1].dlse.copy();
  int calls = 0;
  fattn_executor host{sizeof host, 3, &calls, [](void* context, int32_t n, void (*body)(void*, int32_t), void* arg) -> int32_t {
                        ++*static_cast<int*>(context);
                        for (int32_t i = n; i-- > 0;) body(arg, i);
                        return 0;
                      }};
  for (const bool own : {true, false}) {
    options.num_threads = 5;
    options.executor = own ? nullptr : &host;
    m.o.fill([](int64_t) { return 0.0; });
    m.forward(options);
    m.backward(options);
    EXPECT_TRUE(m.o.same_bits(o));
    EXPECT_TRUE(m.parts[1].dlse.same_bits(dlse));
  }
  EXPECT_EQ(calls, 2);
  host.parallel = [](void*, int32_t, void (*)(void*, int32_t), void*) -> int32_t { return 7; };
  expect_message([&] { m.forward(options); }, "internal: the host's executor failed: parallel() returned 7");
}

std::vector<RowOptions> all_ways() {
  std::vector<RowOptions> ways(1);
  ways[0].backend = Backend::kReference;
  for (const Isa isa : isas_here()) {
    ways.emplace_back();
    ways.back().cpu_isa = isa;
  }
  return ways;
}

TEST(MergeSmall, PartsWithoutLseAreAdded) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Merge m = random_merge(seed);
    m.lse = {};
    for (size_t i = 0; i < m.parts.size(); ++i) {
      m.parts[i].lse = {};
      m.parts[i].o.fill_normal(seed, i);
    }
    Merge wide = m.wide();
    wide.forward();
    for (const RowOptions& way : all_ways()) {
      m.forward(way);
      expect_close(m.o, wide.o, 5, "the sum, seed " + std::to_string(seed));
      if (HasFatalFailure()) return;
    }
  }
  // Of one part: a copy in another dtype; into one of them.
  const RowTensor a(DType::kF32, {1, 2, 3, 8}), b(DType::kBF16, {1, 2, 3, 8});
  a.fill_normal(1, 1), b.fill_normal(1, 2);
  const RowTensor before = a.copy(), rounded(DType::kBF16, {1, 2, 3, 8});
  sum({a.view()}, rounded.view());
  sum({a.view(), b.view()}, a.view());
  for (int64_t i = 0; i < a.size(); ++i) {
    EXPECT_EQ(rounded.at(i), testing::round_to(DType::kBF16, before.at(i)));
    EXPECT_EQ(a.at(i), testing::round_to(DType::kF32, before.at(i) + b.at(i)));
  }
  expect_message([&] { merge({{a.view(), {}, {}, {}}}, b.view(), RowTensor(DType::kF32, {1, 3, 2}).view()); }, "a sum has no lse: leave lse absent");
  expect_message([&] { merge_backward({{a.view(), {}, {}, {}}}, b.view()); }, "its gradient is that of every part");
}

// 300 parts of equal weight, merged one after the other: fp32 rounds an lse of 1000 to 6e-5 each time.
TEST(MergeSmall, AnLseOfFp64KeepsItsLastPlaces) {
  for (const RowOptions& way : all_ways())
    for (const DType of_lse : {DType::kF64, DType::kF32}) {
      const RowTensor o(DType::kF32, {1, 1, 1, 4}), part(DType::kF32, {1, 1, 1, 4}), part_lse(DType::kF32, {1, 1, 1}), lse(of_lse, {1, 1, 1});
      o.fill([](int64_t) { return 0.0; });
      lse.set(0, -kInf);
      double mean = 0;
      for (int i = 0; i < 300; ++i) {
        const double x = std::sin(i);
        mean += x / 300;
        part.fill([&](int64_t) { return x; });
        part_lse.set(0, 1000.0625);
        merge({{o.view(), lse.view(), {}, {}}, {part.view(), part_lse.view(), {}, {}}}, o.view(), lse.view(), way);
      }
      const double error = std::abs(lse.at(0) - (1000.0625 + std::log(300.0)));
      EXPECT_TRUE(of_lse == DType::kF64 ? error < 5e-6 : error > 2e-5) << error;
      EXPECT_NEAR(o.at(0), mean, of_lse == DType::kF64 ? 1e-6 : 1e-2);
      const RowTensor plain(DType::kF32, {1, 1, 1});
      merge({{o.view(), lse.view(), {}, {}}}, o.view(), plain.view(), way);
      EXPECT_EQ(plain.at(0), testing::round_to(DType::kF32, lse.at(0)));
    }
  const RowTensor o(DType::kF32, {1, 1, 1, 4}), lse(DType::kF64, {1, 1, 1});
  lse.set(0, 0);
  expect_message([&] { merge_backward({{o.view(), lse.view(), {}, {}}}, o.view()); }, "parts[0].lse has the dtype fp64 (4); it must be fp32 (1)");
}

TEST(MergeSmall, NothingIsNoError) {
  for (const std::vector<int64_t>& n : {std::vector<int64_t>{0, 3, 2}, {2, 0, 2}, {2, 3, 0}}) {
    Merge m;
    m.parts.push_back({RowTensor(DType::kF32, {n[0], n[1], n[2], 8}), RowTensor(DType::kF32, {n[0], n[2], n[1]}), {}, {}});
    m.o = RowTensor(DType::kBF16, {n[0], n[1], n[2], 8});
    m.dout = m.o;
    m.forward();
    m.backward();
  }
}

TEST(MergeSmall, BadInputIsRefusedInWords) {
  const std::vector<int64_t> o_shape{2, 3, 4, 8}, lse_shape{2, 4, 3};
  Merge good;
  for (int i = 0; i < 2; ++i) good.parts.push_back({RowTensor(DType::kF16, o_shape), RowTensor(DType::kF32, lse_shape), {}, {}});
  good.o = good.dout = RowTensor(DType::kF32, o_shape);
  good.lse = good.dlse = RowTensor(DType::kF32, lse_shape);
  for (const Part& part : good.parts) part.o.fill_normal(1, 1), part.lse.fill_normal(1, 2);
  good.forward();
  const auto with = [&](const std::function<void(Merge&)>& change, const std::string& part, const RowOptions& options = {}) {
    Merge m = good;
    change(m);
    expect_message([&] { m.forward(options); }, part);
  };
  with([](Merge& m) { m.parts.clear(); }, "invalid_argument: nparts is 0; allowed: 1 to 1024");
  with(
      [](Merge& m) {
        m.parts[0].o = RowTensor(DType::kF16, {6, 8});
      },
      "parts[0].o has 2 dimensions; allowed: 4 (batch, seqlen_q, nheads, headdim_v), or 3");
  with(
      [](Merge& m) {
        m.parts[1].o = RowTensor(DType::kF16, {2, 3, 4, 9});
      },
      "parts[1].o has the shape (2, 3, 4, 9); expected (2, 3, 4, 8), the shape of parts[0].o");
  with([](Merge& m) { m.parts[1].o = RowTensor(DType::kF64, {2, 3, 4, 8}); }, "parts[1].o is fp64 but parts[0].o is fp16; fp64 goes with fp64 alone");
  with([](Merge& m) { m.parts[1].o = RowTensor(DType::kI32, {2, 3, 4, 8}); }, "parts[1].o has the dtype int32 (5)");
  with(
      [](Merge& m) {
        m.parts[1].o = RowTensor(DType::kF16, {2, 3, 4, 8}, {0, 1, 3, 2});
      },
      "parts[1].o has the stride 4 in its last dimension; it must be 1");
  with([](Merge& m) { m.parts[1].lse = {}; }, "parts[0].lse is there and parts[1].lse is absent; give all parts theirs (a merge) or none (a sum)");
  with(
      [](Merge& m) {
        m.parts[0].lse = RowTensor(DType::kF32, {2, 3, 4});
      },
      "parts[0].lse has the shape (2, 3, 4); expected (2, 4, 3), from parts[0].o");
  with([](Merge& m) { m.parts[0].lse = RowTensor(DType::kF16, {2, 4, 3}); }, "parts[0].lse has the dtype fp16 (2); it must be fp32 (1) or fp64");
  with([](Merge& m) { m.o = {}; }, "o is absent; this call needs it");
  with([](Merge& m) { m.lse = RowTensor(DType::kF32, {2, 4, 4}); }, "lse has the shape (2, 4, 4); expected (2, 4, 3)");
  with([](Merge& m) { m.o = RowTensor(DType::kF64, {2, 3, 4, 8}); }, "o is fp64 but parts[0].o is fp16");
  Merge wide = good;
  for (Part& part : wide.parts) part.o = RowTensor(DType::kF16, {1, 1, 1, 577}), part.lse = RowTensor(DType::kF32, {1, 1, 1});
  expect_message([&] { wide.forward(); }, "headdim_v of parts[0].o is 577; allowed: 1 to 576");
  RowOptions options;
  options.backend = Backend::kCuda;
  with([](Merge&) {}, "unsupported: backend cuda computes in device memory, and the tensors are on the CPU; copy them to a CUDA device", options);
  options.backend = static_cast<Backend>(9);
  with([](Merge&) {}, "backend is 9; allowed: auto (0), reference (1), cpu (2), cuda (3)", options);
  options = {};
  options.num_threads = -1;
  with([](Merge&) {}, "num_threads is -1; allowed: 0 (as many as usable) to 4096", options);
  options = {};
  options.stream = &options;
  with([](Merge&) {}, "stream is given, and the tensors are on the CPU, which has none; pass null", options);
  options = {};
  options.cpu_isa = available(cpu_info(), Isa::kScalar) && cpu_info().isas_available >> static_cast<int>(Isa::kNeon) & 1u ? Isa::kAvx2 : Isa::kNeon;
  with([](Merge&) {}, "cannot run on this processor; available: scalar", options);
  const Merge f64 = good.wide();
  options = {};
  options.backend = Backend::kCpu;
  expect_message([&] { f64.forward(options); }, "backend cpu computes fp32, fp16 and bf16; fp64 runs on backend reference only");

  // Memory.
  const std::vector<MergePart> parts = {{good.parts[0].o.view(), good.parts[0].lse.view(), {}, {}},
                                        {good.parts[1].o.view(), good.parts[1].lse.view(), {}, {}}};
  const auto call = [&](const std::vector<MergePart>& p, const Tensor& o, const Tensor& lse, const std::string& part) {
    expect_message([&] { merge(p, o, lse); }, part);
  };
  std::vector<MergePart> bad = parts;
  bad[1].o = Tensor(nullptr, DType::kF16, {2, 3, 4, 8});
  call(bad, good.o.view(), {}, "parts[1].o is a null pointer, but its shape has elements; pass its memory");
  bad[1].o = Tensor(static_cast<char*>(good.parts[1].o.data()) + 1, DType::kF16, {2, 3, 4, 8});
  call(bad, good.o.view(), {}, "which is not aligned to its element size of 2 bytes");
  bad = parts;
  bad[1].lse = good.parts[1].lse.view().on(Device::kCuda, 2, good.parts[1].lse.data());
  call(bad, good.o.view(), {}, "parts[1].lse is on CUDA device 2 but parts[0].o is on the CPU; all tensors of a call are on one device");
  call(parts, Tensor(static_cast<char*>(good.parts[1].o.data()) + 2, DType::kF16, {2, 3, 4, 8}), {},
       "o overlaps parts[1].o in memory; allowed: memory of its own, or the same pointer, strides and dtype");
  call(parts, Tensor(good.parts[0].lse.data(), DType::kBF16, {1, 1, 1, 1}), {}, "o has the shape (1, 1, 1, 1); expected (2, 3, 4, 8)");
  call(parts, good.o.view(), Tensor(good.o.data(), DType::kF32, {2, 4, 3}), "o overlaps lse in memory; an output needs memory of its own");
  call(parts, Tensor(good.o.data(), DType::kF32, {2, 3, 4, 8}, {0, 32, 8, 1}), {}, "o is an output whose strides reach one element by two indices");

  // Backward.
  expect_message([&] { merge_backward(parts, {}); }, "dout is absent; this call needs it");
  bad = parts;
  bad[0].dout = good.parts[1].o.view();
  expect_message([&] { merge_backward(bad, good.dout.view()); }, "parts[0].dout overlaps parts[1].o in memory; an output needs memory of its own");
  bad[0].dout = good.dout.view();
  expect_message([&] { merge_backward(bad, good.dout.view()); }, "parts[0].dout overlaps dout in memory");
  bad[0].dout = RowTensor(DType::kF32, {2, 3, 4, 7}).view();
  expect_message([&] { merge_backward(bad, good.dout.view()); }, "parts[0].dout has the shape (2, 3, 4, 7); expected (2, 3, 4, 8)");

  // The structs.
  fattn_merge_problem p{};
  EXPECT_EQ(fattn_merge(nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(fattn_last_error(), "problem is a null pointer");
  EXPECT_EQ(fattn_merge(&p), FATTN_ERROR_ABI);
  EXPECT_NE(std::string(fattn_last_error()).find("problem.struct_size is 0; this library knows "), std::string::npos);
  p.struct_size = sizeof p;
  EXPECT_EQ(fattn_merge_backward(&p), FATTN_ERROR_ABI);
  EXPECT_NE(std::string(fattn_last_error()).find("the problem is of ABI version 0"), std::string::npos);
  p.abi_version = FATTN_ABI_VERSION;
  p.nparts = 3;
  EXPECT_EQ(fattn_merge(&p), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(fattn_last_error(), "parts is a null pointer; pass an array of nparts, 3, parts");
}

}  // namespace
}  // namespace fattn
