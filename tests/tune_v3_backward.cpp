// The search for the tiles of algorithm v3's backward pass (the table in src/backend/cuda/v3_backward.cpp), on a Hopper GPU:
//   tune_v3_backward [--headdim D,...] [--seqlen S,...] [--mask full|causal] [--dtype bf16|fp16] [--rounds N] [--json FILE]
//                    [--tile keys|roles,GROUPS,STAGES,STAGINGS,MAIN,DQ,LOADER]...   these alone, where they fit, and the table's; the last three are
//                    registers of a thread, LOADER is 0 where the warpgroup of dq loads
//   tune_v3_backward --compile-only [--jobs N] ...   fills the cache of kernels, which takes longest; needs NVRTC, no GPU
// For every problem (batch * seqlen = 16384, nheads * headdim = 2048) every tile that fits is compiled; those that ptxas spills or serialises are
// left out. Each pass (three kernels) is launched and its dq, dk and dv compared with algorithm v2's, then all take turns; the fastest take turns
// again, for longer, with the tile that the table chooses, and with and without a ring of dq's accumulators and with sections of other sizes. The
// record has what was measured, the fastest first.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "backend/cuda/requests.h"
#include "backend/cuda/v3_backward.h"
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
using fattn::BackwardTensors;
using fattn::DType;
using fattn::Options;
using fattn::Tensor;
using fattn::core::cuda_device;
using fattn::core::CudaDevice;
using fattn::core::CudaLaunch;
using fattn::core::CUstream;
using fattn::core::Problem;
using fattn::testing::Case;
using nlohmann::ordered_json;
using Candidate = test::Candidate<v3::V3BackwardPlan>;
using v3::V3BackwardKey;
using v3::V3BackwardPlan;
using v3::V3BackwardTile;

struct Arguments {
  test::SearchFlags common;
  DType dtype = DType::kBF16;
  std::vector<V3BackwardTile> tiles;  // none: all
};

// Of --tile.
bool add_tile(const std::string& text, std::vector<V3BackwardTile>& to) {
  V3BackwardTile t{};
  char kind[8] = {};
  if (std::sscanf(text.c_str(), "%7[a-z],%d,%d,%d,%d,%d,%d", kind, &t.groups, &t.stages, &t.stagings, &t.main_registers, &t.dq_registers,
                  &t.loader_registers) != 7)
    return false;
  t.by_role = std::string(kind) == "roles";
  t.own_loader = t.loader_registers > 0;
  to.push_back(t);
  return t.by_role || std::string(kind) == "keys";
}

bool parse(int argc, char** argv, Arguments& to) {
  return test::parse_search(argc, argv, "tune_v3_backward", to.common, [&](const std::string& flag, const std::string& value) {
    if (flag == "--tile") return add_tile(value, to.tiles);
    to.dtype = value == "fp16" ? DType::kF16 : DType::kBF16;
    return flag == "--dtype" && (value == "fp16" || value == "bf16");
  });
}

Problem problem_of(const Case& c) {
  Problem p = test::forward_problem_of(c);
  p.backward = true;
  p.dq = p.q, p.dk = p.k, p.dv = p.v, p.dout = p.o;
  return p;
}

// How registers are divided among the warps; by role those of two groups with a loader. 56 are too few for dq, and three groups have 144 each alone.
// One group without a loader is not among them: 256 registers a thread at launch are more than ptxas gives.
// clang-format off
constexpr struct { int groups, main, dq, loader; } kRegisters[] = {
    {1, 240, 128, 24}, {1, 216, 152, 24},
    {2, 216, 72, 0}, {2, 208, 88, 0}, {2, 192, 120, 0}, {2, 176, 152, 0},
    {2, 208, 72, 24}, {2, 200, 88, 24}, {2, 192, 104, 24}, {2, 176, 136, 24},
    {3, 144, 80, 0},
};
// clang-format on

