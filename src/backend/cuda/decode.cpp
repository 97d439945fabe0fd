#include "backend/cuda/decode.h"

#include <algorithm>
#include <optional>

#include "backend/cuda/call_params.h"
#include "backend/cuda/limits.h"
#include "backend/cuda/tiles/decode.h"
#include "backend/cuda/v2_forward.h"
#include "device_abi/decode_shares.h"
#include "fattn/error.hpp"
#include "plan/features.h"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

constexpr auto& kRows = kDecodeTable;

constexpr int kMostRows = 64, kMostSplits = 128;

constexpr int round_up(int x, int to) { return (x + to - 1) / to * to; }
int64_t rows_of(const Problem& problem) { return problem.group() * problem.seqlen_q; }

// CTAs that a multiprocessor holds at once; 0: not one.
int64_t resident(const DecodeTile& tile, const Problem& problem, const V2Target& device) {
  const int64_t bytes = tile.shared_bytes(static_cast<int>(problem.headdim), static_cast<int>(problem.headdim_v), decode_shares(problem));
  if (bytes > device.shared_bytes) return 0;
  return std::min<int64_t>(tile.ctas, device.shared_bytes_per_multiprocessor / (bytes + kReservedSharedBytes));
}

// Whether the row is for problems as wide, with as many rows: the fewest that hold them all, or the most that there are.
bool row_fits(const DecodeRow& row, const Problem& problem) {
  const int64_t width = std::max(problem.headdim, problem.headdim_v), rows = std::min<int64_t>(rows_of(problem), kMostRows);
  const int least_width = width <= 64 ? 64 : width <= 128 ? 128 : 256;
  const int least_rows = rows <= 16 ? 16 : rows <= 32 ? 32 : 64;
  return row.headdim == least_width && row.tile.rows() == least_rows;
}

// Seconds, but for what is the same for all, to compare tiles and numbers of splits by. The numbers are of one H200 (tune_decode).
double cost_of(const Problem& problem, const DecodeTarget& target, const DecodeTile& tile, int splits) {
  const double bandwidth = target.bytes_per_second;
  const int64_t slots = target.multiprocessors * resident(tile, problem, target.device);
  const int64_t ctas = problem.batch * problem.nheads_k * ceil_div(rows_of(problem), tile.rows()) * splits;
  const int64_t keys = ceil_div(ceil_div(problem.seqlen_k, tile.block_n), splits) * tile.block_n;
  const double bytes = static_cast<double>(keys * 2 * (problem.headdim + problem.headdim_v));  // of a CTA
  const int64_t waves = ctas / slots, rest = ctas % slots;
  double seconds = static_cast<double>(waves * slots) * bytes / bandwidth;
  if (rest > 0) {
    // A multiprocessor reads 2.6 times its share if it is alone; some alone are not quite as fast as all together.
    const double busy = static_cast<double>(rest) / static_cast<double>(slots);
    seconds += static_cast<double>(rest) * bytes / (bandwidth * std::min(1.0, 2.6 * busy) * (0.88 + 0.12 * busy));
  }
  constexpr double kNextWave = 1e-6, kCombine = 2.5e-6, kCombineRow = 2e-9;
  seconds += static_cast<double>(waves + (rest > 0) - 1) * kNextWave / tile.ctas;  // while a CTA ends and the next begins
  if (splits == 1) return seconds;
  const double rows = static_cast<double>(problem.batch * problem.nheads * problem.seqlen_q);
  return seconds + kCombine + rows * (kCombineRow + 1.4 * splits * 8 * static_cast<double>(problem.headdim_v) / bandwidth);
}

// The tile with the most bytes on their way to a multiprocessor, of these that with the most CTAs, which wait at different times; and as many CTAs of
// a key head as the device holds at once, or, where key heads alone are too many for that, as end at about the same time.
std::pair<int, int> plan_shares(const Problem& problem, const DecodeTarget& target) {
  int best = -1;
  std::pair<int64_t, int64_t> most;
  for (int row = 0; row < static_cast<int>(std::size(kRows)); ++row) {
    const DecodeTile& tile = kRows[row].tile;
    const int64_t ctas = row_fits(kRows[row], problem) ? resident(tile, problem, target.device) : 0;
    const std::pair<int64_t, int64_t> its{ctas * tile.teams * tile.stages * tile.block_n, ctas};
    if (ctas == 0 || !(its > most)) continue;
    most = its;
    best = row;
  }
  if (best < 0) return {best, 0};
  const int64_t slots = target.multiprocessors * most.second, heads = problem.nheads_k * ceil_div(rows_of(problem), kRows[best].tile.rows());
  constexpr int64_t kWaves = 4;
  const int64_t ctas = 2 * heads <= slots ? slots / heads : ceil_div(kWaves * slots, heads);
  return {best, static_cast<int>(std::min(ctas, problem.batch * ceil_div(problem.seqlen_k, kRows[best].tile.block_n)))};
}

