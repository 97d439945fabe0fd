// Gradients and training steps of a model's folder, for tests/python/test_gpt2_training.py to compare with torch's.
//   gpt2_gradients MODEL BATCHES OUT [--dtype fp32|bf16|fp16] [--threads N] [--learning-rate X] [--clip X] [--checkpoints]
// BATCHES is a safetensors file: ids and targets, (steps, sequences, seqlen) of I32. OUT gets the gradients of the first batch's mean loss by name.
// With a learning rate a step of AdamW follows each batch. stdout: {"losses": [...], "seconds": [...]}, of each batch.
#include <chrono>
#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files/safetensors/reader.h"
#include "files/safetensors/writer.h"
#include "gpt2/train/network.h"

namespace {

using namespace fattn::gpt2;
namespace st = fattn::files::safetensors;

struct Arguments {
  std::string model, batches, out;
  fattn::DType dtype = fattn::DType::kF32;
  int threads = 0;
  double learning_rate = 0, clip = 0;
  bool checkpoints = false;
};

Arguments parse(int argc, char** argv) {
  if (argc < 4) throw std::runtime_error("gpt2_gradients MODEL BATCHES OUT [--dtype D] [--threads N] [--learning-rate X] [--clip X] [--checkpoints]");
  Arguments a{argv[1], argv[2], argv[3]};
  for (int i = 4; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag == "--checkpoints") {
      a.checkpoints = true;
      continue;
    }
    if (++i == argc) throw std::runtime_error("a flag without a value");
    const std::string value = argv[i];
    if (flag == "--dtype")
      a.dtype = value == "bf16" ? fattn::DType::kBF16 : value == "fp16" ? fattn::DType::kF16 : fattn::DType::kF32;
    else if (flag == "--threads")
      a.threads = std::stoi(value);
    else if (flag == "--learning-rate")
      a.learning_rate = std::stod(value);
    else if (flag == "--clip")
      a.clip = std::stod(value);
    else
      throw std::runtime_error("an unknown flag");
  }
  return a;
}

void write_gradients(Network& network, const std::string& path) {
  std::vector<st::TensorData> tensors;
  for (const Parameter& p : network.parameters()) tensors.push_back({p.name, "F32", p.shape, network.flat(Flat::kGradient) + p.offset});
  fattn::files::WholeFile file(path);
  st::write(file, std::move(tensors), {});
}

void run(const Arguments& a) {
  const Config config = read_config(a.model);
  const st::Reader reader(a.batches);
  const auto *ids = reader.find("ids"), *targets = reader.find("targets");
  if (!ids || !targets || ids->shape.size() != 3 || ids->shape != targets->shape) throw std::runtime_error("no ids and targets of one shape");
  const auto id_bytes = reader.read(*ids), target_bytes = reader.read(*targets);
  const auto count = static_cast<int64_t>(ids->shape[0]), sequences = static_cast<int64_t>(ids->shape[1]);
  const auto seqlen = static_cast<int64_t>(ids->shape[2]), size = sequences * seqlen;
  NetworkOptions options;
  options.dtype = a.dtype;
  options.sequences = sequences;
  options.seqlen = seqlen;
  options.checkpoint_activations = a.checkpoints;
  Compute compute;
  compute.threads = a.threads;
  Network network(config, Weights::open(a.model, config), options, compute);
  std::vector<int32_t> positions(static_cast<size_t>(size));
  for (int64_t i = 0; i < size; ++i) positions[static_cast<size_t>(i)] = static_cast<int32_t>(i % seqlen);
  std::string losses, seconds;
  for (int64_t step = 0; step < count; ++step) {
    Batch batch{sequences, seqlen, reinterpret_cast<const int32_t*>(id_bytes.get()) + step * size,
                reinterpret_cast<const int32_t*>(target_bytes.get()) + step * size, positions.data()};
    for (int64_t i = 0; i < size; ++i) batch.target_count += batch.targets[i] >= 0;
    const auto begin = std::chrono::steady_clock::now();
    network.zero_gradients();
    const LossSum loss = network.accumulate(batch, 1.0 / static_cast<double>(batch.target_count), static_cast<uint64_t>(step));
    if (step == 0) write_gradients(network, a.out);
    if (a.learning_rate > 0) {
      AdamW adam;
      adam.learning_rate = a.learning_rate;
      adam.clip = a.clip;
      adam.step = step + 1;
      network.update(adam);
    }
    const double taken = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const auto append = [&](std::string& list, double x) {
      char text[32];
      std::snprintf(text, sizeof text, "%s%.9g", list.empty() ? "" : ", ", x);
      list += text;
    };
    append(losses, loss.loss / static_cast<double>(loss.targets));
    append(seconds, taken);
  }
  std::printf("{\"losses\": [%s], \"seconds\": [%s]}\n", losses.c_str(), seconds.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    run(parse(argc, argv));
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 2;
  }
}
