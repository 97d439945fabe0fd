// The search for the tiles of algorithm v3's forward pass (the table in src/backend/cuda/v3_forward.cpp), on a Hopper GPU:
//   tune_v3_forward [--headdim D,...] [--seqlen S,...] [--mask full|causal] [--window-left N,...] [--softcap X] [--dropout P] [--rounds N]
//                   [--json FILE]
//                   [--tile GROUPS,BLOCK_N,STAGES_K,STAGES_V,QUERY_BUFFERS,turns|skip|free,EARLY]...   these alone, where they fit, and the table's
//   tune_v3_forward --compile-only [--jobs N] ...   fills the cache of kernels, which takes longest; needs NVRTC, no GPU
// For every problem (bf16, batch * seqlen = 16384, nheads * headdim = 2048) every tile that fits is compiled; those that ptxas spills or serialises
// are left out. Each is launched and its o compared with algorithm v2's, then all take turns; the fastest take turns again, for longer, with the tile
// that the table chooses, and under a causal mask or in a window with sections of other sizes. The record has what was measured, the fastest first.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <vector>

#include "backend/cuda/requests.h"
#include "backend/cuda/v3_forward.h"
#include "gpu_problem.h"
#include "jit/jit.h"
#include "jit/kernel_table.h"
#include "problem/problem.h"
#include "tune_tiles.h"

