// Problems of merge and rotary embeddings with tensors of their own, and random ones of any kind.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "row_tensors.h"

namespace fattn::test {

constexpr DType kDtypes[] = {DType::kF32, DType::kF16, DType::kBF16};

struct Part {
  RowTensor o, lse, dout, dlse;
};
struct Merge {
  std::vector<Part> parts;
  RowTensor o, lse, dout, dlse;

  std::vector<MergePart> views() const {
    std::vector<MergePart> all;
    for (const Part& p : parts) all.push_back({p.o.view(), p.lse.view(), p.dout.view(), p.dlse.view()});
    return all;
  }
  void forward(const RowOptions& options = {}) const {
    std::vector<MergePart> all = views();
    for (MergePart& part : all) part.dout = part.dlse = {};
    merge(all, o.view(), lse.view(), options);
  }
  void backward(const RowOptions& options = {}) const { merge_backward(views(), dout.view(), dlse.view(), options); }
  // The same in float64, with outputs that are not written yet.
  Merge wide() const {
    Merge w{{}, o.empty_wide(), lse.empty_wide(), dout.wide(), dlse.wide()};
    for (const Part& p : parts) w.parts.push_back({p.o.wide(), p.lse.wide(), p.dout.empty_wide(), p.dlse.empty_wide()});
    return w;
  }
};

enum class Layout { kBshd, kBhsd, kPacked };

inline RowTensor rows(Layout layout, DType dtype, int64_t batch, int64_t seqlen, int64_t heads, int64_t headdim, int64_t gap) {
  if (layout == Layout::kPacked) return RowTensor(dtype, {batch * seqlen, heads, headdim}, {0, 1, 2}, gap);
  return RowTensor(dtype, {batch, seqlen, heads, headdim}, layout == Layout::kBshd ? std::vector{0, 1, 2, 3} : std::vector{0, 2, 1, 3}, gap);
}
inline RowTensor lses(Layout layout, DType dtype, int64_t batch, int64_t seqlen, int64_t heads, bool turned) {
  if (layout == Layout::kPacked) return RowTensor(dtype, {heads, batch * seqlen}, turned ? std::vector{1, 0} : std::vector{0, 1});
  return RowTensor(dtype, {batch, heads, seqlen}, turned ? std::vector{0, 2, 1} : std::vector{0, 1, 2});
}

// A problem of any kind from a number.
inline Merge random_merge(uint64_t seed) {
  const testing::Random random(seed, 0);
  uint64_t drawn = 0;
  const auto draw = [&](int64_t n) { return static_cast<int64_t>(random.uniform(drawn++) * static_cast<double>(n)); };
  constexpr int64_t kHeaddims[] = {1, 3, 8, 16, 33, 64, 96, 128, 257, 576};
  const int64_t batch = 1 + draw(3), seqlen = 1 + draw(40), heads = 1 + draw(5), headdim = kHeaddims[draw(10)];
  const auto layout = static_cast<Layout>(draw(3));
  const int64_t nparts = draw(5) == 0 ? 13 : 1 + draw(5);
  const double far = draw(3) == 0 ? 1e4 : 3;
  const auto number = [&] { return rows(layout, kDtypes[draw(3)], batch, seqlen, heads, headdim, draw(2) * 7); };
  const auto lse = [&] { return lses(layout, DType::kF32, batch, seqlen, heads, draw(2) == 0); };
  Merge m{{}, number(), draw(4) == 0 ? RowTensor() : lse(), number(), draw(4) == 0 ? RowTensor() : lse()};
  for (int64_t i = 0; i < nparts; ++i) {
    Part part{number(), lse(), draw(5) == 0 ? RowTensor() : number(), draw(5) == 0 ? RowTensor() : lse()};
    part.o.fill_normal(seed, 10 + static_cast<uint64_t>(i));
    part.lse.fill_normal(seed, 100 + static_cast<uint64_t>(i), far);
    // Of some rows the part sees nothing, and its o is anything.
    for (int64_t b = 0; b < batch; ++b)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t r = 0; r < seqlen; ++r)
          if (draw(4) == 0) {
            const bool packed = layout == Layout::kPacked;
            part.lse.set(packed ? h * batch * seqlen + b * seqlen + r : (b * heads + h) * seqlen + r, -kInf);
            for (int64_t d = 0; d < headdim; ++d) part.o.set(((b * seqlen + r) * heads + h) * headdim + d, d % 2 == 0 ? kNotANumber : kInf);
          }
    m.parts.push_back(std::move(part));
  }
  m.dout.fill_normal(seed, 1);
  if (m.dlse.size() > 1) m.dlse.fill_normal(seed, 2);
  return m;
}

