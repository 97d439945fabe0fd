// The search for tiles and numbers of splits of decode (the table and the costs in src/backend/cuda/decode.cpp), on a GPU:
//   tune_decode [--headdim D,...] [--group G,...] [--nheads-k H] [--rounds N] [--json FILE]
//   tune_decode --compile-only   fills the cache of kernels for capability 9.0; needs NVRTC, no GPU
// For every problem (bf16, one query, 8 or H key heads of `group` query heads each) every tile with every number of splits computes o, which is
// compared with algorithm v3's or, where there is none, the forward kernel's of v2; then it is timed by replays of a graph of launches over copies of
// the keys and values that are more than the L2 cache holds. The record has the time of each, the fastest first, and what the planner chooses.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "backend/cuda/decode.h"
#include "backend/cuda/requests.h"
#include "fattn/error.hpp"
#include "gpu_problem.h"
#include "jit/jit.h"
#include "jit/kernel_table.h"
#include "problem/problem.h"
#include "tune_record.h"

namespace {

namespace core = fattn::core;
namespace jit = fattn::core::jit;
namespace test = fattn::test;
namespace device = fattn::cuda;

using core::cuda::DecodeKey;
using core::cuda::DecodePlan;
using core::cuda::DecodeTarget;
using core::cuda::DecodeTile;
using fattn::DType;
using fattn::Tensor;
using fattn::testing::Case;
using nlohmann::ordered_json;

struct Arguments {
  std::vector<int> headdims = {128, 64, 256}, groups = {4, 1, 16, 32, 64};
  int nheads_k = 8, rounds = 5;
  bool compile_only = false;
  std::string json;
};

bool parse(int argc, char** argv, Arguments& to) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--compile-only") {
      to.compile_only = true;
      continue;
    }
    bool known = true;
    if (flag == "--headdim")
      to.headdims = test::numbers_in(value);
    else if (flag == "--group")
      to.groups = test::numbers_in(value);
    else if (flag == "--nheads-k")
      to.nheads_k = std::clamp(std::atoi(value.c_str()), 1, 1024);
    else if (flag == "--rounds")
      to.rounds = std::clamp(std::atoi(value.c_str()), 1, 1000);
    else if (flag == "--json")
      to.json = value;
    else
      known = false;
    const auto positive = [](const std::vector<int>& all) { return !all.empty() && *std::min_element(all.begin(), all.end()) > 0; };
    if (!known || value.empty() || !positive(to.headdims) || !positive(to.groups)) {
      std::fprintf(stderr, "tune_decode: '%s' is no flag or '%s' not its value; the flags are explained in tests/tune_decode.cpp\n", flag.c_str(),
                   value.c_str());
      return false;
    }
    ++i;
  }
  return true;
}

core::Problem problem_of(const Case& c) {
  core::Problem p;
  p.dtype = c.dtype;
  p.batch = c.batch, p.seqlen_q = c.seqlen_q, p.seqlen_k = c.seqlen_k, p.nheads = c.nheads, p.nheads_k = c.nheads_k;
  p.headdim = p.headdim_v = c.headdim;
  p.softmax_scale = 1 / std::sqrt(static_cast<double>(c.headdim));
  p.q = p.o = {c.seqlen_q * c.nheads * c.headdim, c.nheads * c.headdim, c.headdim};
  p.k = p.v = {c.seqlen_k * c.nheads_k * c.headdim, c.nheads_k * c.headdim, c.headdim};
  p.lse = {c.nheads * c.seqlen_q, 1, c.seqlen_q};
  p.want_lse = true;
  return p;
}

jit::Request request_of(const jit::KernelKey& key) { return core::cuda::decode_request(jit::pod_of_key<DecodeKey>(key)); }

// The rows of the table that the problem may have.
std::vector<int> rows_for(const core::Problem& problem, const DecodeTarget& target) {
  const DecodeTile chosen = plan_decode(problem, target).tile;
  std::vector<int> rows;
  const auto all = core::cuda::decode_rows();
  const int width = problem.headdim <= 64 ? 64 : problem.headdim <= 128 ? 128 : 256;
  for (size_t row = 0; row < all.size(); ++row)
    if (all[row].headdim == width && all[row].tile.rows() == chosen.rows()) rows.push_back(static_cast<int>(row));
  return rows;
}

Case case_of(int headdim, int group, int nheads_k, int batch, int seqlen) {
  return test::shape(DType::kBF16, batch, 1, seqlen, nheads_k * group, nheads_k, headdim, false);
}

