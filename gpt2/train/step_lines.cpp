#include "gpt2/train/step_lines.h"

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <string_view>
#include <system_error>

#include "files/input_file.h"
#include "files/json.h"
#include "files/printable.h"
#include "files/whole_file.h"

namespace fattn::gpt2 {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 32;

int64_t step_of(const nlohmann::json& json) {
  return json.is_object() && json.contains("step") && json["step"].is_number_integer() ? json["step"].get<int64_t>() : 0;
}

}  // namespace

StepLines::StepLines(const std::string& path, int64_t after, const std::string& refusal, const std::function<void(const nlohmann::json&)>& kept)
    : path_(path) {
  std::string lines;
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) {
    const std::string text = files::read_whole(path, kMostBytes);
    size_t number = 0;
    for (size_t begin = 0, end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
      const std::string place = "'" + files::printable(path) + "', line " + std::to_string(++number);
      nlohmann::json json;
      try {
        json = files::parse_json(std::string_view(text).substr(begin, end - begin));
      } catch (const files::JsonError& e) {
        throw std::runtime_error(place + ": " + e.what() + "; it " + refusal);
      }
      if (step_of(json) <= 0) throw std::runtime_error(place + " " + refusal);
      if (step_of(json) > after) break;
      kept(json);
      lines.append(text, begin, end + 1 - begin);
    }
  }
  files::WholeFile whole(path);
  whole.write(lines.data(), lines.size());
  whole.publish();
  file_ = std::fopen(path.c_str(), "ae");
  if (!file_) throw std::runtime_error("'" + files::printable(path) + "' cannot be opened: " + std::strerror(errno));
}

StepLines::~StepLines() {
  if (file_) std::fclose(file_);
}

void StepLines::append(const std::string& lines) {
  if (std::fwrite(lines.data(), 1, lines.size(), file_) != lines.size() || std::fflush(file_) != 0)
    throw std::runtime_error("'" + files::printable(path_) + "' cannot be written: " + std::strerror(errno));
}

}  // namespace fattn::gpt2
