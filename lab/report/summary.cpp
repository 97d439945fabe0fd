// What a reader sees in ten seconds: how much faster, with how much memory; then the same in sentences.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "lab/report/sections.h"

namespace fattn::lab::report {
namespace {

constexpr size_t kMostDevices = 3;

// Of a device what is shown first: beside standard attention if that was there, in the dtype with most problems.
std::vector<const Versus*> first_of_device(const std::vector<Versus>& all, const std::string& device) {
  std::map<std::pair<std::string, std::string>, std::pair<size_t, std::vector<const Versus*>>> by_race;  // other and dtype
  const Versus* best = nullptr;
  size_t most = 0;
  for (const Versus& v : all) {
    if (v.device != device || v.ours != "fattn") continue;
    auto& [problems, list] = by_race[{v.other, v.dtype}];
    problems += v.duels.size();
    list.push_back(&v);
  }
  for (const Versus& v : all) {
    if (v.device != device || v.ours != "fattn") continue;
    const size_t problems = by_race[{v.other, v.dtype}].first;
    const bool standard = is_standard(*v.duels[0].other), best_standard = best && is_standard(*best->duels[0].other);
    if (!best || (standard && !best_standard) || (standard == best_standard && problems > most)) best = &v, most = problems;
  }
  return best ? by_race[{best->other, best->dtype}].second : std::vector<const Versus*>();
}

std::vector<Card> cards_of(const Words& words, const std::vector<const Versus*>& race) {
  std::vector<Card> cards;
  const auto many = [&](const Versus& v, const std::string& low, const std::string& high) {
    return words(Text::kCardMany, {count_text(static_cast<double>(v.duels.size())), low, high});
  };
  for (const Versus* v : race) {
    if (v->pass == "fwdbwd" && race.size() > 2) continue;
    const std::string spread = v->duels.size() == 1 ? words(Text::kCardOne, {times_text(v->low), times_text(v->high)})
                                                    : many(*v, times_text(v->least->ratio), times_text(v->most->ratio));
    cards.push_back({v->low > 1, words(Text::kCardTimes, {times_text(v->mean)}),
                     words(v->low > 1 || v->high < 1 ? Text::kCardFaster : Text::kCardUndecided, {words.pass(v->pass)}), spread});
  }
  const Versus* memory = nullptr;
  for (const Versus* v : race)
    if (v->memory) memory = v;  // the last is that of most passes
  if (memory) {
    const Duel& duel = memory->duels[0];
    const std::string spread = memory->duels.size() == 1
                                   ? words(Text::kCardBytes, {bytes_text(*duel.ours->extra_bytes), bytes_text(*duel.other->extra_bytes)})
                                   : many(*memory, share_text(*memory->memory_least), share_text(*memory->memory_most));
    cards.push_back({*memory->memory < 1, share_text(*memory->memory), words(Text::kCardMemory, {words.pass(memory->pass)}), spread});
  }
  return cards;
}

std::string sentence_of(const Words& words, const Versus& v) {
  const std::string device = words.device(v.device), other = words.contestant(v.other), dtype = clean(v.dtype), pass = words.pass(v.pass);
  std::string text;
  if (v.duels.size() == 1) {
    const Duel& duel = v.duels[0];
    const std::string problem = clean(duel.ours->problem());
    if (duel.faster() || duel.slower())
      text = words(duel.faster() ? Text::kFasterOne : Text::kSlowerOne,
                   {device, dtype, pass, times_text(duel.ratio), other, times_text(duel.low), times_text(duel.high), problem});
    else
      text = words(Text::kUndecidedOne, {device, dtype, pass, other, problem});
    if (duel.memory)
      text = words.then(
          text, words(Text::kMemoryOne, {share_text(*duel.memory), bytes_text(*duel.ours->extra_bytes), bytes_text(*duel.other->extra_bytes)}));
    return text;
  }
  const std::string problems = count_text(static_cast<double>(v.duels.size()));
  if (v.low > 1)
    text = words(Text::kFasterMany, {device, dtype, pass, times_text(v.mean), other, problems, times_text(v.least->ratio),
                                     clean(v.least->ours->problem()), times_text(v.most->ratio), clean(v.most->ours->problem())});
  else
    text = words(v.high < 1 ? Text::kSlowerMany : Text::kUndecidedMany,
                 {device, dtype, pass, times_text(v.mean), other, problems, times_text(v.low), times_text(v.high)});
  if (v.slower + v.undecided == 0)
    text = words.then(text, words(Text::kTallyAll));
  else
    text = words.then(text, words(Text::kTally, {std::to_string(v.faster), std::to_string(v.slower), std::to_string(v.undecided)}));
  if (v.memory) text = words.then(text, words(Text::kMemoryMany, {share_text(*v.memory), share_text(*v.memory_least), share_text(*v.memory_most)}));
  return text;
}

}  // namespace

Section summary(const Material& m) {
  const Words& words = m.words;
  Section section{"in-short", words(Text::kInShort), {}};
  std::vector<std::string> devices;
  for (const Versus& v : m.versus)
    if (std::find(devices.begin(), devices.end(), v.device) == devices.end()) devices.push_back(v.device);
  // Where standard attention took part comes first, then where most was measured.
  const auto weight = [&](const std::string& device) {
    size_t problems = 0;
    for (const Versus& v : m.versus)
      if (v.device == device) problems += v.duels.size() + (is_standard(*v.duels[0].other) ? 10000 : 0);
    return problems;
  };
  std::stable_sort(devices.begin(), devices.end(), [&](const std::string& a, const std::string& b) { return weight(a) > weight(b); });
  std::vector<std::string> sentences;
  for (size_t i = 0; i < devices.size() && i < kMostDevices; ++i) {
    const std::vector<const Versus*> race = first_of_device(m.versus, devices[i]);
    if (race.empty()) continue;
    section.blocks.push_back(
        Block::paragraph(words(Text::kCardsOf, {words.device(devices[i]), clean(race[0]->dtype), words.contestant(race[0]->other)})));
    section.blocks.push_back(Block::of(cards_of(words, race)));
    for (const Versus* v : race) sentences.push_back(sentence_of(words, *v));
  }
  if (sentences.empty()) sentences = crossing_sentences(m);
  if (sentences.empty()) sentences.push_back(words(Text::kNoRace));
  size_t timed = 0, checked = 0;
  double worst = 0;
  for (const MeasuredRecord& record : m.records)
    for (const RowOfRecord& row : record.rows) {
      timed += row.ok();
      if (!row.ok() || row.worst_check < 0) continue;
      ++checked;
      worst = std::max(worst, row.worst_check);
    }
  if (checked > 0) sentences.push_back(words(Text::kChecked, {std::to_string(checked), std::to_string(timed), share_text(worst)}));
  section.blocks.push_back(Block::bullets(sentences));
  section.blocks.push_back(Block::paragraph(words(Text::kShapes)));
  return section;
}

}  // namespace fattn::lab::report
