// The search for how products of few rows are divided over a GPU (the rules in src/ops/cuda/product.cpp):
//   tune_products [--width N,...] [--rows N,...] [--rounds N] [--jobs N] [--json FILE]
//   tune_products --compile-only [--width N,...] [--rows N,...]    what candidates there are for capability 9.0; needs NVRTC, no GPU
// For every product of GPT-2 of a width, in bf16, every division computes y, which is compared with that of the library's plan (of more than 16 rows
// cuBLASLt's), then it is timed by replays of a graph of launches over copies of the weight that are more than the L2 cache holds. More than 16 rows
// are timed beside cuBLASLt with LayerNorm before it. The record has the time of each, the fastest first, and what the rules choose.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "fattn/device.hpp"
#include "fattn/error.hpp"
#include "in_processes.h"
#include "jit/jit.h"
#include "measure/environment.h"
#include "ops/cuda/product.h"
#include "ops_on_device.h"
#include "tune_product_splits.h"
#include "tune_record.h"

namespace {

namespace jit = fattn::core::jit;
namespace test = fattn::test;
namespace device = fattn::cuda;
namespace ops = fattn::ops;

using fattn::DType;
using nlohmann::ordered_json;
using ops::Linear;
using ops::cuda::Gpu;
using ops::cuda::product_variant;
using ops::cuda::product_variants;
using ops::cuda::ProductOptions;
using ops::cuda::ProductSplit;
using ops::cuda::ProductTarget;
using ops::cuda::ProductVariant;

constexpr int64_t kHeaddim = 64, kVocab = 50304;

struct Arguments {
  std::vector<int> widths = {768, 1600}, rows = {1, 16, 64};
  int rounds = 5, jobs = 8;
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
    if (flag == "--width")
      to.widths = test::numbers_in(value);
    else if (flag == "--rows")
      to.rows = test::numbers_in(value);
    else if (flag == "--rounds")
      to.rounds = std::clamp(std::atoi(value.c_str()), 1, 1000);
    else if (flag == "--jobs")
      to.jobs = std::clamp(std::atoi(value.c_str()), 1, 256);
    else if (flag == "--json")
      to.json = value;
    else
      known = false;
    const auto positive = [](const std::vector<int>& all) { return !all.empty() && *std::min_element(all.begin(), all.end()) > 0; };
    if (!known || value.empty() || !positive(to.widths) || !positive(to.rows)) {
      std::fprintf(stderr, "tune_products: '%s' is no flag or '%s' not its value; the flags are explained in tests/tune_products.cpp\n", flag.c_str(),
                   value.c_str());
      return false;
    }
    ++i;
  }
  return true;
}

struct Problem {
  const char* name;
  Linear linear;
  ProductOptions options;
};
std::vector<Problem> problems_of(int64_t width, int64_t rows) {
  const DType t = DType::kBF16;
  return {{"qkv", {rows, width, 3 * width, t, t}, {true, true}},
          {"attn_proj", {rows, width, width, t, DType::kF32, ops::Activation::kNone, true}, {}},
          {"fc", {rows, width, 4 * width, t, t, ops::Activation::kGeluTanh}, {true, false}},
          {"mlp_proj", {rows, 4 * width, width, t, DType::kF32, ops::Activation::kNone, true}, {}},
          {"head", {rows, width, kVocab, t, DType::kF32}, {true, false}}};
}

struct Candidate {
  ProductVariant variant;
  bool chosen = false;
  double seconds = 0;
};

std::vector<Candidate> candidates_of(const Problem& p, const ProductTarget& target) {
  std::vector<Candidate> all;
  for (const ProductSplit& split : test::product_splits(p.linear, target)) {
    const ProductVariant v = product_variant(p.linear, p.options, target, split);
    if (v.shared_in_all() * split.ctas <= target.shared_bytes) all.push_back({v});
  }
  for (const ProductVariant& v : product_variants(p.linear, p.options, target))
    if (v.key.rows >= p.linear.rows) {
      all.push_back({v, true});
      break;
    }
  return all;
}

