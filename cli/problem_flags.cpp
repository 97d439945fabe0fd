// Shared flags of the commands that measure.
#include "cli/problem_flags.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <variant>

#include "cli/presets.h"
#include "cli/sanitize.h"
#include "cli/values.h"

namespace fattn::cli {
namespace {

using measure::PairShape;
using measure::ProblemSpec;

// "none" and the shapes that a bias or a mask may have.
std::vector<std::string> pair_shapes() {
  std::vector<std::string> names = {name_of(PairShape::kNone)};
  for (const PairShape shape : measure::kPairShapes) names.emplace_back(name_of(shape));
  return names;
}
PairShape pair_shape(const std::string& name) {
  for (const PairShape shape : measure::kPairShapes)
    if (name == name_of(shape)) return shape;
  return PairShape::kNone;
}

// What a preset is called, for what was given: names, other names of them, "list".
std::string take_preset(std::string& name) {
  if (name == "list") {
    Output out{OutputFlags()};
    print_presets(out);
    throw CLI::Success();
  }
  if (const Preset* preset = find_preset(name)) {
    name = preset->name;
    return {};
  }
  const std::string near = nearest_preset(name);
  return "there is no preset '" + printable(name, 40) + "'; " + (near.empty() ? "" : "did you mean '" + near + "'? ") + "`--preset list` shows all";
}

// "90" (seconds), "45s", "90m", "6h", "2d" as seconds.
std::string take_duration(std::string& text) {
  const std::string units = "smhd";
  const double seconds[] = {1, 60, 3600, 86400};
  const size_t unit = text.empty() ? std::string::npos : units.find(text.back());
  const std::string digits = unit == std::string::npos ? text : text.substr(0, text.size() - 1);
  char* end = nullptr;
  const double number = std::strtod(digits.c_str(), &end);
  const double value = number * (unit == std::string::npos ? 1 : seconds[unit]);
  if (digits.empty() || *end != 0 || !(value > 0) || !(value < 1e12))
    return "'" + printable(text, 40) + "' is no time; allowed: seconds, or a number with s, m, h or d behind it, e.g. 90m";
  text = CLI::detail::to_string(value);
  return {};
}

// The flags that name tensors must fit each other; what the library refuses, it refuses itself.
void require_consistent(const measure::ProblemSpec& s, bool grad) {
  const auto refuse = [](const char* flag, const std::string& why) { throw CLI::ValidationError(flag, why); };
  if (s.bias == PairShape::kNone && s.bias_f32) refuse("--bias-fp32", "there is no bias; add --bias, or leave it out");
  if (s.bias == PairShape::kNone && s.dbias) refuse("--dbias", "there is no bias; add --bias, or leave it out");
  if (s.dbias && !grad) refuse("--dbias", "the gradient of a bias is of the backward pass; leave it or --no-grad out");
  const auto at_most = [&](const char* flag, int64_t given, int64_t most, const char* of) {
    if (given > most) refuse(flag, std::to_string(given) + " is more than " + of + ", " + std::to_string(most));
  };
  at_most("--seqused-k", s.least_seqused_k, s.seqlen_k, "the keys");
  at_most("--packed", s.least_packed, s.seqlen_q, "the rows of the longest, --seqlen");
  at_most("--documents", s.documents, s.seqlen_q, "the queries");
  // Each length is a part of the problem's cost, and of packed sequences of their tensors' sizes, which every call looks up.
  constexpr int64_t kMostParts = 1024;
  const char* const of_batch = s.packed() ? "--packed" : "--seqused-k";
  if (s.packed() || s.least_seqused_k > 0) at_most(of_batch, s.batch, kMostParts, "the batch entries whose lengths are measured");
  at_most("--documents", s.documents, kMostParts, "the documents that are measured");
  if (s.page_size > 0) {
    if (grad) refuse("--page-size", "a paged cache is of the forward pass; add --no-grad");
    if (s.packed() || s.documents > 0) refuse("--page-size", "it is measured without --packed and --documents; leave them out");
    if (s.seqlen_k % s.page_size != 0)
      refuse("--page-size",
             std::to_string(s.page_size) + " does not divide the keys, " + std::to_string(s.seqlen_k) + "; give --seqlen-k a multiple of it");
  }
  const bool of_rows = s.packed() || s.documents > 0;
  if (of_rows && s.seqlen_q != s.seqlen_k)
    refuse(s.packed() ? "--packed" : "--documents", "queries and keys are the same rows here; leave --seqlen-k out");
  if (static_cast<int>(s.least_seqused_k > 0) + static_cast<int>(s.packed()) + static_cast<int>(s.documents > 0) > 1)
    refuse(s.documents > 0 ? "--documents" : "--packed", "--seqused-k, --packed and --documents are measured one at a time; leave the others out");
}

}  // namespace

template <class Own>
void ProblemFlags::add_option_to(CLI::App& command, const measure::SpecOption& option, const Own& own) {
  if (const auto* flag = std::get_if<bool ProblemSpec::*>(&option.member)) {
    own(command.add_flag(option.flag, options_.*(*flag), option.text));
  } else if (const auto* shape = std::get_if<PairShape ProblemSpec::*>(&option.member)) {
    std::string& name = shapes_.emplace_back(*shape, name_of(PairShape::kNone)).second;
    own(command.add_option(option.flag, name, option.text)->transform(one_of(pair_shapes()))->type_name(option.type)->capture_default_str());
  } else if (const auto* integer = std::get_if<int64_t ProblemSpec::*>(&option.member)) {
    own(command.add_option(option.flag, options_.*(*integer), option.text)
            ->check(whole_number(option.least))
            ->type_name(option.type)
            ->capture_default_str());
  } else {
    own(command.add_option(option.flag, options_.*std::get<double ProblemSpec::*>(option.member), option.text)
            ->type_name(option.type)
            ->capture_default_str());
  }
}

void ProblemFlags::add_problem_to(CLI::App& command, bool presets) {
  // A later flag overrides an earlier one, so that a recorded run can be repeated with a change.
  command.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast)->group("The problem");
  const auto own = [this](CLI::Option* option) {
    problem_options_.push_back(option);
    return option;
  };
  const auto size = whole_number(1);
  auto integer = [&](Integer& flag, const char* name, const char* help) {
    flag.option = own(command.add_option(name, flag.value, help)->check(size)->type_name("N"));
  };
  if (presets)
    own(command
            .add_option("--preset", preset_, "A model's or scenario's attention, e.g. gpt2-small; `list` shows all; other flags override its values")
            ->transform(CLI::Validator(take_preset, ""))
            ->type_name("NAME"));
  integer(batch_, "--batch", "Batch size [1]");
  integer(seqlen_, "--seqlen", "Queries, and keys unless --seqlen-k is given [1024]");
  integer(seqlen_k_, "--seqlen-k", "Keys [as --seqlen]");
  integer(nheads_, "--nheads", "Heads of the queries [8]");
  integer(nheads_k_, "--nheads-k", "Heads of keys and values; divides --nheads (GQA, MQA) [as --nheads]");
  integer(headdim_, "--headdim", "Size of a head of queries and keys [64]");
  integer(headdim_v_, "--headdim-v", "Size of a head of values [as --headdim]");
  causal_option_ = own(command.add_flag("--causal,!--no-causal", causal_, "Causal mask, aligned to the bottom right"));
  for (const measure::SpecOption& option : measure::kSpecOptions) add_option_to(command, option, own);
  dtype_option_ = own(command.add_option("--dtype", dtype_, "Type of all tensors; not given: bf16 on a CUDA device")
                          ->transform(one_dtype_of({name_of(DType::kF32), name_of(DType::kBF16), name_of(DType::kF16), name_of(DType::kF64)}))
                          ->type_name("NAME")
                          ->capture_default_str());
  no_grad_option_ = command.add_flag("--no-grad", no_grad_, "Forward only");
  command.option_defaults()->group("Options");
}

