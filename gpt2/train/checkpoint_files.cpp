#include "gpt2/train/checkpoint_files.h"

#include <cinttypes>
#include <cstdio>

#include "files/checksum.h"
#include "files/file_map.h"
#include "files/input_file.h"
#include "files/json.h"
#include "files/printable.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

uint64_t checksum_of(const files::InputFile& file) {
  const files::FileMap map(file);
  return files::xxh64(map.data(), map.size());
}

}  // namespace
std::string hex_word(uint64_t word) {
  char text[17];
  std::snprintf(text, sizeof text, "%016" PRIx64, word);
  return text;
}

uint64_t word_of(const nlohmann::json& hex, const char* what) {
  const std::string text = hex.is_string() ? hex.get<std::string>() : "";
  if (text.size() != 16 || text.find_first_not_of("0123456789abcdef") != std::string::npos)
    throw Error(std::string("'") + what + "' is no word of 16 hexadecimal digits");
  return std::stoull(text, nullptr, 16);
}

nlohmann::ordered_json file_seal(const std::string& path) {
  const files::InputFile file(path);
  return {{"bytes", file.size()}, {"xxh64", hex_word(checksum_of(file))}};
}

void check_seal(const std::string& path, const nlohmann::json& seal) {
  if (!seal.is_object() || !seal.contains("bytes") || !seal["bytes"].is_number_unsigned() || !seal.contains("xxh64"))
    throw Error("of '" + files::printable(path) + "' there is no size and checksum");
  const uint64_t bytes = seal["bytes"].get<uint64_t>(), checksum = word_of(seal["xxh64"], "xxh64");
  const files::InputFile file(path);
  if (file.size() != bytes)
    throw Error("'" + file.shown() + "' has " + std::to_string(file.size()) + " bytes; it was written with " + std::to_string(bytes));
  if (checksum_of(file) != checksum) throw Error("'" + file.shown() + "' is damaged: its checksum is not the one that it was written with");
}

std::string array_name(Flat which, const Parameter& parameter) {
  const char* kind = which == Flat::kFirstMoment ? "first_moment." : which == Flat::kSecondMoment ? "second_moment." : "master_weight.";
  return kind + parameter.name;
}

}  // namespace fattn::gpt2
