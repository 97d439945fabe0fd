// What a training run is made of beside its network: learning rates, loss scales, options, checkpoints, log, event files, folders.
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <sstream>

#include "gpt2/error.h"
#include "gpt2/train/checkpoint.h"
#include "gpt2/train/event_file.h"
#include "gpt2/train/log.h"
#include "gpt2/train/run_folder.h"
#include "gpt2/train/scaler.h"
#include "gpt2/train/schedule.h"
#include "gpt2/train/work.h"
#include "gpt2/weights/tensors.h"
#include "temporary_folder.h"
#include "thrown.h"

namespace fattn::gpt2 {
namespace {

namespace fs = std::filesystem;
using test::thrown_by;

std::string text_of(const fs::path& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

TEST(Gpt2TrainSmall, LearningRatesRiseAndFall) {
  Schedule s{Curve::kCosine, 2, 0.1, 4, 14};
  EXPECT_DOUBLE_EQ(learning_rate(s, 1), 0.5);
  EXPECT_DOUBLE_EQ(learning_rate(s, 4), 2);
  EXPECT_DOUBLE_EQ(learning_rate(s, 9), 1.1);  // half way from the peak to the floor
  EXPECT_DOUBLE_EQ(learning_rate(s, 14), 0.2);
  EXPECT_GT(learning_rate(s, 6), 2 - (2 - 0.2) * 0.2);  // above the straight line at first
  s.curve = Curve::kLinear;
  EXPECT_DOUBLE_EQ(learning_rate(s, 9), 1.1);
  EXPECT_DOUBLE_EQ(learning_rate(s, 6), 2 - (2 - 0.2) * 0.2);
  s.curve = Curve::kConstant;
  EXPECT_DOUBLE_EQ(learning_rate(s, 14), 2);
  s.warmup = 0;
  EXPECT_DOUBLE_EQ(learning_rate(s, 1), 2);
}

TEST(Gpt2TrainSmall, LossScalesGrowAndFallBack) {
  LossScaler scaler(true);
  EXPECT_EQ(scaler.scale(), 65536);
  EXPECT_TRUE(scaler.overflow());
  EXPECT_EQ(scaler.scale(), 32768);
  for (int64_t i = 0; i + 1 < LossScaler::kGrowth; ++i) scaler.good();
  EXPECT_EQ(scaler.scale(), 32768);
  scaler.good();
  EXPECT_EQ(scaler.scale(), 65536);
  EXPECT_EQ(scaler.state().overflows, 1);
  for (int i = 0; i < 16; ++i) EXPECT_TRUE(scaler.overflow());
  EXPECT_FALSE(scaler.overflow());  // it is 1
  LossScaler none(false);
  none.good();
  EXPECT_EQ(none.scale(), 1);
  EXPECT_FALSE(none.overflow());
}

TEST(Gpt2TrainSmall, OptionsComeBackAndDifferencesAreNamed) {
  TrainOptions options;
  options.dtype = DType::kBF16;
  options.schedule = {Curve::kLinear, 0.1 + 0.2, 1e-300, 7, 9};
  options.seed = uint64_t{1} << 63;
  EXPECT_EQ(options_from(nlohmann::json::parse(to_json(options).dump())), options);
  TrainOptions other = options;
  other.seqlen = 77;
  other.weight_decay = 0;
  const std::vector<Difference> all = differences(options, other);
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].flag, "--seqlen");
  EXPECT_EQ(all[0].is, "77");
  EXPECT_EQ(all[1].flag, "--weight-decay");
  nlohmann::json broken = nlohmann::json::parse(to_json(options).dump());
  broken["seqlen"] = "x";
  EXPECT_NE(thrown_by([&] { options_from(broken); }).find("'seqlen' is text, not a whole number"), std::string::npos);
  broken.erase("seqlen");
  EXPECT_NE(thrown_by([&] { options_from(broken); }).find("'seqlen' is missing"), std::string::npos);
}

TEST(Gpt2TrainSmall, WorkIsSixOperationsAWeight) {
  Config c;
  c.vocab_size = 100;
  c.n_embd = 8;
  c.n_inner = 32;
  c.n_layer = 3;
  c.n_head = c.n_kv_head = 2;
  const double weights = 3 * (8 * 24 + 8 * 8 + 2 * 8 * 32) + 8 * 100;
  EXPECT_DOUBLE_EQ(training_flops_per_token(c, 1), 6 * weights + 12 * 3 * 8);
  c.causal = false;
  EXPECT_DOUBLE_EQ(training_flops_per_token(c, 5), 6 * weights + 12 * 3 * 8 * 5);
}

// A model's arrays, with padding between parameters.
struct FakeArrays {
  explicit FakeArrays(const Config& config) {
    int64_t size = 0;
    for (const TensorSpec& t : tensors_of(config)) {
      parameters.push_back({t.name, t.shape, size, t.size(), t.shape.size() > 1});
      size += t.size() + 3;
    }
    for (auto& array : numbers) array.assign(static_cast<size_t>(size), 0);
    for (int a = 0; a < 4; ++a)
      for (const Parameter& p : parameters)
        for (int64_t i = p.offset; i < p.offset + p.size; ++i)
          numbers[a][static_cast<size_t>(i)] = static_cast<float>(std::sin(0.37 * static_cast<double>(i) + a));
    arrays = {&parameters, size, [this](Flat which) { return numbers[static_cast<int>(which)].data(); }};
  }
  std::vector<Parameter> parameters;
  std::vector<float> numbers[4];
  Arrays arrays;
};

Checkpoint some_checkpoint(DType dtype) {
  Checkpoint c;
  c.config.vocab_size = 31;
  c.config.n_embd = 8;
  c.config.n_inner = 32;
  c.config.n_layer = 1;
  c.config.n_head = c.config.n_kv_head = 2;
  c.config.n_positions = 16;
  c.options.dtype = dtype;
  c.state = {12, 11, 24, {1, 5}, {4096, 7, 1}};
  c.data = 0x0123456789abcdef;
  return c;
}

TEST(Gpt2TrainSmall, CheckpointsHoldAllThatTheNextStepDependsOn) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const test::TemporaryFolder folder;
    const Checkpoint written = some_checkpoint(dtype);
    const FakeArrays fake(written.config);
    const std::string path = write_checkpoint(folder.path().string(), written, fake.arrays, {{"merges.txt", "x"}});
    EXPECT_EQ(fs::path(path).filename(), "step-00000012");
    EXPECT_EQ(text_of(fs::path(path) / "merges.txt"), "x");
    const Checkpoint read = read_checkpoint(path);
    EXPECT_EQ(read.options, written.options);
    EXPECT_EQ(read.state.step, 12);
    EXPECT_EQ(read.state.updates, 11);
    EXPECT_EQ(read.state.draws, 24u);
    EXPECT_EQ(read.state.position.epoch, 1);
    EXPECT_EQ(read.state.position.batch, 5);
    EXPECT_EQ(read.state.scaler, written.state.scaler);
    EXPECT_EQ(read.data, written.data);
    const Weights weights = Weights::open(path, read.config);
    EXPECT_EQ(weights.tensors().front().dtype, dtype);
    std::vector<Flat> restored;
    restore_arrays(read, fake.arrays, [&](Flat which, const float* numbers) {
      restored.push_back(which);
      EXPECT_TRUE(std::equal(numbers, numbers + fake.arrays.flat_size, fake.numbers[static_cast<int>(which)].data()));
    });
    EXPECT_EQ(restored.size(), dtype == DType::kF32 ? 2u : 3u);
    if (dtype == DType::kF32) {
      for (const Parameter& p : fake.parameters)
        EXPECT_EQ(std::memcmp(weights.at(p.name).data, fake.numbers[0].data() + p.offset, static_cast<size_t>(p.size) * 4), 0) << p.name;
    }
  }
}

