// Prints kernels/planned.txt from the tables of the CUDA backend: build/tests/make_planned > kernels/planned.txt
#include <algorithm>
#include <cstdio>
#include <iterator>
#include <limits>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "backend/cuda/decode.h"
#include "backend/cuda/lists.h"
#include "backend/cuda/peak.h"
#include "backend/cuda/plan/planners.h"
#include "backend/cuda/requests.h"
#include "backend/cuda/sequence_rest.h"
#include "backend/cuda/sinks_gradient.h"
#include "backend/cuda/standard.h"
#include "backend/cuda/tiles/v3_forward_rules.h"
#include "backend/cuda/v1.h"
#include "backend/cuda/v2_backward.h"
#include "backend/cuda/v2_forward.h"
#include "backend/cuda/v3_backward.h"
#include "backend/cuda/v3_forward.h"
#include "backend/cuda/v3_forward_f32.h"
#include "backend/cuda/v3_mask_words.h"
#include "jit/planned.h"
#include "plan/architectures.h"
#include "rows/cuda.h"

namespace {

using namespace fattn::core;
using cuda::V3Mask;
using cuda::V3Score;
using fattn::DType;

constexpr int kRegistersOfAnSm = 65536;
constexpr int kTwinOf80 = 87;  // it has the tiles of 80: its common kernels stand for the others

using Which = jit::Planned::List;

// Kernels in the order in which they were added. A line of one has its targets of one list: each is on the shortest that it was added to.
class List {
 public:
  void add(const jit::Request& request, int budget, Which which) {
    if (request.arch == kTwinOf80 && which != Which::kCommon && which != Which::kPacked) return;
    const auto [at, is_new] = places_.try_emplace(request.entry + "\n" + request.source, kernels_.size());
    if (is_new) kernels_.push_back({budget, request, {}});
    for (auto& [target, list] : kernels_[at->second].targets)
      if (target.arch == request.arch && target.arch_specific == request.arch_specific) {
        const bool both = std::min(list, which) == Which::kPacked && std::max(list, which) == Which::kQuick;
        list = both ? Which::kCommon : std::min(list, which);
        return;
      }
    kernels_[at->second].targets.push_back({{request.arch, request.arch_specific}, which});
  }
  void print() const {
    std::printf(
        "# Kernels that are compiled without being asked for: by `make test` for every architecture that NVRTC knows, and into pack\n"
        "# files. src/jit/planned.h says what the fields are: list, budget of registers, targets, entry, source.\n"
        "# Made by build/tests/make_planned from the tables of src/backend/cuda; do not edit.\n");
    for (const Kernel& kernel : kernels_)
      for (const Which which : {Which::kCommon, Which::kPacked, Which::kQuick, Which::kFull}) {
        jit::Planned line{which, kernel.budget, {}, kernel.request};
        for (const auto& [target, list] : kernel.targets)
          if (list == which) line.targets.push_back(target);
        if (!line.targets.empty()) std::printf("%s\n", jit::planned_line(line).c_str());
      }
  }

