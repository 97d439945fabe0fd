// The backward pass.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <thread>

#include "backend/cpu/call.h"
#include "cpu/thread_pool.h"
#include "device_abi/lowest.h"

namespace fattn::core {
namespace {

constexpr int64_t kRowsOfDelta = 256;  // rows of a task of the passes before and after the backward kernel

// -sum(exp(sink - lse) delta) over the rows of a head that have a gradient: dS of a key without a value.
template <class DeltaOf>
float gradient_of_sink(const CpuCall& call, int64_t h, const DeltaOf& delta_of) {
  const Problem& p = call.p;
  const auto sink = static_cast<double>(*call.sink_of(h));
  double sum = 0;
  if (sink == -std::numeric_limits<double>::infinity()) return 0;
  for (int64_t n = 0; n < p.dense_batch(); ++n) {
    const float* const delta = delta_of(n);
    const float* const lse = at(static_cast<const float*>(call.b.lse), n * p.lse.batch + h * p.lse.head);  // null without rows
    const int64_t rows = p.packed ? end_of_queries(p, call.b) : p.seqlen_q;
    for (int64_t row = 0; row < rows; ++row)
      if (const float l = lse[row * p.lse.row]; !(l < kLowestLse)) sum -= std::exp(sink - static_cast<double>(l)) * static_cast<double>(delta[row]);
  }
  return static_cast<float>(sum);
}

// Of the rows [begin, end) of (dense) batch entry n. A row without a gradient has none whatever dlse says: its P is 0, and 0 times a NaN of dlse
// would be NaN.
void subtract_dlse(const CpuCall& call, int64_t n, int64_t h, int64_t begin, int64_t end, float* delta) {
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
void for_super_blocks(const CpuCall& call, const Sequence& s, const ScoreInputs& in, const Body& body) {
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

// What the steps of the backward pass share. In the workspace packed sequences are one batch entry.
struct BackwardPass {
  const CpuCall& call;
  const Problem& p = call.p;
  const int64_t batch = p.dense_batch(), all_rows = p.dense_rows(), blocks = (all_rows + kRowsOfDelta - 1) / kRowsOfDelta;
  const bool dq_in_halves = p.out_dtype() != DType::kF32;
  const Strides of_dq_low{of_batch(p.nheads * all_rows * p.headdim), p.headdim, all_rows* p.headdim};
  uint16_t* const dq_low = reinterpret_cast<uint16_t*>(call.workspace + call.w.dq_low);
  const Strides of_delta{of_batch(p.nheads * all_rows), 1, all_rows};
  float* const delta = call.floats(call.w.delta);
  const PairTensor& pairs = p.dbias;
  const Strides of_sums = call.w.dbias_in_output ? pairs.strides : Strides{pairs.heads * pairs.rows * p.seqlen_k, p.seqlen_k, pairs.rows* p.seqlen_k};
  float* const sums = call.w.dbias_in_output ? static_cast<float*>(call.b.dbias) : call.floats(call.w.dbias);  // of dbias
  const int64_t rows_of_dbias = pairs.batch * pairs.heads * pairs.rows;
  const bool walks_all = walks_all_of_dbias(p);  // else zeros are there before, and dbias is written afterwards
  int64_t* const walked = call.c.splits > 1 ? call.numbers(call.w.walked) : nullptr;

  explicit BackwardPass(const CpuCall& of) : call(of) {}

  int64_t of_batch(int64_t stride) const { return p.packed ? 0 : stride; }
  // Of all rows of dbias.
  int64_t row_of_dbias(int64_t i, const Strides& strides) const {
    return i / pairs.rows / pairs.heads * strides.batch + i / pairs.rows % pairs.heads * strides.head + i % pairs.rows * strides.row;
  }
  void* dq_row(int64_t n, int64_t row, int64_t h) const { return at(call.b.dq, place(p.dq, n, row, h), call.out_element); }
  // Zeros in the gradients of keys [key, end).
  void clear_keys(void* dk, void* dv, int64_t key, int64_t end) const {
    for (; key < end; ++key) {
      std::memset(at(dk, key * p.dk.row, call.out_element), 0, static_cast<size_t>(p.headdim) * call.out_element);
      std::memset(at(dv, key * p.dv.row, call.out_element), 0, static_cast<size_t>(p.headdim_v) * call.out_element);
    }
  }

  void prepare() const;
  void differentiate_sinks() const;
  void clear_keys_of_no_sequence() const;
  BackwardTask task_of(int64_t n, int64_t hk, const Sequence& s) const;
  void add_dbias_to(BackwardTask& t, int64_t n, int64_t hk) const;
  void walk(int64_t n, int64_t hk, int64_t split, int worker) const;
  void walk_super_blocks() const;
  void round_dbias() const;
  void round_dq() const;
};

// delta = rowsum(o * dout) - dlse, and zeros where dq and dbias accumulate. (dS = P (dP - rowsum(o dout) + dlse).)
void BackwardPass::prepare() const {
  run_tasks(call.plan, "zero dbias", walks_all ? 0 : rows_of_dbias,
            [&](int64_t i, int) { std::fill_n(at(sums, row_of_dbias(i, of_sums)), p.seqlen_k, 0.0f); });
  if (walked) std::fill_n(walked, p.batch * p.nheads_k * call.c.splits, 0);
  run_tasks(call.plan, "delta = rowsum(o dout)", batch * p.nheads * blocks, [&](int64_t i, int) {
    const int64_t n = i / blocks / p.nheads, h = i / blocks % p.nheads;
    const int64_t begin = i % blocks * kRowsOfDelta, end = std::min(all_rows, begin + kRowsOfDelta);
    call.kernels.row_dots(call.dtype, at(static_cast<const void*>(call.b.o), place(p.o, n, begin, h), call.element), p.o.row,
                          at(call.b.dout, place(p.dout, n, begin, h), call.element), p.dout.row, end - begin, static_cast<int>(p.headdim_v),
                          delta + place(of_delta, n, begin, h), 1);
    if (p.has_dlse) subtract_dlse(call, n, h, begin, end, delta + place(of_delta, n, 0, h));
    for (int64_t row = begin; row < end; ++row) std::memset(dq_row(n, row, h), 0, static_cast<size_t>(p.headdim) * call.out_element);
    if (dq_in_halves) std::fill_n(dq_low + place(of_dq_low, n, begin, h), (end - begin) * p.headdim, uint16_t{0});
  });
}

void BackwardPass::differentiate_sinks() const {
  if (!p.want_dsinks) return;
  run_tasks(call.plan, "gradient of sinks", p.nheads, [&](int64_t h, int) {
    static_cast<float*>(call.b.dsinks)[h * p.dsinks_stride] = gradient_of_sink(call, h, [&](int64_t n) { return delta + place(of_delta, n, 0, h); });
  });
}

// With seqused_k these are all keys.
void BackwardPass::clear_keys_of_no_sequence() const {
  run_tasks(call.plan, "keys of no sequence", p.packed ? (p.total_k - end_of_keys(p, call.b)) * p.nheads_k : 0, [&](int64_t i, int) {
    const int64_t key = end_of_keys(p, call.b) + i / p.nheads_k, hk = i % p.nheads_k;
    clear_keys(at(call.b.dk, place(p.dk, 0, 0, hk), call.out_element), at(call.b.dv, place(p.dv, 0, 0, hk), call.out_element), key, key + 1);
  });
}

// Of a (batch, key head); which of its keys is still to be said.
BackwardTask BackwardPass::task_of(int64_t n, int64_t hk, const Sequence& s) const {
  const int64_t h = hk * p.group();
  BackwardTask t{};
  t.q = at(call.b.q, place(p.q, n, s.q_begin, h), call.element);
  t.k = at(call.b.k, place(p.k, n, s.k_begin, hk), call.element);
  t.v = at(call.b.v, place(p.v, n, s.k_begin, hk), call.element);
  t.dout = at(call.b.dout, place(p.dout, n, s.q_begin, h), call.element);
  t.lse = at(static_cast<const float*>(call.b.lse), place(p.lse, n, s.q_begin, h));
  t.delta = delta + place(of_delta, n, s.q_begin, h);
  t.dq = at(call.b.dq, place(p.dq, n, s.q_begin, h), call.out_element);
  t.dq_low = dq_in_halves ? dq_low + place(of_dq_low, n, s.q_begin, h) : nullptr;
  t.dk = at(call.b.dk, place(p.dk, n, s.k_begin, hk), call.out_element);
  t.dv = at(call.b.dv, place(p.dv, n, s.k_begin, hk), call.out_element);
  t.fp32_out = p.fp32_out;
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
  add_dbias_to(t, n, hk);
  t.walked = walked ? walked + (n * p.nheads_k + hk) * call.c.splits : nullptr;
  t.pause = pause_of_task;
  return t;
}

// Where the task's part of dbias goes, which batch entries or heads may share, one after the other.
void BackwardPass::add_dbias_to(BackwardTask& t, int64_t n, int64_t hk) const {
  t.has_dbias = pairs.given;
  const bool own_entry = pairs.batch > 1, own_head = pairs.heads > 1;
  const int64_t entry = own_entry ? n : 0, head = own_head ? hk * p.group() : 0;
  if (pairs.given) t.dbias_sums = at(sums, entry * of_sums.batch + head * of_sums.head);
  t.dbias_stride = pairs.rows > 1 ? of_sums.row : 0;
  t.dbias_head_stride = own_head ? of_sums.head : 0;
  t.first_of_dbias = walks_all && (own_entry || n == 0) && (own_head || hk == 0);
  t.last_of_dbias = walks_all && !call.w.dbias_in_output && (own_entry || n == p.batch - 1) && (own_head || hk == p.nheads_k - 1);
  if (t.last_of_dbias) t.dbias = at(call.b.dbias, entry * pairs.strides.batch + head * pairs.strides.head, call.element);
  t.dbias_out_stride = pairs.strides.row;
  t.dbias_out_head_stride = own_head ? pairs.strides.head : 0;
}

// A (batch, key head, split): all super-blocks one after the other, or super-block `split`. Each adds to dq in its turn.
void BackwardPass::walk(int64_t n, int64_t hk, int64_t split, int worker) const {
  const Sequence s = sequence_of(p, call.b, n);
  BackwardTask t = task_of(n, hk, s);
  t.scratch = call.scratch(worker);
  t.turn = split;
  for_super_blocks(call, s, t.inputs, [&](int64_t i, int64_t begin, int64_t end) {
    if (walked && i != split) return;
    t.key_begin = begin;
    t.key_end = std::clamp(s.keys, begin, end);
    if (t.key_begin < t.key_end) call.kernels.backward(call.dtype, t);
    clear_keys(t.dk, t.dv, t.key_end, end);  // that the batch entry does not have
  });
  if (walked) __atomic_store_n(t.walked + split, std::numeric_limits<int64_t>::max(), __ATOMIC_RELEASE);
}

// What adds to the same dbias is done one after the other, in order.
void BackwardPass::walk_super_blocks() const {
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
}

void BackwardPass::round_dbias() const {
  if (!pairs.given || call.w.dbias_in_output || walks_all) return;
  run_tasks(call.plan, "round dbias", rows_of_dbias, [&](int64_t i, int) {
    call.kernels.sum_rows(call.dtype, at(sums, row_of_dbias(i, of_sums)), 0, 1, p.seqlen_k,
                          at(call.b.dbias, row_of_dbias(i, pairs.strides), call.element));
  });
}

void BackwardPass::round_dq() const {
  if (!dq_in_halves) return;
  run_tasks(call.plan, "round dq", batch * p.nheads * blocks, [&](int64_t i, int) {
    const int64_t n = i / blocks / p.nheads, h = i / blocks % p.nheads;
    const int64_t begin = i % blocks * kRowsOfDelta, end = std::min(all_rows, begin + kRowsOfDelta);
    for (int64_t row = begin; row < end; ++row)
      call.kernels.round_sums(call.out_dtype, dq_low + place(of_dq_low, n, row, h), p.headdim, dq_row(n, row, h));
  });
}

}  // namespace

void cpu_backward(const CpuCall& call) {
  const BackwardPass pass(call);
  pass.prepare();
  pass.differentiate_sinks();
  pass.clear_keys_of_no_sequence();
  pass.walk_super_blocks();
  pass.round_dbias();
  pass.round_dq();
}

}  // namespace fattn::core