TEST(Gpt2TrainSmall, DamagedCheckpointsAreNamed) {
  const test::TemporaryFolder folder;
  const Checkpoint written = some_checkpoint(DType::kF32);
  const FakeArrays fake(written.config);
  const auto damaged = [&](const std::string& file, const std::string& said) {
    const fs::path path = write_checkpoint(folder.path().string(), written, fake.arrays, {});
    std::string bytes = text_of(path / file);
    bytes[bytes.size() - 5] ^= 1;
    std::ofstream(path / file, std::ios::binary) << bytes;
    const std::string error = thrown_by([&] { read_checkpoint(path.string()); });
    EXPECT_NE(error.find(said), std::string::npos) << error;
  };
  damaged("model.safetensors", "model.safetensors' is damaged");
  damaged("optimizer.safetensors", "optimizer.safetensors' is damaged");
  const fs::path path = write_checkpoint(folder.path().string(), written, fake.arrays, {});
  fs::resize_file(path / "optimizer.safetensors", 100);
  EXPECT_NE(thrown_by([&] { read_checkpoint(path.string()); }).find("has 100 bytes"), std::string::npos);
  fs::remove(path / "checkpoint.json");
  EXPECT_NE(thrown_by([&] { read_checkpoint(path.string()); }).find("Remove its folder"), std::string::npos);
}

TEST(Gpt2TrainSmall, UnfinishedCheckpointsAreNoneAndOldOnesGo) {
  const test::TemporaryFolder folder;
  const std::string out = folder.path().string();
  Checkpoint c = some_checkpoint(DType::kF32);
  const FakeArrays fake(c.config);
  for (const int64_t step : {5, 200, 1000, 123456789}) {
    c.state.step = step;
    write_checkpoint(out, c, fake.arrays, {});
  }
  for (const char* name : {".step-00000300.tmp", ".step-00000005.old.tmp", "step-7", "step-00000x07", "other"})
    fs::create_directory(folder.path() / name);
  std::vector<int64_t> steps;
  for (const FoundCheckpoint& found : find_checkpoints(out)) steps.push_back(found.step);
  EXPECT_EQ(steps, (std::vector<int64_t>{5, 200, 1000, 123456789}));
  remove_unfinished(out);
  EXPECT_FALSE(fs::exists(folder.path() / ".step-00000300.tmp") || fs::exists(folder.path() / ".step-00000005.old.tmp"));
  EXPECT_TRUE(fs::exists(folder.path() / "other"));
  remove_old(out, 0);
  EXPECT_EQ(find_checkpoints(out).size(), 4u);
  remove_old(out, 2);
  EXPECT_EQ(find_checkpoints(out).front().step, 1000);
}