 private:
  struct Kernel {
    int budget;
    jit::Request request;
    std::vector<std::pair<jit::Target, Which>> targets;
  };
  std::map<std::string, size_t> places_;
  std::vector<Kernel> kernels_;
};

// `make test` compiles for an architecture half of what is common and alike, such that each dtype, width and mask meets each of the others, and for
// a twin, which has the same tiles, the other half. For 87 one of each.
bool in_half(int arch, DType dtype, int headdim, bool causal) {
  const bool odd = (dtype == DType::kBF16) != (causal != (headdim % 128 == 0));
  if (arch == 75) return true;  // alone, with one dtype
  if (arch == kTwinOf80) return dtype == DType::kBF16 && headdim == 128 && causal;
  return odd == (arch != 89 && arch != 90);  // twins are 86, 89 and 120, and 80, 90 and 100
}
bool is_twin(int arch) { return arch == kTwinOf80 || arch == 89 || arch == 100 || arch == 120; }  // of one before it

// What __launch_bounds__ leaves a thread.
int budget_of(int threads, int ctas) { return std::min(255, kRegistersOfAnSm / (threads * ctas) / 8 * 8); }

Problem contiguous(DType dtype, int headdim, int headdim_v, bool causal) {
  Problem p;
  p.dtype = dtype;
  p.batch = 2, p.seqlen_q = p.seqlen_k = 1024, p.nheads = p.nheads_k = 8;
  p.headdim = headdim, p.headdim_v = headdim_v;
  p.causal = causal;
  p.q = p.k = {1024 * 8 * headdim, 8 * headdim, headdim};
  p.v = p.o = {1024 * 8 * headdim_v, 8 * headdim_v, headdim_v};
  return p;
}

void add_forward(List& list, int arch, const Problem& problem, bool aligned, Which which) {
  const cuda::V2Target target = cuda::target_of(arch);
  if (!cuda::v2_forward_refusal(problem, target).empty()) return;
  const cuda::V2ForwardPlan plan = cuda::plan_v2_forward(problem, target);
  cuda::V2ForwardKey key = plan.key;
  key.aligned = aligned && plan.aligned_strides;
  list.add(cuda::v2_forward_request(key), budget_of(plan.threads, plan.tile.ctas), which);
}

Problem with_features(Problem problem, bool window, bool softcap) {
  if (window) problem.window_left = 100, problem.window_right = problem.causal ? -1 : 10;
  if (softcap) problem.softcap = 30;
  return problem;
}

// Lengths, ALiBi and dropout, and with `hides` also bias (with its gradient, but for softcap) and a mask of pairs.
Problem with_pairs(Problem problem, bool hides) {
  problem.has_seqused_k = problem.has_alibi = true;
  problem.dropout_below = 6554;
  if (!hides) return problem;
  problem.bias = {true, DType::kF32, problem.batch, problem.nheads, problem.seqlen_q, {8 << 20, 1024, 1 << 20}};
  problem.pair_mask = problem.dbias = problem.bias;
  problem.pair_mask.dtype = DType::kU8;
  problem.dbias.dtype = problem.dtype;
  problem.dbias.given = problem.softcap == 0;
  return problem;
}

// A bias in the tensors' dtype and its gradient, or a mask of pairs, ALiBi or dropout: alone each has wider tiles than with the others.
enum class Alone { kBias, kMask, kAlibi, kDropout };
Problem with_one(Problem problem, Alone which) {
  const Problem all = with_pairs(problem, true);
  problem.has_alibi = which == Alone::kAlibi;
  problem.dropout_below = which == Alone::kDropout ? all.dropout_below : 0;
  if (which == Alone::kMask) problem.pair_mask = all.pair_mask;
  if (which == Alone::kBias) {
    problem.bias = problem.dbias = all.dbias;
    problem.dbias.given = true;
  }
  return problem;
}

// Sequences of up to as many rows as the problem has; with dlse, which the first kernel of a backward pass reads.
Problem packed(Problem problem, bool documents) {
  problem.packed = problem.has_dlse = true;
  problem.has_documents = documents;
  problem.total_q = problem.total_k = problem.batch * problem.seqlen_q;
  for (Strides* strides : {&problem.q, &problem.k, &problem.v, &problem.o}) strides->batch = 0;
  return problem;
}

// Keys in pages; of packed sequences queries alone stay packed.
Problem paged(Problem problem) {
  problem.paged = true;
  problem.page_size = 16;
  problem.pages = problem.batch * problem.seqlen_k / problem.page_size;
  problem.k_page_stride = problem.page_size * problem.k.row, problem.v_page_stride = problem.page_size * problem.v.row;
  problem.k.batch = problem.v.batch = 0;
  problem.has_seqused_k = problem.packed;
  problem.has_dlse = false;
  return problem;
}

// Every row of the table that can be chosen for these widths, whatever the lengths.
void add_v3_forward(List& list, DType dtype, int headdim, int headdim_v, cuda::V3Mask mask, cuda::V3Score score, Which which,
                    const fattn::PairFeatures& pair = {}) {
  cuda::RegisterFacts facts{cuda::kV3Arch, 0, dtype, headdim, headdim_v, cuda::traits_of(pair)};
  facts.has |= mask == V3Mask::kCausal ? cuda::with::kCausal : mask == V3Mask::kWindow ? cuda::with::kWindow : 0;
  facts.has |= score == V3Score::kCapped ? cuda::with::kSoftcap : 0;
  if (!cuda::register_refusal(cuda::kV3ForwardRefusals, facts).empty()) return;
  const std::span<const cuda::V3ForwardRow> rows = cuda::v3_forward_rows();
  for (size_t row = 0; row < rows.size(); ++row) {
    const cuda::V3ForwardRow& its = rows[row];
    if (its.mask != mask || its.width != cuda::v3_row_width(headdim, headdim_v) || !cuda::v3_row_takes(its, facts)) continue;
    if (its.tile.shared_bytes(headdim, headdim_v, pair) > cuda::v3_target_of(cuda::kV3Arch).shared_bytes) continue;
    cuda::V3ForwardKey key;
    key.dtype = static_cast<int32_t>(dtype);
    key.width = headdim, key.width_v = headdim_v;
    key.mask = mask;
    key.score = score;
    key.row = static_cast<int32_t>(row);
    key.pair = cuda::pair_bits(pair);
    const bool for_any_length = its.most_keys == std::numeric_limits<int>::max();
    const bool in_one_dtype = (row % 2 == 0) == (dtype == DType::kBF16);  // of the common ones, which `make test` has in half
    const Which its_list = which == Which::kCommon && !in_one_dtype ? Which::kPacked : pair.any() && !for_any_length ? Which::kFull : which;
    list.add(cuda::v3_forward_request(key), its.tile.launch_registers(), its_list);
  }
}

// fp32: the kernel that splits, and the one behind it.
void add_v3_forward_f32(List& list, int headdim, int headdim_v, bool causal, bool aligned, Which which) {
  cuda::V3ForwardF32Plan plan = cuda::plan_v3_forward_f32(contiguous(DType::kF32, headdim, headdim_v, causal), cuda::v3_target_of(cuda::kV3Arch));
  plan.key.aligned = aligned && plan.aligned_strides;
  list.add(cuda::v3_forward_f32_request(plan.key), plan.tile.launch_registers(), which);
  list.add(cuda::v3_forward_f32_request(plan.split_key()), 255, which);
}

struct DecodeOptions {
  bool sinks = false, pages = false, fp32_out = false, shares = false;
};
// The tiles of the table for up to `rows` rows that fit, the first `most` of them (of shared sequences the only one), and the kernel that puts splits
// together.
void add_decode(List& list, int arch, DType dtype, int headdim, int rows, int most, Which which, const DecodeOptions& options = {}) {
  const cuda::V2Target device = cuda::target_of(arch);
  if (device.level < 80) return;
  Problem problem = contiguous(dtype, headdim, headdim, false);
  problem.seqlen_q = 1, problem.nheads = rows, problem.nheads_k = 1;
  problem.has_sinks = options.sinks;
  problem.fp32_out = options.fp32_out;
  if (options.pages) problem = paged(problem);
  problem.has_seqused_k = options.shares;
  problem.batch = 2;
  const cuda::DecodeTarget target{device, 1, 1};
  const auto add = [&](const cuda::DecodePlan& plan) {
    list.add(cuda::decode_request(plan.key), budget_of(plan.tile.threads(), plan.tile.ctas), which);
    list.add(cuda::decode_request(plan.combine_key()), 255, which);
  };
  if (options.shares) return add(cuda::plan_decode(problem, target));
  for (size_t row = 0; row < cuda::decode_rows().size(); ++row) {
    const cuda::DecodeTile& tile = cuda::decode_rows()[row].tile;
    if (cuda::decode_rows()[row].headdim != headdim || tile.rows() != rows || most-- <= 0) continue;
    if (tile.shared_bytes(headdim, headdim, false) > device.shared_bytes) continue;
    add(cuda::plan_decode(problem, target, static_cast<int>(row), 2));
  }
}

void add_v3_backward(List& list, Problem problem, bool deterministic, Which which) {
  problem.backward = true;
  problem.deterministic = deterministic;
  problem.dout = problem.o, problem.dq = problem.q, problem.dk = problem.k, problem.dv = problem.v;
  if (!cuda::v3_backward_refusal(problem, cuda::v3_target_of(cuda::kV3Arch)).empty()) return;
  for (const bool many_heads : {false, true}) {
    if (many_heads) {
      problem.batch = 1024;
      problem.has_seqused_k = false;  // which has none
      if (problem.windowed()) problem.window_left = 512;
    }
    const cuda::V3BackwardPlan plan = cuda::plan_v3_backward(problem, cuda::v3_target_of(cuda::kV3Arch));
    if (many_heads && plan.generation == 0) return;
    if (many_heads && which == Which::kQuick) which = Which::kFull;
    list.add(cuda::v3_backward_request(plan.main), plan.tile.launch_registers(), which);
    list.add(cuda::v3_backward_request(plan.prepare), 255, problem.has_dlse ? Which::kFull : which);
    list.add(cuda::v3_backward_request(plan.finish), 255, which);
    if (plan.dbias_tiles > 0) list.add(cuda::v3_backward_request(plan.dbias), cuda::v3_launch_registers(cuda::kV3DbiasThreads), which);
  }
}

void add_backward(List& list, int arch, Problem problem, bool aligned, bool deterministic, Which which) {
  const cuda::V2Target target = cuda::target_of(arch);
  problem.backward = true;
  problem.deterministic = deterministic;
  problem.dout = problem.o, problem.dq = problem.q, problem.dk = problem.k, problem.dv = problem.v;
  if (!cuda::v2_backward_refusal(problem, target).empty()) return;
  const cuda::V2BackwardPlan plan = cuda::plan_v2_backward(problem, target);
  const int ctas = cuda::v2_backward_rows()[static_cast<size_t>(plan.key.row)].ctas;
  const cuda::V2BackwardKeys keys = cuda::v2_backward_keys(plan, aligned);
  list.add(cuda::v2_backward_request(keys.main), budget_of(plan.main.threads, ctas), which);
  if (plan.split.grid > 0) list.add(cuda::v2_backward_request(keys.split), 255, which);
  const Which small = plan.key.pair != 0 ? Which::kFull : which;
  list.add(cuda::v2_backward_request(keys.prepare), 255, small);
  list.add(cuda::v2_backward_request(keys.finish), 255, small);
  if (plan.dbias_zero.grid > 0) list.add(cuda::v2_backward_request(keys.dbias_zero), 255, which);
  if (plan.dbias_finish.grid > 0) list.add(cuda::v2_backward_request(keys.dbias_finish), 255, which);
}

// Rows that a warp and a CTA hold, and longer ones; with and without softcap.
void add_standard(List& list, int arch, Problem problem, int seqlen, bool backward, Which which) {
  problem.seqlen_k = seqlen;
  problem.backward = backward;
  problem.dout = problem.o, problem.dq = problem.q, problem.dk = problem.k, problem.dv = problem.v;
  if (!cuda::standard_refusal(problem, arch).empty()) return;
  problem.algorithm = fattn::Algorithm::kStandard;
  const cuda::Route route = cuda::plan_routes(problem, cuda::any_target(arch, 0)).front();
  for (const bool own : {true, false})  // behind them what makes dbias
    for (const cuda::Launch& launch : route.launches()) {
      if (!launch.kernel.request) continue;
      const auto key = jit::pod_of_key<cuda::StandardKey>(launch.kernel.key);  // every key begins with its kind
      if (own != (key.kind >= cuda::KernelKind::kStandardSoftmax && key.kind <= cuda::KernelKind::kStandardClean)) continue;
      const bool quick = own && (key.pair == 0 || key.kind != cuda::KernelKind::kStandardFinish);
      list.add(launch.kernel.request(launch.kernel.key), own ? budget_of(key.threads(), key.ctas()) : 255, quick ? which : Which::kFull);
    }
}

// A logit of each head beside the keys: by itself in all forward kernels, with all else in those that have most; and its gradient.
void add_sinks(List& list, int arch, Which which) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32})
    for (const int headdim : {64, 128, 192, 256})
      for (const bool causal : {false, true}) {
        Problem problem = contiguous(dtype, headdim, headdim, causal);
        problem.has_sinks = true;
        add_forward(list, arch, problem, true, Which::kFull);  // `make test`: with batch_invariant
        for (const bool window : {false, true})
          if (headdim >= 128) add_forward(list, arch, with_pairs(with_features(problem, window, dtype != DType::kF32), true), true, Which::kFull);
        if (causal) add_standard(list, arch, problem, headdim == 64 ? 4096 : 100000, false, Which::kFull);
      }
  for (const int headdim : {64, 128, 256}) add_decode(list, arch, DType::kBF16, headdim, headdim == 64 ? 64 : 16, 3, Which::kFull, {.sinks = true});
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32})
    if (dtype == DType::kF16 || arch >= 80)
      list.add(cuda::sinks_gradient_request({.arch = arch, .dtype = static_cast<int32_t>(dtype)}), 255, dtype == DType::kBF16 ? which : Which::kFull);
  list.add(cuda::sinks_gradient_request({.kind = cuda::KernelKind::kSinksGradientSum, .arch = arch, .dtype = static_cast<int32_t>(DType::kF32)}), 255,
           which);
}
// Dropout of a part of a matrix, as in attention over several processes: by itself, with the mask that hides keys before those asked for, and with
// all that other specialisations with dropout have.
Problem of_a_part(Problem problem) {
  problem.dropout_below = 6554;
  problem.dropout_places = true;
  return problem;
}
void add_parts(List& list, int arch) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    if (dtype == DType::kF16 && arch != 75) continue;  // compiled to nearly the same
    for (const int headdim : {64, 128, 256})
      for (const bool causal : {false, true}) {
        const Problem plain = contiguous(dtype, headdim, headdim, causal);
        Problem masked = plain, biased = plain, documents = packed(plain, true);
        masked.pair_mask = with_pairs(plain, true).pair_mask;
        biased.bias = biased.dbias = with_pairs(plain, true).bias;
        for (const Problem& problem : {plain, masked, biased, documents, with_pairs(plain, true), packed(with_pairs(plain, true), true),
                                       with_pairs(with_features(plain, !causal, true), false)}) {
          add_forward(list, arch, of_a_part(problem), true, Which::kFull);
          add_backward(list, arch, of_a_part(problem), true, false, Which::kFull);
        }
        if (headdim == 64)
          for (const bool backward : {false, true}) add_standard(list, arch, of_a_part(masked), 4096, backward, Which::kFull);
      }
  }
}
void add_v3_parts(List& list) {
  for (const V3Mask mask : {V3Mask::kFull, V3Mask::kCausal, V3Mask::kWindow})
    for (const int headdim : {64, 96, 128, 192, 256}) {
      const Which few = mask == V3Mask::kCausal && headdim == 128 ? Which::kQuick : Which::kFull;
      const auto add = [&](const fattn::PairFeatures& pair, Which which = Which::kFull) {
        add_v3_forward(list, DType::kBF16, headdim, headdim, mask, V3Score::kPlain, which, pair);
      };
      add({.dropout = true, .places = true}, few);
      add({.dropout = true, .documents = true, .places = true});
      add({.alibi = true, .dropout = true, .documents = true, .places = true});
      add({.alibi = true, .dropout = true, .packed = true, .places = true});
      const Problem plain = with_features(contiguous(DType::kBF16, headdim, headdim, mask == V3Mask::kCausal), mask == V3Mask::kWindow, false);
      Problem alibi = plain;
      alibi.has_alibi = true;
      add_v3_backward(list, of_a_part(plain), false, Which::kFull);
      add_v3_backward(list, of_a_part(alibi), false, Which::kFull);
      add_v3_backward(list, of_a_part(packed(alibi, false)), false, Which::kFull);
    }
}

