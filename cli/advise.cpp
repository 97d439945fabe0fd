// Flags to a request, and the times where rates are known.
#include "cli/advise.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>

#include "cli/advise_report.h"
#include "cli/advise_when.h"
#include "cli/json_output.h"
#include "cli/nearest.h"
#include "cli/sanitize.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "lab/calibration.h"

namespace fattn::cli {
namespace {

using lab::AdviceRequest;

struct AdviseFlags {
  OutputFlags output;
  std::string model = "small", task = "train", precision = "bf16", preset, device = "none", json;
  uint64_t memory = 0;
  int64_t seqlen = 1024, effective_batch = 0, longest = 2048;
  double peak = 0, bandwidth = 0;
  bool when = false;
  CLI::Option *memory_option = nullptr, *model_option = nullptr, *seqlen_option = nullptr;
};

struct AdvicePreset {
  const char* name;
  uint64_t memory;
  int64_t seqlen;
  const char* model;
};
constexpr uint64_t kGiB = uint64_t{1} << 30;
constexpr AdvicePreset kPresets[] = {{"8gb", 8 * kGiB, 1024, "small"}, {"16gb", 16 * kGiB, 2048, "medium"}, {"24gb", 24 * kGiB, 4096, "large"}};

const AdvicePreset* preset_of(const std::string& name) {
  for (const AdvicePreset& preset : kPresets)
    if (name == preset.name) return &preset;
  return nullptr;
}

std::string take_model(std::string& text) {
  std::string why;
  if (lab::model_of(text, why)) return {};
  const std::string near = nearest(text, {"small", "medium", "large", "xl"});
  return "'" + printable(text, 40) + "' " + why + (near.empty() ? "" : "; did you mean '" + near + "'?");
}

lab::Precision precision_of(const AdviseFlags& f) {
  for (const lab::Precision p : {lab::Precision::kFP16, lab::Precision::kFP32})
    if (f.precision == name_of(p)) return p;
  return lab::Precision::kBF16;
}

AdviceRequest request_of(const AdviseFlags& f) {
  const AdvicePreset* preset = preset_of(f.preset);
  AdviceRequest r;
  const auto given = [](const CLI::Option* option) { return option->count() > 0; };
  const uint64_t memory = given(f.memory_option) || !preset ? f.memory : preset->memory;
  if (memory == 0) throw CLI::ValidationError("--gpu-memory", "is needed, e.g. 16GiB; or take a preset: --preset 8gb, 16gb or 24gb");
  r.memory_bytes = static_cast<double>(memory);
  r.seqlen = given(f.seqlen_option) || !preset ? f.seqlen : preset->seqlen;
  std::string why;
  r.model = *lab::model_of(given(f.model_option) || !preset ? f.model : preset->model, why);
  r.task = f.task == "train" ? lab::Task::kTrain : lab::Task::kInfer;
  r.precision = precision_of(f);
  constexpr int64_t kTrained = 32, kServed = 256;
  r.effective_batch = f.effective_batch > 0 ? f.effective_batch : r.task == lab::Task::kTrain ? kTrained : kServed;
  return r;
}

void set_rates(const AdviseFlags& f, const lab::Advice& advice, AdviceTimes& times) {
  if (f.peak > 0) {
    times.rates.emplace();
    times.rates->flops_per_s = f.peak;
    times.rates->bytes_per_s = f.bandwidth;
    times.rates->bound = true;
    times.rates->words = "as stated: times are the least that such a machine can take, real steps take 1.5 to 3 times as long";
    return;
  }
  if (f.device == "none") {
    times.unknown =
        "no machine was named. For this one: --device cuda (or cpu), after `fattn calibrate`; for another one: --peak FLOP/s and --bandwidth B/s";
    return;
  }
  try {
    const lab::Calibration c = lab::stored_calibration(f.device);
    if (!c.kernels) {
      times.unknown = "the calibration of this machine has no times of kernels; `fattn calibrate --force` measures them";
      return;
    }
    times.rates = lab::measured_rates(advice.plan, *c.kernels, c.of("dram_read_bytes_per_s"), measure::placement_of(f.device, true), times.unknown);
  } catch (const lab::CalibrationError& error) {
    times.unknown = error.what();
  }
}

int advise_settings(const AdviseFlags& f) {
  if ((f.peak > 0) != (f.bandwidth > 0))
    throw CLI::ValidationError(f.peak > 0 ? "--bandwidth" : "--peak", "is needed beside the other one: a step computes and moves bytes");
  const AdviceRequest request = request_of(f);
  const lab::Advice advice = lab::advise(request);
  AdviceTimes times;
  if (advice.fits) {
    set_rates(f, advice, times);
    if (times.rates) {
      times.micro_batch = lab::time_of(advice.plan, *times.rates);
      lab::StepPlan standard = advice.plan;
      standard.standard = true;
      times.standard = lab::time_of(standard, *times.rates);
      if (request.task == lab::Task::kTrain) times.optimizer = lab::optimizer_seconds(advice.plan, *times.rates);
    }
  }
  Output out(f.output, f.json);
  if (advice.fits)
    print_advice(out, request, advice, times);
  else
    print_refusal(out, request, advice);
  if (!f.json.empty()) write_json(to_json(request, advice, times), f.json);
  return kExitFine;
}

int advise_when_here(const AdviseFlags& f) {
  const std::string device = f.device == "none" ? "cpu" : f.device;
  std::string why;
  lab::StepPlan plan;
  plan.model = *lab::model_of(f.model, why);
  plan.precision = precision_of(f);
  WhenOptions when;
  when.problem = lab::attention_of(plan);
  when.problem.batch = std::max<int64_t>(1, f.effective_batch);
  when.place = measure::placement_of(device, true);
  when.longest = f.longest;
  when.json = f.json;
  when.flags = {"--when",
                "--device",
                device,
                "--model",
                f.model,
                "--precision",
                f.precision,
                "--effective-batch",
                std::to_string(when.problem.batch),
                "--longest",
                std::to_string(f.longest)};
  Output out(f.output, f.json);
  return advise_when(when, out);
}

}  // namespace

void add_advise(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("advise", "Batch, accumulation, precision and checkpointing for a given memory; when to use which");
  auto flags = std::make_shared<AdviseFlags>();
  command->option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)->group("What is to run");
  flags->memory_option = command->add_option("--gpu-memory", flags->memory, "Memory of the GPU, e.g. 16GiB")
                             ->transform(byte_size(1 << 20, "1MiB or more"))
                             ->type_name("SIZE");
  flags->model_option = command->add_option("--model", flags->model, "GPT-2's small, medium, large or xl, or params=N, e.g. params=7B")
                            ->transform(CLI::Validator(take_model, ""))
                            ->type_name("NAME")
                            ->capture_default_str();
  flags->seqlen_option =
      command->add_option("--seqlen", flags->seqlen, "Tokens of a sequence")->check(whole_number(1, int64_t{1} << 24))->capture_default_str();
  command->add_option("--task", flags->task, "Train it, or run it")->transform(one_of({"train", "infer"}))->type_name("NAME")->capture_default_str();
  command->add_option("--precision", flags->precision, "Of products; training keeps master weights in fp32")
      ->transform(one_dtype_of({"bf16", "fp16", "fp32"}))
      ->type_name("NAME")
      ->capture_default_str();
  command
      ->add_option("--effective-batch", flags->effective_batch,
                   "Sequences of an optimizer step [32]; infer: the most at once [256]; --when: the batch [1]")
      ->check(whole_number(1, 1 << 24))
      ->type_name("N");
  command->add_option("--preset", flags->preset, "8gb: small, 1024 tokens; 16gb: medium, 2048; 24gb: large, 4096; other flags override it")
      ->transform(one_of({"8gb", "16gb", "24gb"}))
      ->type_name("NAME");
  command->option_defaults()->group("What it is timed by");
  command->add_option("--device", flags->device, "This machine's cpu, cuda or cuda:INDEX, as `fattn calibrate` measured it")
      ->check(CLI::Validator(
          [](const std::string& text) {
            const bool index =
                text.rfind("cuda:", 0) == 0 && text.size() > 5 && text.size() < 9 && text.find_first_not_of("0123456789", 5) == std::string::npos;
            return text == "none" || text == "cpu" || text == "cuda" || index
                       ? std::string()
                       : "'" + printable(text, 40) + "' is no device; allowed: none, cpu, cuda, cuda:0, cuda:1, ...";
          },
          ""))
      ->type_name("DEVICE")
      ->capture_default_str();
  command->add_option("--peak", flags->peak, "Another machine's FLOP/s in this precision, e.g. 312e12")->check(number(1e6, 1e20))->type_name("X");
  command->add_option("--bandwidth", flags->bandwidth, "Another machine's bytes per second of memory, e.g. 2e12")
      ->check(number(1e6, 1e18))
      ->type_name("X");
  command->option_defaults()->group("When to use which");
  CLI::Option* when = command->add_flag("--when", flags->when, "Measure here from which length on fattn is faster than standard attention");
  command->add_option("--longest", flags->longest, "The longest sequence that is measured")
      ->check(whole_number(16, 1 << 20))
      ->capture_default_str()
      ->needs(when);
  command->option_defaults()->group("Output");
  command->add_option("--json", flags->json, "Write the record (docs/RECORD.md) to a file, or - for stdout")->type_name("FILE|-");
  flags->output.add_to(*command);
  command->footer(
      "Memory is counted line by line and printed with its arithmetic: what PyTorch keeps of GPT-2 with autocast, fp32 master weights and Adam. The "
      "batch is the largest that fits, up to the effective batch; checkpointing is on where fewer than 4096 tokens fit at once without it. Exit 0 "
      "also "
      "where nothing fits: the answer is what would.\n\n"
      "Examples:\n"
      "  fattn advise --gpu-memory 16GiB --seqlen 2048 --model medium\n"
      "  fattn advise --preset 24gb --device cuda\n"
      "  fattn advise --gpu-memory 80GiB --model params=7B --task infer --peak 990e12 --bandwidth 3.3e12\n"
      "  fattn advise --when --device cpu");
  command->callback([flags, when, &exit_code] {
    require_writable(flags->json);
    if (when->count() == 0) {
      exit_code = advise_settings(*flags);
      return;
    }
    exit_code = advise_when_here(*flags);
  });
}

}  // namespace fattn::cli