namespace {

namespace v3 = fattn::core::cuda;
namespace jit = fattn::core::jit;
namespace test = fattn::test;
namespace device = fattn::cuda;

using fattn::Algorithm;
using fattn::DType;
using fattn::ForwardTensors;
using fattn::Options;
using fattn::Tensor;
using fattn::core::cuda_device;
using fattn::core::CudaDevice;
using fattn::core::CudaLaunch;
using fattn::core::CUstream;
using fattn::core::Problem;
using fattn::testing::Case;
using nlohmann::ordered_json;
using Candidate = test::Candidate<v3::V3ForwardPlan>;
using v3::V3ForwardPlan;
using v3::V3ForwardTile;

struct Arguments {
  test::SearchFlags common;
  std::vector<int> windows_left = {-1};
  std::vector<V3ForwardTile> tiles;  // none: all
  double softcap = 0, dropout = 0;
};

constexpr struct { int groups, producer, consumer; } kRegisters[] = {{2, 40, 232}, {3, 32, 160}, {4, 32, 112}};

// Of --tile.
bool add_tile(const std::string& text, std::vector<V3ForwardTile>& to) {
  V3ForwardTile t{};
  char mode[8] = {};
  if (std::sscanf(text.c_str(), "%d,%d,%d,%d,%d,%7[a-z],%d", &t.groups, &t.block_n, &t.stages_k, &t.stages_v, &t.query_buffers, mode,
                  &t.early_eighths) != 7)
    return false;
  t.ping_pong = std::string(mode) == "turns";
  t.skip = std::string(mode) == "skip";
  for (const auto& r : kRegisters)
    if (r.groups == t.groups) t.producer_registers = r.producer, t.consumer_registers = r.consumer;
  to.push_back(t);
  return t.consumer_registers > 0;
}

bool parse(int argc, char** argv, Arguments& to) {
  return test::parse_search(argc, argv, "tune_v3_forward", to.common, [&](const std::string& flag, const std::string& value) {
    if (flag == "--window-left")
      to.windows_left = test::numbers_in(value);
    else if (flag == "--tile")
      return add_tile(value, to.tiles);
    else if (flag == "--softcap")
      to.softcap = std::max(0.0, std::atof(value.c_str()));
    else if (flag == "--dropout")
      to.dropout = std::clamp(std::atof(value.c_str()), 0.0, 0.99);
    else
      return false;
    return true;
  });
}

Case case_of(const Arguments& arguments, int headdim, int seqlen, bool causal, int window_left) {
  Case c = test::search_case(DType::kBF16, headdim, seqlen, causal);
  c.window_left = window_left;
  c.softcap = arguments.softcap;
  return c;
}

Problem problem_of(const Case& c, double dropout) {
  Problem p = test::forward_problem_of(c);
  p.dropout_below = fattn::core::dropout_below(dropout);
  return p;
}

// All that could be of use, or `given`: what fits into registers by count (ptxas has the last word) and into shared memory.
std::vector<V3ForwardTile> tiles_for(int headdim, bool skipping, int64_t shared_bytes, const std::vector<V3ForwardTile>& given) {
  constexpr std::pair<int, int> kStages[] = {{4, 4}, {3, 3}, {3, 2}, {2, 2}};
  constexpr int kFewest = 22;  // registers that a thread needs besides scores, weights and o
  std::vector<V3ForwardTile> all;
  for (const V3ForwardTile& t : given)
    if (headdim / 2 + t.block_n / 2 + t.block_n / 4 + kFewest <= t.consumer_registers && t.shared_bytes(headdim, headdim) <= shared_bytes &&
        t.registers_suffice() && (skipping || !t.skip))
      all.push_back(t);
  if (!given.empty()) return all;
  for (const auto& r : kRegisters)
    for (const int block_n : {64, 96, 128}) {
      if (headdim / 2 + block_n / 2 + block_n / 4 + kFewest > r.consumer) continue;
      for (const int query_buffers : {2, 1}) {
        int fitting = 0;  // of the numbers of stages: the two largest
        for (const auto& [stages_k, stages_v] : kStages) {
          V3ForwardTile tile{r.groups, block_n, stages_k, stages_v, query_buffers, true, false, 8, r.producer, r.consumer};
          if (tile.shared_bytes(headdim, headdim) > shared_bytes || !tile.registers_suffice() || ++fitting > 2) continue;
          for (const int early : {4, 8}) {
            tile.early_eighths = early;
            tile.ping_pong = true, tile.skip = false;
            all.push_back(tile);
            tile.ping_pong = false, tile.skip = skipping;
            all.push_back(tile);
          }
        }
      }
    }
  return all;
}

// A key of the table of kernels has room for a tile, if two counts of stages share a number.
constexpr int kStagesUnit = 100;
v3::V3ForwardKey key_of(const V3ForwardPlan& plan) {
  const V3ForwardTile& t = plan.tile;
  v3::V3ForwardKey key = plan.key;
  key.reserved = {t.groups,
                  t.block_n,
                  t.stages_k * kStagesUnit + t.stages_v,
                  t.query_buffers,
                  (t.ping_pong ? 1 : 0) + (t.skip ? 2 : 0),
                  t.early_eighths,
                  t.producer_registers,
                  t.consumer_registers};
  return key;
}
jit::Request request_of(const jit::KernelKey& from) {
  v3::V3ForwardKey key = jit::pod_of_key<v3::V3ForwardKey>(from);
  const auto& r = key.reserved;
  const V3ForwardTile tile{r[0], r[1], r[2] / kStagesUnit, r[2] % kStagesUnit, r[3], (r[4] & 1) != 0, (r[4] & 2) != 0, r[5], r[6], r[7]};
  key.reserved = {};
  return v3::v3_forward_request(key, tile);
}

std::string name_of(const V3ForwardPlan& plan) {
  const V3ForwardTile& t = plan.tile;
  std::ostringstream text;
  text << t.groups << " x " << t.block_n << ", " << t.stages_k << " + " << t.stages_v << " stages, " << t.query_buffers << " query buffers, early "
       << t.early_eighths
       << (t.ping_pong ? ", in turns"
           : t.skip    ? ", skipping"
                       : "")
       << "; " << plan.heads_per_section << " heads a section";
  if (plan.tiles_per_cta > 0) text << ", " << plan.tiles_per_cta << " tiles a CTA";
  return text.str();
}

test::SearchKernel kernel_of(const V3ForwardPlan& plan) {
  return {request_of(jit::key_of_pod(key_of(plan))), plan.tile.launch_registers(), name_of(plan)};
}

int compile_all(const Arguments& arguments) {
  std::vector<test::SearchKernel> all;
  for (const int headdim : arguments.common.headdims)
    for (const bool causal : arguments.common.masks)
      for (const int window_left : arguments.windows_left) {
        if (window_left >= 0 && window_left != arguments.windows_left.back()) continue;  // the same kernels
        const v3::V3Target target = v3::v3_target_of(v3::kV3Arch);
        const Problem problem = problem_of(case_of(arguments, headdim, arguments.common.seqlens.back(), causal, window_left), arguments.dropout);
        all.push_back(kernel_of(plan_v3_forward(problem, target, plan_v3_forward(problem, target).tile)));
        for (const V3ForwardTile& tile : tiles_for(headdim, causal || window_left >= 0, target.shared_bytes, arguments.tiles))
          all.push_back(kernel_of(plan_v3_forward(problem, target, tile)));
      }
  std::printf("%zu tiles\n", all.size());
  std::fflush(stdout);
  test::compile_all(all, arguments.common.jobs);
  const auto good = std::count_if(all.begin(), all.end(), test::compiles);
  std::printf("%td without spills\n", good);
  return good > 0 ? 0 : 1;
}

// One problem on the GPU.
class Search {
 public:
  Search(const Arguments& arguments, int headdim, int seqlen, bool causal, int window_left)
      : case_(case_of(arguments, headdim, seqlen, causal, window_left)),
        given_(arguments.tiles),
        problem_(problem_of(case_, arguments.dropout)),
        device_(cuda_device(0)),
        target_{device_.info().shared_per_block_optin, device_.info().l2_bytes, device_.info().multiprocessors},
        tensors_(case_),
        expected_(case_),
        state_(16),
        dropout_state_(Tensor(nullptr, DType::kI64, {2}).on(fattn::Device::kCuda, 0, state_.put({7, 0, 5, 0}, 0).data())),
        stream_(0) {
    uint32_t seed = 1;
    for (const Tensor& t : {tensors_.t.q, tensors_.t.k, tensors_.t.v}) test::fill_with_noise(t, seed++);
    ForwardTensors v2 = tensors_.t;
    v2.o = expected_.t.o, v2.lse = expected_.t.lse;
    Options options = test::on_cuda(case_);
    options.algorithm = Algorithm::kV2;
    options.p_dropout = arguments.dropout;
    if (arguments.dropout > 0) v2.scores.dropout_state = dropout_state_;
    forward(v2, options);
    device::synchronize(0);
  }