constexpr char kNoTile[] = "plan_decode() was called for a problem that the decode kernels cannot compute";

}  // namespace

int DecodeTile::shared_bytes(int headdim, int headdim_v, bool shares) const {
  const int wide = round_up(headdim, 32), wide_v = round_up(headdim_v, 32);
  const int part = rows() * ((round_up(headdim_v, 16) + 8) * 4 + 8);  // kPartBytes and kStatsBytes
  const int walks = shares ? threads() / 32 * kDecodeWalkBytes : 0;
  return std::max(2 * (rows() * wide + teams * stages * block_n * (wide + wide_v)), teams * part) + walks;  // kWalksAt
}

std::span<const DecodeRow> decode_rows() { return kRows; }

DecodeKey DecodePlan::combine_key() const {
  DecodeKey combine = key;
  combine.kind = KernelKind::kDecodeCombine;
  combine.headdim = combine.row = combine.paged = 0;  // all the same to it
  return combine;
}

bool decode_can(const Problem& p, const DecodeTarget& target) {
  if (p.backward || p.empty() || p.seqlen_k == 0 || target.device.level < 80 || !lacks(p, Way::kCudaDecode).empty()) return false;
  if ((p.dtype != DType::kF16 && p.dtype != DType::kBF16) || p.seqlen_q > kMaxSeqlen || p.seqlen_k > kMaxSeqlen) return false;
  if (p.headdim % 8 != 0 || p.headdim_v % 8 != 0 || p.headdim > 256 || p.headdim_v > 256) return false;
  if (!aligned(p.q, p.batch, p.seqlen_q, p.nheads, p.dtype) || !aligned(p.o, p.batch, p.seqlen_q, p.nheads, p.dtype) ||
      !aligned(p.k, p.batch, p.seqlen_k, p.nheads_k, p.dtype) || !aligned(p.v, p.batch, p.seqlen_k, p.nheads_k, p.dtype))
    return false;
  if (!pages_aligned(p)) return false;
  if (rows_of(p) > kMaxSeqlen || p.batch * p.nheads_k > kMaxGrid / kMostSplits / rows_of(p)) return false;
  return std::any_of(std::begin(kRows), std::end(kRows),
                     [&](const DecodeRow& row) { return row_fits(row, p) && resident(row.tile, p, target.device) > 0; });
}

bool decode_takes(const Problem& p, const DecodeTarget& target) {
  if (!decode_can(p, target)) return false;
  if (!v2_forward_refusal(p, target.device).empty()) return true;
  const int64_t rows = rows_of(p);
  if (rows <= kMostRows) return p.seqlen_k >= 4 * rows;
  const int64_t tiles = p.batch * p.nheads * ceil_div(p.seqlen_q, 128);  // of a forward kernel
  return 4 * tiles <= target.multiprocessors && p.seqlen_k >= 1024;
}

bool decode_shares(const Problem& p) {
  constexpr int64_t kMostUnits = int64_t{1} << 30, kLeastStep = 16;
  return p.has_seqused_k && p.batch > 1 && p.batch * (ceil_div(p.seqlen_k, kLeastStep) + kDecodeStart) < kMostUnits;
}

DecodePlan plan_decode(const Problem& problem, const DecodeTarget& target) {
  if (decode_shares(problem)) {
    const auto [row, ctas] = plan_shares(problem, target);
    if (row < 0) throw Error(ErrorCode::kInternal, kNoTile);
    return plan_decode(problem, target, row, ctas);
  }
  std::optional<std::pair<int, int>> best;
  double least = 0;
  for (int row = 0; row < static_cast<int>(std::size(kRows)); ++row) {
    const DecodeTile& tile = kRows[row].tile;
    if (!row_fits(kRows[row], problem) || resident(tile, problem, target.device) == 0) continue;
    const int64_t most = std::min<int64_t>(kMostSplits, ceil_div(problem.seqlen_k, tile.block_n));
    for (int splits = 1; splits <= most; ++splits) {
      const double cost = cost_of(problem, target, tile, splits);
      if (best && !(cost < least)) continue;
      least = cost;
      best = {row, splits};
    }
  }
  if (!best) throw Error(ErrorCode::kInternal, kNoTile);
  return plan_decode(problem, target, best->first, best->second);
}

