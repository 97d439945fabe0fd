// A pass of ring attention, planned: its class. ring_prepare.hpp, ring_scores.hpp and ring_execute.hpp have what the members do; programs include
// fattn/ring.hpp.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "fattn/plan.hpp"
#include "fattn/ring_agreement.hpp"
#include "fattn/ring_schedule.hpp"
#include "fattn/ring_tensors.hpp"
#include "fattn/ring_transport.hpp"
#include "fattn/rows.hpp"

namespace fattn {

// A pass of attention over the rows of all processes. Every process makes it, and executes it as often and in the same order.
//
// Tensors are as one process has them in a call, of this rank's rows: q (batch, rows_q, nheads, headdim), k and v (batch, rows_k, nheads_k, ...), lse
// (batch, nheads, rows_q). Of packed sequences too, where batch is 1. Rows of k and v, and of document_k, lie behind each other without gaps.
// Options: causal masks, windows, softcap, softmax_scale, documents (ids of this rank's rows), sinks and ALiBi (the same on every rank), bias and
// mask (rows of this rank or one for all, a column for each key of all ranks; not of packed sequences), dropout (dropout_state has the seed and the
// offset of the whole matrix, the same on every rank: weights are dropped as one process drops them), dlse, dsinks and dbias (what this rank's rows
// give). A mask beside dropout is copied into the workspace where a rank's first rows lie between random numbers: the mask's bytes, and a few rows.
// Lengths and pages are refused. 16-bit results are rounded once, at the end; on a GPU gradients of blocks are, too.
class RingPlan {
 public:
  // Throws Error: kInvalidArgument, kUnsupported (with the reason), and what `transport` throws. `transport` lives as long as the plan.
  RingPlan(RingTransport& transport, const RingSequence& sequence, const ForwardTensors& tensors, const Options& options)
      : RingPlan(transport, sequence, options, detail::RingTensors(tensors)) {}
  RingPlan(RingTransport& transport, const RingSequence& sequence, const BackwardTensors& tensors, const Options& options)
      : RingPlan(transport, sequence, options, detail::RingTensors(tensors)) {}

  const RingSchedule& schedule() const { return schedule_; }
  // Bytes of execute()'s workspace: the keys of two hops and fp32 sums of this rank's rows.
  size_t workspace_bytes() const { return workspace_bytes_; }

  // `workspace`: at least workspace_bytes() bytes on the tensors' device, aligned to 256. Shapes, strides and dtypes are the plan's. Returns when
  // nothing travels any more; on a GPU what is computed last may still be under way on `stream`. Throws Error.
  void execute(const ForwardTensors& tensors, void* workspace, size_t workspace_bytes, void* stream = nullptr) {
    run(detail::RingTensors(tensors), workspace, workspace_bytes, stream);
  }
  void execute(const BackwardTensors& tensors, void* workspace, size_t workspace_bytes, void* stream = nullptr) {
    run(detail::RingTensors(tensors), workspace, workspace_bytes, stream);
  }

 private:
  RingPlan(RingTransport& transport, const RingSequence& sequence, const Options& options, const detail::RingTensors& tensors);

  void prepare(const RingSequence& sequence, const detail::RingTensors& t);
  detail::RingFacts facts_of(const RingSequence& sequence, const detail::RingTensors& t, const std::string& wrong) const;
  void run(const detail::RingTensors& t, void* workspace, size_t bytes, void* stream) {
    begin(t, workspace, bytes, stream);
    t.is_forward ? forward(t) : backward(t);
    transport_->settle();
  }
  void begin(const detail::RingTensors& t, void* workspace, size_t bytes, void* stream);
  void forward(const detail::RingTensors& t);
  void backward(const detail::RingTensors& t);

  // --- fattn/ring_prepare.hpp, ring_execute.hpp ---

  struct Call {
    Plan plan;
    size_t bytes;
  };
  // What tensors of blocks that share a plan have alike, strides too: rows, keys, window, whose keys, where results go; pads, the side of ALiBi,
  // whether the mask is a copy.
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, int64_t, int64_t, int32_t, bool>;

  // The sums of this rank's rows, or of a hop's keys: the caller's tensors where these are fp32.
  detail::RingPart keys_of(const detail::RingTensors& t, size_t hop) const;
  Tensor sums_of_o(const detail::RingTensors& t) const;
  Tensor sums_of_lse(const detail::RingTensors& t) const;
  Tensor sums_of_dq(const detail::RingTensors& t) const;
  Tensor sums_of_dk(const detail::RingTensors& t, size_t hop) const;
  Tensor sums_of_dv(const detail::RingTensors& t, size_t hop) const;
  ForwardTensors forward_of(const detail::RingTensors& t, const RingBlock& b, size_t hop) const;
  BackwardTensors backward_of(const detail::RingTensors& t, const RingBlock& b, size_t hop) const;
  const Call& call_of(const detail::RingTensors& t, const RingBlock& b, size_t hop);

