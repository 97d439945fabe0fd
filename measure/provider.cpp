// The host's side of the provider protocol.
#include "measure/provider.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <utility>

#include "fattn/system.hpp"
#include "measure/subprocess.h"

namespace fattn::measure {
namespace {

using nlohmann::json;
constexpr int kProtocol = 1;
constexpr double kHelloSeconds = 120;  // importing a framework from a cold disk takes its time

// The statuses that a provider may report. What it reports beside them is a failure of the provider.
Status status_of(const std::string& name) {
  for (Status status : {Status::kUnsupported, Status::kUnavailable, Status::kOutOfMemory})
    if (name == name_of(status)) return status;
  return Status::kFailed;
}

std::string text_of(const json& object, const char* key, const std::string& otherwise = "") {
  const auto it = object.find(key);
  return it != object.end() && it->is_string() ? it->get<std::string>() : otherwise;
}

// Another process opens it under this name; the file itself has none and ends with this process.
std::string path_of(const Pages& pages) { return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(pages.descriptor()); }

class ProviderContestant final : public Contestant {
 public:
  explicit ProviderContestant(const ProviderOptions& options) : options_(options) {}

  bool apart() const override { return true; }

  // So that frameworks are imported by all providers at once.
  void begin() override {
    if (process_) return;
    try {
      launch(pythons().at(0));
    } catch (const std::exception&) {  // start() tries again and says why not
      process_.reset();
    }
  }

  void wait_by(const Patience& patience) override { patience_ = patience; }

  bool compiles() override {
    start();
    return compiles_;
  }

  // A process that failed is not started again: its state is unknown, and the reason is on its first row.
  void start() {
    if (process_ && !greeting_) return;
    std::string reasons, absent;
    Status status = Status::kUnavailable;
    for (const std::string& python : pythons()) {
      try {
        if (!process_) launch(python);
        greeting_ = false;
        hello();
        return;
      } catch (const Failure& failure) {
        process_.reset();
        status = failure.status();
        if (reasons.empty()) absent = failure.absent();
        reasons += (reasons.empty() ? "" : "; ") + (script() ? python + ": " : std::string()) + failure.what();
      }
    }
    if (reasons.empty()) reasons = absent = "no Python was found; give one with --python PATH";
    throw Failure(status, reasons, absent);
  }

  Identity identity() const override {
    Identity id;
    id.provider = options_.name;
    id.backend = device_kind();
    id.algorithm = variant_.empty() ? options_.variant : variant_;
    id.version = version_;
    id.kernel_forward = kernel_;
    id.device = options_.place.name();
    id.threads = threads();
    return id;
  }

  std::string forward_only() const override { return forward_only_; }

  void prepare(const ProblemSpec& spec, const Inputs& inputs, bool grad, int64_t memory_limit) override {
    accept(spec, grad, memory_limit);
    Inputs shared;
    auto share = [](Pages& to, const Pages& from) {
      to = Pages(from.size(), Pages::Kind::kShared);
      if (from.size() > 0) std::memcpy(to.data(), from.data(), from.size());
    };
    share(shared.q, inputs.q);
    share(shared.k, inputs.k);
    share(shared.v, inputs.v);
    json paths = {{"q", path_of(shared.q)}, {"k", path_of(shared.k)}, {"v", path_of(shared.v)}};
    if (grad) {
      share(shared.dout, inputs.dout);
      paths["dout"] = path_of(shared.dout);
    }
    kernel_ = text_of(ask({{"op", "prepare"}, {"inputs", paths}}), "kernel");
  }

  void accept(const ProblemSpec& spec, bool grad, int64_t memory_limit) override {
    start();
    spec_ = spec;
    grad_ = grad;
    if (const std::string options = describe_options(spec); !options.empty())
      throw Failure(Status::kUnsupported, "providers are asked for plain and causal attention only, not for" + options);
    // This process holds the inputs once more in shared memory, the provider its own copy and the outputs twice.
    const int64_t total = 2 * spec.input_bytes(grad) + 2 * spec.output_bytes(grad);
    require_memory(total, memory_limit, options_.name + ": copies of the tensors for " + describe(spec));

    json problem = {{"op", "problem"},
                    {"batch", spec.batch},
                    {"seqlen_q", spec.seqlen_q},
                    {"seqlen_k", spec.seqlen_k},
                    {"nheads", spec.nheads},
                    {"nheads_k", spec.nheads_k},
                    {"headdim", spec.headdim},
                    {"headdim_v", spec.headdim_v},
                    {"causal", spec.causal},
                    {"dtype", name_of(spec.dtype)},
                    {"softmax_scale", 1 / std::sqrt(static_cast<double>(spec.headdim))},
                    {"grad", grad},
                    {"seed", spec.seed},
                    {"threads", threads()},
                    {"device", device_kind()},
                    {"device_index", options_.place.index},
                    {"flush_bytes", flush_bytes(options_.place)},
                    {"flush_repeats", kFlushRepeats},
                    {"variant", variant_},
                    {"min_sample_s", kMinSampleSeconds},
                    {"memory_limit_bytes", memory_limit}};
    ask(problem);
  }