  ordered_json run(int rounds) {
    std::vector<Candidate> all;
    const V3ForwardPlan chosen = plan_v3_forward(problem_, target_);
    add(all, chosen, true);
    for (const V3ForwardTile& tile : tiles_for(static_cast<int>(case_.headdim), uneven(), target_.shared_bytes, given_))
      add(all, plan_v3_forward(problem_, target_, tile), false);
    take_turns(all, 3);
    constexpr size_t kFinalists = 8;
    test::keep_fastest(all, kFinalists);
    if (uneven()) {
      const V3ForwardPlan fastest = all.front().plan;
      for (const int part : {1, 2, 3, 4, 6, 11, 12, 22, 33, 66, 132}) {
        V3ForwardPlan plan = fastest;
        plan.tiles_per_cta = 0;
        plan.grid = static_cast<int>(std::min<int64_t>(plan.tiles, target_.multiprocessors));
        plan.heads_per_section = target_.multiprocessors / part;
        if (plan.heads_per_section <= problem_.batch * problem_.nheads && plan.heads_per_section != fastest.heads_per_section) add(all, plan, false);
      }
      V3ForwardPlan pairs = fastest;  // whichever multiprocessor is free takes the next two tiles
      pairs.tiles_per_cta = 2;
      pairs.grid = static_cast<int>((pairs.tiles + 1) / 2);
      if (fastest.tiles_per_cta == 0) add(all, pairs, false);
    }
    take_turns(all, rounds, test::kTurnSeconds);
    test::keep_fastest(all, all.size());
    return report(all);
  }

 private:
  // Warpgroups may pass over blocks, and the order of the tiles matters.
  bool uneven() const { return case_.causal || case_.window_left >= 0; }

