#include "measure/score_terms.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <utility>

#include "measure/convert.h"

namespace fattn::measure {
namespace {

// Streams of random numbers behind those of q, k, v and dout.
constexpr uint64_t kBiasStream = 16, kMaskStream = 17;
constexpr float kVisibleBelow = 0.6745F;  // three quarters of N(0, 1)

template <class T>
T* as(Pages& pages) {
  return static_cast<T*>(pages.data());
}

void fill_mask(Pages& mask, uint64_t seed) {
  constexpr int64_t kPart = 1 << 20;  // not all numbers at once: they take four times the mask's memory
  const Pages numbers(kPart * sizeof(float));
  const auto count = static_cast<int64_t>(mask.size());
  for (int64_t begin = 0; begin < count; begin += kPart) {
    const int64_t part = std::min(kPart, count - begin);
    fill_normal(numbers.data(), DType::kF32, part, seed, kMaskStream + static_cast<uint64_t>(begin / kPart));
    for (int64_t i = 0; i < part; ++i) as<uint8_t>(mask)[begin + i] = static_cast<const float*>(numbers.data())[i] < kVisibleBelow ? 1 : 0;
  }
}

}  // namespace

int64_t bytes_of(const ProblemSpec& s, ScoreInput input) {
  const auto of_pairs = [&](const char* name, PairShape shape, DType dtype) {
    const auto [batches, heads, rows, keys] = pair_sizes(s, shape);
    return tensor_bytes(name, {batches, heads, rows, keys}, dtype);
  };
  switch (input) {
    case kSequsedK: return s.least_seqused_k > 0 ? tensor_bytes("seqused_k", {s.batch}, DType::kI32) : 0;
    case kAlibiSlopes: return s.alibi ? tensor_bytes("alibi_slopes", {s.nheads}, DType::kF32) : 0;
    case kBias: return of_pairs("bias", s.bias, s.bias_dtype());
    case kMask: return of_pairs("mask", s.mask, DType::kU8);
    case kDropoutState: return s.p_dropout > 0 ? tensor_bytes("dropout_state", {2}, DType::kI64) : 0;
    case kCuSeqlens: return s.packed() ? tensor_bytes("cu_seqlens", {s.batch + 1}, DType::kI32) : 0;
    case kDocuments: return s.documents > 0 ? tensor_bytes("documents", {s.batch, s.seqlen_q}, DType::kI32) : 0;
    case kBlockTable: return s.page_size > 0 ? tensor_bytes("block_table", {s.batch, s.seqlen_k / s.page_size}, DType::kI32) : 0;
    case kScoreInputs: break;
  }
  return 0;
}

ScorePages make_score_pages(const ProblemSpec& s) {
  ScorePages pages;
  for (int input = 0; input < kScoreInputs; ++input)
    if (const int64_t bytes = bytes_of(s, static_cast<ScoreInput>(input)); bytes > 0)
      pages[static_cast<size_t>(input)] = Pages(static_cast<size_t>(bytes));
  if (pages[kSequsedK].data())
    for (int64_t b = 0; b < s.batch; ++b) as<int32_t>(pages[kSequsedK])[b] = static_cast<int32_t>(s.keys_of(b));
  if (pages[kAlibiSlopes].data())
    for (int64_t h = 0; h < s.nheads; ++h)
      as<float>(pages[kAlibiSlopes])[h] = static_cast<float>(std::exp2(-8.0 * static_cast<double>(h + 1) / static_cast<double>(s.nheads)));
  if (pages[kBias].data()) {
    const DType dtype = s.bias_dtype();
    fill_normal(pages[kBias].data(), dtype, s.bias_bytes() / static_cast<int64_t>(size_of(dtype)), s.seed, kBiasStream);
  }
  if (pages[kMask].data()) fill_mask(pages[kMask], s.seed);
  if (pages[kDropoutState].data()) {
    as<int64_t>(pages[kDropoutState])[0] = static_cast<int64_t>(s.seed);
    as<int64_t>(pages[kDropoutState])[1] = 0;
  }
  if (pages[kCuSeqlens].data())
    for (int64_t b = 0, begin = 0; b <= s.batch; begin += b < s.batch ? s.rows_of(b) : 0, ++b)
      as<int32_t>(pages[kCuSeqlens])[b] = static_cast<int32_t>(begin);
  if (pages[kDocuments].data())
    for (int64_t b = 0; b < s.batch; ++b)
      for (int64_t document = 0; document < s.documents; ++document)
        for (int64_t i = s.document_begin(document); i < s.document_begin(document + 1); ++i)
          as<int32_t>(pages[kDocuments])[b * s.seqlen_q + i] = static_cast<int32_t>(document);
  if (pages[kBlockTable].data()) {
    auto* const table = as<int32_t>(pages[kBlockTable]);
    const int64_t count = s.batch * (s.seqlen_k / s.page_size);
    std::iota(table, table + count, 0);
    std::mt19937_64 numbers(s.seed);
    for (int64_t i = count; i > 1; --i) std::swap(table[i - 1], table[numbers() % static_cast<uint64_t>(i)]);
  }
  return pages;
}

ScoreTensors score_views(const ProblemSpec& s, const ScoreAddresses& at) {
  ScoreTensors t;
  if (s.least_seqused_k > 0) t.seqused_k = Tensor(at[kSequsedK], DType::kI32, {s.batch});
  if (s.alibi) t.alibi_slopes = Tensor(at[kAlibiSlopes], DType::kF32, {s.nheads});
  t.bias = pair_view(s, s.bias, s.bias_dtype(), at[kBias]);
  t.mask = pair_view(s, s.mask, DType::kU8, at[kMask]);
  if (s.p_dropout > 0) t.dropout_state = Tensor(at[kDropoutState], DType::kI64, {2});
  if (s.packed()) t.cu_seqlens_q = t.cu_seqlens_k = Tensor(at[kCuSeqlens], DType::kI32, {s.batch + 1});
  if (s.documents > 0) t.document_q = t.document_k = Tensor(at[kDocuments], DType::kI32, {s.batch, s.seqlen_q});
  if (s.page_size > 0) t.block_table = Tensor(at[kBlockTable], DType::kI32, {s.batch, s.seqlen_k / s.page_size});
  return t;
}

ScoreAddresses addresses_of(const ScorePages& pages) {
  ScoreAddresses at = {};
  for (size_t input = 0; input < pages.size(); ++input) at[input] = pages[input].data();
  return at;
}

}  // namespace fattn::measure
