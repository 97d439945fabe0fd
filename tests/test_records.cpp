// Rows: refusals, speed-ups, winners, memory warnings, and their JSON.
#include <gtest/gtest.h>

#include <new>
#include <string>
#include <vector>

#include "measure/contestant.h"
#include "measure/record.h"

namespace fattn::measure {
namespace {

Row row(const char* provider, double median, int64_t extra = 1 << 20, double spread = 0.01) {
  Row r;
  r.who.provider = provider;
  r.cost = cost_of(r.spec, Pass::kForward);
  r.time = summarize({median * (1 - spread), median, median, median, median, median, median * (1 + spread)});
  r.memory = MemoryUse{extra, extra, true, "allocated"};
  r.checks = {{"o", 1e-7, 2e-7, true, "all"}};
  return r;
}

Peaks peaks(double fma, double bf16 = 0) {
  Peaks p;
  p.isa = Isa::kAvx512;
  p.threads = 2;
  p.fma = {"FMA, 512 bit", fma};
  if (bf16 > 0) p.bf16 = {"VDPBF16PS", bf16};
  p.read_bytes_per_s = 50e9;
  return p;
}

TEST(Rates, AreFlopsOverTheMedian) {
  Row r = row("fattn", 0.01);
  set_rates(r, peaks(1e12));
  ASSERT_TRUE(r.ok());
  EXPECT_DOUBLE_EQ(*r.flops_per_s, r.cost.flops / 0.01);
  EXPECT_DOUBLE_EQ(*r.peak_fraction, r.cost.flops / 0.01 / 1e12);
  EXPECT_DOUBLE_EQ(*r.bandwidth_fraction, r.cost.bytes / 0.01 / 50e9);
}

TEST(Rates, RefuseWhatTheMachineCannotDo) {
  Row r = row("fattn", 0.01);
  set_rates(r, peaks(r.cost.flops / 0.01 / 1.04));
  EXPECT_TRUE(r.ok()) << r.reason;
  set_rates(r, peaks(r.cost.flops / 0.01 / 1.06));
  EXPECT_EQ(r.status, Status::kRefused);
  EXPECT_NE(r.reason.find("peak"), std::string::npos);
  EXPECT_FALSE(r.time || r.flops_per_s || r.peak_fraction || r.memory);

  Row instant = row("fattn", 1e-15);
  instant.cost = {};  // no FLOPs, so no rate is too high
  set_rates(instant, peaks(1e12));
  EXPECT_EQ(instant.status, Status::kRefused);
  EXPECT_NE(instant.reason.find("clock"), std::string::npos);
}

TEST(Rates, UseThePeakOfTheDtype) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    Row r = row("fattn", 0.01);
    r.spec.dtype = dtype;
    set_rates(r, peaks(1e12, 2e12));
    EXPECT_EQ(r.peak_name, dtype == DType::kBF16 ? "VDPBF16PS" : "FMA, 512 bit") << name_of(dtype);
    EXPECT_EQ(r.peak_flops_per_s, dtype == DType::kBF16 ? 2e12 : 1e12);
  }
}

TEST(Comparison, NoSpeedupOverAFailedRow) {
  std::vector<Row> rows = {row("fattn", 0.01), row("standard", 0.03), row("torch-sdpa", 0.02)};
  rows[2].fail({Status::kFailed, "died"});
  set_speedups(rows);
  EXPECT_NEAR(*rows[0].speedup_over_standard, 3, 1e-12);
  EXPECT_NEAR(*rows[1].speedup_over_standard, 1, 1e-12);
  EXPECT_FALSE(rows[2].speedup_over_standard);
  rows[1].fail({Status::kOutOfMemory, "too large"});
  set_speedups(rows);
  EXPECT_FALSE(rows[0].speedup_over_standard);
}

