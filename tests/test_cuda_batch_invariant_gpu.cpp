// batch_invariant on a GPU: a row of o and lse has the same bits in any company, however the queries of its sequence are divided among calls, and
// however its keys lie.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "fattn/attention.hpp"
#include "gpu_fixture.h"
#include "testing/check.h"
#include "testing/device_mirror.h"
#include "testing/random_case.h"
#include "testing/run.h"

namespace fattn::testing {
namespace {

constexpr int64_t kBatch = 3, kSeqlen = 300, kHeads = 4, kHeadsK = 2, kPageSize = 24;

Target on_gpu() {
  Target target;
  target.backend = Backend::kCuda;
  target.device = Device::kCuda;
  target.batch_invariant = true;
  return target;
}

Case of(DType dtype, int64_t headdim) {
  Case c;
  c.dtype = dtype;
  c.batch = kBatch;
  c.seqlen_q = c.seqlen_k = kSeqlen;
  c.nheads = kHeads;
  c.nheads_k = kHeadsK;
  c.headdim = c.headdim_v = headdim;
  c.causal = true;
  c.backward = false;
  c.seed = 5;
  return c;
}

// Queries [begin, end) of a batch entry, which see keys below `end`.
struct Piece {
  int64_t entry, begin, end;
  int64_t rows() const { return end - begin; }
};

// A row's o and lse of all heads.
struct Out {
  Dense o, lse;
  int64_t rows = 0, numbers = 0;  // of a batch entry, of a row of o
  bool packed = false;
  Dense row(int64_t entry, int64_t row) const {  // of packed sequences the row of all, of entry 0
    const int64_t first = (entry * rows + row) * numbers;
    Dense all(o.begin() + first, o.begin() + first + numbers);
    for (int64_t h = 0; h < kHeads; ++h) all.push_back(lse[static_cast<size_t>((entry * kHeads + h) * rows + row)]);
    return all;
  }
};

enum class Keys { kBeside, kPacked, kPaged, kPackedPaged };

Tensor view(const Tensor& t, int64_t offset, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides) {
  return Tensor(static_cast<unsigned char*>(t.data()) + static_cast<size_t>(offset) * size_of(t.dtype()), t.dtype(), shape, strides);
}

// A case's sequences, and calls with parts of them.
class Sequences {
 public:
  explicit Sequences(const Case& c) : c_(c), in_(make_inputs(c)), options_(options_of(c, on_gpu())) {}
  const CaseInputs& in() const { return in_; }

  Out whole() const {
    ForwardTensors t = inputs(in_.q, in_.k, in_.v);
    t.scores = in_.scores;
    return run(t, {});
  }

  // One piece, with what its rows and keys have of all that scores depend on.
  Out alone(const Piece& at) const {
    const auto rows = [&](const Tensor& t, int64_t begin, int64_t count) {
      return view(t, at.entry * t.stride(0) + begin * t.stride(1), {1, count, t.shape(2), t.shape(3)},
                  {t.stride(0), t.stride(1), t.stride(2), t.stride(3)});
    };
    const auto pairs = [&](const Tensor& t) {
      return t ? view(t, at.begin * t.stride(2), {t.shape(0), t.shape(1), at.rows(), at.end}, {t.stride(0), t.stride(1), t.stride(2), t.stride(3)})
               : t;
    };
    const auto ids = [&](const Tensor& t, int64_t begin, int64_t count) {
      return t ? view(t, at.entry * t.stride(0) + begin * t.stride(1), {1, count}, {t.stride(0), t.stride(1)}) : t;
    };
    ForwardTensors t = inputs(rows(in_.q, at.begin, at.rows()), rows(in_.k, 0, at.end), rows(in_.v, 0, at.end));
    t.scores = in_.scores;
    t.scores.bias = pairs(in_.scores.bias);
    t.scores.mask = pairs(in_.scores.mask);
    t.scores.document_q = ids(in_.scores.document_q, at.begin, at.rows());
    t.scores.document_k = ids(in_.scores.document_k, 0, at.end);
    return run(t, {});
  }

