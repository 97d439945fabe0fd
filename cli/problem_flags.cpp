// Shared flags of the commands that measure.
#include "cli/problem_flags.h"

#include <limits>

#include "cli/presets.h"

namespace fattn::cli {
namespace {

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const Preset& p : presets()) names.push_back(p.name);
  return names;
}

}  // namespace

void ProblemFlags::add_problem_to(CLI::App& command) {
  // A later flag overrides an earlier one, so that a recorded run can be repeated with a change.
  command.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  // Far above what any machine holds, and below where a number that does not fit is read as the largest one.
  const auto size = CLI::Range(int64_t{1}, int64_t{1} << 48);
  auto integer = [&](Integer& flag, const char* name, const char* help) {
    flag.option = command.add_option(name, flag.value, help)->check(size)->type_name("N");
  };
  preset_option_ = command.add_option("--preset", preset_, "A model's or scenario's attention; other flags override its values")
                       ->check(CLI::IsMember(preset_names()))
                       ->type_name("NAME");
  integer(batch_, "--batch", "Batch size [1]");
  integer(seqlen_, "--seqlen", "Queries, and keys unless --seqlen-k is given [1024]");
  integer(seqlen_k_, "--seqlen-k", "Keys [as --seqlen]");
  integer(nheads_, "--nheads", "Heads of the queries [8]");
  integer(nheads_k_, "--nheads-k", "Heads of keys and values; divides --nheads (GQA, MQA) [as --nheads]");
  integer(headdim_, "--headdim", "Size of a head of queries and keys [64]");
  integer(headdim_v_, "--headdim-v", "Size of a head of values [as --headdim]");
  causal_option_ = command.add_flag("--causal,!--no-causal", causal_, "Causal mask, aligned to the bottom right");
  const CLI::Range limit(int64_t{-1}, int64_t{1} << 48);
  window_left_option_ = command.add_option("--window-left", window_left_, "Keys that a query sees before its own position; -1: all")
                            ->check(limit)
                            ->type_name("N")
                            ->capture_default_str();
  window_right_option_ = command.add_option("--window-right", window_right_, "The same behind it; with --causal there are none")
                             ->check(limit)
                             ->type_name("N")
                             ->capture_default_str();
  softcap_option_ = command.add_option("--softcap", softcap_, "Scaled scores s become softcap * tanh(s / softcap); 0: they stay as they are")
                        ->capture_default_str();
  dtype_option_ = command.add_option("--dtype", dtype_, "Type of all tensors; not given: bf16 on a CUDA device")
                      ->check(CLI::IsMember({name_of(DType::kF32), name_of(DType::kBF16), name_of(DType::kF16), name_of(DType::kF64)}))
                      ->capture_default_str();
  no_grad_option_ = command.add_flag("--no-grad", no_grad_, "Forward only");
}

bool ProblemFlags::problem_given() const {
  for (const CLI::Option* option :
       {batch_.option, seqlen_.option, seqlen_k_.option, nheads_.option, nheads_k_.option, headdim_.option, headdim_v_.option, causal_option_,
        window_left_option_, window_right_option_, softcap_option_, preset_option_, dtype_option_, no_grad_option_})
    if (option->count() > 0) return true;
  return false;
}

std::string ProblemFlags::first_of_one_problem() const {
  for (const CLI::Option* option : {batch_.option, seqlen_.option, seqlen_k_.option, nheads_.option, nheads_k_.option, headdim_.option,
                                    headdim_v_.option, causal_option_, window_left_option_, window_right_option_, softcap_option_, preset_option_,
                                    dtype_option_, sampling_[0], sampling_[1], sampling_[2], sampling_[3], seed_option_})
    if (option->count() > 0) return option->get_name();
  return "";
}

void ProblemFlags::add_to(CLI::App& command) {
  add_problem_to(command);
  target.add_to(command);
  command.add_flag("--warm-l2", warm_l2_, "CUDA: leave in the L2 cache what the call before left there; else it is flushed before every sample");
  sampling_[0] = command.add_option("--repeats", repeats_, "Samples at least, unless that takes longer than --max-time")
                     ->check(CLI::Range(1, 100000))
                     ->capture_default_str();
  sampling_[1] = command.add_option("--min-time", min_seconds_, "Seconds of samples at least")->check(CLI::Range(0.0, 3600.0))->capture_default_str();
  sampling_[2] = command.add_option("--max-time", max_seconds_, "Seconds of samples after which 6 are enough")
                     ->check(CLI::Range(0.0, 3600.0))
                     ->capture_default_str();
  sampling_[3] = command.add_option("--warmup", warmup_, "Untimed calls before; -1: until the time is stable")
                     ->check(CLI::Range(-1, 100000))
                     ->capture_default_str();
  seed_option_ = command.add_option("--seed", seed_, "Seed of the inputs, which are N(0, 1)")->capture_default_str();
  command.add_option("--memory-limit", memory_limit_, "Refuse what needs more than this, e.g. 512MiB; 0: what is available")
      ->transform(CLI::AsSizeValue(true))
      ->check(CLI::Range(uint64_t{0}, static_cast<uint64_t>(std::numeric_limits<int64_t>::max())))
      ->type_name("SIZE");
  command.add_option("--json", json_, "Write the record (docs/RECORD.md) to a file, or - for stdout")->type_name("FILE|-");
}

measure::ProblemSpec ProblemFlags::spec() const {
  measure::ProblemSpec s;
  const Preset* preset = find_preset(preset_);
  if (preset) s = preset->spec;
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
  s.window_left = window_left_;
  s.window_right = window_right_;
  s.softcap = softcap_;
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
  if (s.windowed()) {
    add("--window-left", std::to_string(s.window_left));
    add("--window-right", std::to_string(s.window_right));
  }
  if (s.softcap > 0) add("--softcap", CLI::detail::to_string(s.softcap));
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
  return flags;
}

}  // namespace fattn::cli
