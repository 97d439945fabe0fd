// The CPU backend's tasks: cuts a problem into tasks as the plan says, lays out the workspace and hands the tasks to the
// workers. Every task writes memory of its own, so the results do not depend on who runs it or when.
#include "backend/cpu/cpu.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "backend/cpu/entries.h"
#include "backend/cpu/id_range.h"
#include "backend/cpu/tasks.h"
#include "cpu/thread_pool.h"
#include "device_abi/lowest.h"

namespace fattn::core {
namespace {

constexpr int64_t kFloat = static_cast<int64_t>(sizeof(float)), kHalf = static_cast<int64_t>(sizeof(uint16_t));

// Where the pieces of the workspace begin.
struct Workspace {
  size_t scratch = 0, scratch_of_worker = 0;  // all paths
  size_t largest = 0, sum = 0, acc = 0;       // decode: (batch, nheads_k, chunk, row[, headdim_v])
  size_t delta = 0;                           // backward: (batch, nheads, seqlen_q); packed: batch 1, total_q
  size_t dq_low = 0;                          // backward in 16 bits: (batch, nheads, seqlen_q, headdim), likewise; see dq_sums.h
  size_t walked = 0;                          // backward, if there are splits: (batch, nheads_k, split), see dq_order.h
  size_t dbias = 0;                           // backward: the same for dbias
  bool dbias_in_output = false;
  size_t order = 0, ends = 0;  // packed: (batch) each, see entries.h
  size_t total = 0;
};

constexpr int64_t kRowsOfDelta = 256;  // rows of a task of the passes before and after the backward kernel

int64_t main_tasks(const Plan& plan) {
  const Problem& p = plan.problem;
  const CpuPlan& c = plan.cpu;
  switch (c.path) {
    case CpuPlan::Path::kForward:  // packed: at most
      return p.packed ? p.nheads * (p.total_q / c.rows + std::min(p.batch, p.total_q)) : p.batch * p.nheads * ((p.seqlen_q + c.rows - 1) / c.rows);
    case CpuPlan::Path::kDecode: return p.batch * ((p.nheads_k + c.heads - 1) / c.heads) * c.splits;
    case CpuPlan::Path::kBackward: return p.backward_units() * c.splits;
  }
  return 0;
}

// Is every pair of a batch entry and head some task's? Then the first to come stores its part of dbias and the last writes the tensor.
bool walks_all_of_dbias(const Problem& p) {
  return p.dbias.given && p.dbias.rows > 1 && !p.packed && !p.has_seqused_k && p.batch > 0 && p.nheads > 0 && p.seqlen_k > 0;
}

Workspace lay_out(const Plan& plan) {
  const Problem& p = plan.problem;
  const CpuPlan& c = plan.cpu;
  const CpuKernels& kernels = kernels_of(c.isa);
  const KernelDType dtype = kernel_dtype(p.dtype);
  const KernelShape shape{c.rows,
                          c.task_k,
                          c.block_k,
                          static_cast<int>(p.headdim),
                          static_cast<int>(p.headdim_v),
                          c.heads,
                          p.has_pair_terms() || p.dropout_below > 0 || p.dbias.given || p.has_documents,
                          p.paged};
  Workspace w;
  WorkspaceLayout layout;
  size_t scratch = 0;
  switch (c.path) {
    case CpuPlan::Path::kForward: scratch = kernels.forward_scratch(dtype, shape); break;
    case CpuPlan::Path::kDecode: {
      scratch = kernels.decode_scratch(dtype, shape);
      const int64_t rows = c.rows;
      w.largest = layout.add({p.batch, p.nheads_k, c.splits, rows, kFloat});
      w.sum = layout.add({p.batch, p.nheads_k, c.splits, rows, kFloat});
      w.acc = layout.add({p.batch, p.nheads_k, c.splits, rows, p.headdim_v, kFloat});
      break;
    }
    case CpuPlan::Path::kBackward:
      scratch = kernels.backward_scratch(dtype, shape);
      w.delta = layout.add({p.dense_batch(), p.nheads, p.dense_rows(), kFloat});
      if (p.dtype != DType::kF32) w.dq_low = layout.add({p.dense_batch(), p.nheads, p.dense_rows(), p.headdim, kHalf});
      if (c.splits > 1) w.walked = layout.add({p.batch, p.nheads_k, c.splits, static_cast<int64_t>(sizeof(int64_t))});
      w.dbias_in_output = p.dbias.given && p.dbias.dtype == DType::kF32;
      // Nothing is summed where each part of dbias is one head's of one batch entry.
      if (p.dbias.given && !w.dbias_in_output && (!walks_all_of_dbias(p) || p.shares_dbias_of_batch() || p.shares_dbias_of_heads()))
        w.dbias = layout.add({p.dbias.batch, p.dbias.heads, p.dbias.rows, p.seqlen_k, kFloat});
      break;
  }
  if (p.packed) {
    w.order = layout.add({p.batch, static_cast<int64_t>(sizeof(int64_t))});
    w.ends = layout.add({p.batch, static_cast<int64_t>(sizeof(int64_t))});
  }
  w.scratch_of_worker = (scratch + 63) / 64 * 64;
  w.scratch = layout.add({workers_of(plan, main_tasks(plan)), static_cast<int64_t>(w.scratch_of_worker)});
  w.total = layout.total();
  return w;
}

struct Call {
  const Plan& plan;
  const Problem& p;
  const CpuPlan& c;
  const fattn_buffers& b;
  const CpuKernels& kernels;
  KernelDType dtype;
  size_t element;
  Workspace w;
  char* workspace;

