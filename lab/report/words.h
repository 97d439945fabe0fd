// The sentences of a report in the languages that it is written in: catalogue.h has each of them in all.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "lab/report/catalogue.h"

namespace fattn::lab::report {

enum class Language { kEnglish, kChinese };
const char* tag_of(Language language);  // "en", "zh-TW"

enum class Text {
#define FATTN_TEXT(name, english, chinese) name,
  FATTN_REPORT_TEXTS(FATTN_TEXT)
#undef FATTN_TEXT
      kCount
};

class Words {
 public:
  explicit Words(Language language) : language_(language) {}

  // The sentence with {0}, {1}, ... replaced by `values`, which may come from records: nothing in them is a mark of text. ** and ` in the catalogue
  // are those marks.
  std::string operator()(Text text, std::initializer_list<std::string_view> values = {}) const;
  Language language() const { return language_; }

  std::string pass(std::string_view pass) const;         // "forward"
  std::string contestant(std::string_view label) const;  // "standard attention", "torch-sdpa:flash"
  std::string device(std::string_view device) const;     // "AMD EPYC, 2 threads" of "AMD EPYC (2)"
  // Sentences after each other.
  std::string then(const std::string& first, const std::string& second) const;
  std::string list(const std::vector<std::string>& items) const;

 private:
  Language language_;
};

// A sentence as it is in the catalogue.
std::string_view source_of(Text text, Language language);

// Numbers as sentences have them.
std::string times_text(double ratio);                // "9.4", "1.05", "16"
std::string share_text(double fraction);             // "14 %", "0.6 %"
std::string seconds_text(double seconds);            // "1.36 ms"
std::string seconds_range(double low, double high);  // "168.1 – 168.3 µs"
std::string bytes_text(double bytes);                // "1.06 GiB"
std::string bandwidth_text(double rate);             // "4.42 TB/s"
std::string rate_text(double rate);                  // "613 TFLOP/s"
std::string count_text(double value);                // "16384"

}  // namespace fattn::lab::report
