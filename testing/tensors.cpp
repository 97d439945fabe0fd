#include "testing/tensors.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <utility>

#include "testing/numbers.h"
#include "testing/pages.h"
#include "testing/random.h"

namespace fattn::testing {
namespace {

constexpr int64_t kGuardElements = 128;  // on both sides of an output: wider than any vector or tile row

// Visits the memory offset (in elements) of every element, in row-major order of the shape.
template <class Visit>
void for_each_element(const Tensor& t, const Visit& visit) {
  if (t.size() == 0) return;
  int64_t index[4] = {};
  for (;;) {
    int64_t offset = 0;
    for (int d = 0; d < t.ndim(); ++d) offset += index[d] * t.stride(d);
    visit(offset);
    int d = t.ndim() - 1;
    while (d >= 0 && ++index[d] == t.shape(d)) index[d--] = 0;
    if (d < 0) return;
  }
}

struct RowsShape {
  int64_t batch, seqlen, heads, headdim;
};

// One tensor in a block of its own.
Tensor place_rows(std::vector<TensorBlock>& blocks, DType dtype, Layout layout, RowsShape s, int64_t guard, unsigned char fill) {
  const auto block = [&](int64_t elements) -> TensorBlock& { return blocks.emplace_back(dtype, elements, guard, fill); };
  switch (layout) {
    case Layout::kBshd:
    case Layout::kPacked:
      return block(s.batch * s.seqlen * s.heads * s.headdim)
          .place(0, {s.batch, s.seqlen, s.heads, s.headdim}, {s.seqlen * s.heads * s.headdim, s.heads * s.headdim, s.headdim, 1});
    case Layout::kBhsd:
      return block(s.batch * s.seqlen * s.heads * s.headdim)
          .place(0, {s.batch, s.seqlen, s.heads, s.headdim}, {s.heads * s.seqlen * s.headdim, s.headdim, s.seqlen * s.headdim, 1});
    case Layout::kExpanded:
      return block(s.seqlen * s.heads * s.headdim).place(0, {s.batch, s.seqlen, s.heads, s.headdim}, {0, s.heads * s.headdim, s.headdim, 1});
    case Layout::kPadded: {
      const int64_t head = s.headdim + 1, row = s.heads * head + 3, batch = s.seqlen * row + 5;
      return block(s.batch * batch).place(0, {s.batch, s.seqlen, s.heads, s.headdim}, {batch, row, head, 1});
    }
  }
  return {};
}

// q-, k- and v-like tensors in one block: (batch, seqlen, nheads + 2 nheads_k, headdim).
void place_packed(std::vector<TensorBlock>& blocks, const Case& c, DType dtype, int64_t guard, unsigned char fill, Tensor& q, Tensor& k, Tensor& v) {
  const int64_t d = c.headdim, row = (c.nheads + 2 * c.nheads_k) * d, batch = c.seqlen_q * row;
  TensorBlock& block = blocks.emplace_back(dtype, c.batch * batch, guard, fill);
  q = block.place(0, {c.batch, c.seqlen_q, c.nheads, d}, {batch, row, d, 1});
  k = block.place(c.nheads * d, {c.batch, c.seqlen_k, c.nheads_k, d}, {batch, row, d, 1});
  v = block.place((c.nheads + c.nheads_k) * d, {c.batch, c.seqlen_k, c.nheads_k, d}, {batch, row, d, 1});
}

// The first n numbers of a stream, or more. Drawing takes most of the time of tests that repeat a shape, so what was drawn is kept, up to 64 MiB;
// each thread has its own.
const Dense& drawn(uint64_t seed, uint64_t stream, size_t n) {
  thread_local std::map<std::pair<uint64_t, uint64_t>, Dense> kept;
  thread_local size_t count = 0;
  const std::pair key(seed, stream);
  if (const auto found = kept.find(key); found != kept.end() && found->second.size() >= n) return found->second;
  if (count > (size_t{64} << 20) / sizeof(double)) {
    kept.clear();
    count = 0;
  }
  Dense& x = kept[key];
  const Random random(seed, stream);
  count += n - x.size();
  for (size_t i = x.size(); i < n; ++i) x.push_back(random.normal(i));
  return x;
}

Dense normal(uint64_t seed, uint64_t stream, int64_t n, double mean, double stddev) {
  const Dense& standard = drawn(seed, stream, static_cast<size_t>(n));
  Dense x(static_cast<size_t>(n));
  for (size_t i = 0; i < x.size(); ++i) x[i] = mean + stddev * standard[i];
  return x;
}

// Contiguous, in a block of its own.
Tensor place(std::vector<TensorBlock>& blocks, DType dtype, std::initializer_list<int64_t> shape, int64_t guard, unsigned char fill) {
  const Tensor contiguous(nullptr, dtype, shape);
  const std::vector<int64_t> s{contiguous.stride(0), contiguous.stride(1), contiguous.stride(2), contiguous.stride(3)};
  TensorBlock& block = blocks.emplace_back(dtype, contiguous.size(), guard, fill);
  switch (shape.size()) {
    case 1: return block.place(0, shape, {s[0]});
    case 2: return block.place(0, shape, {s[0], s[1]});
    default: return block.place(0, shape, {s[0], s[1], s[2], s[3]});
  }
}

// Rows of a case's tensors; of packed sequences they are one batch entry.
RowsShape rows_of(const Case& c, bool keys, int64_t heads, int64_t headdim) {
  if (c.varlen) return {1, cu_seqlens(c, keys).back() + kRowsBehind, heads, headdim};
  return {c.batch, keys ? c.seqlen_k : c.seqlen_q, heads, headdim};
}
// As the library wants it: without the batch entry, of packed sequences.
Tensor as_given(const Case& c, const Tensor& t) {
  if (!c.varlen) return t;
  if (t.ndim() == 3) return Tensor(t.data(), t.dtype(), {t.shape(1), t.shape(2)}, {t.stride(1), t.stride(2)});
  return Tensor(t.data(), t.dtype(), {t.shape(1), t.shape(2), t.shape(3)}, {t.stride(1), t.stride(2), t.stride(3)});
}

// A bias, mask or dbias. Rows of whole ones are a few elements apart.
Tensor place_pairs(std::vector<TensorBlock>& blocks, const Case& c, Pairs pairs, DType dtype, int64_t guard, unsigned char fill) {
  switch (pairs) {
    case Pairs::kNone: return {};
    case Pairs::kHeads: return place(blocks, dtype, {1, c.nheads, c.seqlen_q, c.seqlen_k}, guard, fill);
    case Pairs::kOne: return place(blocks, dtype, {1, 1, c.seqlen_q, c.seqlen_k}, guard, fill);
    case Pairs::kKeys: return place(blocks, dtype, {c.batch, 1, 1, c.seqlen_k}, guard, fill);
    case Pairs::kExpanded: {
      TensorBlock& block = blocks.emplace_back(dtype, c.seqlen_q * c.seqlen_k, guard, fill);
      return block.place(0, {c.batch, c.nheads, c.seqlen_q, c.seqlen_k}, {0, 0, c.seqlen_k, 1});
    }
    case Pairs::kAll: break;
  }
  const int64_t row = c.seqlen_k + 3, head = c.seqlen_q * row, batch = c.nheads * head;
  return blocks.emplace_back(dtype, c.batch * batch, guard, fill).place(0, {c.batch, c.nheads, c.seqlen_q, c.seqlen_k}, {batch, head, row, 1});
}

// The rows of a bias with low_bias, in the order of its elements, that are so whole.
bool is_low_row(int64_t row) { return row % 5 == 1; }
double low(LowBias kind, DType dtype) {
  if (kind == LowBias::kBillion) return -1e9;
  const double digits = dtype == DType::kF16 ? 11 : dtype == DType::kBF16 ? 8 : 24;  // fp64 gets fp32's: beyond it a pair is as good as hidden
  return -(2 - std::exp2(1 - digits)) * std::exp2(dtype == DType::kF16 ? 15 : 127);
}

// The gradient of lse, whose strides need not be those of lse: heads lie beside each other in kBhsd, and kPadded has gaps.
Tensor place_dlse(std::vector<TensorBlock>& blocks, const Case& c) {
  const DType dtype = c.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const RowsShape s = rows_of(c, false, c.nheads, 1);
  const int64_t step = c.layout == Layout::kPadded ? 3 : 1, batch = c.nheads * s.seqlen * step;
  TensorBlock& block = blocks.emplace_back(dtype, s.batch * batch, 0, TensorBlock::kUnwritten);
  if (c.layout == Layout::kBhsd) return as_given(c, block.place(0, {s.batch, c.nheads, s.seqlen}, {batch, 1, c.nheads}));
  return as_given(c, block.place(0, {s.batch, c.nheads, s.seqlen}, {batch, s.seqlen * step, step}));
}

ScoreTensors make_scores(const Case& c, std::vector<TensorBlock>& blocks) {
  constexpr unsigned char kFill = TensorBlock::kUnwritten;
  ScoreTensors s;
  const auto numbers = [&](uint64_t stream) { return Random(c.seed, stream); };
  const std::vector<int64_t> first_key = cu_seqlens(c, true), first_query = cu_seqlens(c, false);
  if (c.key_lengths) {
    s.seqused_k = place(blocks, DType::kI32, {c.batch}, 0, kFill);
    Dense lengths(static_cast<size_t>(c.batch));
    for (size_t n = 0; n < lengths.size(); ++n) {
      const auto most = static_cast<double>(c.varlen ? first_key[n + 1] - first_key[n] : c.seqlen_k);
      lengths[n] = n == 1 ? most : n == 2 ? 0 : std::floor(numbers(4).uniform(n) * most);
    }
    write(s.seqused_k, lengths);
  }
  if (c.varlen) {
    s.cu_seqlens_q = place(blocks, DType::kI32, {c.batch + 1}, 0, kFill);
    write(s.cu_seqlens_q, Dense(first_query.begin(), first_query.end()));
  }
  if (c.varlen && c.page_size == 0) {
    s.cu_seqlens_k = place(blocks, DType::kI32, {c.batch + 1}, 0, kFill);
    const std::vector<int64_t> given = given_cu_seqlens_k(c);
    write(s.cu_seqlens_k, Dense(given.begin(), given.end()));
  }
  if (c.documents != Documents::kNone) {
    const auto ids_of = [&](bool keys) {
      const bool of_table = keys && c.page_size > 0;
      const RowsShape rows = of_table ? RowsShape{c.batch, c.seqlen_k, 1, 1} : rows_of(c, keys, 1, 1);
      const Tensor ids = place(blocks, DType::kI32, {rows.batch, rows.seqlen}, 0, kFill);
      Dense values(static_cast<size_t>(ids.size()));
      double id = 0;
      const double run = c.documents == Documents::kLong ? 450 : 60;
      for (size_t i = 0; i < values.size(); ++i) {
        const double x = numbers(keys ? 13 : 12).uniform(i);
        if (rows.seqlen > 0 && i % static_cast<size_t>(rows.seqlen) == 0) id = -2;
        // Runs of some 60 (450) keys and as long a part of the queries; or the least, the largest and two between.
        id += x * run * static_cast<double>(keys ? 1 : std::max<int64_t>(c.seqlen_q, 1)) <
              static_cast<double>(keys ? 1 : std::max<int64_t>(c.seqlen_k, 1));
        const double any[] = {-2147483648.0, -1, 0, 2147483647.0};
        values[i] = c.documents == Documents::kAny ? any[static_cast<size_t>(x * 4)] : id;
      }
      write(ids, values);
      return c.varlen && !of_table ? Tensor(ids.data(), DType::kI32, {rows.seqlen}) : ids;
    };
    s.document_q = ids_of(false);
    s.document_k = ids_of(true);
  }
  if (c.alibi != Alibi::kNone) {
    s.alibi_slopes =
        c.alibi == Alibi::kHeads ? place(blocks, DType::kF32, {c.nheads}, 0, kFill) : place(blocks, DType::kF32, {c.batch, c.nheads}, 0, kFill);
    Dense slopes(static_cast<size_t>(s.alibi_slopes.size()));
    for (size_t i = 0; i < slopes.size(); ++i) slopes[i] = std::exp2(-8 * numbers(5).uniform(i));
    write(s.alibi_slopes, slopes);
  }
  if (c.bias != Pairs::kNone) {
    s.bias = place_pairs(blocks, c, c.bias, c.bias_fp32 ? DType::kF32 : c.dtype, 0, kFill);
    Dense bias = normal(c.seed, 6, s.bias.size(), 0, 1);
    for (size_t i = 0; i < bias.size(); ++i)
      if (numbers(7).uniform(i) < 0.05) bias[i] = -std::numeric_limits<double>::infinity();
    for (size_t i = 0; i < bias.size() && c.low_bias != LowBias::kNone; ++i)
      if (numbers(14).uniform(i) < 0.33 || is_low_row(static_cast<int64_t>(i) / c.seqlen_k)) bias[i] = low(c.low_bias, s.bias.dtype());
    write(s.bias, bias);
  }
  if (c.mask != Pairs::kNone) {
    s.mask = place_pairs(blocks, c, c.mask, DType::kU8, 0, kFill);
    Dense mask(static_cast<size_t>(s.mask.size()));
    const bool has_rows = c.mask != Pairs::kKeys;
    for (size_t i = 0; i < mask.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / std::max<int64_t>(c.seqlen_k, 1) % c.seqlen_q;
      const double x = numbers(8).uniform(i);
      double hidden = has_rows && row == c.seqlen_q / 3 ? 1 : 0.3;
      if (c.mask_blocks) hidden = static_cast<double>(((has_rows ? row / 128 : 0) + static_cast<int64_t>(i) % c.seqlen_k / 192) % 3) / 2;
      mask[i] = x < hidden ? 0 : std::floor(1 + 254 * x);
    }
    write(s.mask, mask);
  }
  if (c.sinks) {
    s.sinks = place(blocks, c.dtype == DType::kF64 ? DType::kF64 : DType::kF32, {c.nheads}, 0, kFill);
    const bool huge = c.inputs == Inputs::kHugeLogits;  // then of the size of a row's largest score
    Dense sinks = normal(c.seed, 15, c.nheads, huge ? 4500 : 1, huge ? 100 : 2);
    if (sinks.size() > 2) sinks[2] = -std::numeric_limits<double>::infinity();
    write(s.sinks, sinks);
  }
  if (c.p_dropout > 0) {
    s.dropout_state = place(blocks, DType::kI64, {c.dropout_part ? 4 : 2}, 0, kFill);
    auto* state = static_cast<int64_t*>(s.dropout_state.data());
    state[0] = static_cast<int64_t>(mix(c.seed));
    state[1] = static_cast<int64_t>(mix(c.seed + 1) | 0xffffff00u);  // the low word overflows among the heads of some cases
    if (c.dropout_part) state[2] = 48, state[3] = 320;
  }
  return s;
}

}  // namespace

Dense read(const Tensor& tensor) {
  Dense values;
  values.reserve(static_cast<size_t>(tensor.size()));
  for_each_element(tensor, [&](int64_t offset) { values.push_back(load(tensor.dtype(), tensor.data(), offset)); });
  return values;
}

void write(const Tensor& tensor, const Dense& values) {
  size_t i = 0;
  for_each_element(tensor, [&](int64_t offset) { store(tensor.dtype(), tensor.data(), offset, values[i++]); });
}

bool same_bits(const Dense& a, const Dense& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0);
}