  void* scratch(int worker) const { return workspace + w.scratch + static_cast<size_t>(worker) * w.scratch_of_worker; }
  float* floats(size_t offset) const { return reinterpret_cast<float*>(workspace + offset); }
  int64_t* numbers(size_t offset) const { return reinterpret_cast<int64_t*>(workspace + offset); }
  // The mask of a batch entry as the tasks have it.
  int64_t diagonal(const Sequence& s) const { return p.mask(s).ends() ? p.mask(s).diagonal() : s.keys; }
  int64_t left_diagonal(const Sequence& s) const { return p.mask(s).begins() ? p.mask(s).left_diagonal() : kNoBegin; }

  // Entries of tasks_of(sequence) tasks, each of a work that grows with work_of(sequence).
  template <class Tasks, class Work>
  Entries entries(const Tasks& tasks_of, const Work& work_of) const {
    if (!p.packed) return {p.batch, tasks_of(Sequence{0, p.seqlen_q, 0, p.seqlen_k, p.seqlen_k})};
    const auto sequence = [&](int64_t n) { return sequence_of(p, b, n); };
    return {p.batch, numbers(w.order), numbers(w.ends), [&](int64_t n) { return tasks_of(sequence(n)); },
            [&](int64_t n) { return work_of(sequence(n)); }};
  }