// Whether kernels/v3/backward_shape.h takes the tile, and registers by count (ptxas has the last word) and shared memory suffice.
bool fits(const V3BackwardTile& t, int headdim, int64_t shared_bytes) {
  constexpr int kMostStages = 4;  // whose rows' places there are
  const bool shape = t.by_role ? t.groups == 2 && t.stagings == 0 && t.own_loader && 2 <= t.stages && t.stages <= kMostStages
                               : 1 <= t.groups && t.groups <= 3 && t.stages == 3 && (t.stagings == 1 || t.stagings == 2);
  if (!shape) return false;
  constexpr int kFewest = 64;  // of a thread besides the sums: scores and operands
  const int width = v3::v3_width(headdim), sums = t.by_role ? width / 2 : width, at_launch = t.launch_registers();
  const auto possible = [](int registers) { return registers % 8 == 0 && 24 <= registers && registers <= 240; };
  return possible(t.main_registers) && possible(t.dq_registers) && (!t.own_loader || possible(t.loader_registers)) && at_launch <= t.main_registers &&
         t.dq_registers <= at_launch && t.loader_registers <= at_launch && t.moved_registers() <= at_launch * (t.threads() / 128) &&
         sums + kFewest <= t.main_registers && t.shared_bytes(width, width, {}) <= shared_bytes;
}

// All that could be of use, or `given`.
std::vector<V3BackwardTile> tiles_for(int headdim, int64_t shared_bytes, const std::vector<V3BackwardTile>& given) {
  std::vector<V3BackwardTile> all, fitting;
  for (const auto& r : kRegisters) {
    for (const int stagings : {2, 1}) all.push_back({false, r.groups, 3, stagings, r.loader > 0, r.main, r.dq, r.loader});
    for (const int stages : {4, 3, 2}) all.push_back({true, r.groups, stages, 0, r.loader > 0, r.main, r.dq, r.loader});
  }
  for (const V3BackwardTile& tile : given.empty() ? all : given)
    if (fits(tile, headdim, shared_bytes)) fitting.push_back(tile);
  return fitting;
}

// A key of a row of the table is what it is; a key of the table of kernels has room for another tile, if two counts share a number.
constexpr int kStagesUnit = 100;
V3BackwardKey key_with_tile(V3BackwardKey key, const V3BackwardTile& t) {
  if (key.row < 0)
    key.reserved = {(t.by_role ? 1 : 0) + (t.own_loader ? 2 : 0),
                    t.groups,
                    t.stages * kStagesUnit + t.stagings,
                    t.main_registers,
                    t.dq_registers,
                    t.loader_registers};
  return key;
}
jit::Request request_of(const jit::KernelKey& from) {
  V3BackwardKey key = jit::pod_of_key<V3BackwardKey>(from);
  if (key.row >= 0) return v3::v3_backward_request(key);
  const auto& r = key.reserved;
  const V3BackwardTile tile{(r[0] & 1) != 0, r[1], r[2] / kStagesUnit, r[2] % kStagesUnit, (r[0] & 2) != 0, r[3], r[4], r[5]};
  key.reserved = {};
  return v3::v3_backward_request(key, tile);
}

std::string name_of(const V3BackwardPlan& plan) {
  const V3BackwardTile& t = plan.tile;
  std::ostringstream text;
  if (t.by_role)
    text << "roles, " << t.stages << " stages";
  else
    text << t.groups << " x 64 keys, " << t.stagings << (t.stagings == 1 ? " staging" : " stagings");
  text << ", registers " << t.main_registers << " + " << t.dq_registers;
  if (t.own_loader) text << " + " << t.loader_registers;
  text << "; ";
  if (plan.generation > 0) text << "ring of " << plan.generation << ", ";
  text << plan.heads_per_section << " heads a section";
  return text.str();
}

