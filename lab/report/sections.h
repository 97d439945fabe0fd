// The sections of a report, each from the records that it is about; one without anything to say has no blocks.
#pragma once

#include <string>
#include <vector>

#include "lab/report/facts.h"
#include "lab/report/page.h"
#include "lab/report/report.h"
#include "lab/report/words.h"

namespace fattn::lab::report {

struct Material {
  Words words;
  std::vector<MeasuredRecord> records;
  std::vector<Input> accuracy, values, regress, memory, calibration, predict, when;
  std::vector<std::string> not_read;
  std::vector<Versus> versus;
  std::vector<Family> families;
};

Section summary(const Material& material);
Section beside_standard(const Material& material);
Section by_seqlen(const Material& material);
Section beside_others(const Material& material);
Section prices(const Material& material);
Section accuracy(const Material& material);
Section memory_model(const Material& material);
Section crossings(const Material& material);
Section predictions(const Material& material);
Section ceilings(const Material& material);
Section comparisons(const Material& material);
Section environment(const Material& material);
Section not_measured(const Material& material);

// Shared by them.
// Of a record whose flags name a device and whose environment says what that is: "NVIDIA H200", "AMD EPYC".
std::string device_named(const JsonPart& whole);
// Of `fattn advise --when`: who is faster from where on.
std::vector<std::string> crossing_sentences(const Material& material);
// "7.80", or "1.02 ?" where the intervals of the two medians overlap.
std::string speed_text(const RowOfRecord& row, const RowOfRecord& base);
int look_for(const std::string& contestant, const std::vector<std::string>& all);
std::string file_name(const std::string& text);  // of a figure: small letters, digits and dashes
Block repeating(const Words& words, const std::vector<const MeasuredRecord*>& records);
std::string base_name(const std::string& path);
void add_once(std::vector<std::string>& all, const std::string& one);  // behind them, if it is some text that none of them is

}  // namespace fattn::lab::report