int64_t ProblemFlags::Integer::or_else(int64_t otherwise) const { return option && option->count() > 0 ? value : otherwise; }

bool ProblemFlags::problem_given() const {
  return no_grad_option_->count() > 0 ||
         std::any_of(problem_options_.begin(), problem_options_.end(), [](const CLI::Option* o) { return o->count() > 0; });
}

std::string ProblemFlags::first_of_one_problem() const {
  for (const auto* options : {&problem_options_, &sampling_options_})
    for (const CLI::Option* option : *options)
      if (option->count() > 0) return option->get_name();
  return "";
}

void ProblemFlags::begin_with(const measure::ProblemSpec& spec) { base_ = spec; }

void ProblemFlags::begin_with(const measure::SamplingOptions& sampling) {
  const auto given = [this](const char* name) {
    return std::any_of(sampling_options_.begin(), sampling_options_.end(),
                       [&](const CLI::Option* o) { return o->count() > 0 && o->check_name(name); });
  };
  if (!given("--repeats")) repeats_ = sampling.repeats;
  if (!given("--min-time")) min_seconds_ = sampling.min_seconds;
  if (!given("--max-time")) max_seconds_ = sampling.max_seconds;
  if (!given("--warmup")) warmup_ = sampling.warmup;
}

void ProblemFlags::add_to(CLI::App& command, bool presets) {
  add_problem_to(command, presets);
  target.add_to(command);
  command.option_defaults()->group("Samples");
  command.add_flag("--warm-l2", warm_l2_, "CUDA: leave in the L2 cache what the call before left there; else it is flushed before every sample");
  const auto own = [this](const CLI::Option* option) { sampling_options_.push_back(option); };
  own(command.add_option("--repeats", repeats_, "Samples at least, unless that takes longer than --max-time")
          ->check(whole_number(1, 100000))
          ->capture_default_str());
  own(command.add_option("--min-time", min_seconds_, "Seconds of samples at least")->check(number(0, 3600))->capture_default_str());
  own(command.add_option("--max-time", max_seconds_, "Seconds of samples after which 6 are enough")->check(number(0, 3600))->capture_default_str());
  own(command.add_option("--warmup", warmup_, "Untimed calls before; -1: until the time is stable")
          ->check(whole_number(-1, 100000))
          ->capture_default_str());
  command.add_option("--patience", patience_, "Refuse what would take longer than this in all, e.g. 90m, 6h or 2d [1h]")
      ->transform(CLI::Validator(take_duration, ""))
      ->type_name("TIME");
  own(command.add_option("--seed", seed_, "Seed of the inputs, which are N(0, 1)")->capture_default_str());
  command.add_option("--memory-limit", memory_limit_, "Refuse what needs more than this, e.g. 512MiB; 0: what is available")
      ->transform(byte_size(0, "0 or more"))
      ->type_name("SIZE");
  command.option_defaults()->group("Output");
  command.add_option("--json", json_, "Write the record (docs/RECORD.md) to a file, or - for stdout")->type_name("FILE|-");
  command.option_defaults()->group("Options");
}