  // Pieces together, each a sequence; but for packed ones they have as many rows. What is behind the keys of a sequence is NaN.
  Out together(const std::vector<Piece>& pieces, Keys how) const {
    const bool packed = how == Keys::kPacked || how == Keys::kPackedPaged, paged = how == Keys::kPaged || how == Keys::kPackedPaged;
    const auto count = static_cast<int64_t>(pieces.size());
    std::vector<TensorBlock> blocks;
    blocks.reserve(8);
    std::vector<int32_t> cu_q{0}, cu_k{0}, used, table;
    int64_t longest_q = 0, longest_k = 0;
    for (const Piece& p : pieces) {
      cu_q.push_back(cu_q.back() + static_cast<int32_t>(p.rows()));
      cu_k.push_back(cu_k.back() + static_cast<int32_t>(p.end));
      used.push_back(static_cast<int32_t>(p.end));
      longest_q = std::max(longest_q, p.rows()), longest_k = std::max(longest_k, p.end);
    }
    const int64_t columns = (longest_k + kPageSize - 1) / kPageSize, pages = columns * count;
    for (int64_t i = 0; i < pages; ++i) table.push_back(static_cast<int32_t>(pages - 1 - i));
    const int64_t room = paged ? kPageSize : longest_k;
    // Rows of a tensor, where the n-th row of piece i goes.
    const auto gather = [&](const Tensor& from, bool keys) {
      const int64_t heads = from.shape(2), width = from.shape(3);
      const int64_t rows = !keys ? (packed ? cu_q.back() : count * longest_q) : paged ? pages * kPageSize : packed ? cu_k.back() : count * longest_k;
      TensorBlock& block = blocks.emplace_back(from.dtype(), rows * heads * width, 0, TensorBlock::kUnwritten);
      const Tensor flat = block.place(0, {rows, heads, width}, {heads * width, width, 1});
      const size_t bytes = static_cast<size_t>(width) * size_of(from.dtype());
      for (int64_t i = 0; i < count; ++i) {
        const Piece& p = pieces[static_cast<size_t>(i)];
        for (int64_t n = 0; n < (keys ? p.end : p.rows()); ++n) {
          const auto at = static_cast<size_t>(i);
          const int64_t to = !keys    ? (packed ? cu_q[at] + n : i * longest_q + n)
                             : paged  ? table[static_cast<size_t>(i * columns + n / kPageSize)] * kPageSize + n % kPageSize
                             : packed ? cu_k[at] + n
                                      : i * longest_k + n;
          for (int64_t h = 0; h < heads; ++h)
            std::memcpy(static_cast<unsigned char*>(flat.data()) + static_cast<size_t>(to * heads + h) * bytes,
                        static_cast<const unsigned char*>(from.data()) +
                            static_cast<size_t>(p.entry * from.stride(0) + ((keys ? 0 : p.begin) + n) * from.stride(1) + h * from.stride(2)) *
                                size_of(from.dtype()),
                        bytes);
        }
      }
      if (keys ? packed && !paged : packed) return flat;
      const int64_t each = keys ? room : longest_q;
      return view(flat, 0, {rows / each, each, heads, width}, {each * heads * width, heads * width, width, 1});
    };
    const auto numbers = [&](const std::vector<int32_t>& values, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides) {
      const auto size = static_cast<int64_t>(values.size());
      const Tensor t = blocks.emplace_back(DType::kI32, size, 0, TensorBlock::kUnwritten).place(0, shape, strides);
      std::memcpy(t.data(), values.data(), 4 * values.size());
      return t;
    };
    ForwardTensors t = inputs(gather(in_.q, false), gather(in_.k, true), gather(in_.v, true));
    t.scores.alibi_slopes = in_.scores.alibi_slopes;
    t.scores.sinks = in_.scores.sinks;
    Options options = options_;
    if (packed) {
      t.scores.cu_seqlens_q = numbers(cu_q, {count + 1}, {1});
      options.max_seqlen_q = longest_q;
      if (!paged) t.scores.cu_seqlens_k = numbers(cu_k, {count + 1}, {1}), options.max_seqlen_k = longest_k;
    }
    if (paged) t.scores.block_table = numbers(table, {count, columns}, {columns, 1});
    if (paged || !packed) t.scores.seqused_k = numbers(used, {count}, {1});
    return run(t, blocks, options);
  }