// Fills the cache of kernels; those that spill are left out of `all`.
void compile(std::vector<Candidate>& all, int jobs) {
  struct Nothing {
    int done = 1;
  };
  const auto workers = static_cast<size_t>(jobs);
  const auto of_worker = [&](size_t worker) {
    for (size_t i = worker; i < all.size(); i += workers) jit::build(request_of(all[i].variant.key));
    return Nothing{};
  };
  if (jobs > 1) test::in_processes<Nothing>(workers, of_worker);
  std::erase_if(all, [](const Candidate& c) {
    const jit::Resources r = jit::build(request_of(c.variant.key)).resources;
    return !c.chosen && r.spill_store_bytes + r.spill_load_bytes + r.stack_bytes > 0;
  });
}

std::string words_of(const ProductVariant& v) {
  char line[120];
  std::snprintf(line, sizeof line, "%d rows, %d warps, %d shares, %d loads, %d CTAs, grid %lld%s", v.key.rows, v.key.warps, v.key.shares, v.key.held,
                v.key.ctas, static_cast<long long>(v.grid), v.key.several ? " in turns" : "");
  return line;
}

// One product on the GPU.
class Search {
 public:
  Search(const Problem& problem, const Gpu& gpu)
      : p_(problem),
        gpu_(gpu),
        rows_(p_.linear.rows),
        weight_bytes_(static_cast<int64_t>(packed_bytes(p_.linear, test::kGpu))),
        copies_(std::clamp<int64_t>(400'000'000 / weight_bytes_, 2, 64)),
        stream_(0),
        weights_(0, static_cast<size_t>(copies_ * weight_bytes_)),
        x_(test::Array(p_.options.norm ? DType::kF32 : DType::kBF16, static_cast<size_t>(rows_ * p_.linear.in), 1)),
        norm_weight_(test::Array(DType::kBF16, static_cast<size_t>(p_.linear.in), 2)),
        norm_bias_(test::Array(DType::kBF16, static_cast<size_t>(p_.linear.in), 3)),
        bias_(test::Array(DType::kBF16, static_cast<size_t>(p_.linear.out), kBiasSeed)),
        bias_single_(0, static_cast<size_t>(p_.linear.out) * sizeof(float)),
        y_(0, static_cast<size_t>(rows_ * p_.linear.out) * 4),
        k_(0, static_cast<size_t>(rows_ * p_.linear.in) * 2),
        v_(0, static_cast<size_t>(rows_ * p_.linear.in) * 2),
        normed_(0, static_cast<size_t>(rows_ * p_.linear.in) * 2),
        library_norm_(plan_of_norm()),
        library_(plan_of_linear()),
        workspace_(0, std::max(p_.options.norm ? library_norm_.workspace_bytes() : library_.workspace_bytes(), size_t{64})) {
    weights_.fill(0x3c, stream_.get());
    test::Array first(DType::kBF16, static_cast<size_t>(weight_bytes_ / 2));
    uint32_t random = 1;
    for (size_t i = 0; i < first.count; ++i) {
      random = random * 1664525 + 1013904223;
      first.set(i, (static_cast<double>(random >> 8) * 0x1p-24 - 0.5) * 0.1);
    }
    stream_.synchronize();
    weights_.copy_from(first.as<void>(), static_cast<size_t>(weight_bytes_));
    const test::Array bias(DType::kBF16, static_cast<size_t>(p_.linear.out), kBiasSeed);
    test::Array single(DType::kF32, bias.count);
    for (size_t i = 0; i < bias.count; ++i) single.set(i, bias.at(i));
    bias_single_.copy_from(single.as<void>(), bias.count * sizeof(float));
    expected_ = outputs([&] { by_library(0); });
  }

