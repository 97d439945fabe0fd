// The presets. Heads and head sizes are those of the models' published configurations.
#include "cli/presets.h"

namespace fattn::cli {
namespace {

Preset preset(const char* name, int64_t batch, int64_t seqlen, int64_t nheads, int64_t nheads_k, int64_t headdim, bool causal, bool grad = true) {
  Preset p;
  p.name = name;
  p.spec.batch = batch;
  p.spec.seqlen_q = p.spec.seqlen_k = seqlen;
  p.spec.nheads = nheads;
  p.spec.nheads_k = nheads_k;
  p.spec.headdim = p.spec.headdim_v = headdim;
  p.spec.causal = causal;
  p.grad = grad;
  return p;
}

}  // namespace

const std::vector<Preset>& presets() {
  static const std::vector<Preset> all = {
      preset("gpt2-small", 8, 1024, 12, 12, 64, true), preset("gpt2-medium", 8, 1024, 16, 16, 64, true),
      preset("gpt2-large", 4, 1024, 20, 20, 64, true), preset("gpt2-xl", 4, 1024, 25, 25, 64, true),
      preset("gpt3-175b", 2, 2048, 96, 96, 128, true), preset("bert-base", 16, 512, 12, 12, 64, false),
      preset("bert-large", 8, 512, 16, 16, 64, false), preset("context-8k", 1, 8192, 8, 8, 64, true),
      preset("context-16k", 1, 16384, 8, 8, 64, true), preset("inference-batch32", 32, 512, 8, 8, 64, false, false),
      preset("llama3-8b", 1, 8192, 32, 8, 128, true),  preset("llama3-70b", 1, 8192, 64, 8, 128, true),
  };
  return all;
}

const Preset* find_preset(const std::string& name) {
  for (const Preset& p : presets())
    if (p.name == name) return &p;
  return nullptr;
}

}  // namespace fattn::cli