measure::ProblemSpec ProblemFlags::spec() const {
  measure::ProblemSpec s;
  const Preset* preset = find_preset(preset_);
  if (preset) s = preset->spec;
  if (base_) s = *base_;
  const bool lengths_given = seqlen_.option->count() > 0;
  s.batch = batch_.or_else(s.batch);
  s.seqlen_q = seqlen_.or_else(s.seqlen_q);
  s.seqlen_k = seqlen_k_.or_else(lengths_given ? s.seqlen_q : s.seqlen_k);
  const bool heads_given = nheads_.option->count() > 0;
  s.nheads = nheads_.or_else(s.nheads);
  s.nheads_k = nheads_k_.or_else(heads_given ? s.nheads : s.nheads_k);
  const bool headdim_given = headdim_.option->count() > 0;
  s.headdim = headdim_.or_else(s.headdim);
  s.headdim_v = headdim_v_.or_else(headdim_given ? s.headdim : s.headdim_v);
  if (causal_option_->count() > 0) s.causal = causal_;
  for (const measure::SpecOption& option : measure::kSpecOptions) std::visit([&](auto member) { s.*member = options_.*member; }, option.member);
  for (const auto& [member, name] : shapes_) s.*member = pair_shape(name);
  require_consistent(s, grad());
  for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kF64})
    if (dtype_ == name_of(dtype)) s.dtype = dtype;
  if (dtype_option_->count() == 0 && target.on_cuda()) s.dtype = DType::kBF16;  // what its kernels compute
  s.seed = seed_;
  return s;
}

