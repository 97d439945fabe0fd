#include "cli/advise_report.h"

#include <fmt/format.h>

#include "cli/sanitize.h"
#include "cli/table.h"
#include "lab/advise/settings.h"

namespace fattn::cli {
namespace {

using lab::Advice;
using lab::AdviceRequest;
using lab::Task;
using Json = nlohmann::ordered_json;

constexpr double kBytesOfGiB = 1024.0 * 1024 * 1024;

Cell gib_cell(double bytes) { return {fmt::format("{:.3f} GiB", bytes / kBytesOfGiB), fmt::format("{:.0f}", bytes)}; }
std::string gib(double bytes) { return fmt::format("{:.2f} GiB", bytes / kBytesOfGiB); }

std::string model_words(const lab::ModelSize& m, int64_t seqlen) {
  std::string words = fmt::format("{}: {} parameters, {} layers, width {}, {} heads of {}", printable(m.name), m.parameters(seqlen), m.layers,
                                  m.width, m.nheads, m.headdim());
  if (m.given_parameters > 0) words += " (the nearest shape of GPT-2's kind)";
  if (seqlen > m.positions) words += fmt::format("; {} of them for positions beyond {}", (seqlen - m.positions) * m.width, m.positions);
  return words;
}

void print_memory(Output& out, const char* title, const lab::StepMemory& memory) {
  Table table({Column::text("what").as_key(), Column::number("memory", "bytes"), Column::text("arithmetic, in bytes").wrapping(24)}, title);
  for (const lab::MemoryLine& line : memory.lines) table.add({line.what, gib_cell(line.bytes), line.arithmetic});
  table.add({"all", gib_cell(memory.bytes), ""});
  out.print(table);
}

void print_time(Output& out, const Advice& advice, const AdviceTimes& times) {
  Table table({Column::text("what").as_key(), Column::number("time", "s"), Column::text("arithmetic").wrapping(24)},
              advice.plan.task == Task::kTrain ? "Time of a micro-batch" : "Time of the prompt");
  for (const lab::TimeLine& line : times.micro_batch.lines) table.add({line.what, seconds_cell(line.seconds), line.arithmetic});
  table.add({"all", seconds_cell(times.micro_batch.seconds), ""});
  out.print(table);
}

void say_gains(Output& out, const AdviceRequest& request, const Advice& advice, const AdviceTimes& times) {
  const double share = advice.memory.bytes / advice.standard.bytes;
  std::string words = fmt::format("Standard attention would take {} for the same, {:.1f} times as much", gib(advice.standard.bytes), 1 / share);
  words += advice.standard.bytes > request.memory_bytes ? advice.standard_batch == 0
                                                              ? ", and not one sequence would fit."
                                                              : fmt::format(", which does not fit: at most {} at once would.", advice.standard_batch)
                                                        : ".";
  if (times.rates && times.standard.seconds > 0 && times.standard.attention > 0) {
    const double whole = times.step(advice, true) / times.step(advice);
    words += fmt::format(" Its attention takes {:.1f} times as long, the whole {:.2f} times.", times.standard.attention / times.micro_batch.attention,
                         whole);
  }
  out.say("\n" + words);
}

Json lines_of(const lab::StepMemory& memory) {
  Json lines = Json::array();
  for (const lab::MemoryLine& line : memory.lines) lines.push_back({{"what", line.what}, {"bytes", line.bytes}, {"arithmetic", line.arithmetic}});
  return {{"bytes", memory.bytes}, {"lines", lines}};
}

}  // namespace

void print_refusal(Output& out, const AdviceRequest& request, const Advice& advice) {
  out.say(model_words(request.model, request.seqlen), 2);
  out.say_line(fmt::format("Does not fit, because {}.", advice.why), 2);
  out.say_line(fmt::format("What would fit: {}.", advice.would_fit), 2);
  print_memory(out, "One sequence, the leanest way", advice.memory);
}

void print_advice(Output& out, const AdviceRequest& request, const Advice& advice, const AdviceTimes& times) {
  const bool trains = request.task == Task::kTrain;
  out.say(model_words(request.model, request.seqlen), 2);
  Table table({Column::text("what").as_key(), Column::text("found")}, "");
  table.without_headings();
  table.add({"batch", count_cell(advice.plan.batch)});
  if (trains) {
    table.add({"accumulation", count_cell(advice.accumulation)});
    table.add({"effective batch", count_cell(advice.effective_batch())});
  }
  table.add({"precision", fmt::format("{}{}", name_of(request.precision),
                                      trains && request.precision != lab::Precision::kFP32 ? " products, fp32 master weights and moments" : "")});
  if (trains) table.add({"checkpointing", advice.checkpointing_why});
  table.add({"attention", "fattn: its memory grows with the sequence, not with its square"});
  table.add({"memory", fmt::format("{} of {}", gib(advice.memory.bytes), gib(request.memory_bytes))});
  if (times.rates) {
    const double step = times.step(advice), tokens = static_cast<double>(advice.effective_batch() * request.seqlen);
    table.add({trains ? "time of a step" : "time of the prompts",
               fmt::format("{}{} ({:.0f} tokens/s)", times.rates->bound ? "no less than " : "", seconds_text(step), tokens / step)});
  } else {
    table.add({"time", "not known"});
  }
  out.print(table);
  if (!times.rates) out.say("\nTime is not known: " + printable(times.unknown, 600), 0);
  say_gains(out, request, advice, times);
  print_memory(out, "Memory", advice.memory);
  if (times.rates) {
    print_time(out, advice, times);
    out.say(fmt::format(
        "Rates: {:.3g} FLOP/s of products, {:.3g} B/s of memory, {}.{}", times.rates->flops_per_s, times.rates->bytes_per_s, times.rates->words,
        trains ? fmt::format(" The optimizer takes {} more, once for all {} micro-batches.", seconds_text(times.optimizer), advice.accumulation)
               : ""));
  }
  if (out.for_programs()) return;
  for (const lab::Settings& s : lab::settings_of(advice)) out.say(fmt::format("\n{}:\n\n{}", s.where, s.text), 4);
}

Json to_json(const AdviceRequest& r, const Advice& a, const AdviceTimes& t) {
  const lab::ModelSize& m = r.model;
  Json time = nullptr;
  if (t.rates && a.fits) {
    Json lines = Json::array();
    for (const lab::TimeLine& line : t.micro_batch.lines)
      lines.push_back({{"what", line.what}, {"seconds", line.seconds}, {"arithmetic", line.arithmetic}});
    time = {{"step_s", t.step(a)},
            {"micro_batch_s", t.micro_batch.seconds},
            {"optimizer_s", t.optimizer},
            {"standard_step_s", t.standard.attention > 0 ? Json(t.step(a, true)) : Json(nullptr)},
            {"bound", t.rates->bound},
            {"flops_per_s", t.rates->flops_per_s},
            {"bytes_per_s", t.rates->bytes_per_s},
            {"lines", lines}};
  }
  Json settings = Json::array();
  if (a.fits)
    for (const lab::Settings& s : lab::settings_of(a)) settings.push_back({{"where", s.where}, {"text", s.text}});
  return {{"fattn_advice", 1},
          {"what", "settings"},
          {"memory_bytes", r.memory_bytes},
          {"seqlen", r.seqlen},
          {"task", r.task == Task::kTrain ? "train" : "infer"},
          {"precision", name_of(r.precision)},
          {"model", {{"name", m.name}, {"parameters", m.parameters(r.seqlen)}, {"layers", m.layers}, {"width", m.width}, {"nheads", m.nheads}}},
          {"fits", a.fits},
          {"why", a.fits ? Json(nullptr) : Json(a.why)},
          {"would_fit", a.fits ? Json(nullptr) : Json(a.would_fit)},
          {"batch", a.fits ? Json(a.plan.batch) : Json(nullptr)},
          {"accumulation", a.fits ? Json(a.accumulation) : Json(nullptr)},
          {"effective_batch", a.fits ? Json(a.effective_batch()) : Json(nullptr)},
          {"checkpointing", a.fits ? Json(a.plan.checkpointing) : Json(nullptr)},
          {"attention", "fattn"},
          {"memory", lines_of(a.memory)},
          {"standard_memory", a.fits ? lines_of(a.standard) : Json(nullptr)},
          {"standard_batch", a.fits ? Json(a.standard_batch) : Json(nullptr)},
          {"time", time},
          {"time_unknown", t.rates ? Json(nullptr) : Json(t.unknown)},
          {"settings", settings}};
}

}  // namespace fattn::cli
