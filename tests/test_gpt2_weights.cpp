// GPT-2's weights as a program sees them: by name, aligned, turned and padded; conversions of every 16-bit number.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "gpt2/error.h"
#include "gpt2/weights/convert.h"
#include "gpt2/weights/initialise.h"
#include "gpt2/weights/save.h"
#include "gpt2/weights/tensors.h"
#include "gpt2/weights/weights.h"
#include "temporary_folder.h"

namespace fattn::gpt2 {
namespace {

Config tiny() {
  Config c;
  c.vocab_size = 5;
  c.n_positions = 4;
  c.n_embd = 6;
  c.n_layer = 2;
  c.n_head = c.n_kv_head = 2;
  c.n_inner = 24;
  return c;
}

std::string saved(const test::TemporaryFolder& folder, const Config& config, DType dtype) {
  const std::string path = (folder.path() / "model").string();
  SaveOptions options;
  options.dtype = dtype;
  save_model(path, tensors_of(config), fill_at_random(config, dtype, 1), {{"config.json", to_json(config, dtype)}}, options);
  return path;
}

TEST(Gpt2WeightsSmall, AreFoundByTheirNames) {
  const test::TemporaryFolder folder;
  const std::string path = saved(folder, tiny(), DType::kF32);
  const Config config = read_config(path);
  const Weights weights = Weights::open(path, config);
  ASSERT_EQ(weights.tensors().size(), tensors_of(config).size());
  EXPECT_EQ(weights.bytes(), static_cast<uint64_t>(parameters_of(config)) * 4);
  EXPECT_TRUE(weights.has_prefix());
  for (const TensorSpec& spec : tensors_of(config)) {
    const Weight& weight = weights.at(spec.name);
    std::vector<float> expected(static_cast<size_t>(spec.size()));
    initialise(spec, config, 1, 0, expected.size(), expected.data());
    EXPECT_EQ(weight.shape, spec.shape);
    EXPECT_EQ(weight.conv1d, spec.conv1d);
    EXPECT_EQ(std::memcmp(weight.data, expected.data(), weight.bytes), 0) << spec.name;
  }
  EXPECT_EQ(&weights.at("lm_head.weight"), &weights.at("wte.weight"));
  EXPECT_THROW(weights.at("h.2.ln_1.weight"), std::out_of_range);
}

TEST(Gpt2WeightsSmall, AreTurnedAndPadded) {
  const test::TemporaryFolder folder;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const std::string path = saved(folder, tiny(), dtype);
    const Weights weights = Weights::open(path, tiny());
    const Weight& w = weights.at("h.1.mlp.c_fc.weight");
    const auto turned = transposed(w);
    const size_t size = size_of(dtype);
    for (size_t r = 0; r < 6; ++r)
      for (size_t c = 0; c < 24; ++c)
        ASSERT_EQ(std::memcmp(turned.get() + (c * 6 + r) * size, static_cast<const char*>(w.data) + (r * 24 + c) * size, size), 0);
    const Weight& wte = weights.at("wte.weight");
    ASSERT_EQ(tiny().padded_vocab(), 64);
    const auto padded = with_rows(wte, 64);
    EXPECT_EQ(std::memcmp(padded.get(), wte.data, wte.bytes), 0);
    for (size_t i = wte.bytes; i < 64 * 6 * size; ++i) ASSERT_EQ(padded[i], std::byte{0});
    EXPECT_THROW(with_rows(wte, 4), std::invalid_argument);
    EXPECT_THROW(transposed(weights.at("ln_f.bias")), std::invalid_argument);
    std::filesystem::remove_all(path);
  }
}

// A header whose length leaves the data at an odd place.
TEST(Gpt2WeightsSmall, AreAlignedWhereTheFileIsNot) {
  const test::TemporaryFolder folder;
  const std::string path = saved(folder, tiny(), DType::kF32), name = path + "/model.safetensors";
  std::string content = files::read_whole(name, 1 << 20);
  uint64_t length = 0;
  std::memcpy(&length, content.data(), 8);
  content.insert(8 + length, 1, ' ');
  ++length;
  std::memcpy(content.data(), &length, 8);
  std::FILE* file = std::fopen(name.c_str(), "wb");
  ASSERT_EQ(std::fwrite(content.data(), 1, content.size(), file), content.size());
  std::fclose(file);
  const Weights weights = Weights::open(path, tiny());
  for (const Weight& weight : weights.tensors()) EXPECT_EQ(reinterpret_cast<uintptr_t>(weight.data) % 4, 0u);
  EXPECT_EQ(static_cast<const float*>(weights.at("h.0.ln_1.weight").data)[5], 1.0f);
}

TEST(Gpt2WeightsSmall, RandomNumbersDependOnTheirPlaceAlone) {
  const TensorSpec spec{"h.0.mlp.c_fc.weight", {6, 24}, true, Start::kNormal};
  std::vector<float> whole(144);
  initialise(spec, tiny(), 9, 0, 144, whole.data());
  for (const int64_t begin : {0, 1, 2, 77})
    for (const size_t count : {1u, 2u, 5u, 60u}) {
      std::vector<float> part(count);
      initialise(spec, tiny(), 9, begin, count, part.data());
      EXPECT_EQ(std::memcmp(part.data(), whole.data() + begin, count * 4), 0) << begin << " " << count;
    }
}

TEST(Gpt2ConvertSmall, EverySixteenBitNumberComesBack) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    std::vector<uint16_t> all(65536), back(65536);
    std::vector<float> wide(65536);
    for (size_t i = 0; i < all.size(); ++i) all[i] = static_cast<uint16_t>(i);
    EXPECT_TRUE(convert(all.data(), dtype, wide.data(), DType::kF32, all.size()));
    EXPECT_TRUE(convert(wide.data(), DType::kF32, back.data(), dtype, all.size()));
    const uint16_t infinity = dtype == DType::kF16 ? 0x7c00 : 0x7f80;
    for (size_t i = 0; i < all.size(); ++i) {
      if ((i & 0x7fff) > infinity)
        EXPECT_TRUE(std::isnan(wide[i]) && (back[i] & 0x7fff) > infinity) << i;
      else
        EXPECT_EQ(back[i], all[i]);
    }
  }
}

