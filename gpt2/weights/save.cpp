// All files are finished under temporary names before the first is renamed.
#include "gpt2/weights/save.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "files/safetensors/writer.h"
#include "files/whole_file.h"
#include "gpt2/error.h"
#include "gpt2/new_folder.h"
#include "gpt2/weights/convert.h"
#include "gpt2/weights/initialise.h"

namespace fattn::gpt2 {
namespace {

using files::WholeFile;
using files::safetensors::TensorSource;

constexpr size_t kMostFiles = 100;
constexpr size_t kChunk = 1 << 18;  // elements

const char* dtype_name(DType dtype) { return dtype == DType::kF32 ? "F32" : dtype == DType::kF16 ? "F16" : "BF16"; }

// Tensors in their order, a new file where the next one would make it too large.
std::vector<std::vector<TensorSpec>> shared_out(const std::vector<TensorSpec>& tensors, const SaveOptions& options) {
  std::vector<std::vector<TensorSpec>> files(1);
  uint64_t filled = 0;
  for (const TensorSpec& tensor : tensors) {
    const uint64_t bytes = static_cast<uint64_t>(tensor.size()) * size_of(options.dtype);
    if (options.most_bytes > 0 && filled > 0 && filled + bytes > options.most_bytes) {
      files.emplace_back();
      filled = 0;
    }
    files.back().push_back(tensor);
    filled += bytes;
  }
  if (files.size() > kMostFiles)
    throw Error("files of at most " + std::to_string(options.most_bytes) + " bytes would be " + std::to_string(files.size()) + "; at most " +
                std::to_string(kMostFiles) + " are written: allow larger ones");
  return files;
}

std::string name_in_file(const TensorSpec& tensor, const SaveOptions& options) {
  return options.prefix && tensor.name != "lm_head.weight" ? "transformer." + tensor.name : tensor.name;
}

TensorSource source_of(const TensorSpec& tensor, const Fill& fill, const SaveOptions& options) {
  TensorSource source{name_in_file(tensor, options), dtype_name(options.dtype), tensor.shape, {}};
  source.write = [&fill, &options, tensor](WholeFile& file) {
    std::vector<uint32_t> chunk(kChunk * size_of(options.dtype) / sizeof(uint32_t));
    for (int64_t begin = 0, end = tensor.size(); begin < end;) {
      const size_t count = std::min(kChunk, static_cast<size_t>(end - begin));
      fill(tensor, begin, count, chunk.data());
      file.write(chunk.data(), count * size_of(options.dtype));
      if (options.progress) options.progress(count * size_of(options.dtype));
      begin += static_cast<int64_t>(count);
    }
  };
  return source;
}

std::string file_name(size_t i, size_t n) {
  if (n == 1) return "model.safetensors";
  char name[64];
  std::snprintf(name, sizeof name, "model-%05zu-of-%05zu.safetensors", i + 1, n);
  return name;
}

}  // namespace

uint64_t saved_bytes(const std::vector<TensorSpec>& tensors, DType dtype) {
  uint64_t sum = 0;
  for (const TensorSpec& tensor : tensors) sum += static_cast<uint64_t>(tensor.size()) * size_of(dtype);
  return sum;
}

void save_model(const std::string& folder, const std::vector<TensorSpec>& tensors, const Fill& fill,
                const std::vector<std::pair<std::string, std::string>>& texts, const SaveOptions& options) {
  const auto shares = shared_out(tensors, options);
  const NewFolder target(folder);
  std::vector<std::unique_ptr<WholeFile>> finished;
  nlohmann::ordered_json index;
  index["metadata"] = {{"total_size", saved_bytes(tensors, options.dtype)}};
  std::map<std::string, std::string> places;
  for (size_t i = 0; i < shares.size(); ++i) {
    const std::string name = file_name(i, shares.size());
    std::vector<TensorSource> sources;
    for (const TensorSpec& tensor : shares[i]) {
      sources.push_back(source_of(tensor, fill, options));
      places[sources.back().name] = name;
    }
    finished.push_back(target.file(name));
    files::safetensors::write_unpublished(*finished.back(), std::move(sources), {{"format", "pt"}});
  }
  const auto write_text = [&](const std::string& name, const std::string& text) {
    finished.push_back(target.file(name));
    finished.back()->write(text.data(), text.size());
  };
  index["weight_map"] = places;
  if (shares.size() > 1) write_text("model.safetensors.index.json", index.dump(2) + "\n");
  for (const auto& [name, text] : texts) write_text(name, text);
  for (const auto& file : finished) file->publish();
}

Fill fill_at_random(const Config& config, DType dtype, uint64_t seed) {
  return [config, dtype, seed, wide = std::vector<float>()](const TensorSpec& tensor, int64_t begin, size_t count, void* to) mutable {
    wide.resize(count);
    initialise(tensor, config, seed, begin, count, wide.data());
    if (!convert(wide.data(), DType::kF32, to, dtype, count))
      throw Error("initializer_range gives numbers that " + std::string(torch_name(dtype)) + " does not hold in '" + tensor.name + "'");
  };
}

Fill fill_from(const Weights& weights, DType dtype) {
  return [&weights, dtype](const TensorSpec& tensor, int64_t begin, size_t count, void* to) {
    const Weight& weight = weights.at(tensor.name);
    const char* from = static_cast<const char*>(weight.data) + static_cast<size_t>(begin) * size_of(weight.dtype);
    if (!convert(from, weight.dtype, to, dtype, count))
      throw Error("'" + tensor.name + "' has numbers that are too large for " + torch_name(dtype) + "; bfloat16 has the range of float32");
  };
}

}  // namespace fattn::gpt2