  ordered_json run(std::vector<Candidate> all, int rounds) {
    const double library = rows_ > 16 ? time_of([&](int64_t copy) { by_library(copy); }, rounds) : 0;
    std::vector<Candidate> good;
    for (Candidate& c : all) {
      const std::vector<float> got = outputs([&] { launch(c.variant, 0); });
      double most = 0, wrong = 0;
      for (const float each : expected_) most = std::max(most, std::abs(static_cast<double>(each)));
      bool near = most > 0;
      for (size_t i = 0; i < got.size() && near; ++i) {
        wrong = std::abs(static_cast<double>(got[i]) - static_cast<double>(expected_[i]));
        near = wrong <= 0.02 * most;  // not of NaN
      }
      if (!near) {
        std::printf("%s: y is wrong by %g of %g\n", words_of(c.variant).c_str(), wrong, most);
        continue;
      }
      c.seconds = time_of([&](int64_t copy) { launch(c.variant, copy); }, rounds);
      good.push_back(c);
    }
    std::stable_sort(good.begin(), good.end(), [](const Candidate& a, const Candidate& b) { return a.seconds < b.seconds; });
    return report(good, library);
  }

 private:
  ops::Plan<ops::NormLinear> plan_of_norm() const {
    if (!p_.options.norm) return {};
    ops::NormLinear n{p_.linear};
    if (p_.options.keys_values) n.nheads = n.nheads_k = p_.linear.in / kHeaddim, n.headdim = kHeaddim;
    return {n, test::kGpu};
  }
  ops::Plan<Linear> plan_of_linear() const { return p_.options.norm ? ops::Plan<Linear>() : ops::Plan<Linear>(p_.linear, test::kGpu); }

  const char* weight(int64_t copy) const { return static_cast<const char*>(weights_.get()) + copy * weight_bytes_; }

  // As operations compute it: by cuBLASLt, if there are many rows.
  void by_library(int64_t copy) {
    if (p_.options.norm)
      library_norm_.execute({rows_, x_.as<float>(), nullptr, norm_weight_.get(), norm_bias_.get(), normed_.get(), weight(copy), bias_.get(), y_.get(),
                             nullptr, nullptr, k_.get(), v_.get()},
                            workspace_.get(), stream_.get());
    else
      library_.execute({rows_, x_.get(), weight(copy), bias_.get(), y_.get(), static_cast<const float*>(bias_single_.get())}, workspace_.get(),
                       stream_.get());
  }

  void launch(const ProductVariant& v, int64_t copy) {
    const int width = static_cast<int>(p_.linear.in);
    const fattn::ProductParams params{x_.get(),
                                      nullptr,
                                      norm_weight_.get(),
                                      norm_bias_.get(),
                                      weight(copy),
                                      bias_.get(),
                                      y_.get(),
                                      nullptr,
                                      k_.get(),
                                      v_.get(),
                                      static_cast<int>(rows_),
                                      static_cast<int>(p_.linear.out),
                                      width,
                                      width,
                                      1e-5f};
    v.launch(gpu_, params, stream_.get());
  }

  // What a call writes, of y the columns that it does write.
  template <class Call>
  std::vector<float> outputs(const Call& call) {
    y_.fill(0, stream_.get());
    call();
    stream_.synchronize();
    std::vector<float> all;
    const auto add = [&](const device::Buffer& from, DType dtype, int64_t columns, int64_t stride) {
      test::Array on_host(dtype, static_cast<size_t>(rows_ * stride));
      from.copy_to(on_host.as<void>(), on_host.count * size_of(dtype));
      for (int64_t r = 0; r < rows_; ++r)
        for (int64_t c = 0; c < columns; ++c) all.push_back(static_cast<float>(on_host.at(static_cast<size_t>(r * stride + c))));
    };
    add(y_, p_.linear.y, p_.options.keys_values ? p_.linear.in : p_.linear.out, p_.linear.out);
    if (p_.options.keys_values)
      for (const device::Buffer* cache : {&k_, &v_}) add(*cache, DType::kBF16, p_.linear.in, p_.linear.in);
    return all;
  }

