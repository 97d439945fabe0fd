#include "cli/sweep_flags.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <filesystem>
#include <set>
#include <stdexcept>

#include "cli/contestants.h"
#include "cli/nearest.h"
#include "cli/sanitize.h"
#include "cli/table.h"
#include "cli/values.h"
#include "cli/words.h"

namespace fattn::cli {
namespace {

using lab::SweepAxis;
using measure::Pass;

constexpr Pass kPasses[] = {Pass::kForward, Pass::kBackward, Pass::kForwardBackward};

[[noreturn]] void refuse_flag(const char* flag, const std::string& why) { throw CLI::ValidationError(flag, why); }

std::vector<std::string> axis_names() {
  std::vector<std::string> names;
  for (const SweepAxis axis : lab::kAxes) names.emplace_back(name_of(axis));
  return names;
}

std::vector<std::string> preset_names() {
  std::vector<std::string> names;
  for (const lab::SweepPreset& preset : lab::sweep_presets()) names.push_back(preset.name);
  return names;
}

std::string take_sweep_preset(std::string& name) {
  if (name == "list") {
    Table table({Column::text("preset").as_key(), Column::text("what it measures").wrapping(20)});
    for (const lab::SweepPreset& preset : lab::sweep_presets()) table.add({preset.name, preset.what});
    Output{OutputFlags()}.print(table);
    throw CLI::Success();
  }
  if (lab::sweep_preset(name)) return {};
  const std::string near = nearest(name.size() > 100 ? "" : name, preset_names());
  return "there is no sweep '" + printable(name, 40) + "'" + (near.empty() ? "" : "; did you mean '" + near + "'?") + "; there are " +
         any_of(preset_names(), "and");
}

std::string unknown(const std::string& name, const std::vector<std::string>& known, const char* what) {
  const std::string near = nearest(name.size() > 100 ? "" : name, known);
  return fmt::format("'{}' is no {}; allowed: {}{}", printable(name, 40), what, any_of(known), near.empty() ? "" : "; did you mean '" + near + "'?");
}

void require_each_once(const char* flag, const std::vector<std::string>& names) {
  for (size_t i = 0; i < names.size(); ++i)
    if (std::find(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(i), names[i]) != names.begin() + static_cast<std::ptrdiff_t>(i))
      refuse_flag(flag, "'" + printable(names[i], 40) + "' is there twice; name every one once");
}

std::vector<Pass> passes_of(const SweepFlags& flags, const lab::SweepPreset* preset) {
  std::vector<Pass> passes = preset ? preset->passes : std::vector<Pass>(std::begin(kPasses), std::end(kPasses));
  if (flags.given("--pass")) {
    const std::vector<std::string> names = split_at_commas(flags.passes);
    if (names.empty()) refuse_flag("--pass", "a pass is wanted: fwd, bwd, fwdbwd, or several of them with commas");
    require_each_once("--pass", names);
    passes.clear();
    for (const std::string& name : names)
      if (std::none_of(std::begin(kPasses), std::end(kPasses), [&](Pass pass) { return name == name_of(pass); }))
        refuse_flag("--pass", unknown(name, {"fwd", "bwd", "fwdbwd"}, "pass"));
    for (const Pass pass : kPasses)
      if (std::find(names.begin(), names.end(), name_of(pass)) != names.end()) passes.push_back(pass);
  }
  if (flags.problem.grad()) return passes;
  if (flags.given("--pass") && passes != std::vector<Pass>{Pass::kForward})
    refuse_flag("--pass", flags.passes + " has a backward pass, --no-grad has none; leave one of them out");
  return {Pass::kForward};
}

std::vector<std::string> contestants_of(const SweepFlags& flags, const lab::SweepPreset* preset) {
  std::vector<std::string> names;
  if (flags.given("--algorithm")) {
    const std::vector<std::string> known = {"standard", "v1", "v2", "v3", "auto"};
    for (const std::string& name : split_at_commas(flags.algorithms)) {
      if (std::find(known.begin(), known.end(), name) == known.end()) refuse_flag("--algorithm", unknown(name, known, "algorithm"));
      names.push_back(name == "auto" ? "fattn" : name);
    }
    if (names.empty()) refuse_flag("--algorithm", "an algorithm is wanted: " + any_of(known) + ", several of them with commas");
  }
  names.insert(names.end(), flags.provider_names.begin(), flags.provider_names.end());
  if (names.empty()) names = preset ? preset->contestants : std::vector<std::string>{"standard", "fattn"};
  require_each_once(flags.given("--algorithm") ? "--algorithm" : "--provider", names);
  return names;
}

std::vector<int64_t> values_of(const SweepFlags& flags, SweepAxis axis, const lab::SweepPreset* preset) {
  const bool range = flags.given("--from") || flags.given("--to");
  if (flags.given("--values")) {
    for (const char* other : {"--from", "--to", "--factor", "--step"})
      if (flags.given(other)) refuse_flag(other, "--values names all that is swept; leave one of them out");
    return lab::values_in(flags.values);
  }
  if (flags.given("--factor") && flags.given("--step")) refuse_flag("--step", "--factor and --step are two ways to go on; leave one of them out");
  if (!range && (flags.given("--factor") || flags.given("--step")))
    refuse_flag(flags.given("--step") ? "--step" : "--factor", "it goes from --from to --to; give both");
  if (range) {
    if (!flags.given("--from")) refuse_flag("--from", "--to alone is no range; give --from, too");
    if (!flags.given("--to")) refuse_flag("--to", "--from alone is no range; give --to, too");
    return flags.given("--step") ? lab::values_by_step(flags.from, flags.to, flags.step) : lab::values_by_factor(flags.from, flags.to, flags.factor);
  }
  if (preset) return preset->values;
  if (axis == SweepAxis::kCausal) return {0, 1};
  throw CLI::RequiredError(fmt::format("sweep --over {}: what it goes through, --from A --to B or --values A,B,...,", name_of(axis)));
}

// A size that the sweep sets is not given beside it: one of the two would be ignored.
void require_no_size_that_is_swept(const SweepFlags& flags, SweepAxis axis, const std::string& fix) {
  std::vector<const char*> swept;
  const bool tokens = fix == "tokens", embed = fix == "embed";
  switch (axis) {
    case SweepAxis::kSeqlen: swept = tokens ? std::vector<const char*>{"--seqlen-k"} : std::vector<const char*>{"--seqlen", "--seqlen-k"}; break;
    case SweepAxis::kBatch: swept = tokens ? std::vector<const char*>{"--seqlen-k"} : std::vector<const char*>{"--batch"}; break;
    case SweepAxis::kNheads: swept = embed ? std::vector<const char*>{"--headdim-v"} : std::vector<const char*>{}; break;
    case SweepAxis::kHeaddim: swept = embed ? std::vector<const char*>{"--headdim-v"} : std::vector<const char*>{"--headdim", "--headdim-v"}; break;
    case SweepAxis::kEmbed: swept = {"--embed", "--headdim-v"}; break;
    case SweepAxis::kSeqlenK: swept = {"--seqlen-k"}; break;
    case SweepAxis::kThreads: swept = {"--threads"}; break;
    case SweepAxis::kCausal: swept = {"--causal"}; break;
  }
  for (const char* flag : swept)
    if (flags.given(flag)) refuse_flag(flag, fmt::format("the sweep over {} sets it; leave it out", name_of(axis)));
}

// Lengths of parts of a sequence must fit the sequences that are swept.
void require_parts_that_fit(const std::vector<lab::Step>& steps) {
  for (const lab::Step& step : steps) {
    const measure::ProblemSpec& s = step.spec;
    if (s.least_packed > s.seqlen_q || s.least_seqused_k > s.seqlen_k || s.documents > s.seqlen_q)
      throw std::invalid_argument(fmt::format("--packed, --seqused-k and --documents do not fit seqlen {}; leave that value out", s.seqlen_q));
    if (s.page_size > 0 && s.seqlen_k % s.page_size != 0)
      throw std::invalid_argument(fmt::format("--page-size {} does not divide seqlen-k {}; leave that value out", s.page_size, s.seqlen_k));
    if (s.packed() && s.seqlen_q != s.seqlen_k) throw std::invalid_argument("--packed has as many keys as rows; it cannot be swept over seqlen-k");
  }
}

std::vector<std::string> repeating(const SweepFlags& flags, const SweepSetup& setup) {
  std::vector<std::string> all;
  const auto add = [&](const char* name, const std::string& value) { all.insert(all.end(), {name, value}); };
  if (setup.preset) add("--preset", setup.preset->name);
  add("--over", name_of(setup.axis));
  add("--values", fmt::format("{}", fmt::join(setup.values, ",")));
  if (!setup.fix.empty()) add("--fix", setup.fix);
  std::vector<std::string> passes;
  for (const Pass pass : setup.passes) passes.emplace_back(name_of(pass));
  add("--pass", fmt::format("{}", fmt::join(passes, ",")));
  for (const std::string& name : setup.contestants) add("--provider", name);
  add("--baseline", flags.baseline);
  // What the sweep sets is not in them, so that they repeat it as they are.
  std::vector<std::string> left_out = {"--no-grad", "--algorithm"};
  const auto leave_out = [&](std::initializer_list<const char*> names) { left_out.insert(left_out.end(), names.begin(), names.end()); };
  const bool tokens = setup.fix == "tokens";
  if (setup.axis == SweepAxis::kSeqlen) leave_out({tokens ? "--seqlen-k" : "--seqlen", "--seqlen-k"});
  if (setup.axis == SweepAxis::kBatch) leave_out({tokens ? "--seqlen-k" : "--batch"});
  if (setup.axis == SweepAxis::kSeqlenK) leave_out({"--seqlen-k"});
  if (setup.axis == SweepAxis::kThreads) leave_out({"--threads"});
  if (setup.axis == SweepAxis::kCausal) leave_out({"--causal", "--no-causal"});
  if (setup.axis == SweepAxis::kHeaddim) leave_out({setup.fix == "embed" ? "--headdim-v" : "--headdim", "--headdim-v"});
  if (setup.axis == SweepAxis::kEmbed || setup.axis == SweepAxis::kNheads) leave_out({"--headdim-v"});
  const std::vector<std::string> problem = flags.problem.repeating_flags();
  for (size_t i = 0; i < problem.size(); ++i) {
    const bool has_value = i + 1 < problem.size() && problem[i + 1].rfind("--", 0) != 0;
    if (std::find(left_out.begin(), left_out.end(), problem[i]) == left_out.end()) {
      all.push_back(problem[i]);
      if (has_value) all.push_back(problem[i + 1]);
    }
    i += has_value ? 1 : 0;
  }
  if (setup.axis != SweepAxis::kEmbed && setup.embed != setup.base.nheads * setup.base.headdim) add("--embed", std::to_string(setup.embed));
  for (const std::string& flag : flags.providers.repeating_flags()) all.push_back(flag);
  for (std::string& flag : all) flag = printable(flag);
  return all;
}

}  // namespace

bool SweepSetup::grad() const {
  return std::any_of(passes.begin(), passes.end(), [](Pass pass) { return pass != Pass::kForward; });
}

SweepSetup set_up(SweepFlags& flags) {
  SweepSetup setup;
  setup.preset = lab::sweep_preset(flags.preset);
  if (!setup.preset && flags.over.empty())
    throw CLI::RequiredError("sweep: what is swept, --over " + any_of(axis_names()) + ", or a whole experiment, --preset NAME (`--preset list`),");
  if (setup.preset && !flags.over.empty() && flags.over != name_of(setup.preset->axis))
    refuse_flag("--over", fmt::format("the preset {} sweeps over {}; leave one of them out", setup.preset->name, name_of(setup.preset->axis)));
  setup.axis = setup.preset ? setup.preset->axis : *lab::axis_named(flags.over);
  if (setup.preset) flags.problem.begin_with(setup.preset->spec);
  if (setup.preset && setup.preset->sampling) flags.problem.begin_with(*setup.preset->sampling);

  const std::vector<std::string> fixes = fixes_of(setup.axis);
  if (!flags.fix.empty()) {
    if (fixes.empty()) refuse_flag("--fix", fmt::format("nothing is tied to {}; leave it out", name_of(setup.axis)));
    if (std::find(fixes.begin(), fixes.end(), flags.fix) == fixes.end())
      refuse_flag("--fix",
                  fmt::format("where {} is swept, {} can stay as it is, not '{}'", name_of(setup.axis), any_of(fixes), printable(flags.fix, 40)));
  }
  setup.fix = !flags.fix.empty() ? flags.fix : fixes.empty() ? "" : fixes.front();
  require_no_size_that_is_swept(flags, setup.axis, setup.fix);
  const bool uses_embed = setup.fix == "embed";
  if (flags.given("--embed") && !uses_embed)
    refuse_flag("--embed", "it says what stays as it is where --over nheads or headdim keeps it; leave it out");
  setup.base = flags.problem.spec();
  setup.embed = flags.embed > 0 ? flags.embed : setup.base.nheads * setup.base.headdim;
  setup.passes = passes_of(flags, setup.preset);
  setup.contestants = contestants_of(flags, setup.preset);
  const auto named = [&](const std::string& name) {
    return std::find(setup.contestants.begin(), setup.contestants.end(), name) != setup.contestants.end();
  };
  if (flags.given("--baseline") && !named(flags.baseline))
    refuse_flag("--baseline", unknown(flags.baseline, setup.contestants, "contestant of this sweep"));
  setup.baseline = named(flags.baseline) ? flags.baseline : "";
  setup.values = values_of(flags, setup.axis, setup.preset);
  setup.steps = steps_of(setup.axis, setup.values, setup.base, setup.embed, setup.fix);
  require_parts_that_fit(setup.steps);
  setup.flags = repeating(flags, setup);

  if (flags.given("--resume")) {
    const std::string json = flags.problem.json();
    setup.resume_must_exist = !flags.resume.empty();
    setup.resume_from = flags.resume.empty() ? json : flags.resume;
    if (setup.resume_from.empty() || setup.resume_from == "-")
      refuse_flag("--resume", "name the record to go on from: --resume FILE, or --json FILE --resume");
  }
  if (!flags.figure.empty() && !flags.figure.ends_with(".svg")) {
    std::error_code error;
    const std::string end = std::filesystem::path(flags.figure).extension().string();
    const bool is_picture = std::set<std::string>{".png", ".pdf", ".jpg", ".jpeg", ".bmp", ".gif", ".eps", ".webp", ".tiff"}.count(end) > 0;
    if (!std::filesystem::is_directory(flags.figure, error) && (is_picture || std::filesystem::exists(flags.figure, error)))
      refuse_flag("--figure", "'" + printable(flags.figure, 80) + "' is neither a folder nor the name of an .svg file");
  }
  return setup;
}

void SweepFlags::add_to(CLI::App& app) {
  command = &app;
  app.option_defaults()->group("What is swept")->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  app.add_option("--preset", preset, "A whole experiment by name; `list` shows all. Other flags override its values")
      ->transform(CLI::Validator(take_sweep_preset, ""))
      ->type_name("NAME");
  app.add_option("--over", over, "The size that changes; threads are those of the CPU, causal is the mask")
      ->transform(one_of(axis_names()))
      ->type_name("SIZE");
  app.add_option("--from", from, "Its first value")->check(whole_number(1))->type_name("N");
  app.add_option("--to", to, "Its last value at most")->check(whole_number(1))->type_name("N");
  app.add_option("--factor", factor, "From one value to the next, times this")->check(number(1.001, 1e6))->type_name("X")->capture_default_str();
  app.add_option("--step", step, "From one value to the next, plus this")->check(whole_number(1))->type_name("N");
  app.add_option("--values", values, "Or its values themselves")->type_name("N,N,...");
  app.add_option(
         "--fix", fix,
         "What stays as it is: of nheads embed (or headdim), of embed and headdim nheads (or headdim, embed), of seqlen batch (or tokens), of "
         "batch seqlen (or tokens) [the first]")
      ->type_name("NAME");
  app.add_option("--embed", embed, "nheads * headdim, where that stays as it is [of --nheads and --headdim]")->check(whole_number(1))->type_name("N");
  app.add_option("--pass", passes, "fwd, bwd and fwdbwd, or some of them with commas [all; with --no-grad fwd]")->type_name("NAME,...");
  problem.add_to(app, false);
  app.remove_option(app.get_option("--algorithm"));
  app.option_defaults()->group("Who is measured");
  app.add_option("--algorithm", algorithms, "These side by side: standard, v1, v2, v3 and auto, which is called fattn [standard,auto]")
      ->type_name("NAME,...");
  app.add_option("--provider", provider_names, "A contestant as of `fattn compare`: fattn, an algorithm, or a provider; may be repeated")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("NAME");
  app.add_option("--baseline", baseline, "The contestant that the others are compared with, if it is one")->type_name("NAME")->capture_default_str();
  providers.add_to(app);
  output.add_to(app);
  app.option_defaults()->group("Output");
  app.add_option("--figure", figure, "Draw the figures: all in one file, or a file for each pass in a folder")->type_name("FILE.svg|DIR");
  app.add_option("--resume", resume, "Take what is ok in an earlier record of this sweep, without FILE that of --json, and measure the rest")
      ->expected(0, 1)
      ->type_name("FILE");
  app.add_option("--status", status, "A file that says what is being done while it runs (docs/RECORD.md); `fattn watch` shows it")->type_name("FILE");
  app.option_defaults()->group("Options");
}

}  // namespace fattn::cli
