// What `fattn lab` computes: online softmax against softmax, blocks against every pair of them, and races that find wrong results.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "lab/course/blocks.h"
#include "lab/course/online_softmax.h"
#include "lab/course/race.h"

namespace fattn::lab {
namespace {

TEST(LabCourseSmall, OnlineSoftmaxIsSoftmax) {
  const std::vector<double> scores = {1, 3, 2, -1, 700, 0, 6, 701}, values = {0, 1, 2, 3, 4, 5, 6, 7};
  for (size_t block = 1; block <= 9; ++block) {
    const std::vector<SoftmaxStep> steps = online_softmax(scores, values, block);
    ASSERT_EQ(steps.size(), (scores.size() + block - 1) / block);
    EXPECT_EQ(steps.front().factor, 0);  // nothing was there
    for (const SoftmaxStep& step : steps) {
      double greatest = -std::numeric_limits<double>::infinity(), sum = 0, weighted = 0;
      for (size_t j = 0; j < step.end; ++j) greatest = std::max(greatest, scores[j]);
      for (size_t j = 0; j < step.end; ++j) sum += std::exp(scores[j] - greatest), weighted += values[j] * std::exp(scores[j] - greatest);
      EXPECT_EQ(step.greatest, greatest);
      EXPECT_NEAR(step.sum, sum, 1e-14 * sum);
      EXPECT_NEAR(step.result(), weighted / sum, 1e-14);
      EXPECT_NEAR(step.exact, weighted / sum, 1e-14);
    }
  }
}

TEST(LabCourseSmall, BlocksAreThoseOfTheirPairs) {
  for (const int64_t seqlen : {1, 7, 12, 13})
    for (const int64_t block : {1, 4, 5})
      for (const bool causal : {false, true})
        for (const int64_t window : {-1, 0, 3, 20}) {
          const Blocks blocks = blocks_of(seqlen, block, causal, window);
          for (int64_t row = 0; row < blocks.rows; ++row)
            for (int64_t column = 0; column < blocks.columns; ++column) {
              int64_t seen = 0, all = 0;
              for (int64_t i = row * block; i < std::min(seqlen, (row + 1) * block); ++i)
                for (int64_t j = column * block; j < std::min(seqlen, (column + 1) * block); ++j) {
                  ++all;
                  seen += (!causal || j <= i) && (window < 0 || j >= i - window) ? 1 : 0;
                }
              const BlockKind kind = blocks.at(row, column);
              EXPECT_EQ(kind, seen == 0     ? BlockKind::kSkipped
                              : seen == all ? BlockKind::kWhole
                                            : BlockKind::kMasked)
                  << seqlen << " " << block << " " << causal << " " << window << ": " << row << ", " << column;
            }
        }
  EXPECT_DOUBLE_EQ(blocks_of(256, 64, true).computed_fraction(), 10.0 / 16);
}

TEST(LabCourseSmall, RacesHoldResultsAgainstEachOther) {
  measure::ProblemSpec spec;
  spec.seqlen_q = spec.seqlen_k = 64;
  spec.nheads = spec.nheads_k = 2;
  spec.headdim = spec.headdim_v = 16;
  for (const measure::Pass pass : {measure::Pass::kForward, measure::Pass::kBackward}) {
    const std::vector<RaceEntry> entries = race(spec, pass, {"v2", "v1"}, {});
    ASSERT_EQ(entries.size(), 2U);
    for (const RaceEntry& entry : entries) {
      EXPECT_TRUE(entry.ok()) << entry.reason;
      EXPECT_GT(entry.time.median, 0);
      EXPECT_GE(entry.extra_bytes, spec.o_bytes());
      EXPECT_LE(entry.difference, 1e-5);
    }
  }
  EXPECT_THROW(race(spec, measure::Pass::kForward, {"v9"}, {}), std::invalid_argument);
}

TEST(LabCourseSmall, WhatCannotRunHasAReason) {
  measure::ProblemSpec spec;
  spec.seqlen_q = spec.seqlen_k = 4;
  spec.headdim = spec.headdim_v = 10000;  // beyond what any kernel has
  const std::vector<RaceEntry> entries = race(spec, measure::Pass::kForward, {"v2"}, {});
  EXPECT_FALSE(entries[0].ok());
  EXPECT_NE(entries[0].reason.find("headdim"), std::string::npos) << entries[0].reason;
}

}  // namespace
}  // namespace fattn::lab
