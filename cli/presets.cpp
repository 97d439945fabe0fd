// The presets. Heads and head sizes are those of the models' published configurations.
#include "cli/presets.h"

#include <algorithm>
#include <cctype>

#include "cli/nearest.h"
#include "cli/table.h"

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

// Other names, as `spelled`. GPT-2, BERT, Llama and GPT-3 without a size are those that people mean by them.
struct Alias {
  const char *name, *preset;
};
constexpr Alias kAliases[] = {
    {"gpt2", "gpt2-small"},
    {"gpt2-124m", "gpt2-small"},
    {"gpt2-small-124m", "gpt2-small"},
    {"gpt2-355m", "gpt2-medium"},
    {"gpt2-774m", "gpt2-large"},
    {"gpt2-1.5b", "gpt2-xl"},
    {"gpt2-1558m", "gpt2-xl"},
    {"gpt3", "gpt3-175b"},
    {"bert", "bert-base"},
    {"bert-base-uncased", "bert-base"},
    {"bert-large-uncased", "bert-large"},
    {"8k", "context-8k"},
    {"16k", "context-16k"},
    {"inference", "inference-batch32"},
    {"llama3", "llama3-8b"},
    {"llama", "llama3-8b"},
    {"llama-8b", "llama3-8b"},
    {"llama-70b", "llama3-70b"},
    {"llama3.1-8b", "llama3-8b"},
    {"llama3.1-70b", "llama3-70b"},
};

// As names are spelled here: lower case, "-" between parts, but none between a family and its number.
std::string spelled(const std::string& given) {
  std::string name;
  for (const char c : given) {
    const char lower = c == '_' || c == ' ' ? '-' : static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
    const bool family = name == "gpt-" || name == "llama-";
    if (family && std::isdigit(static_cast<unsigned char>(lower))) name.pop_back();
    name += lower;
  }
  return name;
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
  std::string wanted = spelled(name);
  for (const Alias& alias : kAliases)
    if (wanted == alias.name) wanted = alias.preset;
  for (const Preset& p : presets())
    if (p.name == wanted) return &p;
  return nullptr;
}

std::string nearest_preset(const std::string& name) {
  std::vector<std::string> known;
  for (const Preset& p : presets()) known.push_back(p.name);
  const std::string given = spelled(name);
  if (const std::string near = nearest(given, known); !near.empty()) return near;
  for (const Alias& alias : kAliases) known.emplace_back(alias.name);
  if (const Preset* preset = find_preset(nearest(given, known))) return preset->name;
  // Of the same family.
  for (const Preset& p : presets())
    if (given.size() >= 3 && p.name.compare(0, 3, given, 0, 3) == 0) return p.name;
  return {};
}

void print_presets(Output& out) {
  Table table({Column::text("preset").as_key(), Column::number("batch"), Column::number("seqlen"), Column::number("nheads"),
               Column::number("nheads_k"), Column::number("headdim"), Column::text("causal"), Column::text("passes")});
  for (const Preset& p : presets())
    table.add({p.name, count_cell(p.spec.batch), count_cell(p.spec.seqlen_q), count_cell(p.spec.nheads), count_cell(p.spec.nheads_k),
               count_cell(p.spec.headdim), p.spec.causal ? "yes" : "no", p.grad ? "all" : "forward"});
  out.print(table);
}

}  // namespace fattn::cli
