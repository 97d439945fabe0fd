// A file of lines of JSON, each of a step of a run, that a run which goes on from a checkpoint goes on with.
#pragma once

#include <cstdint>
#include <cstdio>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>

namespace fattn::gpt2 {

class StepLines {
 public:
  // Keeps lines of steps up to `after`, calling `kept` with each, and goes on behind them. A last line that is cut off is left out. Throws
  // std::runtime_error where the file cannot be read or written, or has a line without a step, which `refusal` says of it: "is no step of ...".
  StepLines(const std::string& path, int64_t after, const std::string& refusal, const std::function<void(const nlohmann::json&)>& kept);
  ~StepLines();
  StepLines(const StepLines&) = delete;
  StepLines& operator=(const StepLines&) = delete;

  // `lines`: whole ones. They are with the system when this returns: kill -9 loses none.
  void append(const std::string& lines);

 private:
  const std::string path_;
  std::FILE* file_ = nullptr;
};

}  // namespace fattn::gpt2