  // Of the query heads from h on.
  ScoreInputs inputs(int64_t n, int64_t h, const Sequence& s) const {
    ScoreInputs in{};
    if (p.has_alibi) in.alibi_slopes = static_cast<const float*>(b.alibi_slopes) + n * p.alibi_batch_stride + h * p.alibi_head_stride;
    in.alibi_head_stride = p.alibi_head_stride;
    const auto head_of = [&](const PairTensor& t, const void* data) {
      return t.given ? at(data, n * t.strides.batch + h * t.strides.head, size_of(t.dtype)) : nullptr;
    };
    in.bias = head_of(p.bias, b.bias);
    in.bias_stride = p.bias.strides.row;
    in.bias_head_stride = p.bias.strides.head;
    in.bias_fp32 = p.bias.dtype == DType::kF32;
    in.mask = static_cast<const uint8_t*>(head_of(p.pair_mask, b.mask));
    in.mask_stride = p.pair_mask.strides.row;
    in.mask_head_stride = p.pair_mask.strides.head;
    if (p.has_documents) {
      in.document_q = at(static_cast<const int32_t*>(b.document_q), n * p.document_q_stride + s.q_begin);
      in.document_k = at(static_cast<const int32_t*>(b.document_k), n * p.document_k_stride + s.k_begin);
    }
    in.shift = s.keys - s.seqlen_q;
    in.dropout_below = p.dropout_below;
    in.dropout_scale = static_cast<float>(p.dropout_scale());
    if (p.dropout_below > 0) {
      const auto* state = static_cast<const int64_t*>(b.dropout_state);
      in.seed = static_cast<uint64_t>(state[0]);
      in.stream = static_cast<uint64_t>(state[1]) + static_cast<uint64_t>(n * p.nheads + h);
    }
    if (p.has_sinks) in.sink = sink_of(h);
    return in;
  }
  KeyPages pages(int64_t n) const { return p.paged ? KeyPages{pages_of(p, b, n), p.page_size, p.k_page_stride, p.v_page_stride} : KeyPages{}; }
  // Of a query head; null: none.
  const float* sink_of(int64_t h) const { return p.has_sinks ? static_cast<const float*>(b.sinks) + h * p.sinks_stride : nullptr; }
};

// Rows of packed tensors that belong to no sequence see nothing: o = 0, lse = -inf.
void finish_packed_rows(const Call& call) {
  const Problem& p = call.p;
  const int64_t begin = end_of_queries(p, call.b);
  run_tasks(call.plan, "rows of no sequence", (p.total_q - begin) * p.nheads, [&](int64_t i, int) {
    const int64_t row = begin + i / p.nheads, h = i % p.nheads;
    std::memset(at(call.b.o, place(p.o, 0, row, h), call.element), 0, static_cast<size_t>(p.headdim_v) * call.element);
    if (p.want_lse) static_cast<float*>(call.b.lse)[place(p.lse, 0, row, h)] = -std::numeric_limits<float>::infinity();
  });
}

void forward(const Call& call) {
  const Problem& p = call.p;
  const auto blocks_of = [&](const Sequence& s) { return (s.seqlen_q + call.c.rows - 1) / call.c.rows; };
  const Entries entries = call.entries([&](const Sequence& s) { return p.nheads * blocks_of(s); }, [](const Sequence& s) { return s.keys; });
  run_tasks(call.plan, "tiles of queries", entries.tasks(), [&](int64_t i, int worker) {
    const auto [n, index] = entries.task(i);
    const Sequence s = sequence_of(p, call.b, n);
    const int64_t blocks = blocks_of(s), block = blocks - 1 - index % blocks;  // a causal mask makes the last rows the longest: first
    const int64_t h = index / blocks, hk = h / p.group();
    ForwardTask t{};
    t.q = at(call.b.q, place(p.q, n, s.q_begin, h), call.element);
    t.k = at(call.b.k, place(p.k, n, s.k_begin, hk), call.element);
    t.v = at(call.b.v, place(p.v, n, s.k_begin, hk), call.element);
    t.o = at(call.b.o, place(p.o, n, s.q_begin, h), call.element);
    t.lse = p.want_lse ? at(static_cast<float*>(call.b.lse), place(p.lse, n, s.q_begin, h)) : nullptr;
    t.q_stride = p.q.row;
    t.k_stride = p.k.row;
    t.v_stride = p.v.row;
    t.o_stride = p.o.row;
    t.lse_stride = p.lse.row;
    t.row_begin = block * call.c.rows;
    t.row_end = std::min(s.seqlen_q, t.row_begin + call.c.rows);
    t.seqlen_k = s.keys;
    t.diagonal = call.diagonal(s);
    t.left_diagonal = call.left_diagonal(s);
    t.block_k = call.c.block_k;
    t.headdim = static_cast<int>(p.headdim);
    t.headdim_v = static_cast<int>(p.headdim_v);
    t.scale = static_cast<float>(p.softmax_scale);
    t.softcap = static_cast<float>(p.softcap);
    t.pages = call.pages(n);
    t.inputs = call.inputs(n, h, s);
    t.scratch = call.scratch(worker);
    call.kernels.forward(call.dtype, t);
  });
  if (p.packed) finish_packed_rows(call);
}

// The sum of a row's weights, in units of exp(reference), with what its head's sink adds, and lse.
struct SinkedRow {
  float sum, lse;
  SinkedRow(const float* sink, double reference, float weights) : sum(weights) {
    if (weights == 0.0f) {
      lse = sink ? *sink : -std::numeric_limits<float>::infinity();
      return;
    }
    const double added = sink ? std::exp(static_cast<double>(*sink) - reference) : 0.0, all = static_cast<double>(weights) + added;
    sum = static_cast<float>(all);
    lse = std::isinf(added) && !std::isnan(weights) ? *sink : static_cast<float>(reference + std::log(all));
  }
};

// Merges the chunks of one row, with m the largest of the chunks' maxima m_c and a_c = exp((m_c - m) |scale|), of whole scores exp(m_c - m):
// o = sum(a_c acc_c) / sum(a_c sum_c), with dropout times its scale, lse = m |scale| (whole: m) + log(sum(a_c sum_c)).
// Chunk c of the row is the part first + c * step.
void merge_row(const Call& call, int64_t first, int64_t step, const float* sink, void* o, float* lse) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  const int64_t chunks = call.c.splits, dv = call.p.headdim_v;
  const float* largest = call.floats(call.w.largest);
  const float* sum = call.floats(call.w.sum);
  float* acc = call.floats(call.w.acc);
  const auto index = [&](int64_t chunk) { return first + chunk * step; };
  float m = kNone;
  for (int64_t c = 0; c < chunks; ++c) m = std::max(m, largest[index(c)]);
  const float safe = m == kNone ? 0.0f : m;
  const bool whole = call.p.softmax_scale == 0 || call.p.softcap > 0 || call.p.has_alibi || call.p.bias.given;
  const float scale = whole ? 1.0f : static_cast<float>(std::fabs(call.p.softmax_scale));
  const auto factor_of = [&](int64_t chunk) { return std::exp((largest[index(chunk)] - safe) * scale); };
  float total = 0;
  for (int64_t c = 0; c < chunks; ++c) total += factor_of(c) * sum[index(c)];
  const SinkedRow row(sink, static_cast<double>(m) * static_cast<double>(scale), total);
  const float inverse = total == 0.0f ? 0.0f : static_cast<float>(call.p.dropout_scale()) / row.sum;
  float* merged = acc + index(0) * dv;
  for (int64_t c = 0; c < chunks; ++c) {
    const float factor = factor_of(c) * inverse;
    const float* part = acc + index(c) * dv;
    for (int64_t d = 0; d < dv; ++d) merged[d] = c == 0 ? factor * part[d] : merged[d] + factor * part[d];
  }
  call.kernels.sum_rows(call.dtype, merged, 0, 1, dv, o);
  if (lse) *lse = row.lse;
}

void decode(const Call& call) {
  const Problem& p = call.p;
  const int64_t chunks = call.c.splits, sets = (p.nheads_k + call.c.heads - 1) / call.c.heads;
  // The part that key head hk's first row of a chunk is in. A batch entry has memory for the most rows; its own lie one behind the other.
  const auto part_of = [&](int64_t n, int64_t hk, int64_t chunk, int64_t rows) {
    return n * p.nheads_k * chunks * call.c.rows + (hk * chunks + chunk) * rows;
  };
  run_tasks(call.plan, "chunks of keys", p.batch * sets * chunks, [&](int64_t i, int worker) {
    const int64_t chunk = i % chunks, n = i / chunks / sets, hk = i / chunks % sets * call.c.heads;
    const Sequence s = sequence_of(p, call.b, n);
    if (s.seqlen_q == 0) return;
    const int64_t rows = p.group() * s.seqlen_q, part = part_of(n, hk, chunk, rows);
    DecodeTask t{};
    t.q = at(call.b.q, place(p.q, n, s.q_begin, hk * p.group()), call.element);
    t.k = at(call.b.k, place(p.k, n, s.k_begin, hk), call.element);
    t.v = at(call.b.v, place(p.v, n, s.k_begin, hk), call.element);
    t.q_stride = p.q.row;
    t.q_head_stride = p.q.head;
    t.k_stride = p.k.row;
    t.v_stride = p.v.row;
    t.heads = std::min(call.c.heads, p.nheads_k - hk);
    t.q_group_stride = p.group() * p.q.head;
    t.k_head_stride = p.k.head;
    t.v_head_stride = p.v.head;
    t.part_stride = chunks;
    t.rows = rows;
    t.seqlen_q = s.seqlen_q;
    t.key_begin = first_key_of_decode(p.mask(s), p) + chunk * call.c.task_k;
    t.key_end = std::min(s.keys, t.key_begin + call.c.task_k);
    t.diagonal = call.diagonal(s);
    t.left_diagonal = call.left_diagonal(s);
    t.headdim = static_cast<int>(p.headdim);
    t.headdim_v = static_cast<int>(p.headdim_v);
    t.scale = static_cast<float>(p.softmax_scale);
    t.softcap = static_cast<float>(p.softcap);
    t.pages = call.pages(n);
    t.inputs = call.inputs(n, hk * p.group(), s);
    t.max = call.floats(call.w.largest) + part;
    t.sum = call.floats(call.w.sum) + part;
    t.acc = call.floats(call.w.acc) + part * p.headdim_v;
    t.scratch = call.scratch(worker);
    call.kernels.decode(call.dtype, t);
  });
  run_tasks(call.plan, "merge chunks", p.batch * p.nheads_k, [&](int64_t i, int) {
    const int64_t n = i / p.nheads_k, hk = i % p.nheads_k;
    const Sequence s = sequence_of(p, call.b, n);
    const int64_t rows = p.group() * s.seqlen_q;
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t h = hk * p.group() + row / s.seqlen_q, q = s.q_begin + row % s.seqlen_q;
      float* lse = p.want_lse ? at(static_cast<float*>(call.b.lse), place(p.lse, n, q, h)) : nullptr;
      merge_row(call, part_of(n, hk, 0, rows) + row, rows, call.sink_of(h), at(call.b.o, place(p.o, n, q, h), call.element), lse);
    }
  });
  if (p.packed) finish_packed_rows(call);
}

