// Files are sealed in checkpoint.json, which is written last; then the folder takes its name.
#include "gpt2/train/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <system_error>

#include "files/input_file.h"
#include "files/json.h"
#include "files/printable.h"
#include "files/safetensors/reader.h"
#include "files/safetensors/writer.h"
#include "files/whole_file.h"
#include "gpt2/error.h"
#include "gpt2/train/checkpoint_files.h"
#include "gpt2/weights/convert.h"
#include "gpt2/weights/save.h"
#include "gpt2/weights/tensors.h"

namespace fattn::gpt2 {
namespace {

namespace fs = std::filesystem;
using files::printable;
using files::safetensors::TensorEntry;
using files::safetensors::TensorSource;
using Json = nlohmann::ordered_json;

constexpr const char* kStepPrefix = "step-";
constexpr const char* kUnfinished = ".tmp";  // how names of what has no name yet end; they begin with a dot
constexpr size_t kDigits = 8;
constexpr uint64_t kMostState = 1 << 24;

std::string name_of(int64_t step) {
  std::string digits = std::to_string(step);
  if (digits.size() < kDigits) digits.insert(0, kDigits - digits.size(), '0');
  return kStepPrefix + digits;
}

// -1: no checkpoint's name.
int64_t step_of(const std::string& name) {
  const size_t prefix = std::strlen(kStepPrefix);
  if (name.compare(0, prefix, kStepPrefix) != 0 || name.size() < prefix + kDigits || name.size() > prefix + 18) return -1;
  if (name.find_first_not_of("0123456789", prefix) != std::string::npos) return -1;
  const int64_t step = std::stoll(name.substr(prefix));
  return name_of(step) == name ? step : -1;
}

// Names in a folder to disk, where the file system can.
void sync_folder(const fs::path& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  fsync(fd);
  close(fd);
}

// What is removed loses its name first, so that half of it is never taken for a checkpoint.
void remove_whole(const fs::path& path) {
  const fs::path away = path.parent_path() / ("." + path.filename().string() + ".old" + kUnfinished);
  std::error_code error;
  fs::remove_all(away, error);
  fs::rename(path, away, error);
  if (error) throw std::runtime_error("'" + printable(path.string()) + "' cannot be removed: " + error.message());
  fs::remove_all(away, error);
}

// A folder that goes again unless it got its name.
class UnfinishedFolder {
 public:
  explicit UnfinishedFolder(const fs::path& final) : final_(final), path_(final.parent_path() / ("." + final.filename().string() + kUnfinished)) {
    std::error_code error;
    fs::remove_all(path_, error);
    if (!fs::create_directory(path_, error)) throw std::runtime_error("'" + printable(path_.string()) + "' cannot be made: " + error.message());
  }
  ~UnfinishedFolder() {
    std::error_code ignored;
    if (!named_) fs::remove_all(path_, ignored);
  }
  UnfinishedFolder(const UnfinishedFolder&) = delete;
  UnfinishedFolder& operator=(const UnfinishedFolder&) = delete;

  const fs::path& path() const { return path_; }
  void take_name() {
    sync_folder(path_);
    std::error_code error;
    if (fs::exists(final_, error)) remove_whole(final_);
    fs::rename(path_, final_, error);
    if (error) throw std::runtime_error("'" + printable(final_.string()) + "' cannot be put in place: " + error.message());
    named_ = true;
    sync_folder(final_.parent_path());
  }