// Merge, rotary embeddings and append: packs have all.
void add_rows(List& list, int arch) {
  for (const auto kind : {cuda::KernelKind::kMerge, cuda::KernelKind::kMergeBackward, cuda::KernelKind::kRotary, cuda::KernelKind::kAppend})
    for (const int unit : {4, 1})
      list.add(rows::cuda::rows_request({.kind = kind, .arch = arch, .unit = unit}), 64, unit == 4 ? Which::kCommon : Which::kPacked);
}

void add_v3_sinks(List& list) {
  for (const auto& [headdim, headdim_v] : {std::pair{64, 64}, {64, 128}, {128, 128}})
    for (const bool causal : {false, true}) {
      Problem problem = contiguous(DType::kF32, headdim, headdim_v, causal);
      problem.has_sinks = true;
      cuda::V3ForwardF32Plan plan = cuda::plan_v3_forward_f32(problem, cuda::v3_target_of(cuda::kV3Arch));
      plan.key.aligned = 1;
      list.add(cuda::v3_forward_f32_request(plan.key), plan.tile.launch_registers(), Which::kFull);
    }
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const int width : {64, 96, 128, 192, 256})
      for (const V3Mask mask : {V3Mask::kFull, V3Mask::kCausal, V3Mask::kWindow}) {
        const auto add = [&](const fattn::PairFeatures& pair, V3Score score = V3Score::kPlain) {
          const bool quick = dtype == DType::kBF16 && width == 64 && mask == V3Mask::kWindow && score == V3Score::kPlain &&
                             cuda::pair_bits(pair) == cuda::pair_bits({.sinks = true});
          add_v3_forward(list, dtype, width, width, mask, score, quick ? Which::kQuick : Which::kFull, pair);
        };
        add({.sinks = true});
        if (width <= 192) add({.sinks = true}, V3Score::kCapped);
        add({.lengths = true, .sinks = true});
        add({.packed = true, .sinks = true});
        add({.alibi = true, .sinks = true});
        add({.dropout = true, .sinks = true});
        add({.documents = true, .sinks = true});
        add({.bias = 1, .sinks = true});
      }
}