  void launch(const V3ForwardPlan& plan) {
    const fattn::core::CudaCurrent scope = device_.current();
    v3::V3ForwardParams params;
    fattn_buffers buffers{};
    buffers.q = tensors_.t.q.data(), buffers.k = tensors_.t.k.data(), buffers.v = tensors_.t.v.data();
    buffers.o = tensors_.t.o.data(), buffers.lse = tensors_.t.lse.data();
    buffers.dropout_state = dropout_state_.data();
    set_v3_forward_params(params, problem_, plan, device_, buffers);
    const jit::Loaded& kernel = jit::kernel_table().get(device_, jit::key_of_pod(key_of(plan)), request_of);
    CudaLaunch shape;
    shape.grid_x = static_cast<unsigned>(plan.grid), shape.block_x = static_cast<unsigned>(plan.threads);
    shape.shared_bytes = static_cast<unsigned>(plan.shared_bytes);
    device_.launch(kernel.function, shape, static_cast<CUstream>(stream_.get()), params.pointers().data(), kernel.name.c_str());
  }

  // If the tile compiles and computes what v2 does.
  void add(std::vector<Candidate>& to, const V3ForwardPlan& plan, bool of_table) {
    if (!test::compiles(kernel_of(plan))) return;
    std::fprintf(stderr, "\r%-150s", name_of(plan).c_str());  // the last word of a hang
    alarm(60);
    tensors_.memory[3].fill(0xff, stream_.get());  // o: NaN
    launch(plan);
    stream_.synchronize();
    alarm(0);
    const double wrong = test::difference_of_pieces(tensors_.t.o, expected_.t.o, 3);
    if (!(wrong <= 0.02)) {
      std::fprintf(stderr, "\n%s: o is not v2's by %g\n", name_of(plan).c_str(), wrong);
      return;
    }
    to.push_back({plan, of_table, {}});
  }

  void take_turns(std::vector<Candidate>& all, int rounds, double turn_seconds = 0) {
    test::take_turns(
        all, rounds, stream_, [&](const V3ForwardPlan& plan) { launch(plan); }, turn_seconds);
  }

  ordered_json report(const std::vector<Candidate>& all) const {
    const double pairs = case_.window_left >= 0
                             ? problem_.mask().visible_pairs()
                             : static_cast<double>(case_.seqlen_q) * static_cast<double>(case_.seqlen_k) * (case_.causal ? 0.5 : 1.0);
    const double flops = 4 * pairs * static_cast<double>(case_.batch * case_.nheads * case_.headdim);
    ordered_json rows = ordered_json::array();
    for (const Candidate& c : all) {
      const V3ForwardTile& t = c.plan.tile;
      rows.push_back({{"flops_per_s", flops / c.median()},
                      {"of_table", c.of_table},
                      {"groups", t.groups},
                      {"block_n", t.block_n},
                      {"stages_k", t.stages_k},
                      {"stages_v", t.stages_v},
                      {"query_buffers", t.query_buffers},
                      {"ping_pong", t.ping_pong},
                      {"skip", t.skip},
                      {"early_eighths", t.early_eighths},
                      {"heads_per_section", c.plan.heads_per_section},
                      {"tiles_per_cta", c.plan.tiles_per_cta}});
      std::printf("%c %6.0f TFLOP/s  %s\n", c.of_table ? '*' : ' ', flops / c.median() * 1e-12, name_of(c.plan).c_str());
    }
    return {{"headdim", case_.headdim},
            {"causal", case_.causal},
            {"window_left", case_.window_left},
            {"softcap", case_.softcap},
            {"dropout", problem_.dropout_below / 65536.0},
            {"seqlen", case_.seqlen_q},
            {"tiles", rows}};
  }

  const Case case_;
  const std::vector<V3ForwardTile> given_;
  const Problem problem_;
  CudaDevice& device_;
  const v3::V3Target target_;
  test::DeviceForward tensors_, expected_;
  test::DeviceLists state_;
  Tensor dropout_state_;  // seed and offset
  const device::Stream stream_;
};

int search_all(const Arguments& arguments) {
  return test::search_all("tune_v3_forward", arguments.common, DType::kBF16, [&](int headdim, bool causal, int seqlen, const auto& file) {
    for (const int window_left : arguments.windows_left) {
      std::printf("headdim %d%s, seqlen %d, window_left %d\n", headdim, causal ? " causal" : "", seqlen, window_left);
      file(Search(arguments, headdim, seqlen, causal, window_left).run(arguments.common.rounds));
    }
  });
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!parse(argc, argv, arguments)) return 2;
  try {
    return arguments.common.compile_only ? compile_all(arguments) : search_all(arguments);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "tune_v3_forward: %s\n", e.what());
    return 2;
  }
}
