#include "lab/advise/settings.h"

#include <fmt/format.h>

namespace fattn::lab {
namespace {

const char* torch_dtype(Precision p) { return p == Precision::kBF16 ? "torch.bfloat16" : p == Precision::kFP16 ? "torch.float16" : "torch.float32"; }
const char* cpp_dtype(Precision p) { return p == Precision::kBF16 ? "kBF16" : p == Precision::kFP16 ? "kF16" : "kF32"; }

// The name of the model on the hub; a model of its own for others.
std::string model_lines(const ModelSize& m, int64_t seqlen) {
  const bool hub = m.given_parameters == 0 && seqlen <= m.positions;
  if (hub)
    return fmt::format("model = AutoModelForCausalLM.from_pretrained(\"gpt2{}\", attn_implementation=\"fattn\")\n",
                       m.name == "small" ? "" : "-" + m.name);
  return fmt::format(
      "config = GPT2Config(n_layer={}, n_embd={}, n_head={}, n_positions={},\n"
      "                    attn_implementation=\"fattn\")\n"
      "model = AutoModelForCausalLM.from_config(config)\n",
      m.layers, m.width, m.nheads, std::max(seqlen, m.positions));
}

std::string training_loop(const Advice& a) {
  const StepPlan& p = a.plan;
  const bool scaled = p.precision == Precision::kFP16, narrow = p.precision != Precision::kFP32;
  std::string text = fmt::format(
      "import torch\nimport fattn.transformers\nfrom transformers import AutoModelForCausalLM, GPT2Config\n\n{}model = model.cuda().train()  # "
      "weights "
      "stay in fp32\n",
      model_lines(p.model, p.seqlen));
  if (p.checkpointing) text += "model.gradient_checkpointing_enable()\n";
  text += "optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)\n";
  if (scaled) text += "scaler = torch.amp.GradScaler()\n";
  text += fmt::format(
      "loader = torch.utils.data.DataLoader(data, batch_size={}, shuffle=True)\naccumulation = {}\n"
      "for i, batch in enumerate(loader):  # batch: tokens (up to {}, {})\n"
      "    batch = batch.cuda()\n"
      "    # The last group may be smaller: its mean is of what it has.\n"
      "    group = min(accumulation, len(loader) - i // accumulation * accumulation)\n",
      p.batch, a.accumulation, p.batch, p.seqlen);
  if (narrow) text += fmt::format("    with torch.autocast(\"cuda\", {}):\n    ", torch_dtype(p.precision));
  text += "    loss = model(input_ids=batch, labels=batch).loss / group\n";
  text += scaled ? "    scaler.scale(loss).backward()\n" : "    loss.backward()\n";
  text += "    if (i + 1) % accumulation == 0 or i + 1 == len(loader):\n";
  text += scaled ? "        scaler.step(optimizer)  # not where gradients have Inf or NaN\n        scaler.update()\n" : "        optimizer.step()\n";
  return text + "        optimizer.zero_grad(set_to_none=True)\n";
}

std::string inference(const Advice& a) {
  const StepPlan& p = a.plan;
  return fmt::format(
      "import torch\nimport fattn.transformers\nfrom transformers import AutoModelForCausalLM, GPT2Config\n\n{}model = model.to(\"cuda\", "
      "{}).eval()\n"
      "with torch.inference_mode():  # prompts: up to {} of them\n"
      "    tokens = model.generate(prompts, max_length={})\n",
      model_lines(p.model, p.seqlen), torch_dtype(p.precision), p.batch, p.seqlen);
}

std::string trainer(const Advice& a) {
  const StepPlan& p = a.plan;
  const std::string precision = p.precision == Precision::kBF16   ? "bf16=True"
                                : p.precision == Precision::kFP16 ? "fp16=True"
                                                                  : "bf16=False, fp16=False";
  return fmt::format(
      "arguments = TrainingArguments(\n    \"out\", per_device_train_batch_size={},\n    gradient_accumulation_steps={},  # the last, partial one is "
      "kept\n    {}, gradient_checkpointing={}, optim=\"adamw_torch\")\n",
      p.batch, a.accumulation, precision, p.checkpointing ? "True" : "False");
}

std::string cpp(const Advice& a) {
  const StepPlan& p = a.plan;
  const ModelSize& m = p.model;
  std::string text = fmt::format(
      "// q, k, v, o: ({}, {}, {}, {}), fattn::DType::{}\nfattn::Options options;\noptions.causal = true;\n"
      "fattn::forward({{q, k, v, o, lse}}, options);\n",
      p.batch, p.seqlen, m.nheads, m.headdim(), cpp_dtype(p.precision));
  if (p.task == Task::kTrain) text += "fattn::backward({q, k, v, o, lse, dout, dq, dk, dv}, options);\n";
  return text;
}

}  // namespace

std::vector<Settings> settings_of(const Advice& advice) {
  if (advice.plan.task == Task::kInfer) return {{"PyTorch and transformers", inference(advice)}, {"C++, attention of a layer", cpp(advice)}};
  return {{"PyTorch", training_loop(advice)}, {"transformers' Trainer", trainer(advice)}, {"C++, attention of a layer", cpp(advice)}};
}

}  // namespace fattn::lab