Widened widen(const Tensor& t) {
  Widened w;
  w.values = read(t);
  if (t.ndim() == 0) return w;
  w.view = t.ndim() == 1   ? Tensor(w.values.data(), DType::kF64, {t.shape(0)})
           : t.ndim() == 2 ? Tensor(w.values.data(), DType::kF64, {t.shape(0), t.shape(1)})
           : t.ndim() == 3 ? Tensor(w.values.data(), DType::kF64, {t.shape(0), t.shape(1), t.shape(2)})
                           : Tensor(w.values.data(), DType::kF64, {t.shape(0), t.shape(1), t.shape(2), t.shape(3)});
  return w;
}

TensorBlock::TensorBlock(DType dtype, int64_t elements, int64_t guard_elements, unsigned char fill)
    : dtype_(dtype), guard_(guard_elements), fill_(fill), memory_(static_cast<size_t>(elements + 2 * guard_elements) * size_of(dtype), fill) {}

Tensor TensorBlock::place(int64_t offset, std::initializer_list<int64_t> shape, std::initializer_list<int64_t> strides) {
  const Tensor tensor(memory_.data() + static_cast<size_t>(guard_ + offset) * size_of(dtype_), dtype_, shape, strides);
  const size_t bytes = size_of(dtype_);
  for_each_element(tensor,
                   [&](int64_t at) { std::memset(static_cast<unsigned char*>(tensor.data()) + static_cast<size_t>(at) * bytes, kUnwritten, bytes); });
  tensors_.push_back(tensor);
  return tensor;
}

