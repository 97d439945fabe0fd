// What is recorded, what is made of it, and that nobody pays for it while nobody listens.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "fattn/plan.hpp"
#include "lab/profile/operations.h"
#include "lab/profile/profile.h"
#include "lab/profile/recorder.h"
#include "lab/profile/trace_file.h"
#include "lab/record_error.h"
#include "measure/library_plans.h"
#include "shared/trace.h"
#include "temporary_folder.h"

namespace fattn::lab::profile {
namespace {

void collect(const TraceEvent* events, size_t count, void* to) {
  auto& all = *static_cast<std::vector<TraceEvent>*>(to);
  all.insert(all.end(), events, events + count);
}

class Recorded : public testing::Test {
 protected:
  void SetUp() override { record_to(collect, &events); }
  void TearDown() override {
    fattn_set_trace(nullptr);
    record_to(nullptr, nullptr);
  }
  std::vector<TraceEvent> events;
};

TraceEvent event(const char* name, int64_t begin, int64_t end, int32_t thread = 1, EventKind kind = EventKind::kPart) {
  TraceEvent e;
  e.begin_ns = begin, e.end_ns = end, e.thread = thread, e.kind = kind;
  copy_text(e.name, sizeof e.name, name);
  return e;
}

measure::ProblemSpec small() {
  measure::ProblemSpec s;
  s.seqlen_q = s.seqlen_k = 96, s.nheads = s.nheads_k = 3, s.headdim = s.headdim_v = 32;
  return s;
}

void run(const measure::ProblemSpec& spec, Algorithm algorithm, bool grad) {
  Options options;
  options.backend = Backend::kCpu, options.algorithm = algorithm, options.num_threads = 2;
  const auto contestant = measure::make_library_contestant("fattn", options);
  const measure::Inputs inputs = measure::make_inputs(spec, grad);
  contestant->prepare(spec, inputs, grad, 0);
  contestant->compute();
}

TEST_F(Recorded, SmallNobodyIsToldUntilSomebodyAsks) {
  run(small(), Algorithm::kV2, false);
  flush_events();
  EXPECT_TRUE(events.empty());
  ASSERT_EQ(fattn_set_trace(&kRecordingTrace), FATTN_OK);
  run(small(), Algorithm::kV2, false);
  ASSERT_EQ(fattn_set_trace(nullptr), FATTN_OK);
  flush_events();
  const size_t told = events.size();
  EXPECT_GE(told, 2u);
  run(small(), Algorithm::kV2, false);
  flush_events();
  EXPECT_EQ(events.size(), told);
}

TEST_F(Recorded, SmallEveryAlgorithmTellsItsParts) {
  const std::map<Algorithm, std::set<std::string>> parts = {
      {Algorithm::kStandard,
       {"s = q k^T", "p = softmax(s)", "o = p v", "dp = dout v^T", "gradient of softmax", "dq = ds k", "dk = ds^T q", "dv = p^T dout"}},
      {Algorithm::kV1, {"heads forward", "heads backward"}},
      {Algorithm::kV2, {"tiles of queries", "delta = rowsum(o dout)", "super-blocks of keys"}}};
  for (const auto& [algorithm, names] : parts) {
    events.clear();
    fattn_set_trace(&kRecordingTrace);
    run(small(), algorithm, true);
    fattn_set_trace(nullptr);
    flush_events();
    std::set<std::string> seen;
    int calls = 0;
    for (const TraceEvent& e : events) {
      EXPECT_TRUE(is_sound(e)) << e.name;
      seen.insert(e.name);
      if (e.kind != EventKind::kCall) continue;
      ++calls;
      EXPECT_NE(std::string(e.detail).find("B1 S96 H3 D32 fp32"), std::string::npos) << e.detail;
      EXPECT_GT(e.flops, 0);
      EXPECT_GT(e.bytes, 0);
    }
    EXPECT_EQ(calls, 2);
    for (const std::string& name : names) EXPECT_TRUE(seen.count(name)) << name_of(algorithm) << " does not tell of " << name;
  }
}

TEST_F(Recorded, SmallTracesThatLackAFunctionAreRefused) {
  fattn_trace trace = kRecordingTrace;
  trace.end = nullptr;
  EXPECT_EQ(fattn_set_trace(&trace), FATTN_ERROR_INVALID_ARGUMENT);
  trace = kRecordingTrace, trace.struct_size = 7;
  EXPECT_EQ(fattn_set_trace(&trace), FATTN_ERROR_ABI);
}

TEST_F(Recorded, SmallOfManyThreadsNothingIsLost) {
  std::vector<std::thread> threads;
  for (int t = 0; t < 8; ++t)
    threads.emplace_back([] {
      for (int i = 0; i < 1000; ++i) {
        const Range outer("outer"), inner("inner");
      }
    });
  for (std::thread& thread : threads) thread.join();
  flush_events();
  EXPECT_EQ(std::count_if(events.begin(), events.end(), [](const TraceEvent& e) { return std::string(e.name) == "outer" && e.depth == 0; }), 8000);
  EXPECT_EQ(std::count_if(events.begin(), events.end(), [](const TraceEvent& e) { return std::string(e.name) == "inner" && e.depth == 1; }), 8000);
}

// A part costs a load and a branch: a nanosecond or so, where the shortest part is some microseconds.
TEST(Profile, WhatNobodyListensToCostsNothing) {
  ASSERT_EQ(core::trace_listener.load(), nullptr);
  constexpr int kTimes = 2'000'000;
  double best = 1;
  for (int round = 0; round < 5; ++round) {
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < kTimes; ++i) {
      const core::Traced traced("part");
      asm volatile("" ::: "memory");
    }
    best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count() / kTimes);
  }
  RecordProperty("nanoseconds", std::to_string(best * 1e9));
  EXPECT_LT(best, 20e-9);
}