  MemoryUse memory(Pass pass) override {
    const json answer = ask({{"op", "memory"}, {"pass", name_of(pass)}});
    const auto bytes = answer.find("extra_bytes");
    if (bytes == answer.end() || !bytes->is_number_integer() || bytes->get<int64_t>() < 0) nonsense("its memory answer has no extra_bytes >= 0");
    MemoryUse use;
    use.extra_bytes = bytes->get<int64_t>();
    use.method = text_of(answer, "method", "unknown");
    return use;
  }

  const Outputs& compute() override {
    json paths = json::object();
    auto make = [&](Pages& pages, const char* name, int64_t bytes) {
      pages = Pages(static_cast<size_t>(bytes), Pages::Kind::kShared);
      // A provider that writes nothing must not pass: every byte 0xFF is a NaN in every dtype.
      if (bytes > 0) std::memset(pages.data(), 0xFF, pages.size());
      paths[name] = path_of(pages);
    };
    make(outputs_.o, "o", spec_.o_bytes());
    if (grad_) {
      make(outputs_.dq, "dq", spec_.q_bytes());
      make(outputs_.dk, "dk", spec_.k_bytes());
      make(outputs_.dv, "dv", spec_.v_bytes());
    }
    ask({{"op", "check"}, {"outputs", paths}});
    return outputs_;
  }

  std::vector<double> time(Pass pass, int samples, int warmup) override {
    const json answer = ask({{"op", "time"}, {"pass", name_of(pass)}, {"samples", samples}, {"warmup", warmup}});
    const auto list = answer.find("seconds");
    if (list == answer.end() || !list->is_array() || list->size() != static_cast<size_t>(samples))
      nonsense("its time answer has not one number for each sample asked for");
    std::vector<double> seconds;
    for (const json& value : *list) {
      const double s = value.is_number() ? value.get<double>() : 0;
      if (!(s > 0) || !std::isfinite(s)) nonsense("its time answer holds something that is no positive number");
      seconds.push_back(s);
    }
    return seconds;
  }

  void release() override {
    outputs_ = Outputs();
    if (process_ && process_->running()) ask({{"op", "release"}});
  }

 private:
  std::string device_kind() const { return options_.place.device == Device::kCpu ? "cpu" : "cuda"; }
  int threads() const { return options_.threads > 0 ? options_.threads : cpu_info().usable_threads; }

  [[noreturn]] void nonsense(const std::string& what) {
    process_->stop();
    throw Failure(Status::kFailed, "the provider does not keep to the protocol: " + what);
  }

  bool script() const { return std::filesystem::path(options_.program).extension() == ".py"; }
  // Those to try; an executable needs none.
  std::vector<std::string> pythons() const { return script() ? options_.pythons : std::vector<std::string>{""}; }

  // Starts the process and says hello, whose answer is read later.
  void launch(const std::string& python) {
    const std::string count = std::to_string(threads());
    process_ =
        std::make_unique<Subprocess>(script() ? std::vector<std::string>{python, options_.program} : std::vector<std::string>{options_.program},
                                     std::vector<std::string>{"OMP_NUM_THREADS=" + count, "MKL_NUM_THREADS=" + count, "PYTHONUNBUFFERED=1"});
    process_->send(json{{"op", "hello"}, {"protocol", kProtocol}, {"device", device_kind()}}.dump(), options_.timeout_seconds);
    greeting_ = true;
  }

  json ask(const json& request) {
    if (!process_) throw Failure(Status::kFailed, "the provider was not started");
    process_->send(request.dump(), options_.timeout_seconds);
    return answer_to(request.value("op", ""), options_.timeout_seconds);
  }

