// Calibrations: what is written is read, what is broken or another machine's is refused in plain words, and measuring finds something everywhere.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>

#include "lab/calibrate.h"
#include "lab/calibration.h"
#include "temporary_folder.h"

namespace fattn::lab {
namespace {

using Json = nlohmann::ordered_json;

Calibration example(bool cuda = false) {
  Calibration c;
  c.device = cuda ? "cuda" : "cpu";
  c.machine = identity_of("cpu");
  double value = 1.5;
  for (const Quantity& q : quantities(cuda)) c.measured[q.name] = {value, value / 2, value *= 1.5, 9, ""};
  for (const char* name : {"threads", "logical_cpus", "l1d_bytes", "l2_bytes", "l3_bytes", "memory_bytes", "multiprocessors",
                           "shared_per_multiprocessor_bytes", "shared_per_block_bytes", "registers_per_multiprocessor"})
    c.facts[name] = 64;
  c.measured[quantities(cuda)[2].name] = {0, 0, 0, 0, "no such products"};
  c.seconds = 3;
  c.environment = {{"date", "2026-01-01T00:00:00Z"}};
  return c;
}

std::string refusal(const std::string& text) {
  try {
    calibration_from_json(text, "FILE");
  } catch (const CalibrationError& error) {
    return error.what();
  }
  return "";
}

void expect_refused(const std::string& text, const std::string& why) {
  const std::string message = refusal(text);
  EXPECT_NE(message.find(why), std::string::npos) << "'" << message << "' for " << text.substr(0, 200);
  EXPECT_NE(message.find("the calibration FILE"), std::string::npos);
  EXPECT_NE(message.find("fattn calibrate"), std::string::npos);
}

TEST(LabCalibrationSmall, WhatIsWrittenIsRead) {
  for (const bool cuda : {false, true}) {
    const Calibration c = example(cuda), read = calibration_from_json(to_json(c).dump(), "FILE");
    EXPECT_EQ(to_json(read).dump(), to_json(c).dump());
    EXPECT_EQ(read.machine, c.machine);
    EXPECT_EQ(read.of("exp_per_s"), c.of("exp_per_s"));
    EXPECT_THROW(read.of("no such quantity"), std::out_of_range);
  }
}

TEST(LabCalibrationSmall, WhatIsCutOffIsRefused) {
  const std::string text = to_json(example()).dump();
  for (size_t length = 0; length < text.size(); length += length % 7 + 1) expect_refused(text.substr(0, length), "no JSON, or cut off");
}

TEST(LabCalibrationSmall, WhatIsNoCalibrationIsRefused) {
  const auto spoilt = [](auto&& spoil) {
    Json json = to_json(example());
    spoil(json);
    return json.dump();
  };
  expect_refused("[]", "no calibration of fattn");
  expect_refused("{\"fattn_record\": 1}", "no calibration of fattn");
  expect_refused(spoilt([](Json& j) { j["fattn_calibration"] = 2; }), "version 2");
  expect_refused(spoilt([](Json& j) { j["fattn_calibration"] = "\x01"; }), "version");
  expect_refused(spoilt([](Json& j) { j["device"] = "tpu"; }), "neither cpu nor cuda");
  expect_refused(spoilt([](Json& j) { j["device"] = "cuda"; }), "no 'multiprocessors'");  // the quantities are a CPU's
  expect_refused(spoilt([](Json& j) { j["machine"]["processor"] = 7; }), "no text");
  expect_refused(spoilt([](Json& j) { j["measured"].erase("call_s"); }), "no 'call_s'");
  expect_refused(spoilt([](Json& j) { j["measured"]["call_s"] = 3; }), "'call_s' is number");
  expect_refused(spoilt([](Json& j) { j["measured"]["call_s"]["value"] = "3"; }), "'value' is string");
  expect_refused(spoilt([](Json& j) { j["measured"]["call_s"]["value"] = -1; }), "above 0");
  expect_refused(spoilt([](Json& j) { j["measured"]["call_s"]["high"] = 1e-9; }), "inside its range");
  expect_refused(spoilt([](Json& j) { j["measured"]["call_s"]["low"] = std::nan(""); }), "'low' is null");
  expect_refused(spoilt([](Json& j) { j["measured"]["call_s"]["samples"] = 1.5; }), "1.5 samples");
  expect_refused(spoilt([](Json& j) { j["measured"]["call_s"] = {{"value", nullptr}, {"reason", ""}}; }), "neither a value nor a reason");
  expect_refused(spoilt([](Json& j) { j["facts"]["threads"] = -2; }), "'threads' is -2");
  expect_refused(spoilt([](Json& j) { j.erase("environment"); }), "no 'environment'");
  for (const char* number : {"NaN", "Infinity", "1e999", "nan"}) {
    std::string text = to_json(example()).dump();
    text.replace(text.find("\"seconds\":3.0") + 10, 3, number);
    expect_refused(text, "");
  }
}

// Whatever a byte becomes, what is read has finite numbers, or it is refused: nothing else is thrown.
TEST(LabCalibrationSmall, SpoiltBytes) {
  const std::string whole = to_json(example()).dump();
  std::mt19937 random(35);
  int refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string text = whole;
    for (int n = 0; n < 1 + i % 3; ++n) text[random() % text.size()] = static_cast<char>(random());
    try {
      const Calibration c = calibration_from_json(text, "FILE");
      for (const auto& [name, m] : c.measured) {
        ASSERT_TRUE(std::isfinite(m.value) && m.low <= m.value && m.value <= m.high) << name;
      }
      for (const auto& [name, value] : c.facts) {
        ASSERT_TRUE(value >= 0 && std::isfinite(value)) << name;
      }
    } catch (const CalibrationError&) {
      ++refused;
    }
  }
  EXPECT_GT(refused, 2000);
}

TEST(LabCalibrationSmall, FilesThatAreNone) {
  const test::TemporaryFolder folder;
  const auto why = [&](const std::string& name) {
    try {
      read_calibration(folder.path() / name);
    } catch (const CalibrationError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_NE(why("absent").find("there is no calibration"), std::string::npos) << why("absent");
  ASSERT_EQ(mkfifo((folder.path() / "fifo").c_str(), 0600), 0);
  EXPECT_NE(why("fifo").find("no regular file"), std::string::npos);
  EXPECT_NE(why("").find("no regular file"), std::string::npos);
  std::ofstream(folder.path() / "large") << std::string((1 << 20) + 1, ' ');
  EXPECT_NE(why("large").find("at most"), std::string::npos);
  std::ofstream(folder.path() / "good") << to_json(example()).dump(2);
  EXPECT_EQ(why("good"), "");
}

TEST(LabCalibrationSmall, AnotherMachinesIsNotServed) {
  Calibration c = example();
  EXPECT_EQ(why_not_served(c, "cpu"), "");
  c.machine[1].second = "Another Processor";
  std::string why = why_not_served(c, "cpu");
  EXPECT_EQ(why.rfind("its processor was 'Another Processor', here it is '", 0), 0u) << why;
  c.machine.erase(c.machine.begin());
  why = why_not_served(c, "cpu");
  EXPECT_EQ(why.rfind("its fattn version was not noted, here it is ", 0), 0u) << why;
  EXPECT_EQ(why_not_served(example(true), "cpu"), "it is of a GPU, not of cpu");
}

// The rates of this machine, from one short sample each: all there, and a cache no slower than what is behind it by more than noise explains.
TEST(LabCalibrate, MeasuresEverything) {
  CalibrateOptions options;
  options.samples = 1;
  options.sample_seconds = 1e-3;
  int last = -1;
  options.progress = [&](int done, int total, const std::string&) {
    EXPECT_GT(done, last);
    EXPECT_LE(done, total);
    last = done;
  };
  const Calibration c = calibrate(options);
  EXPECT_EQ(last, static_cast<int>(quantities(false).size()));
  for (const Quantity& q : quantities(false)) {
    const Measured& m = c.measured.at(q.name);
    EXPECT_TRUE(m.known() || !m.reason.empty()) << q.name;
  }
  for (const char* name : {"fma_flops_per_s", "exp_per_s", "dram_read_bytes_per_s", "dram_copy_bytes_per_s_one_thread", "call_s"})
    EXPECT_GT(c.of(name), 0) << name;
  EXPECT_GT(c.of("fma_flops_per_s_one_thread"), c.of("exp_per_s_one_thread"));
  if (c.of("l1_read_bytes_per_s") > 0) {
    EXPECT_GT(c.of("l1_read_bytes_per_s"), c.of("dram_read_bytes_per_s"));
  }
  EXPECT_EQ(why_not_served(calibration_from_json(to_json(c).dump(), "FILE"), "cpu"), "");
}

}  // namespace
}  // namespace fattn::lab
