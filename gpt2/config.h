// What a GPT-2 is: its sizes and switches, as config.json has them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "fattn/types.hpp"

namespace fattn::gpt2 {

enum class Activation { kGeluTanh, kGelu };  // gelu_new; gelu, with the error function
enum class Positions { kLearned, kRotary };  // added to the embedding; turning q and k

struct Config {
  int64_t vocab_size = 50257, n_positions = 1024, n_embd = 768, n_layer = 12, n_head = 12;
  int64_t n_kv_head = 12;  // heads of k and v; fewer than n_head: GQA
  int64_t n_inner = 4 * 768;
  Activation activation = Activation::kGeluTanh;
  Positions positions = Positions::kLearned;
  double rope_theta = 10000;
  bool causal = true;  // false: every token sees all of them, as in BERT
  double layer_norm_epsilon = 1e-5;
  bool scale_attn_weights = true;                // by 1 / sqrt(headdim)
  bool scale_attn_by_inverse_layer_idx = false;  // and by 1 / (layer + 1)
  bool tied_head = true;                         // the head's weight is the token embedding
  double initializer_range = 0.02;
  double embd_pdrop = 0.1, attn_pdrop = 0.1, resid_pdrop = 0.1;
  std::optional<int64_t> bos_token_id, eos_token_id, pad_token_id;
  int64_t vocab_multiple = 64;  // what the vocabulary is padded to in memory; 1: it is not

  int64_t headdim() const { return n_embd / n_head; }
  int64_t kv_width() const { return n_kv_head * headdim(); }
  int64_t qkv_width() const { return n_embd + 2 * kv_width(); }
  int64_t padded_vocab() const { return (vocab_size + vocab_multiple - 1) / vocab_multiple * vocab_multiple; }
};

// Hugging Face's keys. Beside them, none of which transformers' GPT-2 has: "num_key_value_heads", "is_causal", "position_embedding_type" ("absolute"
// or "rotary"), "rope_theta". What would change the result and is not known here is refused. Throws Error.
Config parse_config(std::string_view json);
// Of a folder's config.json.
Config read_config(const std::string& folder);
// Throws Error for sizes that cannot be.
void check(const Config& config);

// As config.json, for weights of this dtype.
std::string to_json(const Config& config, DType dtype);
// The text of a config.json with another dtype and all else as it is. Throws Error.
std::string with_dtype(std::string_view json, DType dtype);

// gpt2, gpt2-medium, gpt2-large, gpt2-xl.
const std::vector<std::string>& preset_names();
// Throws Error for a name that is none of them.
Config preset(const std::string& name);

// "float32", "float16", "bfloat16": what config.json calls them.
const char* torch_name(DType dtype);

}  // namespace fattn::gpt2