// Paged caches: by themselves, with packed queries, and with what is hardest beside them.
void add_paged(List& list, int arch, Which which) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    const bool is_f32 = dtype == DType::kF32;
    if (is_f32 && arch != 80 && arch != 90 && arch != 120) continue;  // the others have their tiles
    if (dtype == DType::kF16 && arch != 75 && arch != 80) continue;   // compiled to nearly the same
    for (const int headdim : {64, 128, 192, 256})
      for (const bool causal : {false, true}) {
        const Problem plain = contiguous(dtype, headdim, headdim, causal);
        const bool one = headdim == 128 && causal && dtype == DType::kBF16;
        add_forward(list, arch, paged(plain), true, one ? which : Which::kFull);
        if (headdim != 192) add_forward(list, arch, paged(plain), false, Which::kFull);
        add_forward(list, arch, paged(packed(with_features(plain, !causal, false), false)), true, Which::kFull);
        for (const bool hides : {false, true}) {
          Problem all = with_pairs(with_features(plain, !causal, !is_f32), hides);
          all.dbias.given = false;
          all.has_sinks = hides;
          add_forward(list, arch, paged(all), true, Which::kFull);
          if (hides) add_forward(list, arch, paged(packed(all, !is_f32 && headdim <= 128)), true, Which::kFull);
        }
        for (const Alone alone : {Alone::kBias, Alone::kAlibi}) {
          Problem feature = with_one(plain, alone);
          feature.dbias.given = false;
          if (headdim == 128) add_forward(list, arch, paged(feature), true, Which::kFull);
        }
      }
  }
  const Which once = arch == 90 ? which : Which::kFull;  // nearly the same for each
  for (const auto& [headdim, rows] : {std::pair{64, 16}, {64, 64}, {128, 16}, {128, 32}, {128, 64}, {256, 16}, {256, 64}}) {
    add_decode(list, arch, DType::kBF16, headdim, rows, 2, headdim == 128 && rows == 16 ? once : Which::kFull, {.pages = true});
    add_decode(list, arch, DType::kBF16, headdim, rows, 1, headdim == 128 && rows == 16 ? once : Which::kFull, {.pages = true, .shares = true});
  }
  add_decode(list, arch, DType::kF16, 128, 16, 2, Which::kFull, {.sinks = true, .pages = true});
  add_decode(list, arch, DType::kF16, 128, 16, 1, Which::kFull, {.sinks = true, .pages = true, .shares = true});
  list.add(cuda::list_status_request({.arch = arch, .paged = 1}), 255, once);
  list.add(cuda::sequence_rest_request({.arch = arch, .lengths = 1, .paged = 1}), 255, once);
}

// batch_invariant: by itself, however sequences lie, and with what is hardest beside it.
void add_own_bits(List& list, int arch, Which which) {
  for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32}) {
    const bool is_f32 = dtype == DType::kF32;
    if (dtype == DType::kF16 && arch != 75) continue;  // compiled to nearly the same
    for (const int headdim : {64, 128, 192, 256})
      for (const bool causal : {false, true}) {
        const auto add = [&](Problem problem, bool aligned = true, Which its = Which::kFull) {
          problem.batch_invariant = true;
          problem.dbias.given = false;
          add_forward(list, arch, problem, aligned, its);
        };
        const Problem plain = contiguous(dtype, headdim, headdim, causal);
        Problem with_sinks = plain;
        with_sinks.has_sinks = !is_f32;
        add(with_sinks, true, headdim == 128 && causal ? which : Which::kFull);
        add(plain);
        Problem few = plain;
        few.seqlen_q = 1;
        add(few);
        add(paged(few));
        add(packed(with_features(few, !causal, true), false));
        add(plain, false);
        add(with_features(plain, true, true));
        add(paged(plain));
        add(paged(packed(with_features(plain, !causal, false), false)));
        for (const bool hides : {false, true}) {
          add(packed(with_pairs(with_features(plain, !causal, true), hides), !is_f32 && headdim <= 128));
          add(with_pairs(plain, hides));
        }
        for (const Alone alone : {Alone::kBias, Alone::kMask, Alone::kAlibi, Alone::kDropout}) add(with_one(plain, alone));
      }
  }
}

// Outputs in fp32: by themselves in every kernel that writes some, and beside what is hardest.
void add_fp32_outputs(List& list, int arch, Which which) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    if (dtype == DType::kF16 && arch != 75) continue;  // compiled to nearly the same
    for (const int headdim : {64, 128, 256})
      for (const bool causal : {false, true}) {
        Problem problem = contiguous(dtype, headdim, headdim, causal);
        problem.fp32_out = true;
        const Which one = headdim == 128 && causal && dtype == DType::kBF16 ? which : Which::kFull;
        add_forward(list, arch, problem, true, Which::kFull);  // its stores are the backward pass's
        add_forward(list, arch, problem, false, Which::kFull);
        add_backward(list, arch, problem, true, false, one);
        add_backward(list, arch, problem, false, true, Which::kFull);
        for (const bool window : {false, true}) {
          const Problem all = with_pairs(with_features(problem, window && !causal, window), true);
          add_forward(list, arch, all, true, Which::kFull);
          add_backward(list, arch, all, true, false, Which::kFull);
        }
        const Problem sequences = packed(with_features(problem, !causal, false), false);
        add_forward(list, arch, sequences, true, Which::kFull);
        add_backward(list, arch, sequences, true, false, Which::kFull);
        add_forward(list, arch, paged(problem), true, Which::kFull);
      }
  }
  const Which once = arch == 90 ? Which::kQuick : Which::kFull;  // nearly the same for each
  for (const auto& [headdim, rows] : {std::pair{128, 16}, {64, 16}, {64, 64}, {256, 16}})
    add_decode(list, arch, DType::kBF16, headdim, rows, 1, headdim == 128 ? once : Which::kFull, {.fp32_out = true});
  add_decode(list, arch, DType::kF16, 128, 16, 1, Which::kFull, {.sinks = true, .pages = true, .fp32_out = true});
  add_decode(list, arch, DType::kF16, 128, 16, 1, Which::kFull, {.pages = true, .fp32_out = true, .shares = true});
}
void add_v3_fp32_outputs(List& list) {
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const int width : {64, 96, 128, 192, 256})
      for (const V3Mask mask : {V3Mask::kFull, V3Mask::kCausal, V3Mask::kWindow})
        for (const V3Score score : {V3Score::kPlain, V3Score::kSigned}) {
          if (mask == V3Mask::kWindow && width > 192) continue;  // refused
          const bool quick = dtype == DType::kBF16 && width == 128 && mask == V3Mask::kCausal && score == V3Score::kPlain;
          add_v3_forward(list, dtype, width, width, mask, score, quick ? Which::kQuick : Which::kFull, {.fp32_out = true});
        }
}

void add_v1(List& list, DType dtype, int headdim, bool causal, bool aligned) {
  Problem problem = contiguous(dtype, headdim, headdim, causal);
  const cuda::V2Target target = cuda::target_of(90);
  cuda::V1ForwardKey key = cuda::plan_v1_forward(problem, target).key;
  key.aligned = aligned;
  list.add(cuda::v1_forward_request(key), budget_of(32 * cuda::kV1Warps, 1), Which::kQuick);
  problem.backward = true;
  problem.dout = problem.o, problem.dq = problem.q, problem.dk = problem.k, problem.dv = problem.v;
  const cuda::V2BackwardPlan plan = cuda::plan_v1_backward(problem, target);
  if (aligned && causal && headdim == 128) list.add(cuda::v2_backward_request(cuda::v2_backward_keys(plan).main), 255, Which::kQuick);
}

}  // namespace

