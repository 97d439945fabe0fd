// Two passes over the weights: one that counts, one that writes.
#include "gpt2/model/model.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "gpt2/error.h"
#include "gpt2/weights/convert.h"

namespace fattn::gpt2 {
namespace {

size_t bytes_of(const Weight& weight, DType dtype) { return static_cast<size_t>(weight.size()) * size_of(dtype); }

// In the model's dtype; what has another is converted into `room`.
const void* in_dtype(const Weight& weight, DType dtype, std::vector<std::byte>& room) {
  if (weight.dtype == dtype) return weight.data;
  room.resize(bytes_of(weight, dtype));
  if (!convert(weight.data, weight.dtype, room.data(), dtype, static_cast<size_t>(weight.size())))
    throw Error(weight.name + " has a number that " + name_of(dtype) + " does not hold; use bf16 or fp32");
  return room.data();
}

}  // namespace

Products products_of(const Config& c, DType dtype, int64_t rows, int64_t logit_rows) {
  const auto activation = c.activation == Activation::kGelu ? ops::Activation::kGelu : ops::Activation::kGeluTanh;
  Products p;
  p.qkv = {rows, c.n_embd, c.qkv_width(), dtype, dtype};
  p.attn_proj = {rows, c.n_embd, c.n_embd, dtype, DType::kF32, ops::Activation::kNone, true};
  p.fc = {rows, c.n_embd, c.n_inner, dtype, dtype, activation};
  p.mlp_proj = {rows, c.n_inner, c.n_embd, dtype, DType::kF32, ops::Activation::kNone, true};
  p.head = {logit_rows, c.n_embd, c.padded_vocab(), dtype, DType::kF32};
  return p;
}

size_t weight_bytes(const Config& c, DType dtype, const ops::Device& device) {
  const Products p = products_of(c, dtype, 1, 1);
  size_t packed = 0;
  for (const ops::Linear* linear : {&p.qkv, &p.attn_proj, &p.fc, &p.mlp_proj}) packed += ops::packed_bytes(*linear, device);
  size_t bytes = 0;
  const size_t tables = static_cast<size_t>(c.vocab_size + (c.positions == Positions::kLearned ? c.n_positions : 0) + 2);
  const auto layers = static_cast<size_t>(c.n_layer);
  const size_t vectors = static_cast<size_t>(4 * c.n_embd + c.qkv_width() + c.n_embd + c.n_inner + c.n_embd) * size_of(dtype) +
                         (device.place == ops::Place::kCuda ? static_cast<size_t>(2 * c.n_embd) * sizeof(float) : 0);
  if (__builtin_mul_overflow(packed + vectors, layers, &bytes)) throw Error("the weights need more bytes than 64-bit numbers count");
  return bytes + tables * static_cast<size_t>(c.n_embd) * size_of(dtype) + ops::packed_bytes(p.head, device);
}

ops::Device device_of(const Compute& compute) {
  ops::Device device;
  device.place = compute.gpu ? ops::Place::kCuda : compute.reference ? ops::Place::kReference : ops::Place::kCpu;
  device.gpu = compute.gpu.value_or(0);
  device.isa = compute.isa;
  device.threads = compute.threads;
  device.executor = compute.executor;
  return device;
}

MemorySpace space_of(const Compute& compute) { return compute.gpu ? MemorySpace(*compute.gpu) : MemorySpace(); }

Model Model::load(const std::string& folder, const Compute& compute) {
  const Config config = read_config(folder);
  return Model(config, Weights::open(folder, config), compute);
}

Model::Model(const Config& config, Weights weights, const Compute& compute)
    : config_(config),
      weights_(std::move(weights)),
      compute_(compute),
      dtype_(compute.dtype.value_or(weights_.at("wte.weight").dtype)),
      layers_(static_cast<size_t>(config.n_layer)) {
  const Products p = products_of(config_, dtype_, 1, 1);
  const ops::Device on = device();
  const MemorySpace space = space_of(compute_);
  BlockLayout layout;
  std::vector<std::function<void()>> fill;
  std::vector<std::byte> room, packing;
  // Calls write(place on the host) for a piece of the block.
  const auto place_piece = [&](size_t place, size_t bytes, const auto& write) {
    if (!space.on_gpu()) return write(block_.at(place));
    packing.resize(std::max(packing.size(), bytes));
    write(packing.data());
    space.upload(block_.at(place), packing.data(), bytes);
  };
  const auto copied_in = [&](const std::string& name, DType dtype, const void** to, bool read) {
    const Weight& weight = weights_.at(name);
    const size_t bytes = bytes_of(weight, dtype), place = layout.add(bytes);
    if (read) bytes_read_ += bytes;
    fill.push_back([this, &weight, &place_piece, dtype, to, place, bytes] {
      place_piece(place, bytes, [&](std::byte* piece) {
        if (!convert(weight.data, weight.dtype, piece, dtype, static_cast<size_t>(weight.size())))
          throw Error(weight.name + " has a number that " + name_of(dtype) + " does not hold; use bf16 or fp32");
      });
      *to = block_.at(place);
    });
  };
  const auto copied = [&](const std::string& name, const void** to, bool read) { copied_in(name, dtype_, to, read); };
  const auto packed = [&](const std::string& name, const ops::Linear& problem, const void** to) {
    const Weight& weight = weights_.at(name);
    const size_t bytes = ops::packed_bytes(problem, on), place = layout.add(bytes);
    bytes_read_ += bytes;
    fill.push_back([this, &weight, &problem, &room, &place_piece, on, to, place, bytes] {
      place_piece(place, bytes, [&](std::byte* piece) {
        ops::pack(problem, on, in_dtype(weight, dtype_, room), weight.conv1d, weight.conv1d ? problem.out : weight.shape[0], piece);
      });
      *to = block_.at(place);
    });
  };
  const auto table = [&](const std::string& name, const void** to) {
    const Weight& weight = weights_.at(name);
    if (weight.dtype == dtype_ && !space.on_gpu())
      *to = weight.data;
    else
      copied(name, to, false);
  };
  const auto norm = [&](const std::string& name, NormWeights& to) {
    copied(name + ".weight", &to.weight, true);
    copied(name + ".bias", &to.bias, true);
  };
  const auto linear = [&](const std::string& name, const ops::Linear& problem, LinearWeights& to) {
    packed(name + ".weight", problem, &to.weight);
    copied(name + ".bias", &to.bias, true);
    if (space.on_gpu() && problem.accumulate) copied_in(name + ".bias", DType::kF32, &to.bias_single, false);
  };
  table("wte.weight", &token_table_);
  if (config_.positions == Positions::kLearned) table("wpe.weight", &position_table_);
  for (int64_t i = 0; i < config_.n_layer; ++i) {
    const std::string h = "h." + std::to_string(i) + ".";
    LayerWeights& layer = layers_[static_cast<size_t>(i)];
    norm(h + "ln_1", layer.ln_1);
    linear(h + "attn.c_attn", p.qkv, layer.qkv);
    linear(h + "attn.c_proj", p.attn_proj, layer.attn_proj);
    norm(h + "ln_2", layer.ln_2);
    linear(h + "mlp.c_fc", p.fc, layer.fc);
    linear(h + "mlp.c_proj", p.mlp_proj, layer.mlp_proj);
  }
  norm("ln_f", last_norm_);
  packed("lm_head.weight", p.head, &head_);
  block_ = Block(layout.total(), "the weights", space);
  for (const auto& one : fill) one();
}

}  // namespace fattn::gpt2