 private:
  static ForwardTensors inputs(const Tensor& q, const Tensor& k, const Tensor& v) {
    ForwardTensors t;
    t.q = q, t.k = k, t.v = v;
    return t;
  }
  Out run(const ForwardTensors& t, const std::vector<TensorBlock>& blocks) const { return run(t, blocks, options_); }
  Out run(ForwardTensors t, const std::vector<TensorBlock>& blocks, const Options& options) const {
    Out out;
    out.packed = t.q.ndim() == 3;
    const int64_t batch = out.packed ? 1 : t.q.shape(0), width = c_.headdim_v;
    out.rows = out.packed ? t.q.shape(0) : t.q.shape(1);
    out.numbers = kHeads * width;
    std::vector<TensorBlock> written;
    written.reserve(2);
    TensorBlock& of_o = written.emplace_back(c_.dtype, batch * out.rows * out.numbers, 0, TensorBlock::kUnwritten);
    TensorBlock& of_lse = written.emplace_back(DType::kF32, batch * out.rows * kHeads, 0, TensorBlock::kUnwritten);
    t.o = out.packed ? of_o.place(0, {out.rows, kHeads, width}, {out.numbers, width, 1})
                     : of_o.place(0, {batch, out.rows, kHeads, width}, {out.rows * out.numbers, out.numbers, width, 1});
    t.lse = out.packed ? of_lse.place(0, {kHeads, out.rows}, {out.rows, 1})
                       : of_lse.place(0, {batch, kHeads, out.rows}, {kHeads * out.rows, out.rows, 1});
    DeviceMirror mirror(0);
    mirror.add(in_.blocks);
    mirror.add(blocks);
    mirror.add(written);
    forward(each_tensor(t, [&](const Tensor& x) { return mirror.at(x); }), options);
    mirror.fetch();
    out.o = read(t.o);
    out.lse = read(t.lse);
    return out;
  }