struct Rotary {
  RowTensor x, y, cos, sin, offsets, cu_seqlens;
  RotaryOptions options;

  void run(const RowOptions& way = {}) const {
    RotaryOptions all = options;
    static_cast<RowOptions&>(all) = way;
    all.offsets = offsets.view();
    all.cu_seqlens = cu_seqlens.view();
    rotary(x.view(), cos.view(), sin.view(), y.view(), all);
  }
  Rotary wide() const { return {x.wide(), y.empty_wide(), cos.wide(), sin.wide(), offsets, cu_seqlens, options}; }
};

inline RowTensor list(DType dtype, const std::vector<int64_t>& numbers, int64_t gap = 0) {
  const auto n = static_cast<int64_t>(numbers.size());
  RowTensor t(dtype, {n, 1}, {0, 1}, gap);
  t.fill([&](int64_t i) { return static_cast<double>(numbers[static_cast<size_t>(i)]); });
  return t.column();
}

inline Rotary random_rotary(uint64_t seed) {
  const testing::Random random(seed, 0);
  uint64_t drawn = 0;
  const auto draw = [&](int64_t n) { return static_cast<int64_t>(random.uniform(drawn++) * static_cast<double>(n)); };
  constexpr int64_t kHeaddims[] = {1, 2, 6, 8, 33, 64, 96, 128, 576};
  const int64_t batch = 1 + draw(3), seqlen = 1 + draw(20), heads = 1 + draw(4), headdim = kHeaddims[draw(9)];
  const int64_t half = draw(2) == 0 ? headdim / 2 : draw(headdim / 2 + 1), positions = 40;
  const bool packed = draw(3) == 0;
  const DType dtype = kDtypes[draw(3)];
  Rotary r;
  const auto tensor = [&] {
    if (packed) return RowTensor(dtype, {batch * seqlen, heads, headdim}, {0, 1, 2}, draw(2) * 5);
    return RowTensor(dtype, {batch, seqlen, heads, headdim}, draw(2) == 0 ? std::vector{0, 1, 2, 3} : std::vector{0, 2, 1, 3}, draw(2) * 5);
  };
  r.x = tensor(), r.y = tensor();
  r.x.fill_normal(seed, 1);
  r.cos = RowTensor(draw(2) == 0 ? DType::kF32 : dtype, {positions, half}, {0, 1}, draw(2) * 3);
  r.sin = RowTensor(draw(2) == 0 ? DType::kF32 : dtype, {positions, half}, {0, 1}, draw(2) * 3);
  r.cos.fill_normal(seed, 2), r.sin.fill_normal(seed, 3);
  r.options.interleaved = draw(2) == 0;
  r.options.inverse = draw(2) == 0;
  if (packed) {
    std::vector<int64_t> first{0};
    for (int64_t b = 0; b < batch; ++b) first.push_back(std::min(first.back() + draw(seqlen + 1), batch * seqlen));
    r.cu_seqlens = list(DType::kI32, first, draw(2));
  }
  if (draw(2) == 0)
    r.options.offset = draw(20);
  else {
    std::vector<int64_t> offsets;
    for (int64_t b = 0; b < batch; ++b) offsets.push_back(draw(20));
    r.offsets = list(draw(2) == 0 ? DType::kI32 : DType::kI64, offsets, draw(2));
  }
  return r;
}

}  // namespace fattn::test