int compile_all(const Arguments& arguments) {
  const DecodeTarget target{core::cuda::target_of(90), 132, 4.8e12};
  int spilled = 0;
  for (const int headdim : arguments.headdims)
    for (const int group : arguments.groups) {
      const core::Problem problem = problem_of(case_of(headdim, group, arguments.nheads_k, 1, 8192));
      for (const int row : rows_for(problem, target)) {
        const DecodePlan plan = plan_decode(problem, target, row, 2);
        for (const DecodeKey& key : {plan.key, plan.combine_key()}) {
          const jit::Resources r = jit::build(core::cuda::decode_request(key)).resources;
          spilled += r.spill_store_bytes + r.spill_load_bytes + r.stack_bytes > 0;
        }
      }
    }
  std::printf("%d kernels spill\n", spilled);
  return spilled == 0 ? 0 : 1;
}

struct Candidate {
  DecodePlan plan;
  bool chosen = false;
  double seconds = 0;
};

// One problem on the GPU.
class Search {
 public:
  Search(int headdim, int group, int nheads_k, int batch, int seqlen)
      : case_(case_of(headdim, group, nheads_k, batch, seqlen)),
        problem_(problem_of(case_)),
        device_(core::cuda_device(0)),
        target_(core::cuda::decode_target(
            {90, 80, device_.info().shared_per_block_optin, device_.info().shared_per_multiprocessor, device_.info().l2_bytes}, device_.info())),
        kv_bytes_(static_cast<double>(4 * case_.batch * case_.seqlen_k * case_.nheads_k * headdim)),
        stream_(0) {
    constexpr double kMoreThanL2 = 400e6;
    const int copies = std::clamp(static_cast<int>(kMoreThanL2 / kv_bytes_), 1, 16);
    for (int i = 0; i < copies; ++i) {
      tensors_.emplace_back(case_);
      uint32_t seed = 1;
      if (i > 0) continue;  // the first is compared
      for (const Tensor& t : {tensors_.back().t.q, tensors_.back().t.k, tensors_.back().t.v})
        if (t.size() <= (1 << 24)) test::fill_with_noise(t, seed++);
    }
    expected_.emplace_back(case_);
    fattn::ForwardTensors forward_tensors = tensors_[0].t;
    forward_tensors.o = expected_[0].t.o, forward_tensors.lse = expected_[0].t.lse;
    fattn::Options options = test::on_cuda(case_);
    options.algorithm = fattn::Algorithm::kV3;
    forward(forward_tensors, options);
    device::synchronize(0);
  }

  ordered_json run(int rounds) {
    std::vector<Candidate> all;
    const DecodePlan chosen = plan_decode(problem_, target_);
    for (const int row : rows_for(problem_, target_))
      for (const int splits : {1, 2, 3, 4, 6, 8, 11, 12, 16, 22, 24, 32, 33, 48, 64})
        if (const DecodePlan plan = plan_decode(problem_, target_, row, splits);
            splits * plan.tile.block_n <= case_.seqlen_k && (splits == 1 || plan.grid <= 16 * target_.multiprocessors))
          add(all, {plan, false}, rounds);
    add(all, {chosen, true}, rounds);
    std::stable_sort(all.begin(), all.end(), [](const Candidate& a, const Candidate& b) { return a.seconds < b.seconds; });
    return report(all);
  }

 private:
  void launch(const DecodePlan& plan, const test::DeviceForward& on) {
    fattn_buffers buffers{};
    buffers.q = on.t.q.data(), buffers.k = on.t.k.data(), buffers.v = on.t.v.data();
    buffers.o = on.t.o.data(), buffers.lse = on.t.lse.data(), buffers.workspace = workspace_.get();
    core::cuda::DecodeParams params = decode_params(problem_, plan, buffers);
    auto parameters = params.pointers();
    const auto one = [&](const DecodeKey& key, int64_t grid, int threads, int shared_bytes, bool early) {
      const jit::Loaded& kernel = jit::kernel_table().get(device_, jit::key_of_pod(key), request_of);
      core::CudaLaunch shape;
      shape.grid_x = static_cast<unsigned>(grid), shape.block_x = static_cast<unsigned>(threads);
      shape.shared_bytes = static_cast<unsigned>(shared_bytes);
      shape.early = early;
      device_.launch(kernel.function, shape, static_cast<core::CUstream>(stream_.get()), parameters.data(), kernel.name.c_str());
    };
    one(plan.key, plan.grid, plan.tile.threads(), plan.shared_bytes, plan.early());
    if (plan.combine_grid > 0) one(plan.combine_key(), plan.combine_grid, fattn::kDecodeCombineThreads, 0, plan.early());
  }