int main() {
  // What most models need without being asked, some more head dimensions in `make test`, all multiples of 8 in `make test-all`; a kernel that is in
  // several is added once.
  constexpr int kCommon[] = {64, 128}, kQuick[] = {64, 128, 192, 256};
  const auto in = [](const auto& list, int headdim) { return std::find(std::begin(list), std::end(list), headdim) != std::end(list); };
  const auto quick = [](bool is) { return is ? Which::kQuick : Which::kFull; };
  // The backward pass has three kernels a problem: one dtype of most head dimensions is enough for `make test`.
  const auto is_quick_backward = [](int arch, DType dtype, int headdim) {
    const bool common = headdim == 64 || headdim == 128 || headdim == 256;
    return common && (dtype == DType::kBF16 || arch == 75 || headdim == 128);
  };
  List list;
  for (const Architecture& a : kArchitectures) {
    for (const jit::Request& request : cuda_peak_requests(a.capability)) list.add(request, 255, Which::kCommon);
    list.add(cuda::list_status_request({.arch = a.capability}), 255, Which::kFull);                 // `make test`: JitReal
    list.add(cuda::sequence_rest_request({.arch = a.capability}), 255, quick(a.capability != 89));  // 86 stands for it
    list.add(cuda::sequence_rest_request({.arch = a.capability, .lengths = 1}), 255, a.capability == cuda::kV3Arch ? Which::kQuick : Which::kFull);
  }
  // They are small and alike everywhere: the oldest and the best known architecture are enough.
  for (const auto& [arch, dtype, seqlen, backward, softcap] : {std::tuple{75, DType::kF16, 1024, false, false},
                                                               {90, DType::kF16, 1024, false, false},
                                                               {90, DType::kF16, 1024, true, true},
                                                               {90, DType::kF32, 4096, false, false}})
    add_standard(list, arch, with_features(contiguous(dtype, 64, 64, true), false, softcap), seqlen, backward, Which::kQuick);
  for (const int arch : {75, 90})
    for (const DType dtype : {DType::kF16, DType::kBF16, DType::kF32})
      for (const int seqlen : {100, 1024, 4096, 16384, 65536})
        for (const bool backward : {false, true})
          for (const bool softcap : {false, true}) {
            const Problem plain = with_features(contiguous(dtype, 64, 64, true), false, softcap);
            add_standard(list, arch, plain, seqlen, backward, Which::kFull);
            Problem all = with_pairs(plain, true);
            all.has_documents = all.has_dlse = all.dbias.given = true;  // this algorithm has dbias of capped scores
            add_standard(list, arch, all, seqlen, backward, quick(arch == 90 && dtype == DType::kBF16 && seqlen == 16384 && softcap != backward));
            for (const Alone one : {Alone::kBias, Alone::kMask, Alone::kAlibi, Alone::kDropout})
              add_standard(list, arch, with_one(plain, one), seqlen, backward, Which::kFull);
          }
  add_v1(list, DType::kBF16, 64, true, true);
  add_v1(list, DType::kF16, 128, true, true);
  add_v1(list, DType::kBF16, 128, false, false);
  for (const Architecture& a : kArchitectures)
    for (const DType dtype : {DType::kBF16, DType::kF16})
      for (const bool causal : {false, true}) {
        const bool one_dtype = dtype == DType::kBF16 || a.capability == 75;  // the other is compiled to nearly the same
        for (int headdim = 8; headdim <= 256; headdim += 8) {
          const Problem problem = contiguous(dtype, headdim, headdim, causal);
          const bool half = in_half(a.capability, dtype, headdim, causal);
          const auto which = [&](bool is) { return in(kCommon, headdim) ? half ? Which::kCommon : Which::kPacked : quick(is && half); };
          add_forward(list, a.capability, problem, true, which(in(kQuick, headdim) && one_dtype && a.capability != kTwinOf80));
          add_backward(list, a.capability, problem, true, false, which(is_quick_backward(a.capability, dtype, headdim)));
        }
        for (const int headdim : {20, 64, 128, 256}) {
          const Problem problem = contiguous(dtype, headdim, headdim, causal);
          add_forward(list, a.capability, problem, false,
                      quick(headdim == 128 && one_dtype && !is_twin(a.capability) && in_half(a.capability, DType::kBF16, headdim, causal)));
          add_backward(list, a.capability, problem, false, false, Which::kFull);
          add_backward(list, a.capability, problem, true, true, quick(headdim == 128 && causal && dtype == DType::kBF16 && a.capability == 90));
        }
        // Pairs of widths that not every tile can take.
        for (const auto& [headdim, headdim_v] : {std::pair{96, 128}, {32, 192}, {96, 256}})
          add_backward(list, a.capability, contiguous(dtype, headdim, headdim_v, causal), true, false, Which::kFull);
        // Windows and softcap, which do without kCausal. What has both is the harder to fit into registers.
        if (!causal && one_dtype)
          for (const auto& [window, softcap] : {std::pair{true, true}, {true, false}, {false, true}})
            for (const int headdim : {32, 64, 96, 128, 192, 256}) {
              if (!(window && softcap) && headdim != 64 && headdim != 128) continue;
              const Problem problem = with_features(contiguous(dtype, headdim, headdim, causal), window, softcap);
              const Which which = quick(headdim == 128 && window && softcap && a.capability == 80);  // of 90 v3 has them
              add_forward(list, a.capability, problem, true, which);
              add_backward(list, a.capability, problem, true, false, which);
              if (headdim != 128) continue;
              add_forward(list, a.capability, problem, false, Which::kFull);
              add_backward(list, a.capability, problem, false, true, Which::kFull);
            }
        // Features of pairs: all at once are the hardest to fit into registers; lengths alone take the tiles of problems without any.
        if (dtype == (a.capability == 75 ? DType::kF16 : DType::kBF16))
          for (const int headdim : {32, 64, 96, 128, 192, 256})
            for (const bool hides : {false, true}) {
              Problem problem = with_pairs(contiguous(dtype, headdim, headdim, causal), hides);
              const Which which = quick(causal && ((a.capability == 90 && headdim == 128) || (a.capability == 80 && headdim == 64 && hides)));
              add_forward(list, a.capability, problem, true, which);
              add_backward(list, a.capability, problem, true, false, which);
              if (headdim != 64 && headdim != 128 && headdim != 256) continue;
              add_forward(list, a.capability, problem, false, Which::kFull);
              add_backward(list, a.capability, problem, false, false, Which::kFull);
              add_backward(list, a.capability, problem, true, true, Which::kFull);
              if (!causal) {
                Problem both = with_pairs(with_features(contiguous(dtype, headdim, headdim, false), true, true), hides);
                add_forward(list, a.capability, both, true, Which::kFull);
                add_backward(list, a.capability, both, true, false, Which::kFull);
              }
              problem = contiguous(dtype, headdim, headdim, causal);
              problem.has_seqused_k = true;
              add_forward(list, a.capability, problem, true, Which::kFull);
              add_backward(list, a.capability, problem, true, false, Which::kFull);
            }
        // And each alone, with a window, of packed sequences and without alignment too.
        if (dtype == (a.capability == 75 ? DType::kF16 : DType::kBF16))
          for (const int headdim : {64, 128})
            for (const Alone alone : {Alone::kBias, Alone::kMask, Alone::kAlibi, Alone::kDropout}) {
              const Problem problem = with_one(contiguous(dtype, headdim, headdim, causal), alone);
              const Which which = quick(a.capability == 90 && headdim == 128 && causal && alone == Alone::kBias);
              add_forward(list, a.capability, problem, true, which);
              add_backward(list, a.capability, problem, true, false, which);
              if (causal) continue;
              Problem hard = packed(with_features(problem, true, false), false);
              hard.has_seqused_k = true;
              if (alone == Alone::kBias) hard.bias.dtype = DType::kF32;
              for (const bool aligned : {false, true}) add_forward(list, a.capability, hard, aligned, Which::kFull);
              for (const bool aligned : {false, true}) add_backward(list, a.capability, hard, aligned, !aligned, Which::kFull);
            }
        // Packed sequences, and documents in them; with `features` all that there is besides.
        if (dtype == (a.capability == 75 ? DType::kF16 : DType::kBF16))
          for (const int headdim : {32, 64, 96, 128, 192, 256})
            for (const bool documents : {false, true})
              for (const bool features : {false, true}) {
                const Problem plain = contiguous(dtype, headdim, headdim, causal);
                const Problem problem = packed(features ? with_pairs(with_features(plain, !causal, causal), true) : plain, documents);
                const Which which = quick(causal && a.capability == 80 && headdim == 128 && documents && !features);  // of 90 v3 has them
                add_forward(list, a.capability, problem, true, which);
                add_backward(list, a.capability, problem, true, false, which);
                if (headdim != 64 && headdim != 128 && headdim != 256) continue;
                add_forward(list, a.capability, problem, false, Which::kFull);
                add_backward(list, a.capability, problem, false, true, Which::kFull);
              }
        const Problem wide = contiguous(dtype, 192, 128, causal);
        add_forward(list, a.capability, wide, true, Which::kFull);
        add_backward(list, a.capability, wide, true, false, Which::kFull);
      }
  // fp32, in no pack; for one architecture of each kind: the others have the tiles of 80, of 90 or of 120.
  for (const int arch : {80, 90, 120})
    for (const bool causal : {false, true}) {
      for (const int headdim : {32, 64, 80, 96, 128, 192, 256}) {
        const Problem problem = contiguous(DType::kF32, headdim, headdim, causal);
        const bool is_quick = causal && headdim == 64;
        add_forward(list, arch, problem, true, quick(is_quick && arch != 90));  // where v3 has it
        add_backward(list, arch, problem, true, false, quick(is_quick));
      }
      // Windows and softcap, features of pairs, and all of them: a window does without kCausal.
      for (const int headdim : {64, 128, 192, 256}) {
        const Problem plain = contiguous(DType::kF32, headdim, headdim, causal);
        Problem lengths = plain;
        lengths.has_seqused_k = true;
        Problem documents = with_pairs(with_features(plain, !causal, true), false);
        documents.has_documents = true;
        documents.pair_mask = {true, DType::kU8, plain.batch, plain.nheads, plain.seqlen_q, {8 << 20, 1024, 1 << 20}};
        Problem one = with_features(lengths, !causal, false);
        one.pair_mask = documents.pair_mask;
        Problem bias = one;
        bias.bias = bias.dbias = with_pairs(plain, true).bias;
        bias.pair_mask.given = false;
        const Problem all[] = {documents,
                               one,
                               bias,
                               lengths,
                               with_features(plain, !causal, true),
                               with_features(plain, !causal, false),
                               with_pairs(plain, false),
                               with_pairs(plain, true),
                               with_pairs(with_features(plain, !causal, true), true),
                               packed(plain, false),
                               packed(with_features(plain, !causal, true), false),
                               packed(with_pairs(plain, false), false),
                               packed(with_pairs(plain, true), true),
                               packed(with_pairs(with_features(plain, !causal, true), true), false)};
        for (const Problem& problem : all) {
          const bool all_at_once = problem.dropout_below > 0 && problem.dbias.given && !problem.packed;
          const bool sequences = problem.packed && problem.softcap == 0 && problem.dropout_below == 0;
          const Which which = quick(causal && headdim == 64 && arch == 90 && (all_at_once || sequences));
          add_forward(list, arch, problem, true, which);
          add_backward(list, arch, problem, true, false, which);
        }
        for (const bool aligned : {false, true}) {
          const Problem sequences = packed(with_features(plain, !causal, false), false);
          if (!aligned) add_forward(list, arch, sequences, false, Which::kFull);
          add_backward(list, arch, sequences, aligned, aligned, Which::kFull);
        }
      }
      const Problem odd = contiguous(DType::kF32, 20, 50, causal);  // unaligned
      add_forward(list, arch, with_pairs(odd, true), false, Which::kFull);
      add_backward(list, arch, with_pairs(odd, true), false, true, Which::kFull);
      add_forward(list, arch, odd, false, Which::kFull);
      add_backward(list, arch, odd, false, false, Which::kFull);
      add_backward(list, arch, contiguous(DType::kF32, 128, 128, causal), true, true, Which::kFull);
      for (const auto& [headdim, headdim_v] : {std::pair{192, 128}, {40, 256}, {256, 64}}) {
        const Problem unequal = contiguous(DType::kF32, headdim, headdim_v, causal);
        add_forward(list, arch, unequal, true, Which::kFull);
        add_backward(list, arch, unequal, true, false, Which::kFull);
      }
    }
  for (const bool causal : {false, true})
    for (const bool aligned : {false, true}) {
      for (const int headdim : {32, 64, 80, 96, 128})
        add_v3_forward_f32(list, headdim, headdim, causal, aligned, quick(aligned && causal && headdim == 128));
      for (const auto& [headdim, headdim_v] : {std::pair{20, 50}, {64, 128}, {128, 64}, {40, 96}, {96, 20}})
        add_v3_forward_f32(list, headdim, headdim_v, causal, aligned, Which::kFull);
    }
  for (const Architecture& a : kArchitectures) {
    const Which which = quick(!is_twin(a.capability));
    add_decode(list, a.capability, DType::kBF16, 128, 16, 2, Which::kQuick);
    add_decode(list, a.capability, DType::kBF16, 128, 16, 3, Which::kFull);
    add_decode(list, a.capability, DType::kBF16, 128, 64, 1, which);
    add_decode(list, a.capability, DType::kBF16, 64, 32, 1, Which::kFull);
    add_decode(list, a.capability, DType::kBF16, 256, 16, 1, which);
    add_decode(list, a.capability, DType::kBF16, 256, 64, 1, Which::kFull);
    add_decode(list, a.capability, DType::kF16, 128, 32, 1, Which::kFull);
    for (const auto& [headdim, rows] : {std::pair{64, 16}, {64, 32}, {64, 64}, {128, 16}, {128, 32}, {128, 64}, {256, 16}, {256, 32}, {256, 64}})
      add_decode(list, a.capability, DType::kBF16, headdim, rows, 1, Which::kFull, {.shares = true});
  }
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const bool causal : {false, true}) {
      const V3Mask mask = causal ? V3Mask::kCausal : V3Mask::kFull;
      for (const int headdim : {64, 96, 128, 192, 256}) {
        add_v3_forward(list, dtype, headdim, headdim, mask, V3Score::kPlain,
                       in(kCommon, headdim) ? Which::kCommon : quick(dtype == DType::kBF16 && in_half(80, dtype, headdim, causal)));
        add_v3_forward(list, dtype, headdim, headdim, mask, V3Score::kSigned, Which::kFull);
      }
      add_v3_forward(list, dtype, 192, 128, mask, V3Score::kPlain, Which::kFull);
      for (const int headdim : {64, 96, 128, 192, 256}) {
        const bool half = in_half(80, dtype, headdim, causal);
        add_v3_backward(list, contiguous(dtype, headdim, headdim, causal), false,
                        in(kCommon, headdim) ? half ? Which::kCommon : Which::kPacked : quick(dtype == DType::kBF16 && half));
        add_v3_backward(list, contiguous(dtype, headdim, headdim, causal), true, quick(headdim == 128 && causal && dtype == DType::kBF16));
      }
      for (const auto& [headdim, headdim_v] : {std::pair{192, 128}, {64, 128}, {128, 64}, {64, 256}, {256, 64}})
        add_v3_backward(list, contiguous(dtype, headdim, headdim_v, causal), false, Which::kFull);
      for (const auto& [headdim, headdim_v] : {std::pair{64, 256}, {128, 64}, {256, 96}})
        add_v3_forward(list, dtype, headdim, headdim_v, mask, V3Score::kPlain, Which::kFull);
    }
  for (const int headdim : {64, 96, 128, 192, 256}) {
    Problem problem = contiguous(DType::kBF16, headdim, headdim, true);
    problem.has_dlse = true;
    add_v3_backward(list, problem, false, Which::kFull);
  }
  // Backward, features of pairs and of batch entries.
  for (const bool causal : {true, false})
    for (const auto& [window, softcap] : {std::pair{false, false}, {true, false}, {false, true}, {true, true}})
      for (const int headdim : {64, 96, 128, 192, 256}) {
        if (window && causal) continue;
        Problem problem = with_features(contiguous(DType::kBF16, headdim, headdim, causal), window, softcap);
        problem.has_seqused_k = true;
        add_v3_backward(list, problem, false, Which::kFull);
        problem.has_alibi = true;
        add_v3_backward(list, problem, false, quick(headdim == 128 && causal && !softcap));
        if (softcap) {
          add_v3_backward(list, problem, true, Which::kFull);
          problem.dtype = DType::kF16;
          add_v3_backward(list, problem, false, Which::kFull);
          problem.dtype = DType::kBF16;
          problem.has_seqused_k = false;
          add_v3_backward(list, problem, false, Which::kFull);
          continue;
        }
        problem.dropout_below = 6554;
        for (const auto& [alibi, lengths] : {std::pair{true, false}, {false, true}, {false, false}}) {
          problem.has_alibi = alibi;
          problem.has_seqused_k = lengths;
          add_v3_backward(list, problem, false, quick(headdim == 128 && causal && alibi));
        }
      }
  // Of packed sequences, with those of the features that fit beside them.
  for (const V3Mask mask : {V3Mask::kCausal, V3Mask::kFull, V3Mask::kWindow})
    for (const int headdim : {64, 96, 128, 192, 256}) {
      const Problem plain =
          packed(with_features(contiguous(DType::kBF16, headdim, headdim, mask == V3Mask::kCausal), mask == V3Mask::kWindow, false), false);
      Problem problem = plain;
      problem.has_seqused_k = true;  // all that the kernels without lengths have, and more
      add_v3_backward(list, problem, false, quick(mask == V3Mask::kCausal && headdim == 128));
      add_v3_backward(list, plain, false, Which::kFull);
      add_v3_backward(list, plain, true, Which::kFull);
      problem = plain;
      problem.softcap = 30;
      add_v3_backward(list, problem, false, Which::kFull);
      problem.has_alibi = true;
      add_v3_backward(list, problem, false, Which::kFull);
      problem = plain;
      problem.has_alibi = true;
      add_v3_backward(list, problem, false, Which::kFull);
      problem.dropout_below = 6554;
      add_v3_backward(list, problem, false, Which::kFull);
      problem.has_alibi = false;
      add_v3_backward(list, problem, false, Which::kFull);
      if (headdim != 128) continue;
      problem = plain;
      problem.dtype = DType::kF16;
      add_v3_backward(list, problem, false, Which::kFull);
    }
  for (const int block_n : {64, 128, 192})
    for (const int lengths : {1, 0})
      list.add(cuda::v3_packed_key_tiles_request({.block_n = block_n, .lengths = lengths}), 64, quick(block_n == 128 && lengths != 0));
  // Windows and softcap: what has both is the harder to fit into registers.
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const auto& [mask, score] : {std::pair{V3Mask::kWindow, V3Score::kCapped},
                                      {V3Mask::kWindow, V3Score::kPlain},
                                      {V3Mask::kFull, V3Score::kCapped},
                                      {V3Mask::kCausal, V3Score::kCapped}}) {
      const bool both = mask == V3Mask::kWindow && score == V3Score::kCapped;
      if (dtype == DType::kF16 && score != V3Score::kCapped) continue;
      for (const int headdim : {64, 96, 128, 192, 256})
        add_v3_forward(list, dtype, headdim, headdim, mask, score, quick(both && dtype == DType::kBF16 && headdim == 256));
      add_v3_forward(list, dtype, 192, 128, mask, score, Which::kFull);
    }
  for (const V3Mask mask : {V3Mask::kFull, V3Mask::kCausal, V3Mask::kWindow})
    for (const V3Score score : {V3Score::kPlain, V3Score::kSigned})
      for (const int headdim : {64, 96, 128, 192, 256})
        add_v3_forward(list, DType::kBF16, headdim, headdim, mask, score, Which::kFull, {.lengths = true});
  for (const V3Mask mask : {V3Mask::kFull, V3Mask::kCausal, V3Mask::kWindow}) {
    for (const V3Score score : {V3Score::kPlain, V3Score::kSigned, V3Score::kCapped})
      for (const int headdim : {64, 96, 128, 192, 256})
        add_v3_forward(list, DType::kBF16, headdim, headdim, mask, score,
                       quick(score == V3Score::kPlain && headdim == 128 && mask == V3Mask::kCausal), {.packed = true});
    for (const int lengths : {1, 0})
      list.add(cuda::v3_packed_tiles_request({.mask = mask, .block_m = 128, .block_n = 128, .lengths = lengths}), 64,
               quick(mask == V3Mask::kCausal && lengths != 0));
  }
  // Documents, and with what fits beside them.
  for (const V3Mask mask : {V3Mask::kFull, V3Mask::kCausal, V3Mask::kWindow})
    for (const int headdim : {64, 96, 128, 192, 256}) {
      const auto add = [&](V3Score score, const fattn::PairFeatures& pair) {
        const bool few =
            headdim == 128 && mask == V3Mask::kFull && score == V3Score::kPlain && !pair.lengths && !pair.alibi && !pair.dropout && !pair.packed;
        add_v3_forward(list, DType::kBF16, headdim, headdim, mask, score, quick(few), pair);
      };
      for (const V3Score score : {V3Score::kPlain, V3Score::kCapped}) add(score, {.documents = true});
      for (const V3Score score : {V3Score::kPlain, V3Score::kSigned}) add(score, {.lengths = true, .documents = true});
      add(V3Score::kPlain, {.lengths = true, .alibi = true, .documents = true});
      add(V3Score::kPlain, {.lengths = true, .dropout = true, .documents = true});
      add(V3Score::kPlain, {.alibi = true, .dropout = true, .documents = true});
      for (const V3Score score : {V3Score::kPlain, V3Score::kSigned, V3Score::kCapped}) add(score, {.packed = true, .documents = true});
      add(V3Score::kPlain, {.alibi = true, .packed = true, .documents = true});
      add(V3Score::kPlain, {.dropout = true, .packed = true, .documents = true});
      add(V3Score::kPlain, {.alibi = true, .dropout = true, .packed = true, .documents = true});
      add_v3_forward(list, DType::kF16, headdim, headdim, mask, V3Score::kPlain, Which::kFull, {.alibi = true, .packed = true, .documents = true});
      add_v3_forward(list, DType::kF16, headdim, headdim, mask, V3Score::kPlain, Which::kFull, {.documents = true});
      add_v3_forward(list, DType::kF16, headdim, headdim, mask, V3Score::kPlain, Which::kFull, {.lengths = true, .alibi = true, .documents = true});
    }
  for (const V3Mask mask : {V3Mask::kFull, V3Mask::kCausal, V3Mask::kWindow})
    for (const int headdim : {64, 96, 128, 192, 256}) {
      Problem problem = with_features(contiguous(DType::kBF16, headdim, headdim, mask == V3Mask::kCausal), mask == V3Mask::kWindow, false);
      problem.has_documents = true;
      add_v3_backward(list, problem, false, Which::kFull);
      Problem sequences = packed(problem, true);
      add_v3_backward(list, sequences, false, quick(mask == V3Mask::kCausal && headdim == 128));
      sequences.has_seqused_k = problem.has_seqused_k = true;  // of packed ones in the last kernel alone
      add_v3_backward(list, sequences, false, Which::kFull);
      add_v3_backward(list, problem, false, Which::kFull);
      if (headdim != 64 && headdim != 128) continue;
      problem.dtype = sequences.dtype = DType::kF16;
      add_v3_backward(list, problem, false, Which::kFull);
      add_v3_backward(list, sequences, false, Which::kFull);
    }
  // Masks of pairs, backward.
  for (const int forward : {0, 1})
    for (const int causal : {0, 1}) list.add(cuda::v3_mask_words_request({.forward = forward, .causal = causal}), 96, quick(forward + causal == 2));
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const bool causal : {false, true})
      for (const int headdim : {64, 96, 128, 192, 256}) {
        Problem masked = with_one(contiguous(dtype, headdim, headdim, causal), Alone::kMask);
        masked.has_seqused_k = false;
        add_v3_backward(list, masked, false, Which::kFull);
      }
  // Biases likewise, with and without their gradients, and beside a mask.
  for (const bool causal : {false, true})
    for (const int headdim : {64, 96, 128, 192, 256})
      for (const DType dtype : {DType::kBF16, DType::kF16})
        for (const bool f32 : {false, true})
          for (const bool gradient : {false, true})
            for (const bool both : {false, true}) {
              Problem problem = contiguous(dtype, headdim, headdim, causal);
              const Problem all = with_pairs(problem, true);
              problem.bias = f32 ? all.bias : all.dbias;
              if (gradient) problem.dbias = problem.bias;
              if (both) problem.pair_mask = all.pair_mask;
              add_v3_backward(list, problem, false, quick(causal && headdim == 128 && dtype == DType::kBF16 && !f32 && gradient && both));
            }
  for (const int block_m : {64, 128, 192})
    list.add(cuda::v3_document_ranges_request({.block_m = block_m, .block_n = fattn::kV3BackwardRows, .of_keys = 1}), 64, Which::kFull);
  list.add(cuda::v3_document_ranges_request({.block_m = 64, .block_n = fattn::kV3BackwardRows, .of_keys = 1, .packed = 1}), 64, Which::kFull);
  for (const V3Mask mask : {V3Mask::kFull, V3Mask::kCausal, V3Mask::kWindow})
    for (const int lengths : {0, 1})
      list.add(cuda::v3_packed_tiles_request({.mask = mask, .block_m = 128, .block_n = 64, .lengths = lengths, .documents = 1}), 64, Which::kFull);
  for (const int block_n : {64, 128}) list.add(cuda::v3_document_ranges_request({.block_m = 128, .block_n = block_n}), 64, Which::kFull);
  list.add(cuda::v3_document_ranges_request({.block_m = 128, .block_n = 64, .packed = 1}), 64, Which::kQuick);
  list.add(cuda::v3_document_ranges_request({.block_m = 192, .block_n = 64}), 64, Which::kFull);
  // Bias and masks of pairs.
  for (const V3Mask mask : {V3Mask::kFull, V3Mask::kCausal})
    for (const int headdim : {64, 96, 128, 192, 256})
      for (const fattn::PairFeatures& pair :
           {fattn::PairFeatures{.bias = 1}, {.bias = 2}, {.mask = true}, {.bias = 1, .mask = true}, {.bias = 2, .mask = true}}) {
        const bool both = pair.bias != 0 && pair.mask, few = mask == V3Mask::kCausal && headdim == 128 && pair.bias == 0;
        if (headdim > 128 && both) continue;  // refused, and so are lengths of what is not a mask alone
        if (headdim == 192 && pair.bias != 0) continue;
        fattn::PairFeatures with_lengths = pair;
        with_lengths.lengths = true;
        for (const V3Score score : {V3Score::kPlain, V3Score::kSigned}) {
          add_v3_forward(list, DType::kBF16, headdim, headdim, mask, score, quick(few && score == V3Score::kPlain), pair);
          add_v3_forward(list, DType::kF16, headdim, headdim, mask, score, Which::kFull, pair);
          if (headdim <= 128 || pair.bias == 0) add_v3_forward(list, DType::kBF16, headdim, headdim, mask, score, Which::kFull, with_lengths);
        }
      }
  for (const V3Mask mask : {V3Mask::kFull, V3Mask::kCausal})
    for (const bool lengths : {false, true})
      for (const DType dtype : {DType::kBF16, DType::kF16})
        add_v3_forward(list, dtype, 192, 128, mask, V3Score::kPlain, Which::kFull, {.lengths = lengths, .mask = true});
  // ALiBi and dropout, each by itself and both with lengths or packed.
  for (const V3Mask mask : {V3Mask::kFull, V3Mask::kCausal, V3Mask::kWindow})
    for (const int headdim : {64, 96, 128, 192, 256})
      for (const DType dtype : {DType::kBF16, DType::kF16}) {
        const bool few = dtype == DType::kBF16 && mask == V3Mask::kCausal && headdim == 128;
        add_v3_forward(list, dtype, headdim, headdim, mask, V3Score::kPlain, quick(few), {.alibi = true});
        add_v3_forward(list, dtype, headdim, headdim, mask, V3Score::kPlain, Which::kFull, {.dropout = true});
        for (const V3Score score : {V3Score::kPlain, V3Score::kSigned})
          add_v3_forward(list, dtype, headdim, headdim, mask, score, Which::kFull, {.alibi = true, .dropout = true, .packed = true});
      }
  for (const DType dtype : {DType::kBF16, DType::kF16})
    for (const bool causal : {false, true})
      for (const auto& [window, softcap] : {std::pair{true, true}, {true, false}, {false, true}})
        for (const auto& [headdim, headdim_v] : {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 192}, {256, 256}, {64, 128}, {128, 64}}) {
          if ((window && causal) || (dtype == DType::kF16 && headdim != 128)) continue;  // a window is the same kernel with and without causal
          const Problem problem = with_features(contiguous(dtype, headdim, headdim_v, causal), window, softcap);
          const bool hardest = window && softcap && (in(kCommon, headdim) || headdim == 256);
          add_v3_backward(list, problem, false, quick(dtype == DType::kBF16 && headdim == headdim_v && hardest && !causal));
          if (headdim == 128) add_v3_backward(list, problem, true, Which::kFull);
        }
  for (const Architecture& a : kArchitectures) add_sinks(list, a.capability, quick(a.capability == 80));
  add_v3_sinks(list);
  for (const Architecture& a : kArchitectures) add_rows(list, a.capability);
  for (const Architecture& a : kArchitectures) add_paged(list, a.capability, quick(a.capability == 90));
  for (const int arch : {75, 80, 86, 90, 100, 120}) add_own_bits(list, arch, quick(arch == 90));
  for (const int arch : {75, 80, 90, 120}) add_fp32_outputs(list, arch, quick(arch == 80));  // the others have their tiles
  add_v3_fp32_outputs(list);
  for (const int arch : {75, 80, 90, 120}) add_parts(list, arch);  // the others have their tiles
  add_v3_parts(list);
  list.print();
  return 0;
}
