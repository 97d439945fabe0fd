// All that does not fit is collected, so that one error says everything that is wrong with a file.
#include "gpt2/weights/weights.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <stdexcept>
#include <utility>

#include "files/printable.h"
#include "gpt2/error.h"
#include "gpt2/weights/initialise.h"
#include "gpt2/weights/shards.h"
#include "gpt2/weights/tensors.h"

namespace fattn::gpt2 {
namespace {

using files::printable;
using files::safetensors::MappedFile;
using files::safetensors::TensorEntry;

constexpr std::string_view kPrefix = "transformer.";
constexpr const char* kHead = "lm_head.weight";
constexpr size_t kNamed = 8;  // of the tensors that are wrong

std::string list(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + "]";
}

// The first few of them, and how many there are.
std::string named(const std::vector<std::string>& all) {
  std::string text;
  for (size_t i = 0; i < std::min(all.size(), kNamed); ++i) text += (i ? ", " : "") + all[i];
  if (all.size() > kNamed) text += " and " + std::to_string(all.size() - kNamed) + " more";
  return text;
}

std::optional<DType> dtype_of(const std::string& name) {
  if (name == "F32") return DType::kF32;
  if (name == "F16") return DType::kF16;
  if (name == "BF16") return DType::kBF16;
  return std::nullopt;
}

}  // namespace

class WeightsReader {
  struct Found {
    const MappedFile* file;
    const TensorEntry* entry;
  };

 public:
  WeightsReader(const std::string& path, const Config& config) : config_(config), shown_(printable(path)) {
    const WeightFiles files = find_weights(path);
    for (const std::string& file : files.paths) open(file, files);
    for (const auto& [name, file] : files.shard_of)
      if (!found_.count(name)) missing_.push_back("'" + printable(name, 80) + "' (of the index)");
    refuse_if_wrong();
    weights_.prefixed_ = found_.count(std::string(kPrefix) + "wte.weight") > 0;
  }

  Weights read() {
    for (const TensorSpec& spec : tensors_of(config_)) take(spec);
    if (config_.tied_head) check_tied_head();
    for (const auto& [name, found] : found_)
      if (!is_mask_buffer(weights_.prefixed_ && name.compare(0, kPrefix.size(), kPrefix) == 0 ? name.substr(kPrefix.size()) : name, config_))
        extra_.push_back("'" + printable(name, 80) + "'");
    std::sort(extra_.begin(), extra_.end());
    refuse_if_wrong();
    return std::move(weights_);
  }

 private:
  void open(const std::string& path, const WeightFiles& files) {
    try {
      weights_.files_.push_back(std::make_unique<MappedFile>(path));
    } catch (const files::FileError& e) {
      throw Error(e.what());
    }
    const MappedFile& file = *weights_.files_.back();
    for (const TensorEntry& entry : file.reader().header().tensors) {
      if (!files.shard_of.empty()) {
        const auto at = files.shard_of.find(entry.name);
        if (at == files.shard_of.end() || at->second != path) {
          extra_.push_back("'" + printable(entry.name, 80) + "' (the index has it elsewhere or not at all)");
          continue;
        }
      }
      found_.emplace(entry.name, Found{&file, &entry});
    }
  }

  std::string name_in_file(const std::string& name) const { return weights_.prefixed_ && name != kHead ? std::string(kPrefix) + name : name; }

  void take(const TensorSpec& spec) {
    const auto at = found_.find(name_in_file(spec.name));
    if (at == found_.end()) {
      missing_.push_back("'" + name_in_file(spec.name) + "'");
      return;
    }
    const Found found = at->second;
    found_.erase(at);
    const std::optional<DType> dtype = dtype_of(found.entry->dtype);
    if (!dtype) {
      wrong_.push_back("'" + spec.name + "' is " + found.entry->dtype + ", allowed: F32, F16, BF16");
    } else if (found.entry->shape != spec.shape) {
      wrong_.push_back("'" + spec.name + "' is " + list(found.entry->shape) + ", config.json says " + list(spec.shape));
    } else {
      add(spec, *dtype, found);
    }
  }

  void add(const TensorSpec& spec, DType dtype, const Found& found) {
    Weight weight{spec.name, dtype, spec.shape, spec.conv1d, found.file->data(*found.entry), found.entry->end - found.entry->begin};
    if (reinterpret_cast<uintptr_t>(weight.data) % size_of(dtype) != 0) {
      weights_.copies_.push_back(files::safetensors::allocate(weight.bytes));
      std::memcpy(weights_.copies_.back().get(), weight.data, weight.bytes);
      weight.data = weights_.copies_.back().get();
    }
    weights_.by_name_.emplace(weight.name, weights_.tensors_.size());
    weights_.tensors_.push_back(std::move(weight));
  }

  // A head beside a tied embedding is the same tensor once more, or the file is of another model.
  void check_tied_head() {
    const auto at = found_.find(kHead);
    const auto embedding = weights_.by_name_.find("wte.weight");
    if (at == found_.end() || embedding == weights_.by_name_.end()) return;
    const Weight& wte = weights_.tensors_[embedding->second];
    const auto [file, entry] = at->second;
    found_.erase(at);
    if (entry->shape != wte.shape || dtype_of(entry->dtype) != wte.dtype || std::memcmp(file->data(*entry), wte.data, wte.bytes) != 0)
      wrong_.push_back(std::string("'") + kHead + "' is not 'wte.weight', though config.json ties them (tie_word_embeddings)");
  }

  void refuse_if_wrong() const {
    std::string text;
    const auto say = [&](const char* what, const std::vector<std::string>& tensors) {
      if (!tensors.empty()) text += std::string(text.empty() ? "" : "; ") + what + named(tensors);
    };
    say("missing: ", missing_);
    say("wrong: ", wrong_);
    say("not of this model: ", extra_);
    if (!text.empty()) throw Error("the weights of '" + shown_ + "' do not fit config.json: " + text);
  }

  const Config& config_;
  const std::string shown_;
  Weights weights_;
  std::unordered_map<std::string, Found> found_;
  std::vector<std::string> missing_, wrong_, extra_;
};

int64_t Weight::size() const {
  int64_t n = 1;
  for (const int64_t extent : shape) n *= extent;
  return n;
}

Weights Weights::open(const std::string& path, const Config& config) { return WeightsReader(path, config).read(); }

Weights Weights::at_random(const Config& config, uint64_t seed) {
  check(config);
  Weights weights;
  for (const TensorSpec& spec : tensors_of(config)) {
    const auto bytes = static_cast<uint64_t>(spec.size()) * sizeof(float);
    weights.copies_.push_back(files::safetensors::allocate(bytes));
    auto* numbers = reinterpret_cast<float*>(weights.copies_.back().get());
    initialise(spec, config, seed, 0, static_cast<size_t>(spec.size()), numbers);
    weights.by_name_.emplace(spec.name, weights.tensors_.size());
    weights.tensors_.push_back({spec.name, DType::kF32, spec.shape, spec.conv1d, numbers, bytes});
  }
  return weights;
}

const Weight& Weights::at(std::string_view name) const {
  auto found = by_name_.find(std::string(name));
  if (found == by_name_.end() && name == kHead) found = by_name_.find("wte.weight");
  if (found == by_name_.end()) throw std::out_of_range("no weight is named '" + std::string(name) + "'");
  return tensors_[found->second];
}

uint64_t Weights::bytes() const {
  uint64_t sum = 0;
  for (const Weight& weight : tensors_) sum += weight.bytes;
  return sum;
}

}  // namespace fattn::gpt2
