// What a report says of records whose truth is known, that nothing in them becomes markup, and that its page is whole.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <set>

#include "lab/report/page.h"
#include "lab/report/report.h"
#include "lab/report/words.h"

namespace fattn::lab::report {
namespace {

Json row(const std::string& provider, const std::string& algorithm, double seconds, double spread, double bytes, int seqlen = 512,
         const char* pass = "fwd") {
  return {{"batch", 4},
          {"seqlen_q", seqlen},
          {"seqlen_k", seqlen},
          {"nheads", 16},
          {"nheads_k", 16},
          {"headdim", 64},
          {"headdim_v", 64},
          {"causal", true},
          {"dtype", "fp16"},
          {"pass", pass},
          {"provider", provider},
          {"algorithm", algorithm},
          {"device", "cuda:0"},
          {"status", "ok"},
          {"samples", 20},
          {"time_median_s", seconds},
          {"time_ci_low_s", seconds * (1 - spread)},
          {"time_ci_high_s", seconds * (1 + spread)},
          {"time_ci_level", 0.95},
          {"flops_per_s", 1e12 / seconds},
          {"peak_fraction", 0.5},
          {"extra_bytes", bytes},
          {"extra_bytes_method", "allocated"},
          {"checks", Json::array({{{"tensor", "o"}, {"error", 1e-3}, {"allowed", 4e-3}, {"pass", true}, {"where", "all"}}})}};
}

Json failed(const std::string& provider, const std::string& status, const std::string& reason) {
  Json json = row(provider, "", 1, 0, 1);
  json["status"] = status, json["reason"] = reason;
  json.erase("time_median_s");
  return json;
}

Json record(const Json& rows, const std::string& gpu = "A GPU", const std::string& flag = "fp16") {
  return {{"fattn_record", 1},
          {"command", "compare"},
          {"flags", {"--dtype", flag}},
          {"status", "ok"},
          {"complete", true},
          {"environment",
           {{"date", "2026-11-22T00:00:00Z"},
            {"library_version", "0.1.0"},
            {"cpu", {{"model", "A CPU"}, {"usable_threads", 2}}},
            {"gpus", Json::array({{{"device", "cuda:0"}, {"name", gpu}}})}}},
          {"peaks", {{"before", Json::object()}, {"after", Json::object()}}},
          {"rows", rows},
          {"summary", nullptr}};
}

std::string file_of(const std::vector<ReportFile>& files, const std::string& path) {
  for (const ReportFile& file : files)
    if (file.path == path) return file.content;
  ADD_FAILURE() << path;
  return "";
}

std::vector<ReportFile> report_of(const Json& json, Language language = Language::kEnglish) {
  return make_report({{{"race.json", json}}, {}}, language);
}
bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// Elements are closed in their order, ids are unique, links lead to them, and nothing is fetched.
void expect_whole(const std::string& html) {
  const std::set<std::string> empty = {"meta", "!DOCTYPE", "link", "br", "img"};
  std::vector<std::string> open;
  std::set<std::string> ids, links;
  for (size_t at = 0; (at = html.find('<', at)) != std::string::npos;) {
    const size_t end = html.find('>', at);
    ASSERT_NE(end, std::string::npos);
    const std::string tag = html.substr(at + 1, end - at - 1);
    const std::string name = tag.substr(0, tag.find_first_of(" \n/", tag[0] == '/' ? 1 : 0));
    const auto value = [&](const std::string& key) {
      const size_t begin = tag.find(" " + key + "=\"");
      return begin == std::string::npos ? std::string()
                                        : tag.substr(begin + key.size() + 3, tag.find('"', begin + key.size() + 3) - begin - key.size() - 3);
    };
    if (const std::string id = value("id"); !id.empty()) {
      EXPECT_TRUE(ids.insert(id).second) << id;
    }
    if (const std::string href = value("href"); !href.empty()) links.insert(href);
    EXPECT_TRUE(value("src").empty()) << tag;
    at = end + 1;
    if (tag[0] == '/') {
      ASSERT_FALSE(open.empty()) << tag;
      ASSERT_EQ("/" + open.back(), name);
      open.pop_back();
    } else if (tag.back() != '/' && empty.count(name) == 0) {
      open.push_back(name);
      if (name == "style") at = html.find("</style>", at);
    }
  }
  EXPECT_TRUE(open.empty()) << open.back();
  for (const std::string& link : links) {
    ASSERT_EQ(link[0], '#') << link;
    EXPECT_EQ(ids.count(link.substr(1)), 1u) << link;
  }
  EXPECT_FALSE(has(html, "<script")) << html.substr(html.find("<script"), 200);
  EXPECT_FALSE(has(html, "url(") || has(html, "@import"));
}

TEST(LabReportSmall, EverySentenceIsInBothLanguages) {
  for (size_t i = 0; i < static_cast<size_t>(Text::kCount); ++i) {
    const std::string_view english = source_of(static_cast<Text>(i), Language::kEnglish),
                           chinese = source_of(static_cast<Text>(i), Language::kChinese);
    const auto marks = [](std::string_view text) {
      std::multiset<std::string> all;
      for (size_t at = 0; (at = text.find('{', at)) != std::string_view::npos; ++at) all.insert(std::string(text.substr(at, 3)));
      for (const char* mark : {"**", "`"})
        for (size_t at = 0; (at = text.find(mark, at)) != std::string_view::npos; at += std::string(mark).size()) all.insert(mark);
      return all;
    };
    EXPECT_FALSE(english.empty() || chinese.empty()) << i;
    EXPECT_EQ(marks(english), marks(chinese)) << english;
    EXPECT_EQ(marks(english).count("**") % 2 + marks(english).count("`") % 2, 0u) << english;
  }
}

TEST(LabReportSmall, ChineseHasItsSpaces) {
  const Words words(Language::kChinese);
  EXPECT_EQ(words(Text::kThreads, {"AMD EPYC", "2"}), "AMD EPYC（2 個執行緒）");
  const std::string text = words(Text::kUndecidedOne, {"A（2）", "fp16", "前向", "torch-sdpa:flash", "B1"});
  EXPECT_TRUE(has(text, "在 A（2）上以 fp16 計算前向時，無法判定 fattn 與 torch-sdpa:flash 何者較快")) << text;
}

TEST(LabReportSmall, NumbersKeepThreeDigits) {
  EXPECT_EQ(times_text(9.4), "9.40");
  EXPECT_EQ(times_text(16.28), "16.3");
  EXPECT_EQ(share_text(0.141), "14 %");
  EXPECT_EQ(share_text(0.0061), "0.61 %");
  EXPECT_EQ(seconds_text(1.3561e-3), "1.36 ms");
  EXPECT_EQ(seconds_range(1.35571e-3, 1.35644e-3), "1.356 – 1.356 ms");
  EXPECT_EQ(bytes_text(1142948096), "1.06 GiB");
  EXPECT_EQ(rate_text(613e12), "613 TFLOP/s");
}

TEST(LabReportSmall, SaysWhatIsFasterByHowMuchWithHowMuchMemory) {
  const std::string page =
      file_of(report_of(record({row("fattn", "v3", 1e-3, 0.01, 1 << 20), row("standard", "standard", 8e-3, 0.01, 1 << 24)})), "report.md");
  EXPECT_TRUE(has(page, "the forward pass is **8.00 times** as fast as standard attention (between 7.84 and 8.16")) << page;
  EXPECT_TRUE(has(page, "It needs **6.2 %** of the memory")) << page;
  EXPECT_TRUE(has(page, "1 of 2 timed") == false && has(page, "2 of 2 timed results were held")) << page;
  EXPECT_TRUE(has(page, "the largest error is 25 % of what is allowed"));
  EXPECT_TRUE(has(page, "fattn compare --dtype fp16 --json race.json"));
}

TEST(LabReportSmall, SaysNoMoreThanTheIntervalsAllow) {
  const auto page_of = [](double other, double spread) {
    return file_of(report_of(record({row("fattn", "v3", 1e-3, spread, 1 << 20), row("torch-sdpa", "flash", other, spread, 1 << 20)})), "report.md");
  };
  EXPECT_TRUE(has(page_of(1.05e-3, 0.04), "neither the forward pass of fattn nor that of torch-sdpa:flash can be called faster"));
  EXPECT_FALSE(has(page_of(1.05e-3, 0.04), "times** as fast"));
  EXPECT_TRUE(has(page_of(0.5e-3, 0.01), "the forward pass is **slower** than torch-sdpa:flash: 0.50 times its speed"));
  EXPECT_TRUE(has(page_of(1.05e-3, 0.01), "**1.05 times** as fast"));
  // Several problems, of which the mean decides nothing.
  Json rows = Json::array();
  for (const int n : {512, 1024, 2048}) {
    rows.push_back(row("fattn", "v3", 1e-3, 0.1, 1 << 20, n));
    rows.push_back(row("torch-sdpa", "flash", 1.02e-3, 0.1, 1 << 20, n));
  }
  const std::string page = file_of(report_of(record(rows)), "report.md");
  EXPECT_TRUE(has(page, "it cannot be said whether the forward pass is faster than torch-sdpa:flash")) << page;
  EXPECT_TRUE(has(page, "faster in 0 of them, slower in 0, undecided in 3"));
  // Nobody to compare with.
  EXPECT_TRUE(has(file_of(report_of(record(Json::array({row("fattn", "v3", 1e-3, 0.1, 1)}))), "report.md"), "nothing is said about who is faster"));
  // A provider's resident set is no memory of the call.
  Json other = row("torch-sdpa", "flash", 3e-3, 0.01, 1 << 28);
  other["extra_bytes_method"] = "resident set";
  EXPECT_FALSE(has(file_of(report_of(record({row("fattn", "v3", 1e-3, 0.01, 1 << 20), other})), "report.md"), "of the memory"));
}

TEST(LabReportSmall, RowsWithoutTimesAreListedWithTheirReason) {
  const std::string page =
      file_of(report_of(record({row("fattn", "v3", 1e-3, 0.01, 1 << 20), failed("standard", "out_of_memory", "scores need 99 GiB")})), "report.md");
  EXPECT_TRUE(has(page, "| standard attention | out\\_of\\_memory | 1 | scores need 99 GiB |")) << page;
  EXPECT_FALSE(has(page, "Every row of these records was measured"));
}

Json lengths(const std::string& gpu, const std::string& provider, const std::string& flag) {
  Json rows = Json::array();
  for (const char* pass : {"fwd", "bwd"})
    for (const int n : {512, 1024, 2048, 4096}) {
      rows.push_back(row("fattn", "v3", 1e-9 * n * n, 0.01, 1000.0 * n, n, pass));
      rows.push_back(row("standard", "standard", 8e-9 * n * n, 0.01, 4.0 * n * n, n, pass));
      rows.push_back(row(provider, "flash", 2e-9 * n * n, 0.01, 1000.0 * n, n, pass));
    }
  rows.push_back(failed(provider, "failed", "<script>alert(4)</script> | *x* `y`\n# heading"));
  Json json = record(rows, gpu, flag);
  json["rows"][0]["warnings"] = {"<img src=x onerror=alert(5)>"};
  json["disturbance"] = {{"warning", "<script>alert(6)</script>"}};
  return json;
}

TEST(LabReportSmall, GrowthIsFittedAndWhole) {
  for (const Language language : {Language::kEnglish, Language::kChinese}) {
    const std::vector<ReportFile> files = report_of(lengths("A GPU", "torch-sdpa", "fp16"), language);
    const std::string page = file_of(files, "report.md"), html = file_of(files, "index.html");
    expect_whole(html);
    EXPECT_TRUE(has(page, "**2.00**") && has(page, "8.00")) << page;
    EXPECT_TRUE(has(html, language == Language::kEnglish ? "sequence length" : "序列長度"));
    EXPECT_EQ(has(html, "lang=\"zh-TW\""), language == Language::kChinese);
    for (const ReportFile& file : files) EXPECT_TRUE(file.path.rfind("figures/", 0) != 0 || has(page, "(" + file.path + ")")) << file.path;
    EXPECT_GE(files.size(), 4u);
  }
}

TEST(LabReportSmall, NothingInARecordBecomesMarkup) {
  const std::string tag = "<script>alert(1)</script>", bold = "**x** [a](javascript:b) ![c](d) `e` \x01\x02 &lt; \"' | # ~ https://example.org";
  const std::vector<ReportFile> files = report_of(lengths(tag + bold, tag + bold, tag + "'`\n```\n</pre>" + bold));
  expect_whole(file_of(files, "index.html"));
  for (const ReportFile& file : files) {
    std::string text = file.content;
    if (file.path == "report.md")  // what is between fences is shown as it is
      for (size_t begin = 0; (begin = text.find("\n````", begin)) != std::string::npos;) {
        const size_t end = text.find("\n````\n", begin + 6);
        ASSERT_NE(end, std::string::npos);
        text.erase(begin, end + 5 - begin);
      }
    for (size_t at = 0; (at = text.find("<script", at)) != std::string::npos; ++at)
      EXPECT_TRUE(at > 0 && text[at - 1] == '\\') << file.path << text.substr(at, 60);
    for (size_t at = 0; (at = text.find("<img", at)) != std::string::npos; ++at) EXPECT_TRUE(at > 0 && text[at - 1] == '\\') << file.path;
    if (file.path != "report.md") continue;
    for (const char* markup : {"**x", "](javascript", "\n# heading", "s://", "|#"})
      for (size_t at = 0; (at = text.find(markup, at)) != std::string::npos; ++at) EXPECT_TRUE(at > 0 && text[at - 1] == '\\') << text.substr(at, 60);
  }
  EXPECT_TRUE(std::all_of(files.begin(), files.end(), [](const ReportFile& f) { return !has(f.path, "<") && !has(f.path, ".."); }));
}

TEST(LabReportSmall, ModelsAndTheirScores) {
  const Json problem = {{"batch", 1},    {"seqlen_q", 64},  {"seqlen_k", 64}, {"nheads", 2},    {"nheads_k", 2},
                        {"headdim", 64}, {"headdim_v", 64}, {"causal", true}, {"dtype", "fp32"}};
  const auto counted = [](const char* name, double moved) {
    return Json{{"algorithm", name},          {"reason", nullptr},  {"moved_bytes", moved}, {"dram_bytes", moved / 2},
                {"flops_per_byte_dram", 100}, {"binding", nullptr}, {"bound_s", nullptr}};
  };
  const Json memory = {
      {"fattn_memory", 1},
      {"problem", problem},
      {"machine", {{"name", "A CPU"}, {"device", "cpu"}}},
      {"passes",
       Json::array({{{"pass", "fwd"},
                     {"algorithms", {counted("standard", 1 << 24), counted("v2", 1 << 20), {{"algorithm", "v3"}, {"reason", "for GPUs"}}}}}})}};
  Json rows = Json::array();
  for (const double seconds : {1e-3, 2e-3}) {
    rows.push_back(problem);
    rows.back().update({{"pass", "fwd"}, {"predicted_s", 1.1 * seconds}, {"measured_s", seconds}});
  }
  rows.push_back(problem);
  rows.back().update({{"pass", "bwd"}, {"predicted_s", nullptr}, {"measured_s", 1}, {"unknown", "not calibrated"}});
  const Json predict = {{"fattn_predict", 1},
                        {"flags", {"--held-out", "2"}},
                        {"environment", {{"cpu", {{"model", "A CPU"}}}}},
                        {"scores",
                         {{"fwd",
                           {{"count", 2},
                            {"mean_absolute_error_fraction", 0.1},
                            {"error_95_fraction", 0.1},
                            {"worst", "B1 S64"},
                            {"worst_error_fraction", -0.1},
                            {"memory_count", 2},
                            {"memory_exact", 2}}}}},
                        {"rows", rows}};
  const Json calibration = {{"fattn_calibration", 1},
                            {"machine", {{"processor", "A CPU"}}},
                            {"measured",
                             {{"dram_read_bytes_per_s", {{"value", 5e10}, {"low", 4e10}, {"high", 6e10}}},
                              {"bf16_flops_per_s", {{"value", nullptr}, {"reason", "has no such unit"}}}}}};
  const std::vector<ReportFile> files = make_report({{{"m.json", memory}, {"p.json", predict}, {"c.json", calibration}}, {}}, Language::kEnglish);
  expect_whole(file_of(files, "index.html"));
  const std::string page = file_of(files, "report.md");
  EXPECT_TRUE(has(page, "standard attention moves **16.0 MiB** between the chip's own memory and the cache by this count; v2 1.00 MiB.")) << page;
  EXPECT_TRUE(has(page, "fattn memory --batch 1 --seqlen 64"));
  EXPECT_TRUE(has(page, "fattn calibrate --force\n")) << page;
  EXPECT_TRUE(has(page,
                  "the mean absolute error of 2 predicted times is **10 %**; 95 % of them err by at most 10 %, the worst by 10 % (B1 S64). Memory is "
                  "right to the byte in 2 of 2."));
  EXPECT_TRUE(has(page, "Not predicted, 1 rows: not calibrated"));
  EXPECT_TRUE(has(page, "figures/predicted-a-cpu.svg"));
  EXPECT_TRUE(has(page, "| dram read bytes per s | 50.0 GB/s | 40.0 GB/s – 60.0 GB/s |"));
  Json other = memory;
  other["fattn_memory"] = 2;
  EXPECT_THROW(make_report({{{"m.json", other}}, {}}, Language::kEnglish), RecordError);
}

// b against a at lengths: medians, with intervals of 5 % around them; 0: not timed.
Json rule_of(const char* pass, bool decode, const std::vector<std::array<double, 3>>& duels) {
  const auto time = [](double median) {
    return median > 0 ? Json{{"median_s", median}, {"ci_low_s", 0.95 * median}, {"ci_high_s", 1.05 * median}, {"samples", 20}} : Json(nullptr);
  };
  Json all = Json::array();
  for (const auto& [length, a, b] : duels)
    all.push_back(
        {{"seqlen", static_cast<int>(length)}, {"a", time(a)}, {"b", time(b)}, {"reason", a > 0 && b > 0 ? Json(nullptr) : Json("<b>no room")}});
  return {{"what", "x"}, {"a", "standard"}, {"b", "fattn"}, {"pass", pass}, {"decode", decode}, {"conclusion", "not read"}, {"duels", all}};
}

TEST(LabReportSmall, WhenToUseWhichIsCountedFromTimes) {
  Json when = {{"fattn_advice", 1},
               {"what", "when"},
               {"flags", {"--when", "--longest", "512"}},
               {"complete", true},
               {"environment", {{"cpu", {{"model", "A <CPU>"}}}}},
               {"rules",
                {rule_of("fwd", false, {{{8, 1e-6, 2e-6}}, {{512, 4e-3, 1e-3}}, {{64, 5e-5, 5e-5}}, {{90, 2e-4, 1e-4}}}),
                 rule_of("fwdbwd", false, {{{8, 2e-6, 1e-6}}, {{512, 3e-3, 1e-3}}}), rule_of("fwd", true, {{{8, 1e-6, 2e-6}}, {{512, 1e-3, 1e-3}}}),
                 rule_of("bwd", false, {{{8, 1e-6, 0}}, {{512, 0, 1e-3}}})}}};
  const auto page_in = [&](Language language) {
    const std::vector<ReportFile> files = make_report({{{"w.json", when}}, {}}, language);
    expect_whole(file_of(files, "index.html"));
    EXPECT_FALSE(has(file_of(files, "index.html"), "<CPU>") || has(file_of(files, "index.html"), "<b>no"));
    EXPECT_TRUE(has(file_of(files, "figures/when-a-cpu.svg"), "<svg"));
    return file_of(files, "report.md");
  };
  const std::string page = page_in(Language::kEnglish);
  EXPECT_TRUE(
      has(page, "forward: **fattn** is faster than standard attention from 90 tokens on, 4.00 times at 512, the longest; at 64 it is not yet."))
      << page;
  EXPECT_TRUE(has(page, "forward + backward: **fattn** is faster than standard attention at every length that was measured, 8 to 512 tokens, 3.00"))
      << page;
  EXPECT_TRUE(has(page, "decode, one query: up to 512 keys fattn is not measurably faster than standard attention, and slower at some lengths: 1.00"))
      << page;
  EXPECT_TRUE(has(page, "backward: fattn and standard attention were not timed at the same length")) << page;
  EXPECT_TRUE(has(page, "fattn advise --when --longest 512"));
  EXPECT_TRUE(has(page, "| forward | 64 | fattn | 50.0 µs | standard attention | 50.0 µs | 1.00 ? |")) << page;
  EXPECT_TRUE(has(page_in(Language::kChinese), "從 90 個 token 開始，**fattn** 比標準注意力快"));
  when["complete"] = false;  // the last rule was being searched
  EXPECT_TRUE(has(page_in(Language::kEnglish), "the search between fattn and standard attention was interrupted"));
  when["rules"][0]["duels"][0]["b"]["ci_low_s"] = 1;
  EXPECT_THROW(page_in(Language::kEnglish), RecordError);
  when["rules"] = Json::array();
  EXPECT_THROW(page_in(Language::kEnglish), RecordError);
  when["what"] = "settings";
  EXPECT_THROW(page_in(Language::kEnglish), RecordError);
}

TEST(LabReportSmall, TheSameRecordsGiveTheSameBytes) {
  const Json json = lengths("A GPU", "torch-sdpa", "fp16");
  const std::vector<ReportFile> a = report_of(json), b = report_of(json);
  ASSERT_EQ(a.size(), b.size());
  for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(a[i].content, b[i].content) << a[i].path;
}

TEST(LabReportSmall, FilesThatAreNoRecords) {
  const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "fattn-lab-report";
  std::filesystem::create_directories(folder);
  const auto write = [&](const char* name, const std::string& text) {
    std::ofstream(folder / name) << text;
    return (folder / name).string();
  };
  const auto said = [](const std::vector<std::string>& paths) {
    try {
      make_report(read_inputs(paths), Language::kEnglish);
    } catch (const RecordError& error) {
      return std::string(error.what());
    }
    return std::string();
  };
  const std::string whole = record(Json::array({row("fattn", "v3", 1e-3, 0.1, 1)})).dump();
  EXPECT_TRUE(has(said({write("a.json", "")}), "is empty"));
  EXPECT_TRUE(has(said({write("a.json", whole.substr(0, whole.size() / 2))}), "is cut off"));
  EXPECT_TRUE(has(said({write("a.json", "hello")}), "is no JSON"));
  EXPECT_TRUE(has(said({write("a.json", "[]")}), "is no record"));
  EXPECT_TRUE(has(said({write("a.json", "{\"what\": 1}")}), "is no record"));
  EXPECT_TRUE(has(said({write("a.json", "{\"fattn_record\": 2}")}), "version 2"));
  EXPECT_TRUE(has(said({write("a.json", record(Json::array()).dump())}), "has no rows"));
  EXPECT_TRUE(has(said({(folder / "none.json").string()}), "cannot be read"));
  EXPECT_TRUE(has(said({write("b.json", "[{\"ratio\": null, \"values\": \"nan\"}]")}), "nothing was measured"));
  write("a.json", "{\"what\": 1}"), write("b.json", "[]");
  EXPECT_TRUE(has(said({folder.string()}), "has no record"));
  write("c.json", whole);
  const Inputs inputs = read_inputs({folder.string()});
  EXPECT_EQ(inputs.records.size(), 1u);
  EXPECT_EQ(inputs.not_read.size(), 2u);
  EXPECT_TRUE(has(file_of(make_report(inputs, Language::kEnglish), "report.md"), "were not read: a.json, b.json."));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace fattn::lab::report
