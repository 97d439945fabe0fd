#include "testing/pages.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "testing/numbers.h"
#include "testing/random.h"

namespace fattn::testing {
namespace {

int64_t number(const Tensor& list, int64_t element) { return static_cast<int64_t>(load(DType::kI32, list.data(), element)); }

}  // namespace

Unpaged::Unpaged(const Tensor& k, const Tensor& v, const ScoreTensors& scores)
    : table_(scores.block_table),
      lengths_(scores.seqused_k),
      page_size_(k.shape(1)),
      keys_(table_.shape(1) * page_size_),
      k_(gathered(k, k_memory_)),
      v_(gathered(v, v_memory_)),
      scores_(scores) {
  scores_.block_table = {};
  if (!scores.cu_seqlens_q) return;
  const int64_t batch = table_.shape(0), all = batch * keys_;
  for (int64_t n = 0; n <= batch; ++n) first_keys_.push_back(static_cast<int32_t>(n * keys_));
  scores_.cu_seqlens_k = Tensor(first_keys_.data(), DType::kI32, {batch + 1});
  k_ = Tensor(k_.data(), k_.dtype(), {all, k_.shape(2), k_.shape(3)});
  v_ = Tensor(v_.data(), v_.dtype(), {all, v_.shape(2), v_.shape(3)});
  if (const Tensor& ids = scores.document_k; ids) scores_.document_k = Tensor(ids.data(), DType::kI32, {all});
}

Tensor Unpaged::gathered(const Tensor& pages, std::vector<unsigned char>& memory) const {
  const int64_t batch = table_.shape(0), heads = pages.shape(2), headdim = pages.shape(3);
  memory.assign(static_cast<size_t>(batch * keys_ * heads * headdim) * size_of(pages.dtype()), TensorBlock::kUnwritten);
  const Tensor to(memory.data(), pages.dtype(), {batch, keys_, heads, headdim});
  for (int64_t n = 0; n < batch; ++n) {
    const int64_t used = lengths_ ? number(lengths_, n * lengths_.stride(0)) : keys_;
    for (int64_t j = 0; j < used; ++j) {
      const int64_t page = number(table_, n * table_.stride(0) + j / page_size_ * table_.stride(1));
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < headdim; ++d)
          store(to.dtype(), to.data(), ((n * keys_ + j) * heads + h) * headdim + d,
                load(pages.dtype(), pages.data(), page * pages.stride(0) + j % page_size_ * pages.stride(1) + h * pages.stride(2) + d));
    }
  }
  return to;
}

std::optional<Case> in_pages(Case c, int64_t page_size) {
  if (c.layout == Layout::kPacked) return {};
  c.page_size = page_size;
  c.seqlen_k = (c.seqlen_k + page_size - 1) / page_size * page_size;
  c.backward = c.dlse = c.scattered = false;
  c.key_lengths = c.key_lengths || c.varlen;
  c.name = name_of(c);
  return c;
}

PageTable page_table(const Case& c, const std::vector<int64_t>& keys) {
  PageTable t{0, c.seqlen_k / c.page_size, {}};
  const auto used_of = [&](size_t n) { return (keys[n] + c.page_size - 1) / c.page_size; };
  const auto shared_of = [&](size_t n) { return n == 0 ? 0 : std::min(keys[n], keys[0]) / c.page_size / 2; };
  constexpr int64_t kUnused = 3;
  t.pages = kUnused;
  for (size_t n = 0; n < keys.size(); ++n) t.pages += used_of(n) - shared_of(n);
  std::vector<int32_t> order(static_cast<size_t>(t.pages));
  std::iota(order.begin(), order.end(), 0);
  const Random random(c.seed, 21);
  const auto some = [&](uint64_t i) { return static_cast<size_t>(random.uniform(i) * static_cast<double>(t.pages)); };
  for (uint64_t i = 0; i < order.size(); ++i) std::swap(order[some(2 * i)], order[some(2 * i + 1)]);
  size_t next = 0;
  for (size_t n = 0; n < keys.size(); ++n)
    for (int64_t i = 0; i < t.columns; ++i)
      t.numbers.push_back(i < shared_of(n) ? t.numbers[static_cast<size_t>(i)]
                          : i < used_of(n) ? order[next++]
                          : i % 2 == 0     ? -1
                                           : std::numeric_limits<int32_t>::max());
  return t;
}

}  // namespace fattn::testing
