#include "gpt2/train/log.h"

#include <cerrno>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <stdexcept>
#include <system_error>

#include "files/input_file.h"
#include "files/json.h"
#include "files/printable.h"
#include "files/whole_file.h"

namespace fattn::gpt2 {
namespace {

using Json = nlohmann::ordered_json;

constexpr uint64_t kMostLog = uint64_t{1} << 32;

double number_of(const nlohmann::json& json, const char* key) {
  const auto at = json.find(key);
  return at != json.end() && at->is_number() ? at->get<double>() : std::nan("");
}
int64_t whole_of(const nlohmann::json& json, const char* key) {
  const auto at = json.find(key);
  return at != json.end() && at->is_number_integer() ? at->get<int64_t>() : 0;
}

LogLine line_of(const nlohmann::json& json) {
  LogLine line;
  line.step = whole_of(json, "step");
  line.tokens = whole_of(json, "tokens");
  line.targets = whole_of(json, "targets");
  line.loss = number_of(json, "loss");
  line.learning_rate = number_of(json, "learning_rate");
  line.gradient_norm = number_of(json, "gradient_norm");
  line.logit_scale = number_of(json, "logit_scale");
  line.loss_scale = number_of(json, "loss_scale");
  line.overflows = whole_of(json, "overflows");
  line.skipped = json.value("skipped", false);
  line.validated = json.contains("validation_loss");
  if (line.validated) line.validation_loss = number_of(json, "validation_loss");
  line.seconds = number_of(json, "seconds");
  return line;
}

}  // namespace

Json to_json(const LogLine& line) {
  Json json = {{"step", line.step},
               {"tokens", line.tokens},
               {"targets", line.targets},
               {"loss", files::number_or_null(line.loss)},
               {"learning_rate", files::number_or_null(line.learning_rate)},
               {"gradient_norm", files::number_or_null(line.gradient_norm)},
               {"logit_scale", files::number_or_null(line.logit_scale)},
               {"loss_scale", files::number_or_null(line.loss_scale)},
               {"overflows", line.overflows},
               {"skipped", line.skipped}};
  if (line.validated) json["validation_loss"] = files::number_or_null(line.validation_loss);
  json["seconds"] = files::number_or_null(line.seconds);
  return json;
}

TrainingLog::TrainingLog(const std::string& path, int64_t after) : path_(path) {
  std::string kept;
  std::error_code ignored;
  if (std::filesystem::exists(path, ignored)) {
    const std::string text = files::read_whole(path, kMostLog);
    size_t number = 0;
    for (size_t begin = 0, end = 0; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1) {
      ++number;
      nlohmann::json json;
      try {
        json = files::parse_json(std::string_view(text).substr(begin, end - begin));
      } catch (const files::JsonError& e) {
        throw std::runtime_error("'" + files::printable(path) + "', line " + std::to_string(number) + ": " + e.what());
      }
      if (!json.is_object() || whole_of(json, "step") <= 0)
        throw std::runtime_error("'" + files::printable(path) + "', line " + std::to_string(number) + " is no step of a training run");
      if (whole_of(json, "step") > after) break;
      lines_.push_back(line_of(json));
      kept.append(text, begin, end + 1 - begin);
    }
  }
  files::WholeFile whole(path);
  whole.write(kept.data(), kept.size());
  whole.publish();
  file_ = std::fopen(path.c_str(), "ae");
  if (!file_) throw std::runtime_error("'" + files::printable(path) + "' cannot be opened: " + std::strerror(errno));
}

TrainingLog::~TrainingLog() {
  if (file_) std::fclose(file_);
}

void TrainingLog::add(const LogLine& line) {
  const std::string text = to_json(line).dump() + "\n";
  if (std::fwrite(text.data(), 1, text.size(), file_) != text.size() || std::fflush(file_) != 0)
    throw std::runtime_error("'" + files::printable(path_) + "' cannot be written: " + std::strerror(errno));
  lines_.push_back(line);
}

}  // namespace fattn::gpt2