TEST(Profile, SmallSelfTimeIsWithoutWhatIsInside) {
  std::vector<TraceEvent> events = {event("call", 0, 100), event("a", 10, 40), event("b", 15, 25), event("a", 50, 90), event("a", 20, 60, 2)};
  sort_events(events);
  std::map<std::string, Operation> by;
  for (const Operation& o : operations_of(events)) by[o.name] = o;
  EXPECT_NEAR(by["call"].self_seconds, 30e-9, 1e-15);
  EXPECT_NEAR(by["a"].self_seconds, 100e-9, 1e-15);
  EXPECT_NEAR(by["a"].seconds, 110e-9, 1e-15);
  EXPECT_NEAR(by["a"].wall_seconds, 80e-9, 1e-15);
  EXPECT_EQ(by["a"].times, 3);
  EXPECT_NEAR(by["call"].share + by["a"].share + by["b"].share, 1, 1e-12);
}

TEST(Profile, SmallCallsOfTheLibraryAreShownBehindTheFirst) {
  std::vector<TraceEvent> events = {event("a", 0, 100), event("b", 100, 190), event("forward", 200, 205), event("c", 300, 380),
                                    event("forward", 400, 401)};
  events[2].kind = events[4].kind = EventKind::kCall;
  std::snprintf(events[4].detail, sizeof events[4].detail, "another shape");
  std::vector<Operation> operations = operations_of(events);
  ASSERT_EQ(operations.size(), 5u);
  keep_first(operations, 2);
  ASSERT_EQ(operations.size(), 3u);
  EXPECT_EQ(operations[1].name, "b");
  EXPECT_EQ(operations[2].name, "forward");
  EXPECT_NEAR(operations[2].self_seconds, 5e-9, 1e-15);
}

TEST(Profile, SmallKernelsHaveASideOfTheirOwn) {
  std::vector<TraceEvent> events = {event("host", 0, 10), event("k", 0, 100, 7, EventKind::kKernel), event("k", 50, 150, 8, EventKind::kKernel)};
  events[1].device = events[2].device = 0;
  for (const Operation& o : operations_of(events)) EXPECT_NEAR(o.share, 1, 1e-12) << o.name;
}

TEST(Profile, SmallMemoryAddsUpForEachDevice) {
  std::vector<TraceEvent> events = {event("a", 1, 1, 1, EventKind::kMemory), event("b", 2, 2, 1, EventKind::kMemory),
                                    event("a", 3, 3, 1, EventKind::kMemory)};
  events[0].bytes = 10, events[1].bytes = 5, events[1].device = 0, events[2].bytes = -10;
  const std::vector<MemoryChange> changes = memory_changes(events);
  ASSERT_EQ(changes.size(), 3u);
  EXPECT_EQ(changes[0].total, 10);
  EXPECT_EQ(changes[1].total, 5);
  EXPECT_EQ(changes[2].total, 0);
}

TEST(Profile, SmallTextIsCutAtACharacter) {
  char text[8];
  copy_text(text, sizeof text, "12345\xE5\xBA\x8F");
  EXPECT_STREQ(text, "12345");
  copy_text(text, sizeof text, "1234567");
  EXPECT_STREQ(text, "1234567");
}

TEST(Profile, SmallCsvIsNoFormula) { EXPECT_EQ(csv_line({"=1+1", "a\"b\nc", "-2.5", "@x"}), "\"'=1+1\",\"a\"\"b c\",-2.5,\"'@x\"\n"); }

class TraceFiles : public testing::Test {
 protected:
  void write(const std::string& content) {
    std::ofstream(path, std::ios::binary).write(content.data(), static_cast<std::streamsize>(content.size()));
  }
  static std::string bytes(const auto& value) { return {reinterpret_cast<const char*>(&value), sizeof value}; }
  const test::TemporaryFolder folder;
  const std::string path = (folder.path() / "trace.1").string();
};

TEST_F(TraceFiles, SmallAreReadAndACutOffEndIsLeftOut) {
  TraceHeader header;
  header.process = 42;
  copy_text(header.program, sizeof header.program, "a program");
  write(bytes(header) + bytes(event("b", 5, 6)) + bytes(event("a", 1, 9)) + bytes(event("c", 7, 8)).substr(0, 100));
  const Trace trace = read_trace(path);
  EXPECT_EQ(trace.process, 42);
  EXPECT_EQ(trace.program, "a program");
  ASSERT_EQ(trace.events.size(), 2u);
  EXPECT_STREQ(trace.events[0].name, "a");
}

TEST_F(TraceFiles, SmallThatCannotBeAreRefused) {
  TraceHeader header;
  TraceEvent backwards = event("a", 9, 1), unknown = event("a", 1, 2), endless = event("a", 1, 2), infinite = event("a", 1, 2);
  unknown.kind = static_cast<EventKind>(99);
  std::fill_n(endless.name, sizeof endless.name, 'x');
  infinite.flops = HUGE_VAL;
  for (const TraceEvent& e : {backwards, unknown, endless, infinite}) {
    write(bytes(header) + bytes(e));
    EXPECT_THROW(read_trace(path), RecordError);
  }
  header.event_bytes = 8;
  write(bytes(header));
  EXPECT_THROW(read_trace(path), RecordError);
  write("no trace");
  EXPECT_THROW(read_trace(path), RecordError);
  EXPECT_THROW(read_trace((folder.path() / "none").string()), RecordError);
}

}  // namespace
}  // namespace fattn::lab::profile