  Case c_;
  CaseInputs in_;
  Options options_;
};

// Rows of a part of the whole, from row `first` of entry `entry` of the part on.
void expect_same(const Out& whole, const Out& part, const Piece& piece, int64_t entry, int64_t first, const std::string& what) {
  for (int64_t row = 0; row < piece.rows(); ++row) {
    const Dense wanted = whole.row(piece.entry, piece.begin + row), got = part.row(entry, first + row);
    if (same_bits(wanted, got)) continue;
    size_t i = 0;
    while (same_bits({wanted[i]}, {got[i]})) ++i;
    ADD_FAILURE() << what << ": entry " << piece.entry << ", rows " << piece.begin << " to " << piece.end << ", row " << piece.begin + row
                  << ", number " << i << " of " << wanted.size() << " is " << got[i] << ", of the whole " << wanted[i];
    return;
  }
}

// What a row may depend on of itself, of its keys and of options.
std::vector<Case> cases(DType dtype) {
  std::vector<Case> all{of(dtype, 64), of(dtype, 128), of(dtype, 40)};
  const auto add = [&](int64_t headdim, auto change) {
    Case c = of(dtype, headdim);
    change(c);
    all.push_back(c);
  };
  add(192, [](Case& c) { c.inputs = Inputs::kRising; });
  add(dtype == DType::kF32 ? 32 : 256, [](Case& c) { c.inputs = Inputs::kSigma3; });
  add(64, [](Case& c) { c.window_left = 50, c.inputs = Inputs::kSigma2; });
  add(128, [](Case& c) { c.window_left = 100, c.causal = false, c.window_right = 0, c.softcap = 3; });
  add(64, [](Case& c) { c.alibi = Alibi::kHeads, c.sinks = true; });
  add(128, [](Case& c) { c.alibi = Alibi::kHeads, c.inputs = Inputs::kHugeLogits; });
  add(64, [](Case& c) { c.inputs = Inputs::kHugeLogits; });
  add(128, [](Case& c) { c.inputs = Inputs::kSpoiltValues; });
  add(64, [](Case& c) { c.inputs = Inputs::kManyNonfinite, c.softcap = 5; });
  add(64, [](Case& c) { c.bias = Pairs::kHeads, c.mask = Pairs::kOne; });
  add(128, [](Case& c) { c.bias = Pairs::kHeads, c.bias_fp32 = true; });
  add(64, [](Case& c) { c.documents = Documents::kLong; });
  add(64, [](Case& c) { c.softmax_scale = -0.3; });
  return all;
}
constexpr int kCases = 16, kRandomCases = 12;

using Parameter = std::tuple<DType, int>;
std::string parameter_name(const ::testing::TestParamInfo<Parameter>& p) {
  return std::string(fattn::name_of(std::get<0>(p.param))) + "_" + std::to_string(std::get<1>(p.param));
}
constexpr DType kDTypes[] = {DType::kF32, DType::kF16, DType::kBF16};

class BatchInvariantGpu : public test::CudaGpu, public ::testing::WithParamInterface<Parameter> {};

TEST_P(BatchInvariantGpu, RowsInAnyCompany) {
  const auto [dtype, n] = GetParam();
  const std::vector<Case> all = cases(dtype);
  ASSERT_EQ(all.size(), static_cast<size_t>(kCases));
  const Case c = all[static_cast<size_t>(n)];
  SCOPED_TRACE(name_of(c));
  const Sequences sequences(c);
  const Out whole = sequences.whole();
  for (const Piece& piece :
       {Piece{0, 0, 1}, {0, 1, 2}, {1, 63, 64}, {1, 64, 65}, {2, 37, 130}, {0, 100, 300}, {1, 299, 300}, {2, 0, 300}, {2, 255, 258}})
    expect_same(whole, sequences.alone(piece), piece, 0, 0, "alone");
  if (c.bias != Pairs::kNone || c.mask != Pairs::kNone || c.documents != Documents::kNone) return;
  for (const int64_t rows : {1, 7, 130}) {
    const std::vector<Piece> pieces{{0, kSeqlen - rows, kSeqlen}, {1, 131 - rows, 131}, {2, 0, rows}, {2, 200 - rows, 200}, {1, 256 - rows, 256}};
    for (const Keys how : {Keys::kBeside, Keys::kPaged}) {
      const Out part = sequences.together(pieces, how);
      for (size_t i = 0; i < pieces.size(); ++i)
        expect_same(whole, part, pieces[i], static_cast<int64_t>(i), 0, how == Keys::kBeside ? "side by side" : "in pages");
    }
  }
  const std::vector<Piece> pieces{{0, 0, 1}, {1, 7, 300}, {2, 299, 300}, {1, 90, 91}, {0, 120, 260}, {2, 3, 50}};
  for (const Keys how : {Keys::kPacked, Keys::kPackedPaged}) {
    const Out part = sequences.together(pieces, how);
    int64_t first = 0;
    for (const Piece& piece : pieces) {
      expect_same(whole, part, piece, 0, first, how == Keys::kPacked ? "packed" : "packed, in pages");
      first += piece.rows();
    }
  }
}

// What comes behind a row, and that it does not see, changes no bit of it: great numbers, Inf and NaN.
TEST_P(BatchInvariantGpu, WhatComesAfterChangesNothing) {
  const auto [dtype, n] = GetParam();
  const Case c = cases(dtype)[static_cast<size_t>(n)];
  SCOPED_TRACE(name_of(c));
  Sequences sequences(c);
  const Out before = sequences.whole();
  constexpr int64_t kFrom = 150;
  const double most = dtype == DType::kF16 ? 6e4 : 1e30, infinity = std::numeric_limits<double>::infinity();
  for (const double value : {most, -most, infinity, std::nan("")}) {
    for (const Tensor* t : {&sequences.in().q, &sequences.in().k, &sequences.in().v}) {
      Dense values = read(*t);
      const int64_t row = t->shape(2) * t->shape(3);
      for (int64_t i = 0; i < t->size(); ++i)
        if (i / row % kSeqlen >= kFrom && i % 5 < 2) values[static_cast<size_t>(i)] = i % 5 == 0 ? value : values[static_cast<size_t>(i)] * 100;
      write(*t, values);
    }
    const Out after = sequences.whole();
    for (int64_t entry = 0; entry < kBatch; ++entry) expect_same(before, after, {entry, 0, kFrom}, entry, 0, "before " + std::to_string(value));
  }
}

INSTANTIATE_TEST_SUITE_P(All, BatchInvariantGpu, ::testing::Combine(::testing::ValuesIn(kDTypes), ::testing::Range(0, kCases)), parameter_name);

// And it stays within the bounds of the oracle.
class BatchInvariantBoundsGpu : public test::CudaGpu, public ::testing::WithParamInterface<Parameter> {};

TEST_P(BatchInvariantBoundsGpu, IsRight) {
  const auto [dtype, n] = GetParam();
  Case c = n < kCases ? cases(dtype)[static_cast<size_t>(n)] : random_case(dtype, static_cast<uint64_t>(n), 96);
  c.backward = false;
  const CaseResult result = run_case(c, on_gpu());
  if (!result.skipped.empty()) GTEST_SKIP() << result.skipped;
  EXPECT_TRUE(result.passed()) << name_of(c) << ": " << result.summary();
}

INSTANTIATE_TEST_SUITE_P(All, BatchInvariantBoundsGpu, ::testing::Combine(::testing::ValuesIn(kDTypes), ::testing::Range(0, kCases + kRandomCases)),
                         parameter_name);

}  // namespace
}  // namespace fattn::testing
