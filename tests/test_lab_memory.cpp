// Traffic models against loops that count block by block and against closed forms; the levels, the limits, and the memory of a step.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "lab/memory/papers.h"
#include "lab/memory/report.h"
#include "lab/memory/step.h"
#include "lab/memory/traffic.h"

namespace fattn::lab {
namespace {

using measure::MovedTerm;
using measure::Pass;
using measure::ProblemSpec;

ProblemSpec problem(int64_t batch, int64_t q, int64_t k, int64_t heads, int64_t heads_k, int64_t d, int64_t dv, bool causal, DType dtype) {
  ProblemSpec s;
  s.batch = batch, s.seqlen_q = q, s.seqlen_k = k, s.nheads = heads, s.nheads_k = heads_k, s.headdim = d, s.headdim_v = dv, s.causal = causal;
  s.dtype = dtype;
  return s;
}

std::vector<ProblemSpec> problems() {
  std::vector<ProblemSpec> all;
  for (const DType dtype : {DType::kF32, DType::kBF16})
    for (const bool causal : {false, true})
      for (const auto& [q, k] : {std::pair<int64_t, int64_t>{1, 1}, {128, 128}, {129, 255}, {1000, 1000}, {777, 1301}, {3, 2000}, {1024, 1024}}) {
        all.push_back(problem(2, q, k, 6, 2, 64, 64, causal, dtype));
        all.push_back(problem(1, q, k, 3, 3, 72, 40, causal, dtype));
      }
  return all;
}

double total(const std::vector<MovedTerm>& terms) {
  double bytes = 0;
  for (const MovedTerm& t : terms) bytes += t.bytes;
  return bytes;
}

// What the arithmetic in words comes to: numbers, each with a word or none behind it, times each other.
double evaluated(const std::string& arithmetic) {
  double product = 1;
  for (size_t at = 0; at < arithmetic.size();) {
    product *= std::stod(arithmetic.substr(at));
    at = std::min(arithmetic.size(), arithmetic.find(" * ", at));
    at += at < arithmetic.size() ? 3 : 0;
  }
  return product;
}

// The GPU's loops, one block after the other.
double walked(const std::string& algorithm, const ProblemSpec& s, Pass pass) {
  const int64_t e = static_cast<int64_t>(size_of(s.dtype)), d = s.headdim * e, dv = s.headdim_v * e, shift = s.seqlen_k - s.seqlen_q;
  const int64_t heads = s.batch * s.nheads, heads_k = s.batch * s.nheads_k;
  int64_t bytes = 0;
  // Whether a block of `rows` queries from `row` on sees one of the keys from `key` on.
  const auto sees = [&](int64_t row, int64_t rows, int64_t key) { return !s.causal || std::min(row + rows, s.seqlen_q) - 1 + shift >= key; };
  if (pass == Pass::kBackward) {
    for (int64_t key = 0; key < s.seqlen_k; key += 128)
      for (int64_t row = 0; row < s.seqlen_q; row += 64)
        if (sees(row, 64, key)) bytes += heads * 64 * (d + dv + 4 + 4 + (algorithm == "v1" ? 2 : 1) * 4 * s.headdim);
    bytes += heads * s.seqlen_q * (2 * dv + 4 + 4 * s.headdim + 4 * s.headdim + d);
    return static_cast<double>(bytes + heads_k * s.seqlen_k * 2 * (d + dv));
  }
  if (algorithm == "v1") {
    for (int64_t row = 0; row < s.seqlen_q; row += 16) {
      bool first = true;
      for (int64_t key = 0; key < s.seqlen_k; key += 128) {
        if (!sees(row, 16, key)) continue;
        bytes += heads * 16 * d;
        if (!first) bytes += heads * 2 * 16 * 4 * (s.headdim_v + 2);
        first = false;
      }
    }
    return static_cast<double>(bytes + heads * (s.seqlen_k * (d + dv) + s.seqlen_q * (dv + 4)));
  }
  for (int64_t row = 0; row < s.seqlen_q; row += 128)
    for (int64_t key = 0; key < s.seqlen_k; key += 128)
      if (sees(row, 128, key)) bytes += heads * 128 * (d + dv);
  return static_cast<double>(bytes + heads * s.seqlen_q * (d + dv + 4));
}

TEST(LabMemorySmall, CountsAreThoseOfTheLoops) {
  for (const ProblemSpec& s : problems())
    for (const char* algorithm : {"v1", "v2", "v3"})
      for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
        // A causal mask with more queries than keys leaves tiles that see nothing: v1's count takes o out of none of them.
        const auto terms = measure::moved_terms(algorithm, s, pass);
        ASSERT_TRUE(terms);
        EXPECT_EQ(total(*terms), walked(algorithm, s, pass)) << algorithm << " " << describe(s) << " " << name_of(pass);
        EXPECT_EQ(total(*terms), *measure::moved_bytes(algorithm, s, pass));
      }
}

TEST(LabMemorySmall, EveryTermIsItsArithmetic) {
  for (const ProblemSpec& s : problems())
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      std::vector<std::vector<MovedTerm>> all = {*measure::moved_terms_cpu("v2", Isa::kScalar, s, pass)};
      for (const char* algorithm : {"standard", "v1", "v2"}) {
        all.push_back(*measure::moved_terms(algorithm, s, pass));
        all.push_back(papers_terms(algorithm, s, pass, 1 << 17));
      }
      for (const auto& terms : all)
        for (const MovedTerm& t : terms) EXPECT_DOUBLE_EQ(evaluated(t.arithmetic), t.bytes) << t.what << ": " << t.arithmetic;
    }
}