  template <class Call>
  double time_of(const Call& call, int rounds) {
    const int64_t launches = std::clamp<int64_t>(1'000'000'000 / weight_bytes_, 8, 64);
    call(0);
    stream_.synchronize();
    const device::Graph graph(stream_, [&] {
      for (int64_t i = 0; i < launches; ++i) call(i % copies_);
    });
    device::Event begin(0), end(0);
    std::vector<double> seconds;
    for (int round = -1; round < rounds; ++round) {
      begin.record(stream_.get());
      graph.launch(stream_.get());
      end.record(stream_.get());
      if (round >= 0)
        seconds.push_back(begin.seconds_to(end) / static_cast<double>(launches));
      else
        stream_.synchronize();
    }
    std::nth_element(seconds.begin(), seconds.begin() + static_cast<std::ptrdiff_t>(seconds.size() / 2), seconds.end());
    return seconds[seconds.size() / 2];
  }

  ordered_json report(const std::vector<Candidate>& all, double library) const {
    ordered_json rows = ordered_json::array();
    int shown = 0;
    for (const Candidate& c : all) {
      rows.push_back({{"seconds", c.seconds},
                      {"chosen", c.chosen},
                      {"rows", c.variant.key.rows},
                      {"warps", c.variant.key.warps},
                      {"shares", c.variant.key.shares},
                      {"held", c.variant.key.held},
                      {"ctas", c.variant.key.ctas},
                      {"in_turns", c.variant.key.several != 0},
                      {"grid", c.variant.grid}});
      if (++shown <= 3 || c.chosen) std::printf("%c %7.2f us  %s\n", c.chosen ? '*' : ' ', c.seconds * 1e6, words_of(c.variant).c_str());
    }
    if (library > 0) std::printf("  by cuBLASLt %.2f us\n", library * 1e6);
    return {{"product", p_.name},
            {"in", p_.linear.in},
            {"out", p_.linear.out},
            {"rows", rows_},
            {"weight_bytes", weight_bytes_},
            {"library_seconds", library > 0 ? ordered_json(library) : ordered_json()},
            {"candidates", rows}};
  }

  const Problem p_;
  const Gpu& gpu_;
  const int64_t rows_, weight_bytes_, copies_;
  const device::Stream stream_;
  device::Buffer weights_;
  static constexpr unsigned kBiasSeed = 4;
  const test::OnDevice x_, norm_weight_, norm_bias_, bias_;
  device::Buffer bias_single_, y_, k_, v_, normed_;
  const ops::Plan<ops::NormLinear> library_norm_;
  const ops::Plan<Linear> library_;
  device::Buffer workspace_;
  std::vector<float> expected_;
};

int search_all(const Arguments& arguments) {
  const ProductTarget hopper{90, 132, 227 << 10};
  struct Task {
    Problem problem;
    std::vector<Candidate> candidates;
  };
  std::vector<Task> tasks;
  // Compiled before there is a context: processes that were forked from one with a context have none.
  for (const int width : arguments.widths)
    for (const int rows : arguments.rows)
      for (const Problem& p : problems_of(width, rows)) {
        Task task{p, candidates_of(p, hopper)};
        const size_t before = task.candidates.size();
        compile(task.candidates, arguments.jobs);
        if (arguments.compile_only)
          std::printf("%d wide, %d rows, %s: %zu of %zu do not spill\n", width, rows, p.name, task.candidates.size(), before);
        tasks.push_back(std::move(task));
      }
  if (arguments.compile_only) return 0;
  const Gpu gpu(test::kGpu);
  if (gpu.arch() != hopper.arch || gpu.multiprocessors() != hopper.multiprocessors)
    throw std::runtime_error("the candidates are for compute capability 9.0 with 132 multiprocessors; " + gpu.device().info().name + " has others");
  ordered_json record = test::record_of_search("tune_products", gpu.device().info().name, arguments.rounds);
  record["environment"] = fattn::measure::environment();
  for (const Task& task : tasks) {
    const Linear& l = task.problem.linear;
    std::printf("%s, %lld rows, %lld -> %lld\n", task.problem.name, static_cast<long long>(l.rows), static_cast<long long>(l.in),
                static_cast<long long>(l.out));
    record["problems"].push_back(Search(task.problem, gpu).run(task.candidates, arguments.rounds));
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
    return search_all(arguments);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "tune_products: %s\n", e.what());
    return 2;
  }
}
