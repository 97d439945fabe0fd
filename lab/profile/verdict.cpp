// The verdict: what binds, how far from the limit, what to try. A sentence that has no number has no place here.
#include <fmt/format.h>

#include <algorithm>

#include "lab/chart/quantity.h"
#include "lab/profile/profile.h"

namespace fattn::lab::profile {
namespace {

using chart::text_of;
using chart::Unit;
using measure::Row;

std::string pass_words(const std::string& pass) {
  return pass == "fwd" ? "forward" : pass == "bwd" ? "backward" : pass == "fwdbwd" ? "forward and backward" : pass;
}
std::string percent(double share) { return fmt::format("{:.0f} %", 100 * share); }

const Row* row_of(const Profile& p, const std::string& side, const std::string& pass) {
  for (const Row& row : p.rows)
    if (row.ok() && row.time && row.who.provider == side && name_of(row.pass) == pass) return &row;
  return nullptr;
}

const Counter* counter_of(const PassProfile& pass, const std::string& name) {
  for (const Counter& counter : pass.counters)
    if (counter.name == name && counter.value) return &counter;
  return nullptr;
}

void speed(const Profile& p, const PassProfile& pass, std::vector<Finding>& out) {
  const Row *ours = row_of(p, "fattn", pass.pass), *standard = row_of(p, "standard", pass.pass);
  if (!ours || !standard) return;
  const double ratio = standard->time->median / ours->time->median;
  std::string text = fmt::format("{}: fattn takes {} a call, standard attention {}: {:.2f} times as fast", pass_words(pass.pass),
                                 text_of(Unit::kTime, ours->time->median), text_of(Unit::kTime, standard->time->median), ratio);
  if (ours->memory && standard->memory && ours->memory->extra_bytes > 0)
    text += fmt::format(", with {} of memory instead of {}", text_of(Unit::kBytes, static_cast<double>(ours->memory->extra_bytes)),
                        text_of(Unit::kBytes, static_cast<double>(standard->memory->extra_bytes)));
  out.push_back({"speed", text + "."});
  if (ratio < 1)
    out.push_back(
        {"what to try", fmt::format("{}: standard attention is {:.2f} times as fast at this size; `fattn advise --when` shows from which size on "
                                    "fattn is the faster one here.",
                                    pass_words(pass.pass), 1 / ratio)});
}

void limit(const Profile& p, const PassProfile& pass, std::vector<Finding>& out) {
  const Row* const row = row_of(p, "fattn", pass.pass);
  if (!row) return;
  const std::string words = pass_words(pass.pass);
  if (!row->ceiling) {
    if (row->peak_fraction)
      out.push_back(
          {"what binds", fmt::format("{}: {} of the peak of this machine's arithmetic ({}).", words, percent(*row->peak_fraction), row->peak_name)});
    return;
  }
  const measure::CeilingShare& c = *row->ceiling;
  out.push_back({"what binds", fmt::format("{}: {} binds. It alone takes {}, {} of the time; all limits one after the other make up {}{}.", words,
                                           c.limit, text_of(Unit::kTime, c.seconds), percent(c.fraction), percent(c.accounted),
                                           c.rating.empty() ? "" : ", which is " + c.rating)});
  if (!c.whole)
    out.push_back(
        {"what to try", fmt::format("{}: {} of the time is explained by this run's own peak alone; `fattn calibrate` once adds exponentials, "
                                    "caches, memory and the cost of a call.",
                                    words, percent(c.accounted))});
  const bool sixteen = row->spec.dtype == DType::kF16 || row->spec.dtype == DType::kBF16;
  if (c.limit.find("bandwidth") != std::string::npos && !sixteen)
    out.push_back(
        {"what to try", fmt::format("{}: {} binds at {} of the time; --dtype bf16 moves half the bytes.", words, c.limit, percent(c.fraction))});
  if (c.limit == "latency")
    out.push_back(
        {"what to try", fmt::format("{}: starting a call takes {} of the time; a larger batch, or a CUDA graph on a GPU, spreads it over more work.",
                                    words, percent(c.fraction))});
}

// Where standard attention's time goes: its matrices.
void matrices(const PassProfile& pass, std::vector<Finding>& out) {
  double rows = 0, all = 0, bytes = 0;
  for (const Operation& o : pass.operations) {
    if (o.kind != EventKind::kPart) continue;
    all += o.self_seconds;
    bytes += o.bytes;
    if (o.name == "p = softmax(s)" || o.name == "gradient of softmax") rows += o.self_seconds;
  }
  if (all > 0 && rows > 0 && pass.calls > 0)
    out.push_back(
        {"where time goes", fmt::format("{}: standard attention spends {} of its threads' time between its products, going over matrices of "
                                        "(seqlen_q, seqlen_k); its parts move {} a call, by the model.",
                                        pass_words(pass.pass), percent(rows / all), text_of(Unit::kBytes, bytes / static_cast<double>(pass.calls)))});
}

void threads(const Profile& p, const Side& side, const PassProfile& pass, std::vector<Finding>& out) {
  if (p.cuda || side.name != "fattn" || pass.threads < 2 || pass.seconds <= 0) return;
  double busy = 0;
  for (const Operation& o : pass.operations)
    if (o.kind == EventKind::kPart) busy += o.self_seconds;
  const double share = busy / (pass.seconds * pass.threads);
  if (busy <= 0) return;
  out.push_back({"where time goes", fmt::format("{}: {}'s {} threads were at work {} of the time.", pass_words(pass.pass), side.name, pass.threads,
                                                percent(std::min(share, 1.0)))});
  if (share < 0.75)
    out.push_back({"what to try", fmt::format("{}: {} of {} threads' time was spent waiting; another program may have had the processors (see the "
                                              "context switches), or there is too little work to share: try --threads {}, or a larger batch.",
                                              pass_words(pass.pass), percent(1 - share), side.name, std::max(1, pass.threads / 2))});
}

void kernels(const Profile& p, const Side& side, const PassProfile& pass, std::vector<Finding>& out) {
  double gpu = 0, wall = 0;
  const Operation* longest = nullptr;
  for (const Operation& o : pass.operations) {
    if (!o.on_gpu()) continue;
    gpu += o.self_seconds;
    wall += o.wall_seconds;
    if (!longest || o.self_seconds > longest->self_seconds) longest = &o;
  }
  if (!p.cuda || !longest || pass.seconds <= 0) return;
  out.push_back({"where time goes", fmt::format("{}: of {}'s time on the GPU {} is in {} ({} times); the GPU was at work {} of the recorded time.",
                                                pass_words(pass.pass), side.name, percent(longest->self_seconds / gpu), longest->name, longest->times,
                                                percent(std::min(1.0, wall / pass.seconds)))});
}

void counted(const Side& side, const PassProfile& pass, std::vector<Finding>& out) {
  if (const Counter* c = counter_of(pass, "instructions_per_cycle"))
    out.push_back({"what was counted", fmt::format("{}: {} completes {:.2f} instructions a cycle.", pass_words(pass.pass), side.name, *c->value)});
  for (const Counter& c : pass.counters)
    if (const std::optional<double> difference = c.difference())
      out.push_back({"what was counted", fmt::format("{}: {}'s {} are {}; the model says {} ({:+.0f} %).", pass_words(pass.pass), side.name, c.words,
                                                     text_of(Unit::kBytes, *c.value), text_of(Unit::kBytes, *c.model), 100 * *difference)});
}

void of_program(const Profile& p, std::vector<Finding>& out) {
  const ProgramRun& run = *p.program;
  if (run.signal > 0)
    out.push_back({"the program", fmt::format("it was ended by signal {}; what it had left until then is here.", run.signal)});
  else if (run.exit_code != 0)
    out.push_back({"the program", fmt::format("it failed with exit code {}, which `fattn profile` has, too.", run.exit_code)});
  for (const Side& side : p.sides)
    for (const PassProfile& pass : side.passes) {
      double ours = 0, gpu = 0;
      int64_t calls = 0;
      const Operation* slowest = nullptr;
      for (const Operation& o : pass.operations) {
        if (o.on_gpu()) gpu += o.self_seconds;
        if (o.kind != EventKind::kCall) continue;
        calls += o.times;
        ours += o.wall_seconds;
        if (!slowest || o.seconds > slowest->seconds) slowest = &o;
      }
      if (calls == 0) {
        out.push_back(
            {"the program", fmt::format("{} made 0 calls of libfattn.so in {}; a program that is linked with the archive, or that never calls it, "
                                        "shows its processors' counters and memory alone.",
                                        side.name, text_of(Unit::kTime, pass.seconds))});
        continue;
      }
      out.push_back({"where time goes", fmt::format("{}: {} calls of fattn took {}, {} of its {}; most of it {} ({}).", side.name, calls,
                                                    text_of(Unit::kTime, ours), percent(pass.seconds > 0 ? ours / pass.seconds : 0),
                                                    text_of(Unit::kTime, pass.seconds), slowest->name, slowest->detail)});
      if (gpu > 0)
        out.push_back({"where time goes", fmt::format("{}: kernels and copies took {} on the GPU, {} of the time.", side.name,
                                                      text_of(Unit::kTime, gpu), percent(pass.seconds > 0 ? gpu / pass.seconds : 0))});
      if (pass.seconds > 0 && ours / pass.seconds < 0.1 && gpu <= 0)
        out.push_back({"what to try", fmt::format("{}: a faster attention could save {} of the time at most; look at the rest first.", side.name,
                                                  percent(ours / pass.seconds))});
    }
}

}  // namespace

std::vector<Finding> verdict_of(const Profile& p) {
  std::vector<Finding> out;
  if (p.program) of_program(p, out);
  for (const Side& side : p.sides)
    for (const PassProfile& pass : side.passes) {
      if (!pass.reason.empty()) continue;
      if (side.name == "fattn" && !p.program) {
        speed(p, pass, out);
        limit(p, pass, out);
      }
      if (side.name == "standard") matrices(pass, out);
      threads(p, side, pass, out);
      kernels(p, side, pass, out);
      counted(side, pass, out);
    }
  std::stable_sort(out.begin(), out.end(), [](const Finding& a, const Finding& b) {
    const auto rank = [](const Finding& f) {
      constexpr const char* kOrder[] = {"the program", "speed", "what binds", "where time goes", "what was counted", "what to try"};
      return std::find(std::begin(kOrder), std::end(kOrder), f.topic) - std::begin(kOrder);
    };
    return rank(a) < rank(b);
  });
  return out;
}

}  // namespace fattn::lab::profile