TEST(LabMemorySmall, OnceIsTheCompulsoryTraffic) {
  for (const ProblemSpec& s : problems())
    for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
      std::vector<std::vector<MovedTerm>> all = {*measure::moved_terms_cpu("v2", Isa::kScalar, s, pass)};
      for (const char* algorithm : {"standard", "v1", "v2", "v3"}) all.push_back(*measure::moved_terms(algorithm, s, pass));
      for (const auto& terms : all) {
        double once = 0;
        for (const MovedTerm& t : terms) once += t.once;
        EXPECT_EQ(once, measure::cost_of(s, pass).bytes) << describe(s) << " " << name_of(pass) << ": " << terms.front().what;
      }
    }
}

// FlashAttention, algorithm 1 and 4, as their lines say it.
double walked_as_published(const ProblemSpec& s, Pass pass, int64_t chip_bytes) {
  const int64_t e = static_cast<int64_t>(size_of(s.dtype)), numbers = chip_bytes / e, d = s.headdim;
  const int64_t block_k = std::min(s.seqlen_k, (numbers + 4 * d - 1) / (4 * d)), block_q = std::min(d, block_k);
  int64_t moved = 0;  // numbers
  for (int64_t key = 0; key < s.seqlen_k; key += block_k) {
    const int64_t keys = std::min(block_k, s.seqlen_k - key);
    moved += (pass == Pass::kForward ? 2 : 4) * keys * d;
    for (int64_t row = 0; row < s.seqlen_q; row += block_q) {
      const int64_t rows = std::min(block_q, s.seqlen_q - row);
      moved += pass == Pass::kForward ? rows * (d + 2 * d + 4) : rows * (3 * d + 2 * d + 2);
    }
  }
  return static_cast<double>(s.batch * s.nheads * moved * e);
}

TEST(LabMemorySmall, ThePapersCount) {
  for (const int64_t n : {64, 1000, 1024, 4096})
    for (const int64_t chip : {100 << 10, 227 << 10}) {
      const ProblemSpec s = problem(2, n, n, 3, 3, 64, 64, false, DType::kBF16);
      const double d = 64, e = 2, heads = 6, rows = static_cast<double>(n);
      EXPECT_EQ(total(papers_terms("standard", s, Pass::kForward, 0)), heads * e * (4 * rows * rows + 4 * rows * d));
      for (const Pass pass : {Pass::kForward, Pass::kBackward})
        EXPECT_EQ(total(papers_terms("v1", s, pass, static_cast<double>(chip))), walked_as_published(s, pass, chip)) << n << " " << name_of(pass);
    }
}

// Theta(N^2 d^2 / M): four times as much for twice as long a sequence, half as much for twice the memory.
TEST(LabMemorySmall, ThePapersCountGrowsWithTheSquare) {
  const auto count = [](int64_t n, double chip) {
    return total(papers_terms("v1", problem(1, n, n, 1, 1, 64, 64, false, DType::kBF16), Pass::kForward, chip));
  };
  EXPECT_NEAR(count(1 << 17, 1 << 16) / count(1 << 16, 1 << 16), 4, 0.1);
  EXPECT_NEAR(count(1 << 17, 1 << 16) / count(1 << 17, 1 << 17), 2, 0.05);
}