  json answer_to(const std::string& op, double most_seconds) {
    double seconds = most_seconds;
    if (patience_.until)
      seconds = std::clamp(std::chrono::duration<double>(*patience_.until - std::chrono::steady_clock::now()).count(), 0.0, most_seconds);
    const std::string limit = seconds < most_seconds ? "--time-limit" : "--timeout";
    const bool capped = seconds >= most_seconds && most_seconds < options_.timeout_seconds;  // a "hello": no option gives it longer
    const auto tell = [&](const std::string& what) {
      if (patience_.tell) patience_.tell(options_.name + (variant_.empty() ? "" : ":" + variant_) + what);
    };
    bool slow = false;
    const auto began = std::chrono::steady_clock::now();
    std::string line;
    try {
      line = process_->receive(seconds, [&] {
        slow = true;
        tell(" is still at work on its answer to \"" + op + "\"; it has " + std::to_string(std::lround(seconds)) + " s for it" +
             (capped ? "" : " (" + limit + ")"));
      });
    } catch (const Failure& failure) {
      if (failure.status() != Status::kTimeout) throw;
      throw Failure(Status::kTimeout, failure.what() + (" to \"" + op + "\"") + (capped ? "" : "; a larger " + limit + " gives it longer"));
    }
    if (slow)
      tell(" took " + std::to_string(std::lround(std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count())) +
           " s to answer \"" + op + "\"");
    json answer = json::parse(line, nullptr, false);
    if (!answer.is_object()) nonsense("\"" + line.substr(0, 80) + "\" is no JSON object");
    const auto ok = answer.find("ok");
    if (ok == answer.end() || !ok->is_boolean()) nonsense("its answer has no \"ok\": true or false");
    if (!ok->get<bool>())
      throw Failure(status_of(text_of(answer, "status")), text_of(answer, "reason", "no reason was given"),
                    op == "hello" ? text_of(answer, "absent") : std::string());
    return answer;
  }

  void hello() {
    const json answer = answer_to("hello", std::min(kHelloSeconds, options_.timeout_seconds));
    const auto protocol = answer.find("protocol");
    if (protocol == answer.end() || *protocol != kProtocol) nonsense("it speaks another version than " + std::to_string(kProtocol));
    version_ = text_of(answer, "version");
    forward_only_ = text_of(answer, "forward_only");
    const auto compiles = answer.find("compiles");
    compiles_ = compiles != answer.end() && *compiles == true;
    std::vector<std::string> variants;
    const auto devices = answer.find("devices");
    const json* list = nullptr;
    if (devices != answer.end() && devices->is_object() && devices->contains(device_kind())) list = &(*devices)[device_kind()];
    if (!list) throw Failure(Status::kUnsupported, "has no device " + device_kind() + " here", "no device " + device_kind());
    if (!list->is_array()) nonsense("its hello lists no variants for " + device_kind());
    for (const json& variant : *list)
      if (variant.is_string()) variants.push_back(variant.get<std::string>());
    if (variants.empty()) nonsense("its hello lists no variants for " + device_kind());
    variant_ = options_.variant.empty() ? variants.front() : options_.variant;
    if (std::find(variants.begin(), variants.end(), variant_) == variants.end()) {
      std::string known;
      for (const std::string& variant : variants) known += (known.empty() ? "" : ", ") + variant;
      throw Failure(Status::kUnsupported, "has no variant " + variant_ + " on " + device_kind() + "; it has " + known);
    }
  }

  ProviderOptions options_;
  std::unique_ptr<Subprocess> process_;
  std::string version_, variant_, kernel_, forward_only_;
  ProblemSpec spec_;
  Patience patience_;
  bool grad_ = false, compiles_ = false;
  bool greeting_ = false;  // it was said hello to and has not answered yet
  Outputs outputs_;
};

}  // namespace

std::unique_ptr<Contestant> make_provider_contestant(const ProviderOptions& options) { return std::make_unique<ProviderContestant>(options); }

std::string why_unavailable(const ProviderOptions& options) {
  try {
    ProviderContestant(options).start();
    return "";
  } catch (const Failure& failure) {
    return failure.what();
  }
}

std::vector<ProviderProgram> find_providers(const std::string& directory) {
  std::vector<ProviderProgram> found;
  std::error_code error;
  for (std::filesystem::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const std::filesystem::path path = it->path();
    if (!it->is_regular_file(error)) continue;
    if (path.extension() != ".py" && access(path.c_str(), X_OK) != 0) continue;
    if (path.filename().string().front() == '_') continue;  // what providers share
    std::string name = path.stem().string();
    std::replace(name.begin(), name.end(), '_', '-');
    found.push_back({name, path.string()});
  }
  std::sort(found.begin(), found.end(), [](const ProviderProgram& a, const ProviderProgram& b) { return a.name < b.name; });
  return found;
}

}  // namespace fattn::measure