std::string TensorBlock::damage() const {
  std::vector<unsigned char> bytes(memory_.data(), memory_.data() + memory_.size());
  const size_t element = size_of(dtype_);
  for (const Tensor& t : tensors_)
    for_each_element(t, [&](int64_t at) {
      const auto* address = static_cast<const unsigned char*>(t.data()) + static_cast<size_t>(at) * element;
      std::memset(bytes.data() + (address - memory_.data()), fill_, element);
    });
  for (size_t i = 0; i < bytes.size(); ++i)
    if (bytes[i] != fill_)
      return "byte " + std::to_string(static_cast<int64_t>(i) - guard_ * static_cast<int64_t>(element)) + " of an output's memory of " +
             std::to_string(bytes.size() - 2 * static_cast<size_t>(guard_) * element) + " bytes was written, but belongs to no element";
  return {};
}

namespace {

// Gives k and v, which lie side by side, to pages.
void put_in_pages(const Case& c, CaseInputs& in) {
  const std::vector<int64_t> first_key = cu_seqlens(c, true);
  std::vector<int64_t> keys(static_cast<size_t>(c.batch), c.seqlen_k);
  if (in.scores.seqused_k)
    for (size_t n = 0; n < keys.size(); ++n) keys[n] = static_cast<int64_t>(read(in.scores.seqused_k)[n]);
  const PageTable table = page_table(c, keys);
  const int64_t row = table.columns + 2;
  in.scores.block_table = in.blocks.emplace_back(DType::kI32, c.batch * row, 0, TensorBlock::kUnwritten).place(0, {c.batch, table.columns}, {row, 1});
  write(in.scores.block_table, Dense(table.numbers.begin(), table.numbers.end()));
  const auto paged = [&](const Tensor& from) {
    const int64_t heads = from.shape(from.ndim() - 2), headdim = from.shape(from.ndim() - 1), width = heads * headdim;
    const Dense rows = read(from);
    const Layout layout = c.layout == Layout::kExpanded ? Layout::kBshd : c.layout;
    const Tensor to = place_rows(in.blocks, c.dtype, layout, {table.pages, c.page_size, heads, headdim}, 0, TensorBlock::kUnwritten);
    Dense values(static_cast<size_t>(to.size()), std::numeric_limits<double>::quiet_NaN());
    for (size_t n = keys.size(); n-- > 0;)  // what is shared is the first entry's
      for (int64_t j = 0; j < keys[n]; ++j) {
        const int64_t page = table.numbers[n * static_cast<size_t>(table.columns) + static_cast<size_t>(j / c.page_size)];
        const int64_t first = c.varlen ? first_key[n] : static_cast<int64_t>(n) * c.seqlen_k;
        std::copy_n(rows.begin() + (first + j) * width, width, values.begin() + (page * c.page_size + j % c.page_size) * width);
      }
    write(to, values);
    return to;
  };
  in.k = paged(in.k);
  in.v = paged(in.v);
}

}  // namespace

