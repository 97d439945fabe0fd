// Every key that changes what is computed is read or refused; the others are the business of transformers.
#include "gpt2/config.h"

#include <cmath>
#include <iterator>
#include <nlohmann/json.hpp>

#include "files/input_file.h"
#include "files/json.h"
#include "files/printable.h"
#include "gpt2/error.h"
#include "gpt2/model_folder.h"

namespace fattn::gpt2 {
namespace {

using Json = nlohmann::json;

constexpr uint64_t kMostBytes = 1 << 24;

struct Preset {
  const char* name;
  int64_t n_embd, n_layer, n_head;
};
constexpr Preset kPresets[] = {{"gpt2", 768, 12, 12}, {"gpt2-medium", 1024, 24, 16}, {"gpt2-large", 1280, 36, 20}, {"gpt2-xl", 1600, 48, 25}};

std::string show(const Json& value) { return files::printable(value.dump(-1, ' ', false, Json::error_handler_t::replace), 60); }

[[noreturn]] void fail(const char* key, const Json& value, const std::string& allowed) {
  throw Error(std::string("'") + key + "' is " + show(value) + "; " + allowed);
}

// Reads the keys that are there; what is null or not there keeps its value.
class Keys {
 public:
  explicit Keys(const Json& object) : object_(object) {}

  const Json* find(const char* key) const {
    const auto at = object_.find(key);
    return at == object_.end() || at->is_null() ? nullptr : &*at;
  }
  bool size(const char* key, int64_t most, int64_t& to) const {
    const Json* value = find(key);
    if (!value) return false;
    if (!value->is_number_unsigned() || value->get<uint64_t>() < 1 || value->get<uint64_t>() > static_cast<uint64_t>(most))
      fail(key, *value, "it must be a whole number from 1 to " + std::to_string(most));
    to = value->get<int64_t>();
    return true;
  }
  void id(const char* key, std::optional<int64_t>& to) const {
    const Json* value = find(key);
    if (!value) return;
    if (!value->is_number_unsigned() || value->get<uint64_t>() > INT32_MAX) fail(key, *value, "it must be a token's id, or null");
    to = value->get<int64_t>();
  }
  void flag(const char* key, bool& to) const {
    const Json* value = find(key);
    if (!value) return;
    if (!value->is_boolean()) fail(key, *value, "it must be true or false");
    to = value->get<bool>();
  }
  void number(const char* key, double least, double most, double& to) const {
    const Json* value = find(key);
    if (!value) return;
    if (!value->is_number() || !(value->get<double>() >= least && value->get<double>() <= most))
      fail(key, *value, "it must be a number from " + Json(least).dump() + " to " + Json(most).dump());
    to = value->get<double>();
  }
  void refuse(const char* key, const char* why) const {
    const Json* value = find(key);
    if (value && *value != false && *value != "" && !(value->is_object() && value->empty())) fail(key, *value, why);
  }