// -sum(exp(sink - lse) delta) over the rows of a head that have a gradient: dS of a key without a value.
template <class DeltaOf>
float gradient_of_sink(const Call& call, int64_t h, const DeltaOf& delta_of) {
  const Problem& p = call.p;
  const auto sink = static_cast<double>(*call.sink_of(h));
  double sum = 0;
  if (sink == -std::numeric_limits<double>::infinity()) return 0;
  for (int64_t n = 0; n < p.dense_batch(); ++n) {
    const float* const delta = delta_of(n);
    const auto* lse = static_cast<const float*>(call.b.lse) + n * p.lse.batch + h * p.lse.head;
    const int64_t rows = p.packed ? end_of_queries(p, call.b) : p.seqlen_q;
    for (int64_t row = 0; row < rows; ++row)
      if (const float l = lse[row * p.lse.row]; !(l < kLowestLse)) sum -= std::exp(sink - static_cast<double>(l)) * static_cast<double>(delta[row]);
  }
  return static_cast<float>(sum);
}

// Of the rows [begin, end) of (dense) batch entry n. A row without a gradient has none whatever dlse says: its P is 0, and 0 times a NaN of dlse
// would be NaN.
void subtract_dlse(const Call& call, int64_t n, int64_t h, int64_t begin, int64_t end, float* delta) {
  const Problem& p = call.p;
  const auto* dlse = static_cast<const float*>(call.b.dlse) + n * p.dlse.batch + h * p.dlse.head;
  const auto* lse = static_cast<const float*>(call.b.lse) + n * p.lse.batch + h * p.lse.head;
  for (int64_t row = begin; row < end; ++row)
    if (!(lse[row * p.lse.row] < kLowestLse)) delta[row] -= dlse[row * p.dlse.row];
}

