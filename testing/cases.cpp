#include "testing/cases.h"

#include <algorithm>
#include <cmath>
#include <sstream>

#include "testing/case_table.h"

namespace fattn::testing {

double Case::scale() const { return softmax_scale.value_or(1.0 / std::sqrt(static_cast<double>(headdim))); }

bool Case::has_scores() const {
  return varlen || documents != Documents::kNone || key_lengths || alibi != Alibi::kNone || bias != Pairs::kNone || mask != Pairs::kNone ||
         p_dropout > 0 || sinks || page_size > 0;
}

bool Case::meant_nonfinite() const {
  return inputs == Inputs::kNanQuery || inputs == Inputs::kNanValue || inputs == Inputs::kInfKey || inputs == Inputs::kNanGradient ||
         inputs == Inputs::kSpoiltValues || inputs == Inputs::kMinusInfKeys || inputs == Inputs::kManyNonfinite;
}

double Case::flops() const {
  double pairs = 0;
  for (int64_t i = 0; i < seqlen_q; ++i) {
    const int64_t own = i + seqlen_k - seqlen_q, right = causal ? 0 : window_right;  // the key that the query is aligned with
    const int64_t begin = window_left < 0 ? 0 : std::clamp<int64_t>(own - window_left, 0, seqlen_k);
    pairs += static_cast<double>((right < 0 ? seqlen_k : std::clamp<int64_t>(own + right + 1, 0, seqlen_k)) - begin);
  }
  return pairs * static_cast<double>(batch * nheads) * 2 * static_cast<double>(headdim + headdim_v) * (backward ? 3.5 : 1.0);
}

const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = [] {
    std::vector<Case> all;
    for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      Table table(dtype);
      add_lengths(table);
      add_headdims(table);
      add_groups(table);
      add_decode(table);
      add_empty(table);
      add_layouts(table);
      add_inputs(table);
      add_sigmas(table);
      add_options(table);
      add_fp32_outputs(table);
      add_windows(table);
      add_softcaps(table);
      add_key_lengths(table);
      add_alibi(table);
      add_pairs(table);
      add_dropout(table);
      add_lse_gradients(table);
      add_sinks(table);
      add_pages(table);
      add_packed_sequences(table);
      add_documents(table);
      add_many_nonfinite(table);
      const std::vector<Case> some = table.take();
      all.insert(all.end(), some.begin(), some.end());
    }
    return all;
  }();
  return cases;
}

std::vector<int64_t> cu_seqlens(const Case& c, bool keys) {
  const Random random(c.seed, keys ? 11 : 10);
  const int64_t longest = keys ? c.seqlen_k : c.seqlen_q;
  std::vector<int64_t> first{0};
  for (int64_t n = 0; n < c.batch; ++n) {
    const auto some = static_cast<int64_t>(random.uniform(static_cast<uint64_t>(n)) * static_cast<double>(longest + 1));
    first.push_back(first.back() + (n == 0 ? longest : n == (keys ? 3 : 2) ? 0 : some));
  }
  return first;
}

std::vector<int64_t> given_cu_seqlens_k(const Case& c) {
  const std::vector<int64_t> first = cu_seqlens(c, true);
  if (!c.scattered) return first;
  std::vector<int64_t> given;
  for (size_t n = 0; n + 1 < first.size(); ++n) given.push_back(first.back() - first[n + 1]);
  given.push_back(-7);
  return given;
}

std::string name_of(const Case& c) {
  std::ostringstream name;
  name << fattn::name_of(c.dtype) << "-b" << c.batch << "-q" << c.seqlen_q << "-k" << c.seqlen_k << "-h" << c.nheads;
  if (c.nheads_k != c.nheads) name << "_" << c.nheads_k;
  name << "-d" << c.headdim;
  if (c.headdim_v != c.headdim) name << "_" << c.headdim_v;
  if (c.causal) name << "-causal";
  if (c.window_left != -1 || c.window_right != -1) name << "-window" << c.window_left << "_" << c.window_right;
  if (c.softcap != 0) name << "-softcap" << c.softcap;
  if (c.varlen) name << "-varlen";
  if (c.key_lengths) name << (c.scattered ? "-scattered" : "-lengths");
  if (c.alibi != Alibi::kNone) name << (c.alibi == Alibi::kHeads ? "-alibi" : "-alibi_batch");
  if (c.documents != Documents::kNone)
    name << (c.documents == Documents::kSorted ? "-documents" : c.documents == Documents::kAny ? "-documents_any" : "-documents_long");
  if (c.bias != Pairs::kNone) name << "-bias_" << name_of(c.bias) << (c.bias_fp32 ? "_fp32" : "");
  if (c.low_bias != LowBias::kNone) name << (c.low_bias == LowBias::kLowest ? "_lowest" : "_billion");
  if (c.mask != Pairs::kNone) name << "-mask_" << name_of(c.mask) << (c.mask_blocks ? "_blocks" : "");
  if (c.sinks) name << "-sinks";
  if (c.page_size > 0) name << "-pages" << c.page_size;
  if (c.p_dropout > 0) name << "-dropout" << c.p_dropout << (c.dropout_part ? "_part" : "");
  if (c.softmax_scale) name << "-scale" << *c.softmax_scale;
  if (c.layout != Layout::kBshd) name << "-" << name_of(c.layout);
  if (c.inputs != Inputs::kNormal) name << "-" << name_of(c.inputs);
  if (!c.want_lse) name << "-nolse";
  if (c.fp32_outputs) name << "-fp32out";
  if (c.dlse) name << "-dlse";
  if (!c.backward) name << "-fwd";
  return name.str();
}

const char* name_of(Layout layout) {
  switch (layout) {
    case Layout::kBshd: return "bshd";
    case Layout::kBhsd: return "bhsd";
    case Layout::kPacked: return "packed";
    case Layout::kExpanded: return "expanded";
    case Layout::kPadded: return "padded";
  }
  return "unknown";
}

const char* name_of(Pairs pairs) {
  switch (pairs) {
    case Pairs::kNone: return "none";
    case Pairs::kAll: return "all";
    case Pairs::kHeads: return "heads";
    case Pairs::kOne: return "one";
    case Pairs::kKeys: return "keys";
    case Pairs::kExpanded: return "expanded";
  }
  return "unknown";
}

const char* name_of(Inputs inputs) {
  switch (inputs) {
    case Inputs::kNormal: return "normal";
    case Inputs::kHugeLogits: return "huge_logits";
    case Inputs::kConstant: return "constant";
    case Inputs::kDominantKey: return "dominant_key";
    case Inputs::kRising: return "rising";
    case Inputs::kSigma2: return "sigma2";
    case Inputs::kSigma3: return "sigma3";
    case Inputs::kFarKeys: return "far_keys";
    case Inputs::kTiny: return "tiny";
    case Inputs::kOffset: return "offset";
    case Inputs::kNanQuery: return "nan_query";
    case Inputs::kNanValue: return "nan_value";
    case Inputs::kInfKey: return "inf_key";
    case Inputs::kNanGradient: return "nan_gradient";
    case Inputs::kSpoiltValues: return "spoilt_values";
    case Inputs::kMinusInfKeys: return "minus_inf_keys";
    case Inputs::kManyNonfinite: return "many_nonfinite";
  }
  return "unknown";
}

}  // namespace fattn::testing
