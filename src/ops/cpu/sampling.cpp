// The next token of each row. Numbers are those of the reference in float64, so that the same seed draws the same token; only what cannot be drawn is
// not sorted.
#include <cmath>

#include "ops/backends.h"
#include "ops/cpu/host.h"
#include "ops/penalised.h"

namespace fattn::ops::cpu {
namespace {

struct Candidate {
  double logit;  // then its share
  int32_t token;
};
bool before(const Candidate& a, const Candidate& b) { return a.logit != b.logit ? a.logit > b.logit : a.token < b.token; }

class CpuSampling final : public Kernel<Sampling> {
 public:
  CpuSampling(const Sampling& p, const Device& device) : p_(p), workers_(device) {
    layout_.add({p.rows, p.vocab, static_cast<int64_t>(sizeof(Candidate))});
  }
  size_t workspace_bytes() const override { return layout_.total(); }
  void execute(const Sampling::Buffers& b, void* workspace, void*) const override {
    auto* candidates = static_cast<Candidate*>(workspace);
    workers_.run(b.rows, [&](int64_t r, int) { b.token[r] = draw(b.logits + r * p_.stride, b.choice[r], candidates + r * p_.vocab); });
  }

 private:
  int32_t draw(const float* logits, const Choice& choice, Candidate* all) const {
    check_choice(choice);
    int64_t n = p_.vocab;
    for (int64_t i = 0; i < n; ++i) {
      if (std::isnan(logits[i])) refuse_nan(i);
      all[i] = {logits[i], static_cast<int32_t>(i)};
    }
    penalise(
        choice, n, [&](int32_t token) -> double& { return all[token].logit; }, logits);
    const auto first = std::min_element(all, all + n, before);
    if (choice.temperature == 0) return first->token;
    const double largest = first->logit;
    const double number = uniform_number(choice.seed, choice.request, choice.position);
    const bool sorted = choice.top_k > 0 || choice.top_p < 1;
    if (choice.top_k > 0 && choice.top_k < n) {
      std::nth_element(all, all + choice.top_k - 1, all + n, before);
      n = choice.top_k;
    }
    if (sorted) std::sort(all, all + n, before);
    double total = 0;
    for (int64_t i = 0; i < n; ++i) total += all[i].logit = share_of(all[i].logit, largest, choice.temperature);
    if (choice.top_p < 1) {
      const double enough = choice.top_p * total;
      double sum = 0;
      int64_t kept = 0;
      while (kept < n && (kept == 0 || sum < enough)) sum += all[kept++].logit;
      n = kept, total = sum;
    }
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) {
      sum += all[i].logit;
      if (number * total < sum) return all[i].token;
    }
    int64_t last = n - 1;  // rounding left nothing: the last that can be drawn
    while (last > 0 && !(all[last].logit > 0)) --last;
    return all[last].token;
  }

  const Sampling p_;
  const Workers workers_;
  core::WorkspaceLayout layout_;
};

}  // namespace

std::unique_ptr<const Kernel<Sampling>> make(const Sampling& p, const Device& device) { return std::make_unique<CpuSampling>(p, device); }

}  // namespace fattn::ops::cpu
