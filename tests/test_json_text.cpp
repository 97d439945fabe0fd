// Records as text: a row a line, the same values when they are read again.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "files/json_text.h"

namespace fattn::files {
namespace {

using Json = nlohmann::ordered_json;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

TEST(JsonText, ARowIsALine) {
  const Json record = {{"fattn_record", 1},
                       {"flags", {"--seqlen", "64"}},
                       {"environment", {{"date", "today"}, {"gpus", Json::array()}}},
                       {"rows", {{{"batch", 1}, {"checks", {{{"tensor", "o"}, {"pass", true}}}}}, {{"batch", 2}, {"checks", Json::array()}}}},
                       {"nothing", Json::object()}};
  EXPECT_EQ(json_text(record),
            "{\n"
            "  \"fattn_record\": 1,\n"
            "  \"flags\": [\"--seqlen\", \"64\"],\n"
            "  \"environment\": {\n"
            "    \"date\": \"today\",\n"
            "    \"gpus\": []\n"
            "  },\n"
            "  \"rows\": [\n"
            "    {\"batch\": 1, \"checks\": [{\"tensor\": \"o\", \"pass\": true}]},\n"
            "    {\"batch\": 2, \"checks\": []}\n"
            "  ],\n"
            "  \"nothing\": {}\n"
            "}\n");
}

TEST(JsonText, ValuesAreTheSameWhenRead) {
  const Json value = {{"quote \" and \\ and\nbreak", {0.1, 1e-300, -0.0, 1e22, 123456789012345678}},
                      {"deep", {{{"a", {{{"b", {nullptr, false, "x"}}}}}}}},
                      {"unicode", "\xe6\xb3\xa8\xe6\x84\x8f"}};
  EXPECT_EQ(Json::parse(json_text(value)), value);
  for (const Json& alone : {Json(3), Json("text"), Json(), Json::array(), Json::object(), Json{1, 2}})
    EXPECT_EQ(Json::parse(json_text(alone)), alone);
}

TEST(JsonText, LongElementsAreTakenApart) {
  Json row = {{"name", "long"}, {"rows", Json::array()}};
  for (int i = 0; i < 300; ++i) row["rows"].push_back({{"index", i}, {"half", i / 2.0}});
  const Json record = {{"records", {row, {{"name", "short"}}}}};
  const std::vector<std::string> lines = lines_of(json_text(record));
  EXPECT_EQ(lines.size(), 300u + 10u);  // { "records": [ { "name" "rows": [ ... ] }, {short} ] }
  for (const std::string& line : lines) EXPECT_LE(line.size(), 100u) << line;
  EXPECT_EQ(Json::parse(json_text(record)), record);

  const Json numbers = {{"samples", std::vector<double>(5000, 0.125)}};
  EXPECT_EQ(lines_of(json_text(numbers)).size(), 5004u);
  EXPECT_EQ(Json::parse(json_text(numbers)), numbers);
}

TEST(JsonText, WhatJsonLacks) {
  EXPECT_EQ(json_text({{"nan", std::nan("")}, {"inf", std::numeric_limits<double>::infinity()}}), "{\n  \"nan\": null,\n  \"inf\": null\n}\n");
  const Json odd = {{"bad \xff key", "bad \xfe text"}};
  EXPECT_TRUE(Json::accept(json_text(odd)));
}

}  // namespace
}  // namespace fattn::files