bool ProblemFlags::grad() const {
  const Preset* preset = find_preset(preset_);
  return !no_grad_ && (!preset || preset->grad);
}

std::vector<measure::Pass> ProblemFlags::passes() const {
  using measure::Pass;
  return grad() ? std::vector<Pass>{Pass::kForward, Pass::kBackward, Pass::kForwardBackward} : std::vector<Pass>{Pass::kForward};
}

measure::SamplingOptions ProblemFlags::sampling() const {
  measure::SamplingOptions o;
  o.repeats = repeats_;
  o.min_seconds = min_seconds_;
  o.max_seconds = max_seconds_;
  o.warmup = warmup_;
  return o;
}

Options ProblemFlags::options() const {
  Options o;
  target.apply_to(o);
  return o;
}

measure::Placement ProblemFlags::place() const {
  if (!target.on_cuda()) return {};
  return {Device::kCuda, target.device_index(), !warm_l2_};
}

std::vector<std::string> ProblemFlags::repeating_flags() const {
  const measure::ProblemSpec s = spec();
  std::vector<std::string> flags;
  auto add = [&](const char* name, const std::string& value) {
    flags.emplace_back(name);
    flags.push_back(value);
  };
  add("--batch", std::to_string(s.batch));
  add("--seqlen", std::to_string(s.seqlen_q));
  add("--seqlen-k", std::to_string(s.seqlen_k));
  add("--nheads", std::to_string(s.nheads));
  add("--nheads-k", std::to_string(s.nheads_k));
  add("--headdim", std::to_string(s.headdim));
  add("--headdim-v", std::to_string(s.headdim_v));
  flags.emplace_back(s.causal ? "--causal" : "--no-causal");
  for (const measure::SpecOption& option : measure::kSpecOptions) {
    if (!has(s, option)) continue;
    if (std::holds_alternative<bool ProblemSpec::*>(option.member))
      flags.emplace_back(option.flag);
    else if (const auto* shape = std::get_if<PairShape ProblemSpec::*>(&option.member))
      add(option.flag, name_of(s.*(*shape)));
    else if (const auto* integer = std::get_if<int64_t ProblemSpec::*>(&option.member))
      add(option.flag, std::to_string(s.*(*integer)));
    else
      add(option.flag, CLI::detail::to_string(s.*std::get<double ProblemSpec::*>(option.member)));
  }
  add("--dtype", name_of(s.dtype));
  if (!grad()) flags.emplace_back("--no-grad");
  for (const std::string& flag : place_flags()) flags.push_back(flag);
  add("--repeats", std::to_string(repeats_));
  add("--min-time", CLI::detail::to_string(min_seconds_));
  add("--max-time", CLI::detail::to_string(max_seconds_));
  add("--warmup", std::to_string(warmup_));
  add("--seed", std::to_string(seed_));
  return flags;
}

std::vector<std::string> ProblemFlags::place_flags() const {
  std::vector<std::string> flags = target.repeating_flags();
  if (warm_l2_) flags.emplace_back("--warm-l2");
  if (memory_limit_ > 0) flags.insert(flags.end(), {"--memory-limit", std::to_string(memory_limit_)});
  if (patience_ != ProblemFlags().patience_) flags.insert(flags.end(), {"--patience", CLI::detail::to_string(patience_)});
  return flags;
}

}  // namespace fattn::cli
