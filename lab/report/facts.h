// What records say, before it is put into words: who raced whom, what depends on seqlen, what was not measured.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "lab/record_file.h"

namespace fattn::lab::report {

// One problem and pass, the library and another contestant in the same run.
struct Duel {
  const MeasuredRecord* record = nullptr;
  const RowOfRecord *ours = nullptr, *other = nullptr;
  double ratio = 0, low = 0, high = 0;  // the other's time over ours, with what the intervals of both medians leave
  std::optional<double> memory;         // ours over the other's
  bool faster() const { return low > 1; }
  bool slower() const { return high < 1; }
};

// All duels on a device in a dtype and pass against one other.
struct Versus {
  std::string device, dtype, pass, ours, other;
  std::vector<Duel> duels;
  double mean = 0, low = 0, high = 0;  // geometric mean, and that of the bounds
  const Duel *least = nullptr, *most = nullptr;
  int faster = 0, slower = 0, undecided = 0;
  std::optional<double> memory, memory_least, memory_most;  // geometric mean and range
};

// Times of contestants by seqlen, all else equal or batch * seqlen equal; or by what a sweep changes.
struct Family {
  std::string over = "seqlen";
  std::string device, dtype;
  bool constant_tokens = false;
  double size = 0, seqlen = 0, nheads = 0, nheads_k = 0, headdim = 0;  // size: the batch, or batch * seqlen
  bool causal = false;
  std::vector<double> values;  // lengths, or what else was swept
  std::vector<std::string> passes, contestants;
  std::vector<const MeasuredRecord*> records;
  std::map<std::string, const RowOfRecord*> rows;  // by key()
  static std::string key(const std::string& pass, const std::string& contestant, double value);
  const RowOfRecord* row(const std::string& pass, const std::string& contestant, double value) const;
  double weight() const;  // how much there is to see: lengths at which contestants can be compared
};

// What a call needs beside its inputs. Nothing where a provider measured its resident set, which counts what the system happened to map.
std::optional<double> memory_of(const RowOfRecord& row);

// Standard attention of the library or of a provider: what is not fused.
bool is_standard(const RowOfRecord& row);
// "NVIDIA H200", "AMD EPYC, 2 threads": of a row in its record.
std::string device_of(const MeasuredRecord& record, const RowOfRecord& row);
// "fattn"; with an algorithm that the flags asked for "fattn (v2)".
std::string name_of(const MeasuredRecord& record, const RowOfRecord& row);

std::vector<Versus> versus_of(const std::vector<MeasuredRecord>& records);
// At least three lengths; those with most contestants and lengths first.
std::vector<Family> families_of(const std::vector<MeasuredRecord>& records);

// Rows that are not ok, by who and why.
struct Missing {
  std::string who, status, reason, example;
  int rows = 0;
};
std::vector<Missing> missing_of(const std::vector<MeasuredRecord>& records);

}  // namespace fattn::lab::report
