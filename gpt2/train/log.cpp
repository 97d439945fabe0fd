#include "gpt2/train/log.h"

#include <cmath>

#include "files/json.h"

namespace fattn::gpt2 {
namespace {

using Json = nlohmann::ordered_json;

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

TrainingLog::TrainingLog(const std::string& path, int64_t after)
    : file_(path, after, "is no step of a training run", [this](const nlohmann::json& json) { lines_.push_back(line_of(json)); }) {}

void TrainingLog::add(const LogLine& line) {
  file_.append(to_json(line).dump() + "\n");
  lines_.push_back(line);
}

}  // namespace fattn::gpt2