  void convert_lse(const Tensor& o, const Tensor& from, const Tensor& to) const;
  void finish_oldest() {
    transport_->finish(stream_);
    --open_;
  }
  void begin_keys(const detail::RingTensors& t, size_t h);
  void begin_gradients(const detail::RingTensors& t, size_t h);
  void finish_gradients(const detail::RingTensors& t, size_t h);

  // --- fattn/ring_scores.hpp ---

  // Rows and keys that a block gets before its own.
  struct Pads {
    int64_t rows = 0, keys = 0;
  };
  Pads pads_of(const RingBlock& b) const;
  static int64_t place_of(int64_t position, const std::vector<int64_t>& begins, const RingBlock& b) {
    return position - (begins.empty() ? 0 : begins[static_cast<size_t>(b.sequence)]);
  }
  static bool has_pairs(const RingBlock& b) { return b.q_rows > 0 && b.k_rows > 0; }
  int64_t slopes_batch() const { return planned_.slopes.ndim() == 2 ? planned_.slopes.shape(0) : 1; }
  size_t number_of(const RingBlock& b, size_t hop) const { return first_block_[hop] + static_cast<size_t>(&b - schedule_.hops[hop].blocks.data()); }
  // Multiples of slopes that a block's ALiBi adds to keys, and to rows: `count` of them from `first` on, or from -first down.
  struct Stretch {
    bool descends;
    int64_t first, count;
  };
  static Stretch key_stretch(const RingBlock& b) { return {b.side < 0, b.side < 0 ? 0 : 1 - b.k_rows, b.k_rows}; }
  Stretch row_stretch(const RingBlock& b) const;
  char* multiples_at(const Stretch& s) const;
  Tensor key_terms_of(const RingBlock& b) const;
  size_t hiding_at(int64_t keys) const { return space_.hiding + sizeof(float) * static_cast<size_t>(63 - keys); }  // for so many keys, then zeros
  ScoreTensors scores_of(const detail::RingTensors& t, const RingBlock& b, size_t hop) const;
  Tensor pairs_of(const Tensor& t, const RingBlock& b, const Pads& pads) const;
  bool makes_bias(const RingBlock& b) const;
  Tensor made_bias(const RingBlock& b) const;
  bool makes_mask(const RingBlock& b) const;
  Tensor made_mask(const RingBlock& b) const;
  int64_t lay_out_mask();
  Tensor ids_of(const Tensor& ids, size_t padded, int64_t first, int64_t count, int64_t pad) const;
  void make_block(const detail::RingTensors& t, const RingBlock& b, size_t hop, const ForwardTensors& f) const;
  void make_block(const detail::RingTensors& t, const RingBlock& b, size_t hop, const BackwardTensors& g) const;
  void make_scores(const detail::RingTensors& t, const RingBlock& b, size_t hop, const ScoreTensors& s) const;
  Tensor row_terms_of(const RingBlock& b) const;
  void lay_out_tables(size_t& used);
  void fill_tables(const detail::RingTensors& t);
  void fill_multiples(const detail::RingTensors& t);
  void copy_mask(const detail::RingTensors& t) const;
  std::vector<char> read(const Tensor& from, size_t count) const;
  void copy_bytes(void* to, const void* from, size_t bytes, int32_t direction) const;
  void set_bytes(void* to, size_t bytes) const;
  Tensor constant(size_t offset, int64_t rows, int64_t heads, int64_t width) const;
  void sum_pairs(std::initializer_list<Tensor> parts, const Tensor& to) const;
  static Tensor lse_as_rows(const Tensor& lse);
  void pad_rows(const Tensor& own, const Tensor& to, int64_t pad) const;
  void pad_lse(const Tensor& own, const Tensor& to, int64_t pad, size_t before) const;
  void pad_ids(const Tensor& own, const Tensor& to, int64_t first, int64_t count, int64_t pad) const;
  Tensor sums_of_dbias(const detail::RingTensors& t) const;
  Tensor dbias_of(const RingBlock& b) const;
  void begin_dbias(const detail::RingTensors& t) const;
  void add_dbias(const detail::RingTensors& t, const RingBlock& b, const Tensor& part) const;

  // --- rows ---

  char* at(size_t offset) const { return memory_ ? memory_ + offset : nullptr; }
  Tensor fresh(size_t offset, DType dtype, int64_t rows, int64_t heads, int64_t width) const {
    return Tensor(nullptr, dtype, {batch_, rows, heads, width}).on(device_, index_, at(offset));
  }
  // Rows of a tensor, or memory for them behind others.
  Tensor rows_of(const Tensor& x, size_t padded, int64_t first, int64_t count, int64_t pad) const {
    return pad == 0 ? detail::slice(x, 1, first, count) : fresh(padded, x.dtype(), pad + count, x.shape(2), x.shape(3));
  }
  Tensor fresh_lse(size_t offset, DType dtype, int64_t rows) const {
    return Tensor(nullptr, dtype, {batch_, nheads_, rows}).on(device_, index_, at(offset));
  }
  RowOptions row_options() const {
    RowOptions o;
    o.cpu_isa = options_.cpu_isa;
    o.num_threads = options_.num_threads;
    o.executor = options_.executor;
    o.stream = stream_;
    return o;
  }
  void add(const Tensor& to, const Tensor& part, bool more) const { more ? sum({to, part}, to, row_options()) : sum({part}, to, row_options()); }

