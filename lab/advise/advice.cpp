#include "lab/advise/advice.h"

#include <fmt/format.h>

#include <algorithm>

namespace fattn::lab {
namespace {

// So many tokens at once keep a GPU busy; more of them are not worth computing every layer again.
constexpr int64_t kBusyTokens = 4096;

std::string gib(double bytes) { return fmt::format("{:.2f} GiB", bytes / (1 << 30)); }

StepPlan plan_of(const AdviceRequest& r, int64_t batch, bool checkpointing) {
  return {r.model, r.task, r.precision, r.seqlen, batch, checkpointing && r.task == Task::kTrain, false};
}

bool fits(const StepPlan& plan, double memory) { return memory_of(plan).bytes <= memory; }

// The leanest way, of one sequence.
StepPlan leanest(const AdviceRequest& r) { return plan_of(r, 1, true); }

// The longest sequence of which one fits; 0: none.
int64_t longest_sequence(const AdviceRequest& r) {
  const auto one_fits = [&](int64_t seqlen) {
    AdviceRequest shorter = r;
    shorter.seqlen = seqlen;
    return fits(leanest(shorter), r.memory_bytes);
  };
  if (!one_fits(1)) return 0;
  int64_t good = 1, bad = r.seqlen;
  while (bad - good > 1) {
    const int64_t middle = good + (bad - good) / 2;
    (one_fits(middle) ? good : bad) = middle;
  }
  return good;
}

void explain_refusal(const AdviceRequest& r, Advice& advice) {
  const StepPlan least = leanest(r);
  advice.memory = memory_of(least);
  double fixed = 0;
  const size_t count = r.task == Task::kTrain ? (r.precision == Precision::kFP32 ? 3 : 4) : 1;
  for (size_t i = 0; i < count; ++i) fixed += advice.memory.lines[i].bytes;
  const std::string of_model = r.task == Task::kTrain ? "weights, gradients and Adam's moments" : "the weights";
  advice.why = fixed > r.memory_bytes ? fmt::format("{} alone take {} of the {}", of_model, gib(fixed), gib(r.memory_bytes))
                                      : fmt::format("one sequence of {} tokens{} takes {}, {} of it {}, and there are {}", r.seqlen,
                                                    r.task == Task::kTrain ? " with checkpointing" : "", gib(advice.memory.bytes), gib(fixed),
                                                    of_model, gib(r.memory_bytes));
  std::string options = fmt::format("{} of memory for this model and length", gib(advice.memory.bytes));
  if (const int64_t seqlen = longest_sequence(r); seqlen >= 16) options += fmt::format("; sequences of up to {} tokens", seqlen);
  for (auto model = gpt2_models().rbegin(); model != gpt2_models().rend(); ++model) {
    AdviceRequest smaller = r;
    smaller.model = *model;
    if (model->shape_parameters() >= r.model.parameters(0) || !fits(leanest(smaller), r.memory_bytes)) continue;
    options += fmt::format("; --model {} ({} parameters)", model->name, model->shape_parameters());
    break;
  }
  if (r.task == Task::kTrain) {
    AdviceRequest infer = r;
    infer.task = Task::kInfer;
    if (fits(leanest(infer), r.memory_bytes)) options += "; --task infer";
  }
  if (r.precision == Precision::kFP32) {
    AdviceRequest narrow = r;
    narrow.precision = Precision::kBF16;
    if (fits(leanest(narrow), r.memory_bytes)) options += "; --precision bf16";
  }
  advice.would_fit = options;
}

}  // namespace

int64_t largest_batch(StepPlan plan, double memory_bytes, int64_t most) {
  const auto batch_fits = [&](int64_t batch) {
    plan.batch = batch;
    return fits(plan, memory_bytes);
  };
  if (most < 1 || !batch_fits(1)) return 0;
  int64_t good = 1, bad = most + 1;
  while (bad - good > 1) {
    const int64_t middle = good + (bad - good) / 2;
    (batch_fits(middle) ? good : bad) = middle;
  }
  return good;
}

Advice advise(const AdviceRequest& r) {
  Advice advice;
  const int64_t most = std::max<int64_t>(1, r.effective_batch);
  const int64_t busy = std::clamp<int64_t>((kBusyTokens + r.seqlen - 1) / r.seqlen, 1, most);
  int64_t batch = largest_batch(plan_of(r, 1, false), r.memory_bytes, most);
  bool checkpointing = false;
  if (r.task == Task::kTrain && batch < busy) {
    const int64_t with = largest_batch(plan_of(r, 1, true), r.memory_bytes, busy);
    checkpointing = with > batch;
    batch = std::max(batch, with);
  }
  advice.plan = plan_of(r, batch, checkpointing);
  if (batch == 0) {
    advice.plan = leanest(r);
    explain_refusal(r, advice);
    return advice;
  }
  advice.fits = true;
  if (r.task == Task::kTrain) {
    // As many micro-batches as it takes, all of the same size.
    advice.accumulation = (most + batch - 1) / batch;
    advice.plan.batch = (most + advice.accumulation - 1) / advice.accumulation;
    advice.checkpointing_why =
        checkpointing
            ? fmt::format("on: without it {}, and {} keep a GPU busy",
                          largest_batch(plan_of(r, 1, false), r.memory_bytes, most) == 0 ? "not one sequence fits" : "fewer tokens fit at once",
                          fmt::format("{} tokens", kBusyTokens))
            : fmt::format("off: {} tokens fit at once without it, and it would cost a third more products", advice.plan.batch * r.seqlen);
  }
  advice.memory = memory_of(advice.plan);
  StepPlan standard = advice.plan;
  standard.standard = true;
  advice.standard = memory_of(standard);
  advice.standard_batch = largest_batch(standard, r.memory_bytes, most);
  return advice;
}

}  // namespace fattn::lab