CaseInputs make_inputs(const Case& c) {
  CaseInputs in;
  const RowsShape q_shape = rows_of(c, false, c.nheads, c.headdim), k_shape = rows_of(c, true, c.nheads_k, c.headdim),
                  v_shape = rows_of(c, true, c.nheads_k, c.headdim_v), o_shape = rows_of(c, false, c.nheads, c.headdim_v);
  // Inputs end at the end of their memory and what lies between their elements is NaN, so that reading it shows.
  constexpr unsigned char kNan = TensorBlock::kUnwritten;
  in.blocks.reserve(18);
  const Layout q_layout = c.layout == Layout::kExpanded ? Layout::kBshd : c.layout;
  if (c.layout == Layout::kPacked) {
    place_packed(in.blocks, c, c.dtype, 0, kNan, in.q, in.k, in.v);
  } else {
    const Layout k_layout = c.varlen ? q_layout : c.layout;
    in.q = as_given(c, place_rows(in.blocks, c.dtype, q_layout, q_shape, 0, kNan));
    in.k = as_given(c, place_rows(in.blocks, c.dtype, k_layout, k_shape, 0, kNan));
    in.v = as_given(c, place_rows(in.blocks, c.dtype, k_layout, v_shape, 0, kNan));
  }
  in.dout = as_given(c, place_rows(in.blocks, c.dtype, q_layout, o_shape, 0, kNan));
  if (c.dlse) in.dlse = place_dlse(in.blocks, c);
  in.scores = make_scores(c, in.blocks);

  const double sigma = c.inputs == Inputs::kSigma2 ? 2 : c.inputs == Inputs::kSigma3 ? 3 : 1;
  const double stddev = c.inputs == Inputs::kTiny ? 1e-5 : sigma, mean_v = c.inputs == Inputs::kOffset ? 3.0 : 0.0;
  Dense q = normal(c.seed, 0, in.q.size(), 0, stddev), k = normal(c.seed, 1, in.k.size(), 0, stddev);
  Dense v = normal(c.seed, 2, in.v.size(), mean_v, stddev), dout = normal(c.seed, 3, in.dout.size(), mean_v, stddev / sigma);

  // Every q row gets a 1 as its first element where scores are to depend on the key alone in that direction.
  const auto lead = [&](double first_of_q, const auto& first_of_k) {
    for (size_t i = 0; i < q.size(); i += static_cast<size_t>(c.headdim)) q[i] = first_of_q;
    for (int64_t i = 0; i < in.k.size() / std::max<int64_t>(c.headdim, 1); ++i)
      k[static_cast<size_t>(i * c.headdim)] = first_of_k((i / c.nheads_k) % c.seqlen_k);
  };
  const double root = std::sqrt(static_cast<double>(c.headdim));
  const int64_t middle_k = c.seqlen_k / 2, middle_q = c.seqlen_q / 2;
  const double nan = std::numeric_limits<double>::quiet_NaN(), infinity = std::numeric_limits<double>::infinity();
  switch (c.inputs) {
    case Inputs::kHugeLogits:
      for (double& x : q) x *= 45;
      for (double& x : k) x *= 45;
      break;
    case Inputs::kConstant:
      for (double& x : q) x = 0.75;
      for (double& x : k) x = 1.25;
      break;
    case Inputs::kDominantKey: lead(1.0, [&](int64_t j) { return j == middle_k ? 30 * root : 0.0; }); break;
    case Inputs::kRising: lead(1.0, [&](int64_t j) { return 0.25 * root * static_cast<double>(j); }); break;
    case Inputs::kFarKeys: lead(0.0, [&](int64_t j) { return j % 48 != 5 ? 0.0 : c.dtype == DType::kF16 ? 3e4 : 1e10; }); break;
    case Inputs::kNanQuery: q[static_cast<size_t>(middle_q * c.nheads * c.headdim)] = nan; break;
    case Inputs::kNanValue: v[static_cast<size_t>(middle_k * c.nheads_k * c.headdim_v)] = nan; break;
    case Inputs::kInfKey: k[static_cast<size_t>(middle_k * c.nheads_k * c.headdim)] = infinity; break;
    case Inputs::kNanGradient: dout[static_cast<size_t>(middle_q * c.nheads * c.headdim_v)] = nan; break;
    case Inputs::kSpoiltValues:
      for (int64_t i = 0; i < in.v.size(); ++i) {
        const int64_t column = i % c.headdim_v, j = i / c.headdim_v / c.nheads_k % c.seqlen_k;
        double& x = v[static_cast<size_t>(i)];
        if (column % 3 == 1 && j % 61 == column % 61) x = column % 9 < 3 ? nan : column % 9 < 6 ? infinity : -infinity;
        if (column % 7 == 2 && middle_k <= j && j < middle_k + 20) x = infinity;
        if (column % 5 == 0 && j + 1 == c.seqlen_k) x = nan;
      }
      break;
    case Inputs::kMinusInfKeys: lead(1.0, [&](int64_t j) { return j < middle_k ? -infinity : 0.0; }); break;
    case Inputs::kManyNonfinite: {
      const auto spoil = [&](Dense& x, int64_t row, int64_t seqlen, int64_t width) {
        if (row < 0 || row >= seqlen) return;
        const double values[] = {nan, infinity, -infinity};
        for (int64_t i = 0; i < width; ++i)
          if ((row + i) % 4 != 3) x[static_cast<size_t>(row * width + i)] = values[(row + i) % 4];
      };
      for (int64_t row : {0, 3, 21}) spoil(q, row, c.seqlen_q, c.nheads * c.headdim);
      for (int64_t row : {1, 30}) spoil(dout, row, c.seqlen_q, c.nheads * c.headdim_v);
      for (int64_t key : {1, 2, 40}) spoil(k, c.seqlen_k - key, c.seqlen_k, c.nheads_k * c.headdim);
      for (int64_t key : {1, 3, 70}) spoil(v, c.seqlen_k - key, c.seqlen_k, c.nheads_k * c.headdim_v);
      break;
    }
    case Inputs::kNormal:
    case Inputs::kSigma2:
    case Inputs::kSigma3:
    case Inputs::kTiny:
    case Inputs::kOffset: break;
  }
  write(in.q, q);
  write(in.k, k);
  write(in.v, v);
  if (c.page_size > 0) put_in_pages(c, in);
  write(in.dout, dout);
  if (c.dlse) write(in.dlse, normal(c.seed, 9, in.dlse.size(), 0, stddev / sigma));
  return in;
}