 private:
  const Json& object_;
};

Activation activation_of(const Json& value) {
  if (value == "gelu_new" || value == "gelu_pytorch_tanh" || value == "gelu_fast") return Activation::kGeluTanh;
  if (value == "gelu") return Activation::kGelu;
  fail("activation_function", value, "allowed: gelu_new, gelu_pytorch_tanh, gelu_fast, gelu");
}

Positions positions_of(const Json& value) {
  if (value == "absolute") return Positions::kLearned;
  if (value == "rotary") return Positions::kRotary;
  fail("position_embedding_type", value, "allowed: absolute, rotary");
}

}  // namespace

void check(const Config& c) {
  const auto sizes = [](const std::string& what) { throw Error(what); };
  if (c.n_embd % c.n_head != 0)
    sizes("n_embd " + std::to_string(c.n_embd) + " is no multiple of n_head " + std::to_string(c.n_head) + "; every head has the same width");
  if (c.n_head % c.n_kv_head != 0)
    sizes("n_head " + std::to_string(c.n_head) + " is no multiple of num_key_value_heads " + std::to_string(c.n_kv_head) +
          "; every head of k and v serves the same number of heads of q");
  if (c.positions == Positions::kRotary && c.headdim() % 2 != 0)
    sizes("rotary positions turn pairs, but the heads' width n_embd / n_head is " + std::to_string(c.headdim()) + "; it must be even");
}

Config parse_config(std::string_view text) {
  const Json root = files::parse_json(text);
  if (!root.is_object()) throw Error(std::string("config.json is ") + files::kind_of(root) + "; it must be an object");
  const Keys keys(root);
  const Json* type = keys.find("model_type");
  if (!type || *type != "gpt2") throw Error("'model_type' is " + (type ? show(*type) : "not there") + "; it must be \"gpt2\"");
  keys.refuse("add_cross_attention", "cross-attention is not part of GPT-2; it must be false");
  keys.refuse("quantization_config", "quantised weights cannot be read; give weights in fp32, fp16 or bf16");
  keys.refuse("rope_scaling", "scaled rotary positions are not known; it must be null");
  Config c;
  keys.size("vocab_size", int64_t{1} << 24, c.vocab_size);
  if (!keys.size("n_positions", int64_t{1} << 30, c.n_positions)) keys.size("n_ctx", int64_t{1} << 30, c.n_positions);
  keys.size("n_embd", 1 << 17, c.n_embd);
  keys.size("n_layer", 1 << 12, c.n_layer);
  keys.size("n_head", 1 << 16, c.n_head);
  c.n_kv_head = c.n_head;
  keys.size("num_key_value_heads", 1 << 16, c.n_kv_head);
  c.n_inner = 4 * c.n_embd;
  keys.size("n_inner", 1 << 20, c.n_inner);
  if (const Json* value = keys.find("activation_function")) c.activation = activation_of(*value);
  if (const Json* value = keys.find("position_embedding_type")) c.positions = positions_of(*value);
  keys.number("rope_theta", 1, 1e15, c.rope_theta);
  keys.flag("is_causal", c.causal);
  keys.number("layer_norm_epsilon", 1e-20, 1, c.layer_norm_epsilon);
  keys.flag("scale_attn_weights", c.scale_attn_weights);
  keys.flag("scale_attn_by_inverse_layer_idx", c.scale_attn_by_inverse_layer_idx);
  keys.flag("tie_word_embeddings", c.tied_head);
  keys.number("initializer_range", 0, 1e3, c.initializer_range);
  keys.number("embd_pdrop", 0, 1, c.embd_pdrop);
  keys.number("attn_pdrop", 0, 1, c.attn_pdrop);
  keys.number("resid_pdrop", 0, 1, c.resid_pdrop);
  keys.id("bos_token_id", c.bos_token_id);
  keys.id("eos_token_id", c.eos_token_id);
  keys.id("pad_token_id", c.pad_token_id);
  check(c);
  return c;
}

Config read_config(const std::string& folder) {
  require_model_folder(folder);
  const std::string path = folder + "/config.json";
  try {
    return parse_config(files::read_whole(path, kMostBytes));
  } catch (const files::FileError& e) {
    throw Error(e.what());
  } catch (const std::runtime_error& e) {
    throw Error("'" + files::printable(path) + "': " + e.what());
  }
}

std::string to_json(const Config& c, DType dtype) {
  nlohmann::ordered_json j;
  const auto id = [](const std::optional<int64_t>& value) { return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json(); };
  j["activation_function"] = c.activation == Activation::kGeluTanh ? "gelu_new" : "gelu";
  j["architectures"] = {"GPT2LMHeadModel"};
  j["attn_pdrop"] = c.attn_pdrop;
  j["bos_token_id"] = id(c.bos_token_id);
  j["dtype"] = torch_name(dtype);
  j["embd_pdrop"] = c.embd_pdrop;
  j["eos_token_id"] = id(c.eos_token_id);
  j["initializer_range"] = c.initializer_range;
  if (!c.causal) j["is_causal"] = false;
  j["layer_norm_epsilon"] = c.layer_norm_epsilon;
  j["model_type"] = "gpt2";
  j["n_embd"] = c.n_embd;
  j["n_head"] = c.n_head;
  j["n_inner"] = c.n_inner == 4 * c.n_embd ? nlohmann::ordered_json() : nlohmann::ordered_json(c.n_inner);
  j["n_layer"] = c.n_layer;
  j["n_positions"] = c.n_positions;
  if (c.n_kv_head != c.n_head) j["num_key_value_heads"] = c.n_kv_head;
  j["pad_token_id"] = id(c.pad_token_id);
  if (c.positions == Positions::kRotary) {
    j["position_embedding_type"] = "rotary";
    j["rope_theta"] = c.rope_theta;
  }
  j["resid_pdrop"] = c.resid_pdrop;
  j["scale_attn_by_inverse_layer_idx"] = c.scale_attn_by_inverse_layer_idx;
  j["scale_attn_weights"] = c.scale_attn_weights;
  j["tie_word_embeddings"] = c.tied_head;
  j["use_cache"] = true;
  j["vocab_size"] = c.vocab_size;
  return j.dump(2) + "\n";
}

std::string with_dtype(std::string_view json, DType dtype) {
  Json root = files::parse_json(json);
  if (!root.is_object()) throw Error("config.json must be an object");
  if (root.contains("torch_dtype")) root["torch_dtype"] = torch_name(dtype);
  if (root.contains("dtype") || !root.contains("torch_dtype")) root["dtype"] = torch_name(dtype);
  return root.dump(2) + "\n";
}

const std::vector<std::string>& preset_names() {
  static const std::vector<std::string> names = [] {
    std::vector<std::string> list;
    for (const Preset& p : kPresets) list.emplace_back(p.name);
    return list;
  }();
  return names;
}

Config preset(const std::string& name) {
  for (const Preset& p : kPresets) {
    if (name != p.name) continue;
    Config c;
    c.n_embd = p.n_embd;
    c.n_layer = p.n_layer;
    c.n_head = c.n_kv_head = p.n_head;
    c.n_inner = 4 * p.n_embd;
    c.bos_token_id = c.eos_token_id = c.vocab_size - 1;
    return c;
  }
  std::string known;
  for (const Preset& p : kPresets) known += std::string(known.empty() ? "" : ", ") + p.name;
  throw Error("'" + files::printable(name, 80) + "' is no preset; allowed: " + known);
}

const char* torch_name(DType dtype) { return dtype == DType::kF32 ? "float32" : dtype == DType::kF16 ? "float16" : "bfloat16"; }

}  // namespace fattn::gpt2