MemoryMachine machine(bool cuda, double cache_bytes) {
  MemoryMachine m;
  m.device = cuda ? "cuda" : "cpu", m.cuda = cuda, m.isa = Isa::kScalar;
  m.workers = cuda ? 132 : 4, m.chip_bytes = 227 << 10, m.cache_bytes = cache_bytes, m.chip = "SM", m.cache = "L2";
  return m;
}

// What CUPTI counted on one H200 (docs/results/profile): bf16, seqlen 8192, not causal.
TEST(LabMemorySmall, IsWhatAnH200Counted) {
  struct Counted {
    int64_t batch, nheads, headdim;
    const char* algorithm;
    Pass pass;
    measure::CudaTiles tiles;
    double l2_bytes, dram_bytes;
  };
  const Counted counted[] = {
      {4, 16, 128, "v3", Pass::kForward, {192, 128, 64, 128}, 11814305792.0, 562000128.0},
      {4, 16, 128, "v3", Pass::kBackward, {192, 128, 64, 128}, 36134134976.0, 2337543936.0},
      {4, 32, 64, "v3", Pass::kForward, {256, 128, 64, 192}, 8862564352.0, 548187392.0},
      {4, 32, 64, "v3", Pass::kBackward, {256, 128, 64, 192}, 24954918848.0, 2233748224.0},
      {4, 16, 128, "standard", Pass::kForward, {}, 51694828512.0, 35168381440.0},
      {4, 16, 128, "standard", Pass::kBackward, {}, 116659841600.0, 79513710592.0},
      {4, 32, 64, "standard", Pass::kForward, {}, 83928054752.0, 69415600640.0},
      {4, 32, 64, "standard", Pass::kBackward, {}, 187551336416.0, 156570481408.0},
  };
  for (const Counted& c : counted) {
    ProblemSpec s;
    s.batch = c.batch, s.nheads = s.nheads_k = c.nheads, s.headdim = s.headdim_v = c.headdim, s.seqlen_q = s.seqlen_k = 8192, s.dtype = DType::kBF16;
    const Traffic t = traffic_of(c.algorithm, s, c.pass, machine(true, 60 << 20), c.tiles);
    const auto name = std::string(c.algorithm) + " " + name_of(c.pass) + " " + std::to_string(c.headdim);
    EXPECT_NEAR(t.moved_bytes / c.l2_bytes, 1, 0.05) << name;
    EXPECT_NEAR(t.dram_bytes / c.dram_bytes, 1, 0.05) << name;
  }
}

TEST(LabMemorySmall, ACacheServesWhatItHolds) {
  for (const ProblemSpec& s : problems())
    for (const bool cuda : {false, true})
      for (const char* algorithm : {"standard", "v1", "v2"})
        for (const Pass pass : {Pass::kForward, Pass::kBackward}) {
          const auto dram = [&](double cache) { return traffic_of(algorithm, s, pass, machine(cuda, cache)).dram_bytes; };
          const Traffic none = traffic_of(algorithm, s, pass, machine(cuda, 0));
          double without = 0;  // sums that are added to come and go
          for (const LevelTerm& t : none.terms) without += t.moved.bytes * t.moved.dram_of_missed;
          EXPECT_LE(none.dram_bytes, std::max(without, measure::cost_of(s, pass).bytes)) << algorithm << describe(s);
          double before = none.dram_bytes;
          for (const double cache : {1e4, 1e5, 1e6, 1e7, 1e12}) {
            EXPECT_LE(dram(cache), before);
            before = dram(cache);
          }
          if (none.by_our_loops) {
            EXPECT_EQ(dram(1e18), measure::cost_of(s, pass).bytes) << algorithm << describe(s);
          }
        }
  EXPECT_FALSE(traffic_of("v3", problem(1, 64, 64, 1, 1, 64, 64, false, DType::kBF16), Pass::kForward, machine(false, 1e6)).reason.empty());
}