namespace {

CaseForward make_forward_as(const Case& c, DType dtype_of_o) {
  CaseForward out;
  out.blocks.reserve(2);
  const Layout layout = c.layout == Layout::kExpanded ? Layout::kBshd : c.layout;
  const RowsShape s = rows_of(c, false, c.nheads, c.headdim_v);
  out.o = as_given(c, place_rows(out.blocks, dtype_of_o, layout, s, kGuardElements, TensorBlock::kCanary));
  const DType dtype = c.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const int64_t row = c.layout == Layout::kPadded ? 2 : 1, head = s.seqlen * row + (c.layout == Layout::kPadded ? 1 : 0);
  TensorBlock& block = out.blocks.emplace_back(dtype, s.batch * c.nheads * head, kGuardElements, TensorBlock::kCanary);
  out.lse = as_given(c, block.place(0, {s.batch, c.nheads, s.seqlen}, {c.nheads * head, head, row}));
  return out;
}

}  // namespace

CaseForward make_forward(const Case& c) { return make_forward_as(c, c.out_dtype()); }
CaseForward make_saved(const Case& c) { return make_forward_as(c, c.dtype); }

CaseGradients make_gradients(const Case& c) {
  CaseGradients out;
  out.blocks.reserve(5);
  constexpr unsigned char kCanary = TensorBlock::kCanary;
  const DType of_lse = c.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  if (c.sinks) out.dsinks = place(out.blocks, of_lse, {c.nheads}, kGuardElements, kCanary);
  if (c.bias != Pairs::kNone)
    out.dbias =
        place_pairs(out.blocks, c, c.bias == Pairs::kExpanded ? Pairs::kAll : c.bias, c.bias_fp32 ? DType::kF32 : c.dtype, kGuardElements, kCanary);
  if (c.layout == Layout::kPacked) {
    place_packed(out.blocks, c, c.out_dtype(), kGuardElements, kCanary, out.dq, out.dk, out.dv);
    return out;
  }
  const Layout layout = c.layout == Layout::kExpanded ? Layout::kBshd : c.layout;
  const auto rows = [&](bool keys, int64_t heads, int64_t headdim) {
    return as_given(c, place_rows(out.blocks, c.out_dtype(), layout, rows_of(c, keys, heads, headdim), kGuardElements, kCanary));
  };
  out.dq = rows(false, c.nheads, c.headdim);
  out.dk = rows(true, c.nheads_k, c.headdim);
  out.dv = rows(true, c.nheads_k, c.headdim_v);
  return out;
}

}  // namespace fattn::testing