DecodePlan plan_decode(const Problem& problem, const DecodeTarget& target, int row, int splits) {
  DecodePlan plan;
  plan.key.arch = target.device.arch;
  plan.key.dtype = static_cast<int32_t>(problem.dtype);
  plan.key.headdim = static_cast<int32_t>(problem.headdim);
  plan.key.headdim_v = static_cast<int32_t>(problem.headdim_v);
  plan.key.row = row;
  plan.key.sinks = problem.has_sinks;
  plan.key.paged = problem.paged;
  plan.key.fp32_out = problem.fp32_out;
  plan.key.shares = decode_shares(problem);
  plan.tile = kRows[row].tile;
  plan.rows = static_cast<int>(rows_of(problem));
  plan.row_tiles = static_cast<int>(ceil_div(plan.rows, plan.tile.rows()));
  plan.splits = splits;
  const int64_t sequences = plan.key.shares != 0 ? 1 : problem.batch;  // that the CTAs of a key head share
  plan.grid = sequences * problem.nheads_k * plan.row_tiles * splits;
  plan.shared_bytes = plan.tile.shared_bytes(plan.key.headdim, plan.key.headdim_v, plan.key.shares != 0);
  if (splits > 1) {
    plan.combine_grid = problem.batch * problem.nheads_k * plan.rows;
    const int64_t parts = sequences * problem.nheads_k * plan.rows * (plan.key.shares != 0 ? decode_parts(splits, problem.batch) : splits);
    plan.stats_offset = parts * problem.headdim_v * 4;
    plan.parts_offset = plan.stats_offset + parts * 8;
    plan.workspace_bytes = plan.parts_offset + (plan.key.shares != 0 ? problem.batch * static_cast<int64_t>(sizeof(DecodeParts)) : 0);
  }
  return plan;
}

DecodeParams decode_params(const Problem& problem, const DecodePlan& plan, const fattn_buffers& b) {
  DecodeParams params{forward_params(problem, 1, b), {}, {}};
  if (problem.paged) params.pages = page_params(problem, b);
  params.work.lengths = problem.has_seqused_k ? static_cast<const int*>(b.seqused_k) : nullptr;
  params.work.length_stride = problem.seqused_k_stride;
  params.work.sinks = static_cast<const float*>(b.sinks);
  params.work.sinks_stride = problem.sinks_stride;
  params.work.rows = plan.rows;
  params.work.row_tiles = plan.row_tiles;
  params.work.splits = plan.splits;
  params.work.causal = problem.causal;
  if (plan.splits > 1) {
    params.work.part_o = static_cast<float*>(b.workspace);
    params.work.part_stats = reinterpret_cast<float*>(static_cast<char*>(b.workspace) + plan.stats_offset);
    if (plan.key.shares != 0) params.work.parts = reinterpret_cast<DecodeParts*>(static_cast<char*>(b.workspace) + plan.parts_offset);
  }
  return params;
}

jit::Request decode_request(const DecodeKey& key) {
  const bool combine = key.kind == KernelKind::kDecodeCombine;
  const DecodeTile& tile = kRows[key.row].tile;
  const char* const element = key.dtype == static_cast<int32_t>(DType::kBF16) ? "bf16" : "f16";
  std::string source = text("// ", name_of(static_cast<DType>(key.dtype)), ", headdim ", combine ? key.headdim_v : key.headdim);
  if (!combine && key.headdim_v != key.headdim) source += text(" and ", key.headdim_v);
  if (!combine) source += text(", up to ", tile.rows(), " rows, ", tile.teams, " x ", tile.block_n, " keys, ", tile.stages, " stages");
  if (key.sinks != 0) source += ", sinks";
  if (key.paged != 0) source += ", pages";
  if (key.shares != 0) source += ", sequences shared by their lengths";
  if (key.fp32_out != 0) source += ", fp32 outputs";
  source += text("\n#include \"kernels/decode/", combine ? "combine" : "forward", ".h\"\nstruct Spec {\n  using Element = fattn::", element,
                 ";\n  static constexpr bool kDependent = ", key.arch >= 90 ? "true" : "false", ";\n");
  if (combine) {
    source += text("  static constexpr int kHeaddimV = ", key.headdim_v, ";\n");
  } else {
    source += text("  static constexpr int kHeaddim = ", key.headdim, ", kHeaddimV = ", key.headdim_v,
                   ";\n  static constexpr int kRowTiles = ", tile.row_tiles, ", kRowWarps = ", tile.row_warps, ", kTeams = ", tile.teams,
                   ", kBlockN = ", tile.block_n, ", kStages = ", tile.stages,
                   ";\n  static constexpr bool kQueriesInRegisters = ", tile.queries_in_registers ? "true" : "false", ";\n");
  }
  if (key.sinks != 0) source += "  static constexpr bool kSinks = true;\n";
  if (key.fp32_out != 0) source += "  static constexpr bool kFp32Out = true;\n";
  if (key.shares != 0) source += "  static constexpr bool kShares = true;\n";
  const std::string entry = combine ? "fattn_decode_combine" : "fattn_decode";
  source +=
      text("};\nextern \"C\" __global__ void __launch_bounds__(", combine ? kDecodeCombineThreads : tile.threads(), ", ", combine ? 1 : tile.ctas,
           ") ", entry, "(const __grid_constant__ fattn::AttentionParams p, const __grid_constant__ fattn::DecodeWork work",
           key.paged != 0 ? ", const __grid_constant__ fattn::Pages pages" : "", ") {\n  fattn::decode::", combine ? "combine" : "forward",
           "<Spec>(p, work", key.paged != 0 ? ", pages" : "", ");\n}\n");
  return {.entry = entry, .source = source, .arch = key.arch};
}

}  // namespace fattn::core::cuda
