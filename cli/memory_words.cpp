// Sizes in tables are MiB; what is exact to the byte is so in the record and in --format csv.
#include "cli/memory_words.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

#include "cli/calibrate.h"
#include "cli/sanitize.h"
#include "cli/streams.h"
#include "lab/chart/terminal_plot.h"

namespace fattn::cli {
namespace {

using lab::AttentionStepMemory;
using lab::MemoryReport;
using lab::PassTraffic;
using lab::Traffic;
using measure::Pass;

std::string title_of(Pass pass) { return pass == Pass::kForward ? "Forward" : "Backward"; }

// Without its unit, which the title has.
Cell mebibytes_cell(double bytes) {
  const double mib = bytes / (1 << 20);
  return Cell(fmt::format("{:.{}f}", mib, mib < 9.95 ? 2 : 1), fmt::format("{:.0f}", bytes));
}
Cell intensity_cell(double value) { return Cell(fmt::format("{:.3g}", value), fmt::format("{}", value)); }

void print_pass(Output& out, const MemoryReport& r, const PassTraffic& p) {
  const std::string chip = r.machine.chip + "-" + r.machine.cache, dram = r.machine.cache + "-DRAM";
  Table table(
      {Column::text("algorithm").as_key(), Column::number("papers", "bytes").ranked(2), Column::number(chip, "bytes"), Column::number(dram, "bytes"),
       Column::number("FLOP/B").ranked(1), Column::number("at least", "s").if_any(), Column::text("limit").if_any()},
      title_of(p.pass) + ": MiB moved, FLOP for each byte of them between " + r.machine.chip + " and " + r.machine.cache);
  for (const Traffic& t : p.algorithms) {
    if (!t.reason.empty()) {
      table.add({t.algorithm, "-", "-", "-", "-"});
      table.note(printable(t.reason, 300));
      continue;
    }
    const bool known = t.bound_known;
    table.add({t.algorithm, mebibytes_cell(t.papers_bytes), mebibytes_cell(t.moved_bytes), mebibytes_cell(t.dram_bytes),
               intensity_cell(t.intensity()), known ? seconds_cell(t.bound_seconds()) : Cell(), known ? t.limits[t.binding].name : ""});
  }
  out.print(table);
}

const Traffic* find(const PassTraffic& p, const std::string& algorithm) {
  for (const Traffic& t : p.algorithms)
    if (t.algorithm == algorithm && t.reason.empty()) return &t;
  return nullptr;
}

// The newest whose loops run here; else the newest.
const Traffic* newest(const PassTraffic& p) {
  const Traffic* found = nullptr;
  for (const char* name : {"v3", "v2", "v1"})
    if (const Traffic* t = find(p, name); t && (!found || (t->by_our_loops && !found->by_our_loops))) found = t;
  return found;
}

std::string times(double a, double b) { return fmt::format("{:.{}f}", a / b, a / b < 9.95 ? 1 : 0); }

void say_pass(const Output& out, const MemoryReport& r, const PassTraffic& p) {
  const Traffic *standard = find(p, "standard"), *ours = newest(p);
  std::string words = title_of(p.pass) + ": ";
  if (standard && ours) {
    const bool less = ours->moved_bytes < standard->moved_bytes;
    words +=
        fmt::format("{} moves {} times {} than standard attention between {} and {}, and {} of its bytes between {} and DRAM. ", ours->algorithm,
                    less ? times(standard->moved_bytes, ours->moved_bytes) : times(ours->moved_bytes, standard->moved_bytes), less ? "less" : "more",
                    r.machine.chip, r.machine.cache, percent_text(ours->dram_bytes / standard->dram_bytes), r.machine.cache);
  }
  for (const Traffic* t : {standard, ours}) {
    if (!t || !t->bound_known) continue;
    const lab::Limit& limit = t->limits[t->binding];
    const bool compute = limit.name == "matrix unit" || limit.name == "arithmetic";
    words += fmt::format("{} is limited by {}: it takes {} at least{}. ", t == standard ? "Standard attention" : t->algorithm, limit.name,
                         seconds_text(limit.seconds), compute ? ", and memory keeps up" : "");
  }
  if (ours && ours->on_chip_bytes > 0)
    words += fmt::format("A block of {} takes {} of the {} {}.", ours->algorithm, bytes_text(ours->on_chip_bytes), bytes_text(r.machine.chip_bytes),
                         r.machine.cuda ? "of shared memory that it can have" : "of a core's own cache");
  if (words.size() > title_of(p.pass).size() + 2) out.say("\n" + words);
}

void print_steps(Output& out, const MemoryReport& r) {
  Table table({Column::text("algorithm").as_key(), Column::number("forward", "bytes"), Column::number("saved", "bytes").if_any(),
               Column::number("backward", "bytes").if_any(), Column::number("peak", "bytes"), Column::text("known from")},
              r.grad ? "Memory of a training step: all tensors, and workspace" : "Memory of a forward call: all tensors, and workspace");
  for (const AttentionStepMemory& m : r.steps) {
    if (!m.reason.empty()) {
      table.add({m.algorithm, "-", "", "", "-", ""});
      table.note(printable(m.reason, 300));
      continue;
    }
    const auto cell = [](int64_t bytes) { return bytes_cell(static_cast<double>(bytes)); };
    table.add({m.algorithm, cell(m.forward_bytes()), r.grad ? cell(m.saved_bytes()) : Cell(), r.grad ? cell(m.backward_bytes()) : Cell(),
               cell(m.peak_bytes()), m.exact ? "its plan, exactly" : "model"});
  }
  out.print(table);
}

void say_steps(const Output& out, const MemoryReport& r) {
  const AttentionStepMemory *least = nullptr, *textbook = nullptr;
  for (const AttentionStepMemory& m : r.steps) {
    if (!m.reason.empty()) continue;
    if (!m.exact) textbook = &m;
    if (m.exact && m.algorithm != "standard" && (!least || m.peak_bytes() <= least->peak_bytes())) least = &m;
  }
  if (!least || !textbook) return;
  out.say(
      fmt::format("At its peak {} takes {}, textbook standard attention {}: {}. Textbook attention keeps the weights, (batch, nheads, seqlen_q, "
                  "seqlen_k), {}.",
                  least->algorithm, bytes_text(static_cast<double>(least->peak_bytes())), bytes_text(static_cast<double>(textbook->peak_bytes())),
                  percent_text(static_cast<double>(least->peak_bytes()) / static_cast<double>(textbook->peak_bytes())),
                  r.grad ? "from the forward pass to the backward pass" : "while it multiplies them with v"));
}

std::string exact(double bytes) { return fmt::format("{:.0f}", bytes); }

void explain(const Output& out, const MemoryReport& r, const PassTraffic& p, const Traffic& t) {
  const lab::MemoryMachine& m = r.machine;
  out.say(fmt::format("\n{}, {}", t.algorithm, title_of(p.pass)));
  out.say(fmt::format("  {:.6g} FLOP: products of all pairs of a query and a key {}, {:.6g} exponentials", t.flops,
                      t.algorithm == "standard" || !r.spec.causal ? "there are" : "that causal leaves", t.exponentials),
          4);
  out.say("  The papers' count:");
  for (const measure::MovedTerm& term : t.papers) out.say(fmt::format("    {}: {} = {}", term.what, term.arithmetic, exact(term.bytes)), 4);
  out.say(fmt::format("    in all {} bytes", exact(t.papers_bytes)));
  out.say(fmt::format("  {} to {}, by {}:", m.chip, m.cache, t.by_our_loops ? "the loops that run" : "the papers' loops"));
  for (const lab::LevelTerm& level : t.terms) {
    const measure::MovedTerm& term = level.moved;
    out.say(fmt::format("    {}: {} = {}", term.what, term.arithmetic, exact(term.bytes)), 4);
  }
  out.say(fmt::format("    in all {} bytes, {:.4g} FLOP a byte", exact(t.moved_bytes), t.intensity()));
  out.say(fmt::format("  {} to DRAM:", m.cache));
  for (const lab::LevelTerm& level : t.terms) {
    const measure::MovedTerm& term = level.moved;
    std::string line = fmt::format("    {}: once {}", term.what, exact(term.once));
    if (level.reused_bytes > 0 && term.bytes > term.once)
      line += level.missed > 0
                  ? fmt::format(" + {:.3g} * ({} - {}) = {}: {} has {} of the {} bytes that are touched in between", level.missed, exact(term.bytes),
                                exact(term.once), exact(level.dram_bytes), m.cache, exact(m.cache_bytes), exact(level.reused_bytes))
                  : fmt::format(", as {} holds the {} bytes that are touched in between", m.cache, exact(level.reused_bytes));
    out.say(line, 4);
  }
  out.say(fmt::format("    in all {} bytes, {:.4g} FLOP a byte; every input and output once is {}", exact(t.dram_bytes), t.dram_intensity(),
                      exact(p.compulsory_bytes)),
          4);
  out.say(t.on_chip_bytes > 0 ? fmt::format("  On the chip: {} = {} of {} bytes", t.on_chip, exact(t.on_chip_bytes), exact(m.chip_bytes))
                              : "  On the chip: " + t.on_chip,
          4);
  for (const lab::Limit& limit : t.limits)
    out.say(limit.arithmetic.empty() ? fmt::format("  {}: not known", limit.name)
                                     : fmt::format("  {}: {} = {}{}", limit.name, limit.arithmetic, seconds_text(limit.seconds),
                                                   t.bound_known && &limit == &t.limits[t.binding] ? "  <- binds" : ""),
            4);
}

void explain(const Output& out, const AttentionStepMemory& m) {
  if (!m.reason.empty()) return;
  out.say(fmt::format("\n{}: memory of a step{}", m.algorithm, m.exact ? "" : " (model)"));
  for (const lab::StepTensor& t : m.tensors)
    out.say(fmt::format("  {}: {} = {}; {}{}", t.name, t.arithmetic, t.bytes,
                        t.forward && t.backward ? "in both passes"
                        : t.forward             ? "forward alone"
                                                : "backward alone",
                        t.saved ? ", saved" : ""),
            4);
  out.say(m.backward_bytes() > 0 ? fmt::format("  forward {}, backward {}, peak {} bytes", m.forward_bytes(), m.backward_bytes(), m.peak_bytes())
                                 : fmt::format("  forward {} bytes", m.forward_bytes()));
}

}  // namespace

void print_report(Output& out, const MemoryReport& r) {
  const lab::MemoryMachine& m = r.machine;
  out.say(fmt::format("{} on {}: {}, {} {}{}, {} {}", measure::describe(r.spec), m.device, printable(m.name, 120), m.workers,
                      m.cuda ? "SM" : "thread", m.workers == 1 ? "" : "s", m.cache,
                      m.cache_bytes > 0 ? bytes_text(m.cache_bytes) : "of unknown size"));
  for (const PassTraffic& p : r.passes) print_pass(out, r, p);
  for (const PassTraffic& p : r.passes) say_pass(out, r, p);
  print_steps(out, r);
  say_steps(out, r);
  if (!m.lacks.empty()) out.say("\nNo limits and no roofline: " + printable(m.lacks, 600));
}

void print_arithmetic(const Output& out, const MemoryReport& r) {
  const lab::MemoryMachine& m = r.machine;
  out.say(fmt::format(
      "\nThe models. {0} to {1} is what the papers count as accesses of HBM. FlashAttention (Dao et al. 2022, section 3.2, theorem 2) has Theta(N^2 "
      "d^2 / M) of them for an on-chip memory of M numbers, standard attention Theta(N d + N^2): both grow with the square of N, and blocks make the "
      "factor small. {1} to DRAM is what of that {1} does not hold: every input and output goes once; what is read again comes from DRAM in the "
      "share "
      "1 - C / R, where C is {1} and R what all heads at work touch in between; at work are as many blocks as there are {2}. Nothing here was "
      "counted by hardware.",
      m.chip, m.cache, m.cuda ? "SMs" : "threads"));
  for (const PassTraffic& p : r.passes)
    for (const Traffic& t : p.algorithms)
      if (t.reason.empty()) explain(out, r, p, t);
  for (const AttentionStepMemory& step : r.steps) explain(out, step);
}

void print_rooflines(const Output& out, const MemoryReport& r, size_t width, bool colour) {
  for (const lab::chart::Panel& panel : lab::rooflines(r)) {
    lab::chart::TerminalPlot how;
    how.width = std::min<size_t>(width, 100);
    how.colour = colour;
    put(out.words(), "\n" + lab::chart::terminal_plot(panel, how));
  }
}

}  // namespace fattn::cli