 private:
  const fs::path final_, path_;
  bool named_ = false;
};

const Parameter& parameter_named(const std::vector<Parameter>& all, const std::string& name) {
  const auto at = std::find_if(all.begin(), all.end(), [&](const Parameter& p) { return p.name == name; });
  if (at == all.end()) throw Error("the network has no parameter '" + name + "'");
  return *at;
}

void write_weights(const fs::path& folder, const Checkpoint& checkpoint, const Arrays& arrays, const FileTexts& texts) {
  const DType dtype = checkpoint.options.dtype;
  SaveOptions options;
  options.dtype = dtype;
  const float* masters = arrays.flat(Flat::kMaster);
  const Fill fill = [&](const TensorSpec& tensor, int64_t begin, size_t count, void* to) {
    const float* from = masters + parameter_named(*arrays.parameters, tensor.name).offset + begin;
    if (!convert(from, DType::kF32, to, dtype, count))
      throw Error("'" + tensor.name + "' has grown beyond what " + torch_name(dtype) + " holds; train in bf16 or fp32");
  };
  FileTexts all = texts;
  all.emplace_back("config.json", to_json(checkpoint.config, dtype));
  save_model(folder.string(), tensors_of(checkpoint.config), fill, all, options);
}

std::vector<Flat> kept_arrays(DType dtype) {
  std::vector<Flat> all{Flat::kFirstMoment, Flat::kSecondMoment};
  if (dtype != DType::kF32) all.push_back(Flat::kMaster);  // else model.safetensors has them
  return all;
}

void write_optimizer(const fs::path& folder, DType dtype, const Arrays& arrays) {
  std::vector<TensorSource> sources;
  struct Copy {
    const float* numbers = nullptr;
    Flat which = Flat::kMaster;
  };
  const auto copy = std::make_shared<Copy>();
  for (const Flat which : kept_arrays(dtype))
    for (const Parameter& p : *arrays.parameters) {
      TensorSource source{array_name(which, p), "F32", p.shape, {}};
      source.write = [&arrays, &p, which, copy](files::WholeFile& file) {
        if (copy->numbers == nullptr || copy->which != which) *copy = {arrays.flat(which), which};
        file.write(copy->numbers + p.offset, static_cast<size_t>(p.size) * sizeof(float));
      };
      sources.push_back(std::move(source));
    }
  files::WholeFile file((folder / kOptimizerFile).string());
  files::safetensors::write_unpublished(file, std::move(sources), {});
  file.publish();
}

void write_seals(const fs::path& folder, const Checkpoint& c) {
  Json sealed = Json::object();
  std::vector<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.push_back(entry.path().filename().string());
  std::sort(names.begin(), names.end());
  for (const std::string& name : names) sealed[name] = file_seal((folder / name).string());
  const TrainState& s = c.state;
  const Json json = {{"fattn_checkpoint", 1},
                     {"step", s.step},
                     {"updates", s.updates},
                     {"draws", s.draws},
                     {"position", {{"epoch", s.position.epoch}, {"batch", s.position.batch}}},
                     {"scaler", {{"scale", s.scaler.scale}, {"good_steps", s.scaler.good_steps}, {"overflows", s.scaler.overflows}}},
                     {"data", hex_word(c.data)},
                     {"options", to_json(c.options)},
                     {"files", sealed}};
  const std::string text = json.dump(2) + "\n";
  files::WholeFile file((folder / kCheckpointFile).string());
  file.write(text.data(), text.size());
  file.publish();
}

const nlohmann::json& member(const nlohmann::json& object, const char* key) {
  const auto at = object.find(key);
  if (at == object.end()) throw Error(std::string("'") + key + "' is missing");
  return *at;
}
int64_t count_of(const nlohmann::json& object, const char* key) {
  const nlohmann::json& value = member(object, key);
  if (!value.is_number_unsigned() || value.get<uint64_t>() > INT64_MAX) throw Error(std::string("'") + key + "' is no whole number from 0 on");
  return value.get<int64_t>();
}

void parse_state(const nlohmann::json& json, Checkpoint& c) {
  if (!json.is_object() || count_of(json, "fattn_checkpoint") != 1) throw Error("this is no checkpoint of a version that is known");
  TrainState& s = c.state;
  s.step = count_of(json, "step");
  s.updates = count_of(json, "updates");
  s.draws = static_cast<uint64_t>(count_of(json, "draws"));
  s.position = {count_of(member(json, "position"), "epoch"), count_of(member(json, "position"), "batch")};
  const nlohmann::json& scaler = member(json, "scaler");
  const nlohmann::json& scale = member(scaler, "scale");
  if (!scale.is_number() || !(scale.get<double>() >= LossScaler::kLeast && scale.get<double>() <= LossScaler::kMost))
    throw Error("'scale' is no number from 1 to 2^24");
  s.scaler = {scale.get<double>(), count_of(scaler, "good_steps"), count_of(scaler, "overflows")};
  c.data = word_of(member(json, "data"), "data");
  c.options = options_from(member(json, "options"));
}

}  // namespace

std::string write_checkpoint(const std::string& out, const Checkpoint& checkpoint, const Arrays& arrays, const FileTexts& texts) {
  const fs::path final = fs::path(out) / name_of(checkpoint.state.step);
  UnfinishedFolder folder(final);
  write_weights(folder.path(), checkpoint, arrays, texts);
  write_optimizer(folder.path(), checkpoint.options.dtype, arrays);
  write_seals(folder.path(), checkpoint);
  folder.take_name();
  return final.string();
}

std::vector<FoundCheckpoint> find_checkpoints(const std::string& out) {
  std::vector<FoundCheckpoint> all;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(out, ignored))
    if (const int64_t step = step_of(entry.path().filename().string()); step >= 0 && entry.is_directory(ignored))
      all.push_back({entry.path().string(), step});
  std::sort(all.begin(), all.end(), [](const FoundCheckpoint& a, const FoundCheckpoint& b) { return a.step < b.step; });
  return all;
}