TEST(Comparison, FastestIsUndecidedWhereIntervalsOverlap) {
  std::vector<Row> rows = {row("fattn", 0.0101, 1 << 20, 0.02), row("standard", 0.010, 50 << 20, 0.02), row("slow", 0.02)};
  Winner winner = fastest(rows);
  EXPECT_EQ(winner.index, 1);
  EXPECT_EQ(winner.undecided_with, std::vector<int>{0});
  EXPECT_EQ(leanest(rows).index, 0);
  rows[1].fail({Status::kCheckFailed, "wrong"});
  winner = fastest(rows);
  EXPECT_EQ(winner.index, 0);
  EXPECT_TRUE(winner.undecided_with.empty());
  for (Row& r : rows) r.fail({Status::kFailed, "died"});
  EXPECT_EQ(fastest(rows).index, -1);
  EXPECT_EQ(leanest(rows).index, -1);
}

TEST(Memory, WarnsWhereTheResidentSetGrewMore) {
  Row r = row("fattn", 0.01, 100 << 20);
  compare_memory(r);
  EXPECT_TRUE(r.warnings.empty());
  r.memory->rss_extra_bytes = 120 << 20;
  compare_memory(r);
  ASSERT_EQ(r.warnings.size(), 1u);
  EXPECT_NE(r.warnings[0].find("120.0 MiB"), std::string::npos) << r.warnings[0];
}

TEST(Memory, OutOfMemoryIsFoundByTypeAndCodeNotByMessage) {
  EXPECT_EQ(as_failure(std::bad_alloc()).status(), Status::kOutOfMemory);
  EXPECT_EQ(as_failure(Error(ErrorCode::kOutOfMemory, "x")).status(), Status::kOutOfMemory);
  EXPECT_EQ(as_failure(Error(ErrorCode::kInternal, "out of memory")).status(), Status::kFailed);
  EXPECT_EQ(as_failure(std::runtime_error("CUDA out of memory")).status(), Status::kFailed);
  EXPECT_EQ(as_failure(Error(ErrorCode::kUnsupported, "x")).status(), Status::kUnsupported);
}

TEST(Library, CountsOutputsAndWorkspaceAndNothingElse) {
  ProblemSpec s;
  s.seqlen_q = s.seqlen_k = 33, s.nheads = s.nheads_k = 2, s.headdim = s.headdim_v = 16;
  Options options;
  options.backend = Backend::kReference;
  const auto library = make_library_contestant("fattn", options);
  const Inputs inputs = make_inputs(s, true);
  library->prepare(s, inputs, true, 0);
  EXPECT_EQ(library->memory(Pass::kForward).extra_bytes, s.o_bytes() + s.lse_bytes());
  EXPECT_EQ(library->memory(Pass::kBackward).extra_bytes, s.output_bytes(true));
  const Outputs& outputs = library->compute();
  EXPECT_TRUE(all_finite(outputs.dk.data(), s.dtype, s.k_bytes() / 4));
  for (Pass pass : {Pass::kForward, Pass::kBackward, Pass::kForwardBackward}) EXPECT_EQ(library->time(pass, 2, 0).size(), 2u);
  try {
    library->prepare(s, inputs, true, s.input_bytes(true) + s.output_bytes(true) - 1);
    FAIL() << "more than the limit was allowed";
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.status(), Status::kOutOfMemory);
  }
}

TEST(Record, SaysTheGravestStatus) {
  Record record;
  record.command = "compare";
  record.rows = {row("fattn", 0.01), row("standard", 0.03)};
  EXPECT_EQ(to_json(record)["status"], "ok");
  record.rows[1].fail({Status::kUnsupported, "x"});
  EXPECT_EQ(to_json(record)["status"], "unsupported");
  record.rows[0].fail({Status::kCheckFailed, "x"});
  EXPECT_EQ(to_json(record)["status"], "check_failed");
  const auto json = to_json(record);
  EXPECT_EQ(json["fattn_record"], 1);
  EXPECT_FALSE(json["rows"][0].contains("time_median_s"));
  EXPECT_EQ(json["rows"][0]["reason"], "x");
}

}  // namespace
}  // namespace fattn::measure