TEST(LabMemorySmall, TheLimitThatBinds) {
  const ProblemSpec s = problem(1, 1024, 1024, 8, 8, 64, 64, false, DType::kBF16);
  MemoryMachine m = machine(true, 5e7);
  EXPECT_FALSE(traffic_of("v2", s, Pass::kForward, m).bound_known);
  m.product_flops_per_s = 1e15, m.exp_per_s = 1e15, m.cache_bytes_per_s = 1e15, m.dram_bytes_per_s = 1e15, m.start_s = 1e-9;
  const double flops = 8.0 * 1024 * 1024 * 256;
  EXPECT_EQ(traffic_of("v2", s, Pass::kForward, m).flops, flops);
  EXPECT_EQ(traffic_of("v2", s, Pass::kForward, m).exponentials, 8.0 * 1024 * 1024);
  EXPECT_EQ(traffic_of("v2", s, Pass::kBackward, m).flops, 2.5 * flops);
  const auto limit = [&] {
    const Traffic t = traffic_of("v2", s, Pass::kForward, m);
    for (const Limit& l : t.limits) EXPECT_LE(l.seconds, t.bound_seconds());
    return t.limits[t.binding].name;
  };
  EXPECT_EQ(limit(), "matrix unit");
  m.exp_per_s = 1e12;
  EXPECT_EQ(limit(), "exponentials");
  m.cache_bytes_per_s = 1e11;
  EXPECT_EQ(limit(), "L2 bandwidth");
  m.dram_bytes_per_s = 1e9;
  EXPECT_EQ(limit(), "DRAM bandwidth");
  m.start_s = 1;
  EXPECT_EQ(limit(), "latency");
  EXPECT_DOUBLE_EQ(traffic_of("v2", s, Pass::kForward, m).bound_seconds(), 1);
  // Standard attention skips no pair of a causal problem.
  ProblemSpec causal = s;
  causal.causal = true;
  EXPECT_EQ(traffic_of("standard", causal, Pass::kForward, m).flops, flops);
  EXPECT_LT(traffic_of("v2", causal, Pass::kForward, m).flops, 0.51 * flops);
}

TEST(LabMemorySmall, AStepIsTheSumOfItsTensors) {
  const ProblemSpec s = problem(2, 33, 65, 4, 2, 48, 32, true, DType::kBF16);
  const int64_t q = 2 * 33 * 4 * 48 * 2, kv = 2 * 65 * 2 * 80 * 2, o = 2 * 33 * 4 * 32 * 2, lse = 2 * 4 * 33 * 4, matrix = 2 * 4 * 33 * 65 * 2;
  const AttentionStepMemory textbook = textbook_step(s, true);
  EXPECT_EQ(textbook.forward_bytes(), q + kv + o + 2 * matrix);
  EXPECT_EQ(textbook.backward_bytes(), 2 * (q + kv + o) + 3 * matrix);
  EXPECT_EQ(textbook.saved_bytes(), o + matrix);
  EXPECT_EQ(textbook_step(s, false).backward_bytes(), 0);
  const AttentionStepMemory ours = planned_step("v2", s, true, "cpu");
  ASSERT_TRUE(ours.reason.empty()) << ours.reason;
  EXPECT_EQ(ours.saved_bytes(), o + lse);
  int64_t workspace[2] = {};
  for (const StepTensor& t : ours.tensors)
    if (t.name.rfind("workspace", 0) == 0) workspace[t.backward ? 1 : 0] = t.bytes;
  EXPECT_EQ(ours.forward_bytes(), q + kv + o + lse + workspace[0]);
  EXPECT_EQ(ours.backward_bytes(), 2 * (q + kv + o) + lse + workspace[1]);
  EXPECT_EQ(ours.peak_bytes(), std::max(ours.forward_bytes(), ours.backward_bytes()));
  EXPECT_FALSE(planned_step("v3", s, true, "cpu").reason.empty());
}

TEST(LabMemorySmall, FiguresAndRecordsOfEverything) {
  for (const double rate : {0.0, 1e12})
    for (const bool grad : {false, true}) {
      MemoryMachine m = machine(false, 3e7);
      m.fma_flops_per_s = m.product_flops_per_s = m.exp_per_s = m.cache_bytes_per_s = m.dram_bytes_per_s = rate;
      m.name = "<script>alert(1)</script>";
      const MemoryReport report = memory_report(problems().front(), grad, {"standard", "v1", "v2", "v3"}, m);
      EXPECT_EQ(rooflines(report).size(), rate > 0 ? (grad ? 4u : 2u) : 0u);
      const std::string svg = chart::to_svg(memory_figure(report));
      EXPECT_EQ(svg.find("<script"), std::string::npos);
      EXPECT_EQ(svg.find("nan"), std::string::npos);
      EXPECT_EQ(to_json(report)["passes"].size(), grad ? 2u : 1u);
    }
}

}  // namespace
}  // namespace fattn::lab
