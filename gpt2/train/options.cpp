// One list of keys for writing, reading and comparing.
#include "gpt2/train/options.h"

#include <algorithm>

#include "files/json.h"
#include "files/printable.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

using Json = nlohmann::ordered_json;

DType dtype_named(const std::string& name) {
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16})
    if (name == name_of(dtype)) return dtype;
  throw Error("'" + files::printable(name, 40) + "' is no dtype; allowed: fp32, fp16, bf16");
}

// Calls each(key, value) for every option; enumerations as text.
template <class Options, class Each>
void for_options(Options& o, const Each& each) {
  each("dtype", o.dtype);
  each("algorithm", o.algorithm);
  each("device", o.device);
  each("batch", o.sequences);
  each("seqlen", o.seqlen);
  each("accumulate", o.accumulate);
  each("steps", o.schedule.steps);
  each("schedule", o.schedule.curve);
  each("learning_rate", o.schedule.peak);
  each("floor", o.schedule.floor);
  each("warmup", o.schedule.warmup);
  each("weight_decay", o.weight_decay);
  each("clip", o.clip);
  each("beta1", o.beta1);
  each("beta2", o.beta2);
  each("epsilon", o.epsilon);
  each("dropout", o.dropout);
  each("shuffle", o.shuffle);
  each("checkpoint_activations", o.checkpoint_activations);
  each("deterministic", o.deterministic);
  each("seed", o.seed);
}

struct Writer {
  Json& json;
  void operator()(const char* key, DType value) const { json[key] = name_of(value); }
  void operator()(const char* key, Curve value) const { json[key] = curve_name(value); }
  template <class T>
  void operator()(const char* key, const T& value) const {
    json[key] = value;
  }
};

struct Reader {
  const nlohmann::json& json;

  template <class T>
  T get(const char* key, bool (nlohmann::json::*is)() const noexcept, const char* kind) const {
    const auto at = json.find(key);
    if (at == json.end()) throw Error(std::string("options: '") + key + "' is missing");
    if (!((*at).*is)()) throw Error(std::string("options: '") + key + "' is " + files::kind_of(*at) + ", not " + kind);
    return at->template get<T>();
  }
  void operator()(const char* key, std::string& to) const { to = get<std::string>(key, &nlohmann::json::is_string, "text"); }
  void operator()(const char* key, bool& to) const { to = get<bool>(key, &nlohmann::json::is_boolean, "true or false"); }
  void operator()(const char* key, int64_t& to) const { to = get<int64_t>(key, &nlohmann::json::is_number_integer, "a whole number"); }
  void operator()(const char* key, uint64_t& to) const { to = get<uint64_t>(key, &nlohmann::json::is_number_unsigned, "a whole number from 0 on"); }
  void operator()(const char* key, double& to) const { to = get<double>(key, &nlohmann::json::is_number, "a number"); }
  void operator()(const char* key, DType& to) const { to = dtype_named(get<std::string>(key, &nlohmann::json::is_string, "text")); }
  void operator()(const char* key, Curve& to) const { to = curve_named(get<std::string>(key, &nlohmann::json::is_string, "text")); }
};

}  // namespace

const char* curve_name(Curve curve) { return curve == Curve::kCosine ? "cosine" : curve == Curve::kLinear ? "linear" : "constant"; }

Curve curve_named(const std::string& name) {
  for (const Curve curve : {Curve::kCosine, Curve::kLinear, Curve::kConstant})
    if (name == curve_name(curve)) return curve;
  throw Error("'" + files::printable(name, 40) + "' is no schedule; allowed: cosine, linear, constant");
}

Json to_json(const TrainOptions& options) {
  Json json = Json::object();
  for_options(options, Writer{json});
  return json;
}

TrainOptions options_from(const nlohmann::json& json) {
  if (!json.is_object()) throw Error("options: there are none");
  TrainOptions options;
  for_options(options, Reader{json});
  return options;
}

std::string flag_of(const std::string& key) {
  std::string flag = "--" + key;
  std::replace(flag.begin(), flag.end(), '_', '-');
  return flag;
}

std::vector<std::pair<std::string, std::string>> flags_of(const TrainOptions& options) {
  std::vector<std::pair<std::string, std::string>> all;
  const Json json = to_json(options);
  for (const auto& [key, value] : json.items()) all.emplace_back(flag_of(key), value.is_string() ? value.get<std::string>() : value.dump());
  return all;
}

std::vector<Difference> differences(const TrainOptions& was, const TrainOptions& is) {
  const auto before = flags_of(was), now = flags_of(is);
  std::vector<Difference> all;
  for (size_t i = 0; i < before.size(); ++i)
    if (before[i].second != now[i].second) all.push_back({before[i].first, before[i].second, now[i].second});
  return all;
}

}  // namespace fattn::gpt2