test::SearchKernel kernel_of(const V3BackwardPlan& plan, const V3BackwardKey& key) {
  const bool is_main = key.kind == plan.main.kind;
  return {request_of(jit::key_of_pod(key_with_tile(key, plan.tile))), is_main ? plan.tile.launch_registers() : 0, name_of(plan)};
}
bool compiles(const V3BackwardPlan& plan) {
  return test::compiles(kernel_of(plan, plan.main)) && test::compiles(kernel_of(plan, plan.prepare)) && test::compiles(kernel_of(plan, plan.finish));
}

// With a ring and without, whatever the number of heads asks for.
int compile_all(const Arguments& arguments) {
  struct Tiles {
    std::string of;
    std::vector<V3BackwardPlan> plans;
  };
  std::vector<Tiles> tiles;
  std::map<std::string, test::SearchKernel> by_source;  // of the small kernels tiles have the same
  for (const int headdim : arguments.common.headdims)
    for (const bool causal : arguments.common.masks) {
      const v3::V3Target target = v3::v3_target_of(v3::kV3Arch);
      const Problem problem = problem_of(test::search_case(arguments.dtype, headdim, arguments.common.seqlens.back(), causal));
      std::vector<V3BackwardPlan> plans = {plan_v3_backward(problem, target)};
      for (const V3BackwardTile& tile : tiles_for(headdim, target.shared_bytes, arguments.tiles))
        if (tile != plans[0].tile) plans.push_back(plan_v3_backward(problem, target, tile));
      for (const V3BackwardPlan& plan : plans)
        for (const auto& keys : {std::array{plan.prepare, plan.main, plan.finish}, other_keys_of(problem, plan)})
          for (const V3BackwardKey& key : keys) {
            const test::SearchKernel kernel = kernel_of(plan, key);
            by_source.emplace(kernel.request.entry + kernel.request.source, kernel);
          }
      tiles.push_back({"headdim " + std::to_string(headdim) + (causal ? " causal" : ""), std::move(plans)});
    }
  std::vector<test::SearchKernel> all;
  all.reserve(by_source.size());
  for (const auto& [source, kernel] : by_source) all.push_back(kernel);
  std::printf("%zu kernels\n", all.size());
  std::fflush(stdout);
  test::compile_all(all, arguments.common.jobs);
  std::ptrdiff_t least = static_cast<std::ptrdiff_t>(all.size());
  for (const Tiles& of : tiles) {
    const auto good = std::count_if(of.plans.begin(), of.plans.end(), compiles);
    std::printf("%s: %zu tiles, %td without spills\n", of.of.c_str(), of.plans.size(), good);
    least = std::min(least, good);
  }
  return least > 0 ? 0 : 1;
}

// One problem on the GPU.
class Search {
 public:
  Search(const Arguments& arguments, int headdim, int seqlen, bool causal)
      : case_(test::search_case(arguments.dtype, headdim, seqlen, causal)),
        given_(arguments.tiles),
        problem_(problem_of(case_)),
        device_(cuda_device(0)),
        target_{device_.info().shared_per_block_optin, device_.info().l2_bytes, device_.info().multiprocessors},
        forward_(case_),
        gradients_(case_),
        expected_(case_),
        stream_(0) {
    uint32_t seed = 1;
    for (const Tensor& t : {forward_.t.q, forward_.t.k, forward_.t.v, gradients_.t.o}) test::fill_with_noise(t, seed++);
    Options options = test::on_cuda(case_);
    options.algorithm = Algorithm::kV2;
    forward(forward_.t, options);
    backward(backward_to(expected_), options);
    device::synchronize(0);
  }

