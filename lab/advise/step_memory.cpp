// What PyTorch keeps of GPT-2 with autocast: weights in fp32, which are the master weights, their copies in 16 bits, and of a block the input of
// every operation that its backward pass needs.
#include "lab/advise/step_memory.h"
#include "lab/parts.h"

#include <fmt/format.h>

#include <algorithm>

namespace fattn::lab {
namespace {

// With thousands apart, as sizes are read.
std::string n(double value) {
  std::string digits = fmt::format("{:.0f}", value);
  for (auto at = static_cast<std::ptrdiff_t>(digits.size()) - 3; at > 0; at -= 3) digits.insert(static_cast<size_t>(at), ",");
  return digits;
}

class Lines {
 public:
  explicit Lines(StepMemory& memory) : memory_(memory) {}
  void add(const char* what, double bytes, std::string arithmetic) {
    memory_.lines.push_back({what, std::move(arithmetic), bytes});
    memory_.bytes += bytes;
  }

 private:
  StepMemory& memory_;
};

constexpr double kContext = 600.0 * (1 << 20);  // CUDA context, kernels, cuBLAS's workspace
constexpr double kFragments = 0.05;             // of what is allocated and freed in a step

void train(Lines& lines, const StepPlan& p) {
  const ModelSize& m = p.model;
  const bool wide = p.precision == Precision::kFP32;
  const double params = real(m.parameters(p.seqlen)), tokens = real(p.batch) * real(p.seqlen), d = real(m.width), heads = real(m.nheads),
               layers = real(m.layers), vocabulary = real(m.vocabulary), e = wide ? 4 : 2;
  lines.add("master weights, fp32", 4 * params, fmt::format("{} parameters * 4", n(params)));
  if (!wide) lines.add("weights for products", 2 * params, fmt::format("{} * 2, {}", n(params), name_of(p.precision)));
  lines.add("gradients, fp32", 4 * params, fmt::format("{} * 4", n(params)));
  lines.add("Adam's moments, fp32", 8 * params, fmt::format("{} * 2 * 4", n(params)));

  // Of a token and a block: inputs of both layer norms in fp32 (8 d), what they put out (2 e d), q, k and v (3 e d), o (e d), the input of the
  // activation and what it puts out (8 e d), two masks of dropout (2 d), lse of a head and mean and deviation of the norms (4 heads + 16).
  const double of_token = (10 + 14 * e) * d + 4 * heads + 16, kept = 4 * d;
  const double block = tokens * of_token;
  // What standard attention keeps besides: weights in fp32 for the softmax, and in 16 bits for the product with v.
  const double of_pair = wide ? 4 : 6, matrices = real(p.batch) * heads * real(p.seqlen) * real(p.seqlen) * of_pair;
  double moving = 0;
  if (p.checkpointing) {
    lines.add("inputs of layers", layers * tokens * kept, fmt::format("{} layers * {} tokens * {} * 4", m.layers, n(tokens), m.width));
    lines.add("one layer, again", block, fmt::format("{} tokens * ({:.0f} * {} + 4 * {} + 16)", n(tokens), 10 + 14 * e, m.width, m.nheads));
    if (p.standard) lines.add("its matrices", matrices, fmt::format("{} * {} heads * {}^2 * {:.0f}", p.batch, m.nheads, p.seqlen, of_pair));
    moving += layers * tokens * kept + block;
  } else {
    lines.add("activations", layers * block,
              fmt::format("{} layers * {} tokens * ({:.0f} * {} + 4 * {} + 16)", m.layers, n(tokens), 10 + 14 * e, m.width, m.nheads));
    if (p.standard)
      lines.add("attention's matrices", layers * matrices,
                fmt::format("{} layers * {} * {} heads * {}^2 * {:.0f}", m.layers, p.batch, m.nheads, p.seqlen, of_pair));
    moving += layers * block;
  }
  if (p.standard) moving += matrices * (p.checkpointing ? 1 : layers);
  const double gradients = tokens * 10 * e * d;
  lines.add("gradients of a block", gradients, fmt::format("{} tokens * 10 * {} * {:.0f}", n(tokens), m.width, e));
  const double workspace = p.standard ? 2 * matrices : tokens * (4 * d + 8 * heads);
  lines.add("attention, backward", workspace,
            p.standard ? fmt::format("2 * {} * {} heads * {}^2 * {:.0f}", p.batch, m.nheads, p.seqlen, of_pair)
                       : fmt::format("{} tokens * (4 * {} + 8 * {})", n(tokens), m.width, m.nheads));
  // As they are, and in fp32 as the loss wants them, their log-softmax and its gradient.
  const double of_logit = wide ? 12 : 14, logits = tokens * vocabulary * of_logit;
  lines.add("logits and loss", logits, fmt::format("{} tokens * {} * {:.0f}", n(tokens), n(vocabulary), of_logit));
  lines.add("tokens and labels", tokens * 16, fmt::format("{} * 2 * 8", n(tokens)));
  moving += gradients + workspace + logits;
  lines.add("fragmentation", kFragments * moving, "5 % of what comes and goes");
}

void infer(Lines& lines, const StepPlan& p) {
  const ModelSize& m = p.model;
  const double e = p.precision == Precision::kFP32 ? 4 : 2, params = real(m.parameters(p.seqlen)), tokens = real(p.batch) * real(p.seqlen),
               d = real(m.width), heads = real(m.nheads);
  lines.add("weights", e * params, fmt::format("{} parameters * {:.0f}", n(params), e));
  lines.add("KV cache", 2 * real(m.layers) * tokens * d * e, fmt::format("2 * {} layers * {} tokens * {} * {:.0f}", m.layers, n(tokens), m.width, e));
  // The prompt goes through one layer at a time: its input and output, q, k and v, o, and the wide part of the MLP.
  const double prompt = tokens * (14 * e) * d + tokens * 4 * heads;
  lines.add("a layer of the prompt", prompt, fmt::format("{} tokens * ({:.0f} * {} + 4 * {})", n(tokens), 14 * e, m.width, m.nheads));
  const double of_pair = e + 4, matrices = real(p.batch) * heads * real(p.seqlen) * real(p.seqlen) * of_pair;
  if (p.standard) lines.add("attention's matrices", matrices, fmt::format("{} * {} heads * {}^2 * {:.0f}", p.batch, m.nheads, p.seqlen, of_pair));
  const double logits = real(p.batch) * real(m.vocabulary) * (e + 4);
  lines.add("logits of last tokens", logits, fmt::format("{} * {} * {:.0f}", p.batch, n(real(m.vocabulary)), e + 4));
  lines.add("tokens", tokens * 8, fmt::format("{} * 8", n(tokens)));
  lines.add("fragmentation", kFragments * (prompt + logits + (p.standard ? matrices : 0)), "5 % of what comes and goes");
}

}  // namespace

StepMemory memory_of(const StepPlan& plan) {
  StepMemory memory;
  Lines lines(memory);
  if (plan.task == Task::kTrain)
    train(lines, plan);
  else
    infer(lines, plan);
  lines.add("CUDA and its libraries", kContext, "600 MiB: context, kernels, cuBLAS");
  return memory;
}

}  // namespace fattn::lab
