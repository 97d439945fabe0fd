// Merge and rotary embeddings on a GPU without one: the host's side on stubs of driver and NVRTC, whose launches run the kernels thread by thread.
#include <algorithm>

#include "cuda_backend.h"
#include "emulated/device.h"
//
#include "jit/kernel_table.h"
#include "kernels/rows/merge.h"
#include "kernels/rows/rotary.h"
#include "row_tensors.h"
#include "rows/cuda.h"

namespace fattn {
namespace {

using namespace test;
using test::launches::launched;
using test::launches::stub;

// Whether the next launch is of a kernel that takes four elements at once.
bool in_fours = true;

struct Four {
  static constexpr int kUnit = 4;
};
struct One {
  static constexpr int kUnit = 1;
};

template <class Params>
Params params_of(const void* argument) {
  Params params;
  std::memcpy(&params, argument, sizeof params);
  return params;
}
long long merge_ctas(long long rows) { return (rows + kRowsThreads / 32 - 1) / (kRowsThreads / 32); }
void run_merge(const void* argument) {
  const auto p = params_of<MergeParams>(argument);
  launched.emplace_back("merge");
  emulated::run(merge_ctas(p.rows), kRowsThreads, [&] { in_fours ? rows::merge<Four>(p) : rows::merge<One>(p); });
}
void run_merge_backward(const void* argument) {
  const auto p = params_of<MergeBackwardParams>(argument);
  launched.emplace_back("merge backward");
  emulated::run(merge_ctas(p.rows), kRowsThreads, [&] { in_fours ? rows::merge_backward<Four>(p) : rows::merge_backward<One>(p); });
}
long long rotary_ctas = 0;
void run_rotary(const void* argument) {
  const auto p = params_of<RotaryRowParams>(argument);
  launched.emplace_back("rotary");
  emulated::run(rotary_ctas, kRowsThreads, [&] { in_fours ? rows::rotary<Four>(p) : rows::rotary<One>(p); });
}

class CudaRows : public ::testing::Test {
 protected:
  void SetUp() override {
    stub().kernel("fattn_merge", run_merge, sizeof(MergeParams));
    stub().kernel("fattn_merge_backward", run_merge_backward, sizeof(MergeBackwardParams));
    stub().kernel("fattn_rotary", run_rotary, sizeof(RotaryRowParams));
    launched.clear();
  }
  Tensor on_device(const RowTensor& t) { return device_.put(t); }
  void copy_back() const { device_.fetch(); }
  const CacheFolder folder_;
  DeviceTensors device_;
};

// The first of this program: it counts kernels. Addresses and strides of four elements take one of their own, as any others do.
TEST_F(CudaRows, KernelsByAlignment) {
  const RowTensor o(DType::kF32, {1, 1, 2, 8}), l(DType::kF32, {1, 2, 1}), odd(DType::kF32, {1, 1, 2, 8}, {0, 1, 2, 3}, 1),
      angles(DType::kF32, {1, 4});
  const Tensor there = on_device(o), there_l = on_device(l), to = on_device(o), to_odd = on_device(odd), there_angles = on_device(angles);
  const Tensor skewed(static_cast<float*>(on_device(RowTensor(DType::kF32, {1, 1, 2, 9})).data()) + 1, DType::kF32, {1, 1, 2, 8});
  rotary_ctas = 1;
  const size_t before = core::jit::kernel_table().size();
  const auto kernels = [&] { return core::jit::kernel_table().size() - before; };
  for (const auto& [result, count] : {std::pair{to, 3u}, {to_odd, 6u}, {skewed.on(Device::kCuda, 0, skewed.data()), 6u}}) {
    in_fours = count == 3;
    merge({{there, there_l, {}, {}}}, result);
    merge_backward({{there, there_l, result, {}}}, there);
    rotary(there, there_angles, there_angles, result);
    EXPECT_EQ(kernels(), count);
  }
}

TEST_F(CudaRows, MergesAsTheReferenceDoes) {
  for (int n = 0; n < 8; ++n) {
    device_ = {};
    const int64_t headdim = n % 2 == 0 ? 64 : 33, batch = 2, seqlen = 5, heads = 3;
    in_fours = n % 2 == 0;
    const bool packed = n >= 4;
    const DType dtypes[] = {DType::kF16, DType::kBF16, DType::kF32};
    const auto number = [&](int i) {
      const DType dtype = dtypes[(n + i) % 3];
      return packed ? RowTensor(dtype, {batch * seqlen, heads, headdim})
                    : RowTensor(dtype, {batch, seqlen, heads, headdim}, i % 2 == 0 ? std::vector{0, 1, 2, 3} : std::vector{0, 2, 1, 3},
                                in_fours ? 4 : 3);
    };
    const auto lse = [&] { return packed ? RowTensor(DType::kF32, {heads, batch * seqlen}) : RowTensor(DType::kF32, {batch, heads, seqlen}); };
    const auto row_of_lse = [&](int64_t i) {  // of o, from an element of lse
      const int64_t length = packed ? batch * seqlen : seqlen, row = i % length, head = i / length % heads, entry = i / length / heads;
      return (entry * length + row) * heads + head;
    };
    std::vector<MergePart> wide, there;
    std::vector<RowTensor> keep, dout, dlse, wide_dout, wide_dlse;
    for (int i = 0; i < 3; ++i) {
      const RowTensor o = number(i), l = lse();
      o.fill_normal(static_cast<uint64_t>(n), static_cast<uint64_t>(i));
      l.fill_normal(static_cast<uint64_t>(n), 10 + static_cast<uint64_t>(i), 3);
      // Of these rows the part sees nothing, and its o is anything; no part sees the first three.
      for (int64_t r = 0; r < l.size(); ++r) {
        if (r >= 3 && r % 4 != i && (i != 1 || r >= 9)) continue;
        l.set(r, -kInf);
        for (int64_t d = 0; d < headdim; ++d) o.set(row_of_lse(r) * headdim + d, kNotANumber);
      }
      dout.push_back(number(i + 1)), dlse.push_back(lse());
      keep.push_back(o.wide()), keep.push_back(l.wide());
      wide_dout.push_back(dout.back().empty_wide()), wide_dlse.push_back(dlse.back().empty_wide());
      wide.push_back({keep[keep.size() - 2].view(), keep.back().view(), wide_dout.back().view(), wide_dlse.back().view()});
      there.push_back({on_device(o), on_device(l), on_device(dout.back()), on_device(dlse.back())});
    }
    const RowTensor o = number(2), l = lse(), given = number(0), given_lse = lse(), wide_o = o.empty_wide(), wide_l = l.empty_wide();
    given.fill_normal(static_cast<uint64_t>(n), 20), given_lse.fill_normal(static_cast<uint64_t>(n), 21);
    given.set(row_of_lse(1) * headdim, kNotANumber);  // which no part sees
    merge(wide, wide_o.view(), wide_l.view());
    merge_backward(wide, given.wide().view(), given_lse.wide().view());
    merge(there, on_device(o), on_device(l));
    merge_backward(there, on_device(given), on_device(given_lse));
    copy_back();
    const std::string what = ", problem " + std::to_string(n);
    expect_close(o, wide_o, 5, "o" + what);
    expect_close(l, wide_l, 0.1, "lse" + what);
    for (size_t i = 0; i < 3; ++i) {
      expect_close(dout[i], wide_dout[i], 1, "dout" + what);
      expect_close(dlse[i], wide_dlse[i], 20, "dlse" + what);
    }
    if (HasFatalFailure()) return;
  }
  EXPECT_EQ(launched.size(), 16u);
}

TEST_F(CudaRows, TheResultMayBeAPart) {
  in_fours = true;
  const RowTensor o(DType::kF32, {1, 3, 2, 64}), l(DType::kF32, {1, 2, 3}), o2(DType::kF16, {1, 3, 2, 64}), l2(DType::kF32, {1, 2, 3});
  o.fill_normal(1, 1), l.fill_normal(1, 2), o2.fill_normal(1, 3), l2.fill_normal(1, 4);
  const RowTensor expected = o.empty_wide(), expected_l = l.empty_wide(), a = o.wide(), b = l.wide(), c = o2.wide(), d = l2.wide();
  merge({{a.view(), b.view(), {}, {}}, {c.view(), d.view(), {}, {}}}, expected.view(), expected_l.view());
  const Tensor o_there = on_device(o), l_there = on_device(l);
  merge({{o_there, l_there, {}, {}}, {on_device(o2), on_device(l2), {}, {}}}, o_there, l_there);
  copy_back();
  expect_close(o, expected, 5, "o");
  expect_close(l, expected_l, 0.1, "lse");
}

TEST_F(CudaRows, SumsAndAnLseOfFp64) {
  in_fours = true;
  const RowTensor a(DType::kF32, {1, 3, 2, 64}), b(DType::kBF16, {1, 3, 2, 64}), to(DType::kF16, {1, 3, 2, 64});
  a.fill_normal(1, 1), b.fill_normal(1, 2);
  const RowTensor l(DType::kF64, {1, 2, 3}), l2(DType::kF32, {1, 2, 3}), o(DType::kF32, {1, 3, 2, 64}), to_l(DType::kF64, {1, 2, 3});
  l.fill([](int64_t i) { return i == 4 ? -kInf : 1000 + 1e-6 * static_cast<double>(i); });
  l2.fill([](int64_t i) { return i == 4 ? -kInf : 1000.0; });
  const RowTensor sums = to.empty_wide(), merged = o.empty_wide(), merged_l(DType::kF64, {1, 2, 3}), wa = a.wide(), wb = b.wide(), wl2 = l2.wide();
  sum({wa.view(), wb.view()}, sums.view());
  merge({{wa.view(), l.view(), {}, {}}, {wb.view(), wl2.view(), {}, {}}}, merged.view(), merged_l.view());
  const Tensor a_there = on_device(a), b_there = on_device(b);
  sum({a_there, b_there}, on_device(to));
  merge({{a_there, on_device(l), {}, {}}, {b_there, on_device(l2), {}, {}}}, on_device(o), on_device(to_l));
  copy_back();
  expect_close(to, sums, 1, "the sum");
  expect_close(o, merged, 1, "o");
  for (int64_t i = 0; i < 6; ++i)
    EXPECT_TRUE(to_l.at(i) == merged_l.at(i) || std::abs(to_l.at(i) - merged_l.at(i)) < 2e-7) << i;  // of log(total) alone
}

TEST_F(CudaRows, TurnsAsTheReferenceDoes) {
  for (int n = 0; n < 16; ++n) {
    device_ = {};
    const bool interleaved = n % 2 != 0, packed = n / 2 % 2 != 0, lists = n / 4 % 2 != 0;
    in_fours = n / 8 != 0;
    const int64_t heads = 3, headdim = in_fours ? 40 : 15, half = in_fours ? 16 : 7;
    const DType dtype = n % 3 == 0 ? DType::kF32 : n % 3 == 1 ? DType::kF16 : DType::kBF16;
    const std::vector<int64_t> shape = packed ? std::vector<int64_t>{9, heads, headdim} : std::vector<int64_t>{3, 3, heads, headdim};
    const RowTensor x(dtype, shape), y(dtype, shape), cos(DType::kF32, {20, half}), sin(n % 2 == 0 ? DType::kF32 : dtype, {20, half});
    x.fill_normal(1, 1), cos.fill_normal(1, 2), sin.fill_normal(1, 3);
    const RowTensor first(DType::kI32, {4}), offsets(n % 2 == 0 ? DType::kI32 : DType::kI64, {3});
    const int64_t firsts[] = {0, 4, 4, 8}, each[] = {16, 0, 3};
    first.fill([&](int64_t i) { return static_cast<double>(firsts[i]); });
    offsets.fill([&](int64_t i) { return static_cast<double>(each[i]); });
    RotaryOptions options, there;
    options.interleaved = there.interleaved = interleaved;
    options.inverse = there.inverse = n % 3 == 0;
    if (packed) options.cu_seqlens = first.view(), there.cu_seqlens = on_device(first);
    if (lists)
      options.offsets = offsets.view(), there.offsets = on_device(offsets);
    else
      options.offset = there.offset = 5;
    const RowTensor wide_x = x.wide(), wide_y = y.empty_wide(), wide_cos = cos.wide(), wide_sin = sin.wide();
    rotary(wide_x.view(), wide_cos.view(), wide_sin.view(), wide_y.view(), options);
    rotary_ctas = 9;
    rotary(on_device(x), on_device(cos), on_device(sin), on_device(y), there);
    copy_back();
    expect_close(y, wide_y, 3, "problem " + std::to_string(n));
    if (HasFatalFailure()) return;
  }
}

// Of lists on the device the host knows nothing; nothing is read by a bad number.
TEST_F(CudaRows, PositionsOutOfRangeAreNan) {
  in_fours = false;
  const RowTensor x(DType::kF32, {4, 2, 1, 3}), y(DType::kF32, {4, 2, 1, 3}), cos(DType::kF32, {5, 1}), sin(DType::kF32, {5, 1});
  for (const RowTensor& t : {x, cos, sin}) t.fill([](int64_t) { return 1.0; });
  const RowTensor offsets(DType::kI64, {4});
  const double each[] = {5, -1, 4, 9e18};
  offsets.fill([&](int64_t i) { return each[i]; });
  RotaryOptions options;
  options.offsets = on_device(offsets);
  rotary_ctas = 8;
  rotary(on_device(x), on_device(cos), on_device(sin), on_device(y), options);
  copy_back();
  for (int64_t r = 0; r < 8; ++r) {
    const bool good = r == 4;  // position 4, the last one
    EXPECT_EQ(std::isnan(y.at(3 * r)), !good) << r;
    EXPECT_EQ(std::isnan(y.at(3 * r + 1)), !good) << r;
    EXPECT_EQ(y.at(3 * r + 2), 1) << r;
  }
}

TEST_F(CudaRows, RefusedInWords) {
  const RowTensor o(DType::kF16, {1, 2, 2, 8}), l(DType::kF32, {1, 2, 2});
  const Tensor there = on_device(o), l_there = on_device(l), out = on_device(o);
  const std::vector<MergePart> many(25, MergePart{there, l_there, {}, {}});
  expect_message([&] { merge(many, out); },
                 "unsupported: nparts is 25; backend cuda merges up to 24 parts in a call. Merge as many into o and lse in fp32");
  RowOptions options;
  options.backend = Backend::kCpu;
  expect_message(
      [&] {
        merge({{there, l_there, {}, {}}}, out, {}, options);
      },
      "unsupported: backend cpu computes in host memory, and the tensors are on CUDA device 0");
  const Tensor host = o.view().on(Device::kCuda, 0, o.data());
  expect_message([&] { merge({{there, l_there, {}, {}}}, host); }, "o is at ");
  expect_message([&] { merge({{host, l_there, {}, {}}}, out); }, "parts[0].o is at ");
  expect_message([&] { merge({{there, l_there, {}, {}}}, o.view()); }, "o is on the CPU but parts[0].o is on CUDA device 0");
  EXPECT_TRUE(launched.empty());
  const RowTensor wide(DType::kF64, {1, 2, 2, 8}), wide_l(DType::kF64, {1, 2, 2});
  const Tensor w = on_device(wide), wl = on_device(wide_l), w2 = on_device(wide);
  expect_message([&] { merge({{w, wl, {}, {}}}, w2); }, "backend cuda computes fp32, fp16 and bf16; fp64 runs on backend reference only");
}

// They are among those that packs have, and are told no more than a kernel may be.
TEST_F(CudaRows, RequestsNameTheirHeaders) {
  using core::cuda::KernelKind;
  for (const KernelKind kind : {KernelKind::kMerge, KernelKind::kMergeBackward, KernelKind::kRotary, KernelKind::kAppend}) {
    const core::jit::Request request = core::rows::cuda::rows_request({.kind = kind, .arch = 90, .unit = 1});
    EXPECT_NE(request.source.find("#include \"kernels/rows/"), std::string::npos);
    EXPECT_NE(request.source.find("static constexpr int kUnit = 1;"), std::string::npos);
    EXPECT_FALSE(core::jit::reachable(request.source, core::jit::embedded_sources()).empty());
    EXPECT_EQ(request.source.find("kDependent = true") != std::string::npos, kind == KernelKind::kAppend) << "comes up early";
    EXPECT_EQ(core::rows::cuda::rows_request({.kind = kind, .arch = 89, .unit = 1}).source.find("kDependent"), std::string::npos);
  }
}

}  // namespace
}  // namespace fattn