  ordered_json run(int rounds) {
    std::vector<Candidate> all;
    const V3BackwardPlan chosen = plan_v3_backward(problem_, target_);
    add(all, chosen, true);
    for (const V3BackwardTile& tile : tiles_for(static_cast<int>(case_.headdim), target_.shared_bytes, given_))
      if (tile != chosen.tile) add(all, plan_v3_backward(problem_, target_, tile), false);
    if (all.empty()) return report(all);
    constexpr int kFewRounds = 3;
    constexpr size_t kTiles = 4, kFinalists = 12;
    take_turns(all, kFewRounds);
    test::keep_fastest(all, kTiles);
    for (const V3BackwardPlan& plan : other_orders(all.front().plan)) add(all, plan, false);
    take_turns(all, kFewRounds);
    test::keep_fastest(all, kFinalists);
    take_turns(all, rounds, test::kTurnSeconds);
    test::keep_fastest(all, all.size());
    return report(all);
  }

 private:
  // o and lse of a forward pass by v2; gradients in the places of q, k and v, dout in that of o.
  BackwardTensors backward_to(const test::DeviceForward& to) const {
    return {forward_.t.q, forward_.t.k, forward_.t.v, forward_.t.o, forward_.t.lse, gradients_.t.o, to.t.q, to.t.k, to.t.v};
  }

  // The fastest with a ring of other generations or none, and other numbers of heads side by side.
  std::vector<V3BackwardPlan> other_orders(const V3BackwardPlan& fastest) const {
    const int heads = static_cast<int>(problem_.batch * problem_.nheads_k);
    std::vector<int> generations = {fastest.generation};
    if (other_keys_of(problem_, fastest)[1].ring != fastest.main.ring) {
      generations.push_back(0);
      const int least = std::max(1, (target_.multiprocessors + fastest.key_tiles / 2) / fastest.key_tiles);  // as many tiles as run at once
      for (const int generation : {least, 2 * least})
        if (3 * generation <= heads) generations.push_back(generation);  // the last kernel has two of them
    }
    std::sort(generations.begin(), generations.end());
    generations.erase(std::unique(generations.begin(), generations.end()), generations.end());
    std::vector<V3BackwardPlan> all;
    for (const int generation : generations) {
      V3BackwardPlan plan = plan_v3_backward(problem_, target_, fastest.tile, generation);
      std::vector<int> sizes = {plan.heads_per_section};
      for (const int size : {1, 2, 4, 8, 16, 32, 64})
        // No more than a generation: its tiles would come up together with those that wait for it.
        if (size != plan.heads_per_section && size <= (generation > 0 ? generation : heads)) sizes.push_back(size);
      for (const int size : sizes) {
        plan.heads_per_section = size;
        if (generation != fastest.generation || size != fastest.heads_per_section) all.push_back(plan);
      }
    }
    return all;
  }

  void launch(const V3BackwardPlan& plan) {
    const fattn::core::CudaCurrent scope = device_.current();
    const BackwardTensors t = backward_to(gradients_);
    v3::V3BackwardParams params;
    fattn_buffers buffers{};
    for_each_tensor(t, [&](const fattn::TensorRow& row, const Tensor& view) { row.pointer.set(buffers, view.data()); });
    buffers.workspace = workspace_.get();
    set_v3_backward_params(params, problem_, plan, device_, buffers);
    auto parameters = params.pointers();
    const auto one = [&](const V3BackwardKey& key, int64_t grid, int threads, int shared_bytes, bool early) {
      const jit::Loaded& kernel = jit::kernel_table().get(device_, jit::key_of_pod(key_with_tile(key, plan.tile)), request_of);
      CudaLaunch shape;
      shape.grid_x = static_cast<unsigned>(grid), shape.block_x = static_cast<unsigned>(threads);
      shape.shared_bytes = static_cast<unsigned>(shared_bytes);
      shape.early = early;
      device_.launch(kernel.function, shape, static_cast<CUstream>(stream_.get()), parameters.data(), kernel.name.c_str());
    };
    one(plan.prepare, plan.prepare_grid, fattn::kV3PrepareThreads, 0, false);
    one(plan.main, plan.grid, plan.threads, plan.shared_bytes, true);
    one(plan.finish, plan.finish_grid, fattn::kV3FinishThreads, plan.finish_shared_bytes, true);
  }