  void add(std::vector<Candidate>& to, Candidate c, int rounds) {
    const size_t bytes = std::max<size_t>(256, static_cast<size_t>(c.plan.workspace_bytes));
    if (bytes > workspace_.bytes()) workspace_ = device::Buffer(0, bytes);
    workspace_.fill(0xff, stream_.get());  // NaN
    tensors_[0].memory[3].fill(0xff, stream_.get());
    launch(c.plan, tensors_[0]);
    stream_.synchronize();
    const double wrong = test::difference(tensors_[0].t.o, expected_[0].t.o);
    if (!(wrong <= 0.01)) {
      std::printf("row %d, %d splits: o is wrong by %g\n", c.plan.key.row, c.plan.splits, wrong);
      return;
    }
    // As many launches as take a millisecond, each on the next copy of the keys.
    const int launches = std::clamp(static_cast<int>(4e9 / kv_bytes_), 2, 200);
    const device::Graph graph(stream_, [&] {
      for (int i = 0; i < launches; ++i) launch(c.plan, tensors_[static_cast<size_t>(i) % tensors_.size()]);
    });
    device::Event begin(0), end(0);
    std::vector<double> seconds;
    for (int round = -1; round < rounds; ++round) {
      begin.record(stream_.get());
      graph.launch(stream_.get());
      end.record(stream_.get());
      if (round >= 0)
        seconds.push_back(begin.seconds_to(end) / launches);
      else
        stream_.synchronize();
    }
    std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2), seconds.end());
    c.seconds = seconds[seconds.size() / 2];
    to.push_back(c);
  }

  ordered_json report(const std::vector<Candidate>& all) const {
    ordered_json rows = ordered_json::array();
    int shown = 0;
    for (const Candidate& c : all) {
      rows.push_back({{"seconds", c.seconds},
                      {"kv_bytes_per_s", kv_bytes_ / c.seconds},
                      {"chosen", c.chosen},
                      {"row", c.plan.key.row},
                      {"teams", c.plan.tile.teams},
                      {"block_n", c.plan.tile.block_n},
                      {"stages", c.plan.tile.stages},
                      {"ctas", c.plan.tile.ctas},
                      {"splits", c.plan.splits}});
      if (++shown <= 6 || c.chosen)
        std::printf("%c %8.2f us %6.3f TB/s  row %d, %d teams x %d keys, %d stages, %d CTAs; %d splits\n", c.chosen ? '*' : ' ', c.seconds * 1e6,
                    kv_bytes_ / c.seconds * 1e-12, c.plan.key.row, c.plan.tile.teams, c.plan.tile.block_n, c.plan.tile.stages, c.plan.tile.ctas,
                    c.plan.splits);
    }
    return {{"headdim", case_.headdim}, {"batch", case_.batch},       {"seqlen_k", case_.seqlen_k},
            {"nheads", case_.nheads},   {"nheads_k", case_.nheads_k}, {"candidates", rows}};
  }

  const Case case_;
  const core::Problem problem_;
  core::CudaDevice& device_;
  const DecodeTarget target_;
  const double kv_bytes_;
  std::vector<test::DeviceForward> tensors_, expected_;
  device::Buffer workspace_;
  const device::Stream stream_;
};

int search_all(const Arguments& arguments) {
  std::string reason;
  if (core::cuda_device_count(&reason) == 0) throw std::runtime_error(reason);
  const core::CudaDeviceInfo& gpu = core::cuda_device(0).info();
  if (gpu.capability() != 90)
    throw std::runtime_error("the kernels are compared with algorithm v3's, for compute capability 9.0; " + gpu.name + " is another");
  ordered_json record = test::record_of_search("tune_decode", gpu.name, arguments.rounds);
  for (const int headdim : arguments.headdims)
    for (const int group : arguments.groups)
      for (const auto& [batch, seqlen] : {std::pair{1, 1024}, {1, 8192}, {1, 65536}, {4, 2048}, {16, 8192}, {64, 4096}, {128, 8192}}) {
        std::printf("headdim %d, %d/%d heads, batch %d, seqlen_k %d\n", headdim, arguments.nheads_k * group, arguments.nheads_k, batch, seqlen);
        record["problems"].push_back(Search(headdim, group, arguments.nheads_k, batch, seqlen).run(arguments.rounds));
        std::fflush(stdout);
        if (!arguments.json.empty()) test::write_whole(arguments.json, record);  // after each, so that nothing is lost
      }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments arguments;
  if (!parse(argc, argv, arguments)) return 2;
  try {
    return arguments.compile_only ? compile_all(arguments) : search_all(arguments);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "tune_decode: %s\n", e.what());
    return 2;
  }
}