// The nearest of the two neighbours, of ties the even one, for numbers between all neighbours.
TEST(Gpt2ConvertSmall, RoundsToTheNearest) {
  for (const DType dtype : {DType::kF16, DType::kBF16}) {
    const auto value = [&](uint32_t bits) {
      const auto narrow = static_cast<uint16_t>(bits);
      float wide = 0;
      convert(&narrow, dtype, &wide, DType::kF32, 1);
      return static_cast<double>(wide);
    };
    const uint32_t largest = dtype == DType::kF16 ? 0x7bff : 0x7f7f;
    for (uint32_t bits = 0; bits < largest; bits += 3) {
      const double low = value(bits), high = value(bits + 1), middle = (low + high) / 2;
      const float tie = static_cast<float>(middle);
      if (static_cast<double>(tie) != middle) continue;  // two subnormal numbers of bf16
      const float below = std::nextafter(tie, 0.0f), above = std::nextafter(tie, 1e30f);
      for (const auto& [x, expected] : std::map<float, uint32_t>{{below, bits}, {tie, bits + bits % 2}, {above, bits + 1}}) {
        uint16_t narrow = 0;
        EXPECT_TRUE(convert(&x, DType::kF32, &narrow, dtype, 1));
        ASSERT_EQ(narrow, expected) << x;
      }
    }
  }
  const float large = 65520, fits = 65519, infinite = std::numeric_limits<float>::infinity();
  uint16_t narrow = 0;
  EXPECT_FALSE(convert(&large, DType::kF32, &narrow, DType::kF16, 1));
  EXPECT_TRUE(convert(&fits, DType::kF32, &narrow, DType::kF16, 1));
  EXPECT_EQ(narrow, 0x7bff);
  EXPECT_TRUE(convert(&infinite, DType::kF32, &narrow, DType::kF16, 1));
  EXPECT_EQ(narrow, 0x7c00);
}

TEST(Gpt2ConfigSmall, WhatIsWrittenIsRead) {
  Config c = tiny();
  c.n_kv_head = 1;
  c.n_inner = 7;
  c.n_embd = 12;
  c.positions = Positions::kRotary;
  c.rope_theta = 5e5;
  c.causal = false;
  c.tied_head = false;
  c.activation = Activation::kGelu;
  c.eos_token_id = 3;
  const Config back = parse_config(to_json(c, DType::kF16));
  EXPECT_EQ(to_json(back, DType::kF16), to_json(c, DType::kF16));
  EXPECT_EQ(back.n_inner, 7);
  EXPECT_EQ(back.qkv_width(), 12 + 2 * 6);
  EXPECT_FALSE(back.causal || back.tied_head || back.bos_token_id);
  EXPECT_EQ(parameters_of(preset("gpt2")), 124'439'808);
  EXPECT_THROW(preset("gpt2-tiny"), Error);
}

}  // namespace
}  // namespace fattn::gpt2
