#include "lab/advise/model_size.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

namespace fattn::lab {

int64_t ModelSize::shape_parameters() const {
  return vocabulary * width + positions * width + layers * (12 * width * width + 13 * width) + 2 * width;
}

int64_t ModelSize::parameters(int64_t seqlen) const {
  return (given_parameters > 0 ? given_parameters : shape_parameters()) + std::max<int64_t>(0, seqlen - positions) * width;
}

const std::vector<ModelSize>& gpt2_models() {
  static const std::vector<ModelSize> models = {{"small", 12, 768, 12}, {"medium", 24, 1024, 16}, {"large", 36, 1280, 20}, {"xl", 48, 1600, 25}};
  return models;
}

ModelSize model_with(int64_t parameters) {
  constexpr int64_t kMostWidth = 65536, kHeaddim = 64, kWideHeaddim = 128;
  ModelSize best;
  double least = 0;
  for (int64_t width = kHeaddim; width <= kMostWidth; width += width < 2048 ? kHeaddim : kWideHeaddim) {
    ModelSize m;
    m.width = width;
    m.nheads = width / (width < 2048 ? kHeaddim : kWideHeaddim);
    m.layers = 0;
    const double rest = static_cast<double>(parameters - m.shape_parameters());
    const auto of_layer = static_cast<double>(12 * width * width + 13 * width);
    m.layers = std::clamp<int64_t>(static_cast<int64_t>(std::llround(rest / of_layer)), 1, 1000);
    // GPT-2 small has a width of 64 times its layers, GPT-3 of 128.
    const double ratio = static_cast<double>(width) / static_cast<double>(m.layers);
    const double off = std::fabs(static_cast<double>(m.shape_parameters()) / static_cast<double>(parameters) - 1);
    const double cost = off + 0.02 * std::fabs(std::log(ratio / 96));
    if (least != 0 && !(cost < least)) continue;
    least = cost;
    best = m;
  }
  best.name = "params=" + std::to_string(parameters);
  best.given_parameters = parameters;
  return best;
}

std::optional<ModelSize> model_of(const std::string& text, std::string& why) {
  for (const ModelSize& model : gpt2_models())
    if (text == model.name) return model;
  const std::string prefix = "params=";
  if (text.rfind(prefix, 0) == 0) {
    char* end = nullptr;
    double count = std::strtod(text.c_str() + prefix.size(), &end);
    const std::string unit = end;
    for (const auto& [name, factor] : {std::pair{"", 1.0}, {"K", 1e3}, {"k", 1e3}, {"M", 1e6}, {"m", 1e6}, {"B", 1e9}, {"b", 1e9}, {"T", 1e12}})
      if (unit == name && end != text.c_str() + prefix.size()) {
        count *= factor;
        constexpr double kLeast = 1e4, kMost = 1e13;
        if (count >= kLeast && count <= kMost) return model_with(static_cast<int64_t>(std::llround(count)));
        why = "has no number of parameters from 1e4 to 1e13";
        return std::nullopt;
      }
    why = "has no number of parameters; write it as 7e9, 7B or 350M";
    return std::nullopt;
  }
  why = "is no model; allowed: small, medium, large, xl (GPT-2's), or params=N";
  return std::nullopt;
}

}  // namespace fattn::lab