  // Rows that no block writes begin as what a call without keys, or without queries, makes of them.
  static RingBlock empty_block(int64_t q_rows, int64_t k_rows) {
    RingBlock b{};
    b.q_rows = q_rows;
    b.k_rows = k_rows;
    b.window_left = b.window_right = -1;
    return b;
  }
  RingBlock without_keys() const { return empty_block(schedule_.rows_q, 0); }
  RingBlock without_queries(size_t hop) const { return empty_block(0, keys_in(hop)); }
  int64_t keys_in(size_t hop) const { return hop == 0 ? schedule_.rows_k : schedule_.hops[hop].rows_received; }
  bool writes_all_queries() const {
    int64_t written = 0;
    for (const RingHop& hop : schedule_.hops)
      for (const RingBlock& b : hop.blocks) written += b.merges ? 0 : b.q_rows;
    return written == schedule_.rows_q;
  }
  bool writes_all_keys(size_t hop) const {
    int64_t written = 0;
    for (const RingBlock& b : schedule_.hops[hop].blocks) written += b.adds ? 0 : b.k_rows;
    return written == keys_in(hop);
  }
  // Whether a block's rows, or keys, have results already; whether its own go beside them, to be added.
  bool merges(const RingBlock& b) const { return b.merges || (starts_ && b.k_rows > 0); }
  bool adds(const RingBlock& b, size_t hop) const { return b.adds || (b.q_rows > 0 && starts_keys_[hop]); }
  bool aside(bool more, int64_t pad) const { return more || pad > 0 || part_dtype_ != DType::kF32; }

  // Offsets into the workspace.
  struct Space {
    size_t plans = 0;                                                      // the workspace of a block's plan
    size_t keys[2] = {}, values[2] = {}, ids[2] = {};                      // of every other hop
    size_t o = 0, lse = 0, part = 0, lse_part = 0;                         // forward: sums of this rank's rows, results of a block
    size_t dq = 0, dk = 0, dv = 0, dq_part = 0, dk_part = 0, dv_part = 0;  // backward, likewise
    size_t q_pad = 0, k_pad = 0, v_pad = 0, ids_q = 0, ids_k = 0;          // a block behind rows and keys before its own
    size_t o_pad = 0, dout_pad = 0, lse_pad = 0, dlse_pad = 0;             // backward, likewise; lse_pad: or with row terms
    size_t bias = 0, dbias = 0, dbias_part = 0;                            // of a block, made; the gradient of a bias of one row, a block's
    size_t mask = 0;                                                       // rows of the caller's behind others
    int64_t mask_rows = 0, mask_strides[3] = {};                           // of the caller's; of the copy: batch, heads, rows
    int64_t mask_run = 0, mask_runs[3] = {};                               // bytes that are copied at once; how often, likewise
    size_t tables = 0, hiding = 0, zero_row = 0, zero_row_bytes = 0;       // fattn/ring_scores.hpp
    size_t multiples[2] = {};                                              // of slopes, ascending and descending
    bool has_multiples[2] = {};                                            // that blocks take some of these
    int64_t least[2] = {}, length = 0;                                     // the first of each, how many of a head
    size_t dk_hop[2] = {}, dv_hop[2] = {}, dk_came = 0, dv_came = 0;       // of every other hop's keys; of this rank's, from another
  };
  void lay_out();

  RingTransport* transport_;
  Options options_;
  RingSchedule schedule_;
  std::vector<std::vector<fattn_ring_range>> pieces_;  // of each hop: in which pieces its keys come
  detail::RingTensors planned_;                        // but for their memory
  Device device_;
  int index_;
  DType dtype_, part_dtype_ = DType::kF32;  // part_dtype_: of a block's gradients
  int64_t batch_ = 0, nheads_ = 0, nheads_k_ = 0, headdim_ = 0, headdim_v_ = 0;
  int64_t most_q_ = 0, most_k_ = 0, most_received_ = 0, most_sent_ = 0;
  bool starts_ = false;  // with a call without keys
  std::vector<int64_t> cu_seqlens_q_, cu_seqlens_k_;
  std::vector<size_t> first_block_;  // of each hop, among all
  std::vector<char> tables_;         // as they are in the workspace
  std::vector<char> slopes_;         // that multiples in the tables are of
  std::vector<bool> starts_keys_;    // of each hop: with a call without queries
  bool merges_any_ = false;          // some rows have results of several blocks
  Space space_;
  size_t workspace_bytes_ = 0;
  std::map<Key, Call> calls_;
  int open_ = 0;  // exchanges that are begun and not finished
  char* memory_ = nullptr;
  void* stream_ = nullptr;
};

}  // namespace fattn