void remove_unfinished(const std::string& out) {
  std::error_code ignored;
  std::vector<fs::path> left;
  for (const auto& entry : fs::directory_iterator(out, ignored)) {
    const std::string name = entry.path().filename().string();
    if (name.compare(0, 1 + std::strlen(kStepPrefix), std::string(".") + kStepPrefix) == 0 && name.size() > std::strlen(kUnfinished) &&
        name.compare(name.size() - std::strlen(kUnfinished), std::string::npos, kUnfinished) == 0)
      left.push_back(entry.path());
  }
  for (const fs::path& path : left) fs::remove_all(path, ignored);
}

void remove_old(const std::string& out, int64_t keep) {
  const std::vector<FoundCheckpoint> all = find_checkpoints(out);
  if (keep <= 0) return;
  for (size_t i = 0; i + static_cast<size_t>(keep) < all.size(); ++i) remove_whole(all[i].path);
}

Checkpoint read_checkpoint(const std::string& path) {
  Checkpoint checkpoint;
  checkpoint.path = path;
  const std::string file = (fs::path(path) / kCheckpointFile).string();
  try {
    const nlohmann::json json = files::parse_json(files::read_whole(file, kMostState));
    parse_state(json, checkpoint);
    const nlohmann::json& sealed = member(json, "files");
    if (!sealed.is_object()) throw Error("'files' is no list of files");
    for (const char* needed : {"config.json", "model.safetensors", kOptimizerFile}) member(sealed, needed);
    for (const auto& [name, seal] : sealed.items()) {
      if (name.find('/') != std::string::npos) throw Error("'" + printable(name, 80) + "' is no file of the checkpoint's folder");
      check_seal((fs::path(path) / name).string(), seal);
    }
    checkpoint.config = read_config(path);
  } catch (const std::runtime_error& e) {
    throw Error("the checkpoint '" + printable(path) + "' cannot be used: " + e.what() +
                ". Remove its folder to go on from the one before it, or from the beginning");
  }
  return checkpoint;
}

void restore_arrays(const Checkpoint& checkpoint, const Arrays& arrays, const std::function<void(Flat, const float*)>& restore) {
  const std::string path = (fs::path(checkpoint.path) / kOptimizerFile).string();
  const files::safetensors::Reader reader(path);
  std::vector<float> numbers(static_cast<size_t>(arrays.flat_size));
  for (const Flat which : kept_arrays(checkpoint.options.dtype)) {
    for (const Parameter& p : *arrays.parameters) {
      const TensorEntry* entry = reader.find(array_name(which, p));
      if (!entry || entry->dtype != "F32" || entry->shape != p.shape)
        throw Error("'" + printable(path) + "' has no '" + array_name(which, p) + "' of the model's shape in fp32");
      reader.read_part(*entry, 0, numbers.data() + p.offset, static_cast<uint64_t>(p.size) * sizeof(float));
    }
    restore(which, numbers.data());
  }
}

}  // namespace fattn::gpt2