// The end of the super-block of keys at `begin`: with documents in its second half where one begins, so that its rows meet few other super-blocks.
// `document_k`: null where all super-blocks are alike.
int64_t end_of_super_block(const int32_t* document_k, int64_t begin, int64_t most, int64_t seqlen_k) {
  if (seqlen_k - begin <= most) return seqlen_k;
  if (!document_k) return begin + most;
  int64_t end = begin + most;
  while (end > begin + most / 2 && document_k[end - 1] == document_k[end]) --end;
  return end > begin + most / 2 ? end : begin + most;
}

// Calls body(number, begin, end) for the super-blocks of keys of a sequence. With dropout every one begins with a block of random numbers; where
// batch entries add to the same dbias, a split has the same keys of each.
template <class Body>
void for_super_blocks(const Call& call, const Sequence& s, const ScoreInputs& in, const Body& body) {
  const int32_t* document_k = in.dropout_below > 0 || call.p.shares_dbias_of_batch() ? nullptr : in.document_k;
  for (int64_t begin = 0, end = 0, i = 0; begin < s.seqlen_k; begin = end, ++i) {
    end = end_of_super_block(document_k, begin, call.c.task_k, s.seqlen_k);
    body(i, begin, end);
  }
}

// Between two looks of a task that waits for another one, which is computing.
void pause_of_task(int64_t times) {
  constexpr int64_t kSpins = 64;
  times < kSpins ? relax_cpu() : std::this_thread::yield();
}