  // If the tile compiles and computes what v2 does.
  void add(std::vector<Candidate>& to, const V3BackwardPlan& plan, bool of_table) {
    if (!compiles(plan)) return;
    const size_t bytes = static_cast<size_t>(plan.workspace_bytes);
    if (bytes > workspace_.bytes()) workspace_ = device::Buffer(0, bytes);
    std::fprintf(stderr, "\r%-150s", name_of(plan).c_str());  // the last word of a hang
    alarm(60);
    workspace_.fill(0xff, stream_.get());  // NaN, and so are the gradients before
    for (size_t gradient = 0; gradient < 3; ++gradient) gradients_.memory[gradient].fill(0xff, stream_.get());
    launch(plan);
    stream_.synchronize();
    alarm(0);
    constexpr int kPieces = 8;
    const double wrong[] = {test::difference_of_pieces(gradients_.t.q, expected_.t.q, kPieces),
                            test::difference_of_pieces(gradients_.t.k, expected_.t.k, kPieces),
                            test::difference_of_pieces(gradients_.t.v, expected_.t.v, kPieces)};
    if (!(wrong[0] <= 0.02 && wrong[1] <= 0.02 && wrong[2] <= 0.02)) {
      std::fprintf(stderr, "\n%s: dq, dk and dv are not v2's by %g, %g and %g\n", name_of(plan).c_str(), wrong[0], wrong[1], wrong[2]);
      return;
    }
    to.push_back({plan, of_table, {}});
  }

  void take_turns(std::vector<Candidate>& all, int rounds, double turn_seconds = 0) {
    test::take_turns(
        all, rounds, stream_, [&](const V3BackwardPlan& plan) { launch(plan); }, turn_seconds);
  }

  ordered_json report(const std::vector<Candidate>& all) const {
    const double pairs = static_cast<double>(case_.seqlen_q) * static_cast<double>(case_.seqlen_k) * (case_.causal ? 0.5 : 1.0);
    const double flops = 10 * pairs * static_cast<double>(case_.batch * case_.nheads * case_.headdim);
    ordered_json rows = ordered_json::array();
    for (const Candidate& c : all) {
      const V3BackwardTile& t = c.plan.tile;
      rows.push_back({{"flops_per_s", flops / c.median()},
                      {"of_table", c.of_table},
                      {"by_role", t.by_role},
                      {"groups", t.groups},
                      {"stages", t.stages},
                      {"stagings", t.stagings},
                      {"own_loader", t.own_loader},
                      {"main_registers", t.main_registers},
                      {"dq_registers", t.dq_registers},
                      {"loader_registers", t.loader_registers},
                      {"generation", c.plan.generation},
                      {"heads_per_section", c.plan.heads_per_section}});
      std::printf("%c %6.0f TFLOP/s  %s\n", c.of_table ? '*' : ' ', flops / c.median() * 1e-12, name_of(c.plan).c_str());
    }
    return {{"headdim", case_.headdim}, {"causal", case_.causal}, {"seqlen", case_.seqlen_q}, {"tiles", rows}};
  }

  const Case case_;
  const std::vector<V3BackwardTile> given_;
  const Problem problem_;
  CudaDevice& device_;
  const v3::V3Target target_;
  test::DeviceForward forward_, gradients_, expected_;
  device::Buffer workspace_;
  const device::Stream stream_;
};

int search_all(const Arguments& arguments) {
  return test::search_all("tune_v3_backward", arguments.common, arguments.dtype, [&](int headdim, bool causal, int seqlen, const auto& file) {
    std::printf("headdim %d%s, seqlen %d\n", headdim, causal ? " causal" : "", seqlen);
    file(Search(arguments, headdim, seqlen, causal).run(arguments.common.rounds));
  });
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!parse(argc, argv, arguments)) return 2;
  try {
    return arguments.common.compile_only ? compile_all(arguments) : search_all(arguments);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "tune_v3_backward: %s\n", e.what());
    return 2;
  }
}