TEST(Gpt2TrainSmall, ACheckpointThatCannotBeWrittenLeavesNothing) {
  const test::TemporaryFolder folder;
  const Checkpoint c = some_checkpoint(DType::kF16);
  FakeArrays fake(c.config);
  fake.numbers[0][5] = 1e6f;  // fp16 does not hold it
  const std::string error = thrown_by([&] { write_checkpoint(folder.path().string(), c, fake.arrays, {}); });
  EXPECT_NE(error.find("'wte.weight' has grown"), std::string::npos) << error;
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(Gpt2TrainSmall, LogsGoOnBehindTheCheckpoint) {
  const test::TemporaryFolder folder;
  const std::string path = (folder.path() / "log.jsonl").string();
  {
    TrainingLog log(path, 0);
    for (int64_t step = 1; step <= 5; ++step) {
      LogLine line;
      line.step = step;
      line.loss = 1.0 / static_cast<double>(step);
      log.add(line);
    }
  }
  std::ofstream(path, std::ios::app) << "{\"step\":6,\"lo";  // cut off
  TrainingLog log(path, 3);
  ASSERT_EQ(log.lines().size(), 3u);
  EXPECT_EQ(log.lines()[2].loss, 1.0 / 3);
  EXPECT_EQ(std::ranges::count(text_of(path), '\n'), 3);
  LogLine line;
  line.step = 4;
  line.loss = NAN;
  log.add(line);
  EXPECT_NE(text_of(path).find("\"step\":4,\"tokens\":0,\"targets\":0,\"loss\":null"), std::string::npos);
  std::ofstream(path) << "no log\n";
  EXPECT_THROW(TrainingLog(path, 3), std::runtime_error);
}

TEST(Gpt2TrainSmall, EventFilesAreFramedByTheirChecksums) {
  EXPECT_EQ(crc32c("123456789", 9), 0xe3069283u);  // the known check value
  const test::TemporaryFolder folder;
  EventFile events(folder.path().string(), 0);
  events.scalar("loss", 300, 2.5);
  events.scalar("loss", 301, NAN);  // left out
  events.flush();
  const std::string bytes = text_of(events.path());
  size_t at = 0, records = 0;
  while (at < bytes.size()) {
    uint64_t length = 0;
    uint32_t crc = 0;
    std::memcpy(&length, bytes.data() + at, 8);
    std::memcpy(&crc, bytes.data() + at + 8, 4);
    const uint32_t plain = crc32c(bytes.data() + at, 8);
    EXPECT_EQ(crc, (plain >> 15 | plain << 17) + 0xa282ead8u);
    at += 12 + length + 4;
    ++records;
  }
  EXPECT_EQ(at, bytes.size());
  EXPECT_EQ(records, 3u);
  EXPECT_NE(bytes.find(std::string("\x10\xac\x02", 3)), std::string::npos);                       // step 300
  EXPECT_NE(bytes.find(std::string("\x0a\x04loss\x15\x00\x00\x20\x40", 11)), std::string::npos);  // the tag, and 2.5 in four bytes
}

TEST(Gpt2TrainSmall, FoldersAreOfOneRunAndOneProcess) {
  const test::TemporaryFolder folder;
  const std::string out = (folder.path() / "run").string();
  { const RunFolder unused(out, false); }
  EXPECT_FALSE(fs::exists(out));  // nothing came of it
  RunDescription run;
  run.config.n_layer = 3;
  run.data = {"a", "b"};
  run.fingerprint = 77;
  {
    const RunFolder first(out, false);
    EXPECT_FALSE(first.before());
    first.describe(run);
    EXPECT_NE(thrown_by([&] { RunFolder(out, true); }).find("another process trains"), std::string::npos);
  }
  EXPECT_NE(thrown_by([&] { RunFolder(out, false); }).find("--resume"), std::string::npos);
  const RunFolder again(out, true);
  ASSERT_TRUE(again.before());
  EXPECT_EQ(again.before()->config.n_layer, 3);
  EXPECT_EQ(again.before()->data, run.data);
  EXPECT_EQ(again.before()->fingerprint, 77u);
  std::ofstream(folder.path() / "file") << "x";
  EXPECT_NE(thrown_by([&] { RunFolder(folder.path().string(), false); }).find("holds something else"), std::string::npos);
  EXPECT_NE(thrown_by([&] { RunFolder((folder.path() / "file").string(), false); }).find("is no folder"), std::string::npos);
}

}  // namespace
}  // namespace fattn::gpt2