void backward(const Call& call) {
  const Problem& p = call.p;
  // In the workspace packed sequences are one batch entry.
  const int64_t batch = p.dense_batch(), all_rows = p.dense_rows();
  const auto of_batch = [&](int64_t stride) { return p.packed ? 0 : stride; };
  const bool dq_in_halves = p.dtype != DType::kF32;
  const Strides of_dq_low{of_batch(p.nheads * all_rows * p.headdim), p.headdim, all_rows * p.headdim};
  auto* const dq_low = reinterpret_cast<uint16_t*>(call.workspace + call.w.dq_low);
  float* delta = call.floats(call.w.delta);
  const Strides of_delta{of_batch(p.nheads * all_rows), 1, all_rows};
  const PairTensor& pairs = p.dbias;
  Strides dbias{pairs.heads * pairs.rows * p.seqlen_k, p.seqlen_k, pairs.rows * p.seqlen_k};
  float* dbias_base = call.floats(call.w.dbias);
  if (call.w.dbias_in_output) {
    dbias = pairs.strides;
    dbias_base = static_cast<float*>(call.b.dbias);
  }
  const auto dbias_row = [&](int64_t i) {  // of all rows of dbias
    return at(dbias_base, i / pairs.rows / pairs.heads * dbias.batch + i / pairs.rows % pairs.heads * dbias.head + i % pairs.rows * dbias.row);
  };
  const int64_t dbias_rows = pairs.batch * pairs.heads * pairs.rows;
  const bool walks_all = walks_all_of_dbias(p);  // else zeros are there before, and the tensor is written afterwards
  run_tasks(call.plan, "zero dbias", walks_all ? 0 : dbias_rows, [&](int64_t i, int) { std::fill_n(dbias_row(i), p.seqlen_k, 0.0f); });

  auto* const walked = call.c.splits > 1 ? call.numbers(call.w.walked) : nullptr;
  if (walked) std::fill_n(walked, p.batch * p.nheads_k * call.c.splits, 0);

  const int64_t blocks = (all_rows + kRowsOfDelta - 1) / kRowsOfDelta;
  // delta = rowsum(o * dout) - dlse, and zeros where dq accumulates. (dS = P (dP - rowsum(o dout) + dlse).)
  run_tasks(call.plan, "delta = rowsum(o dout)", batch * p.nheads * blocks, [&](int64_t i, int) {
    const int64_t n = i / blocks / p.nheads, h = i / blocks % p.nheads;
    const int64_t begin = i % blocks * kRowsOfDelta, end = std::min(all_rows, begin + kRowsOfDelta);
    call.kernels.row_dots(call.dtype, at(static_cast<const void*>(call.b.o), place(p.o, n, begin, h), call.element), p.o.row,
                          at(call.b.dout, place(p.dout, n, begin, h), call.element), p.dout.row, end - begin, static_cast<int>(p.headdim_v),
                          delta + place(of_delta, n, begin, h), 1);
    if (p.has_dlse) subtract_dlse(call, n, h, begin, end, delta + place(of_delta, n, 0, h));
    for (int64_t row = begin; row < end; ++row)
      std::memset(at(call.b.dq, place(p.dq, n, row, h), call.element), 0, static_cast<size_t>(p.headdim) * call.element);
    if (dq_in_halves) std::fill_n(dq_low + place(of_dq_low, n, begin, h), (end - begin) * p.headdim, uint16_t{0});
  });

  if (p.want_dsinks)
    run_tasks(call.plan, "gradient of sinks", p.nheads, [&](int64_t h, int) {
      static_cast<float*>(call.b.dsinks)[h * p.dsinks_stride] =
          gradient_of_sink(call, h, [&](int64_t n) { return delta + place(of_delta, n, 0, h); });
    });

  run_tasks(call.plan, "keys of no sequence", p.packed ? (p.total_k - end_of_keys(p, call.b)) * p.nheads_k : 0,
            [&](int64_t i, int) {  // keys of no sequence, or with seqused_k all
              const int64_t key = end_of_keys(p, call.b) + i / p.nheads_k, hk = i % p.nheads_k;
              std::memset(at(call.b.dk, place(p.dk, 0, key, hk), call.element), 0, static_cast<size_t>(p.headdim) * call.element);
              std::memset(at(call.b.dv, place(p.dv, 0, key, hk), call.element), 0, static_cast<size_t>(p.headdim_v) * call.element);
            });

  // A (batch, key head, split): all super-blocks one after the other, or super-block `split`. Each adds to dq in its turn.
  const auto walk = [&](int64_t n, int64_t hk, int64_t split, int worker) {
    const int64_t h = hk * p.group();
    const Sequence s = sequence_of(p, call.b, n);
    BackwardTask t{};
    t.q = at(call.b.q, place(p.q, n, s.q_begin, h), call.element);
    t.k = at(call.b.k, place(p.k, n, s.k_begin, hk), call.element);
    t.v = at(call.b.v, place(p.v, n, s.k_begin, hk), call.element);
    t.dout = at(call.b.dout, place(p.dout, n, s.q_begin, h), call.element);
    t.lse = at(static_cast<const float*>(call.b.lse), place(p.lse, n, s.q_begin, h));
    t.delta = delta + place(of_delta, n, s.q_begin, h);
    t.dq = at(call.b.dq, place(p.dq, n, s.q_begin, h), call.element);
    t.dq_low = dq_in_halves ? dq_low + place(of_dq_low, n, s.q_begin, h) : nullptr;
    t.dk = at(call.b.dk, place(p.dk, n, s.k_begin, hk), call.element);
    t.dv = at(call.b.dv, place(p.dv, n, s.k_begin, hk), call.element);
    t.q_stride = p.q.row;
    t.k_stride = p.k.row;
    t.v_stride = p.v.row;
    t.dout_stride = p.dout.row;
    t.lse_stride = p.lse.row;
    t.delta_stride = 1;
    t.dq_stride = p.dq.row;
    t.dq_low_stride = of_dq_low.row;
    t.dk_stride = p.dk.row;
    t.dv_stride = p.dv.row;
    t.q_head_stride = p.q.head;
    t.dout_head_stride = p.dout.head;
    t.lse_head_stride = p.lse.head;
    t.delta_head_stride = of_delta.head;
    t.dq_head_stride = p.dq.head;
    t.dq_low_head_stride = of_dq_low.head;
    t.group = p.group();
    t.seqlen_q = s.seqlen_q;
    t.seqlen_k = s.seqlen_k;
    t.diagonal = call.diagonal(s);
    t.left_diagonal = call.left_diagonal(s);
    t.block_k = call.c.block_k;
    t.headdim = static_cast<int>(p.headdim);
    t.headdim_v = static_cast<int>(p.headdim_v);
    t.scale = static_cast<float>(p.softmax_scale);
    t.softcap = static_cast<float>(p.softcap);
    t.inputs = call.inputs(n, h, s);
    t.has_dbias = pairs.given;
    const bool own_entry = pairs.batch > 1, own_head = pairs.heads > 1;
    if (pairs.given) t.dbias_sums = at(dbias_base, (own_entry ? n : 0) * dbias.batch + (own_head ? h : 0) * dbias.head);
    t.dbias_stride = pairs.rows > 1 ? dbias.row : 0;
    t.dbias_head_stride = own_head ? dbias.head : 0;
    t.first_of_dbias = walks_all && (own_entry || n == 0) && (own_head || hk == 0);
    t.last_of_dbias = walks_all && !call.w.dbias_in_output && (own_entry || n == p.batch - 1) && (own_head || hk == p.nheads_k - 1);
    if (t.last_of_dbias)
      t.dbias = at(call.b.dbias, (own_entry ? n : 0) * pairs.strides.batch + (own_head ? h : 0) * pairs.strides.head, call.element);
    t.dbias_out_stride = pairs.strides.row;
    t.dbias_out_head_stride = own_head ? pairs.strides.head : 0;
    t.scratch = call.scratch(worker);
    t.walked = walked ? walked + (n * p.nheads_k + hk) * call.c.splits : nullptr;
    t.turn = split;
    t.pause = pause_of_task;
    for_super_blocks(call, s, t.inputs, [&](int64_t i, int64_t begin, int64_t end) {
      if (walked && i != split) return;
      t.key_begin = begin;
      t.key_end = std::clamp(s.keys, begin, end);
      if (t.key_begin < t.key_end) call.kernels.backward(call.dtype, t);
      for (int64_t key = t.key_end; key < end; ++key) {  // keys that the batch entry does not have
        std::memset(at(t.dk, key * p.dk.row, call.element), 0, static_cast<size_t>(p.headdim) * call.element);
        std::memset(at(t.dv, key * p.dv.row, call.element), 0, static_cast<size_t>(p.headdim_v) * call.element);
      }
    });
    if (walked) __atomic_store_n(t.walked + split, std::numeric_limits<int64_t>::max(), __ATOMIC_RELEASE);
  };
  // What adds to the same dbias is done one after the other, in order.
  const int64_t entries = p.shares_dbias_of_batch() ? p.batch : 1, heads = p.shares_dbias_of_heads() ? p.nheads_k : 1;
  const int64_t head_units = p.nheads_k / heads;
  const Entries order = call.entries([&](const Sequence&) { return head_units * (p.packed ? call.c.splits : 1); },
                                     [](const Sequence& s) { return static_cast<double>(s.seqlen_q) * static_cast<double>(s.keys); });
  run_tasks(call.plan, "super-blocks of keys", p.backward_units() * call.c.splits, [&](int64_t i, int worker) {
    // The splits of a key head lie as far apart as they can, so that few tasks wait for one another; of a sequence at a time, the longest first.
    const auto [entry, index] = order.task(p.packed ? i : i % p.backward_units());  // the first, if all entries are one unit
    const int64_t split = p.packed ? index / head_units : i / p.backward_units(), unit = index % head_units;
    const int64_t first = entries > 1 ? 0 : entry;
    for (int64_t n = first; n < first + entries; ++n)
      for (int64_t hk = unit * heads; hk < (unit + 1) * heads; ++hk) walk(n, hk, split, worker);
  });

  if (pairs.given && !call.w.dbias_in_output && !walks_all)
    run_tasks(call.plan, "round dbias", dbias_rows, [&](int64_t i, int) {
      void* out = at(
          call.b.dbias,
          i / pairs.rows / pairs.heads * pairs.strides.batch + i / pairs.rows % pairs.heads * pairs.strides.head + i % pairs.rows * pairs.strides.row,
          call.element);
      call.kernels.sum_rows(call.dtype, dbias_row(i), 0, 1, p.seqlen_k, out);
    });

  if (!dq_in_halves) return;
  run_tasks(call.plan, "round dq", batch * p.nheads * blocks, [&](int64_t i, int) {
    const int64_t n = i / blocks / p.nheads, h = i / blocks % p.nheads;
    const int64_t begin = i % blocks * kRowsOfDelta, end = std::min(all_rows, begin + kRowsOfDelta);
    for (int64_t row = begin; row < end; ++row)
      call.kernels.round_sums(call.dtype, dq_low + place(of_dq_low, n, row, h), p.headdim, at(call.b.dq, place(p.dq, n, row, h), call.element));
  });
}

}  // namespace

size_t cpu_workspace_bytes(const Plan& plan) { return lay_out(plan).total; }

void execute_cpu(const Plan& plan, const fattn_buffers& buffers) {
  const Problem& p = plan.problem;
  const Call call{plan,
                  p,
                  plan.cpu,
                  buffers,
                  kernels_of(plan.cpu.isa),
                  kernel_dtype(p.dtype),
                  size_of(p.dtype),
                  lay_out(plan),
                  static_cast<char*>(buffers.workspace)};
  switch (plan.cpu.path) {
    case CpuPlan::Path::kForward: return forward(call);
    case CpuPlan::Path::kDecode: return decode(call);
    case CpuPlan::Path::kBackward: return backward(call);
  }
}

}  // namespace fattn::core
