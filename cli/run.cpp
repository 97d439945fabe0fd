// Read, plan, refuse what cannot fit, compute, verify, write: in this order, so that nothing is written that is not whole.
#include "cli/run.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/sanitize.h"
#include "cli/target_flags.h"
#include "cli/usage_error.h"
#include "cli/values.h"
#include "cli/verdicts.h"
#include "cli/whole_file.h"
#include "fattn/fattn.hpp"
#include "files/safetensors/reader.h"
#include "files/safetensors/writer.h"
#include "measure/environment.h"
#include "testing/check.h"

namespace fattn::cli {

namespace safetensors = files::safetensors;

namespace {

using Json = nlohmann::ordered_json;

struct RunFlags {
  std::string input, output, layout = "bshd", json;
  bool causal = false, verify = false;
  int64_t window_left = -1, window_right = -1;
  std::optional<double> softmax_scale;
  double softcap = 0, p_dropout = 0;
  int64_t dropout_seed = 0, dropout_offset = 0;
  TargetFlags target;
  OutputFlags format;

  Options options() const {
    Options options;
    options.causal = causal;
    options.window_left = window_left;
    options.window_right = window_right;
    options.softmax_scale = softmax_scale;
    options.softcap = softcap;
    options.p_dropout = p_dropout;
    target.apply_to(options);
    return options;
  }
};

struct FileDType {
  const char* name;  // in the file
  DType dtype;
};
constexpr FileDType kFileDTypes[] = {{"F32", DType::kF32}, {"F16", DType::kF16}, {"BF16", DType::kBF16}, {"F64", DType::kF64},
                                     {"I32", DType::kI32}, {"U8", DType::kU8},   {"BOOL", DType::kU8},   {"I64", DType::kI64}};

const char* file_name_of(DType dtype) {
  for (const FileDType& known : kFileDTypes)
    if (known.dtype == dtype) return known.name;
  return "";
}

std::string show(const std::vector<int64_t>& shape) { return fmt::format("({})", fmt::join(shape, ", ")); }

// A contiguous tensor with memory of its own, in the layout of the file.
struct Held {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  bool rows = true;  // q, k, v and what has their shapes: four dimensions in the order of --layout
  safetensors::Bytes data;
  cuda::Buffer on_device;  // a copy, where a CUDA device computes

  uint64_t bytes() const {
    uint64_t n = size_of(dtype);
    for (int64_t d : shape) n *= static_cast<uint64_t>(d);
    return n;
  }
  void allocate() { data = safetensors::allocate(bytes()); }
  // As the library sees it: (batch, seqlen, heads, headdim), without a copy; on a CUDA device (or, -1, in host memory). Absent without a name.
  Tensor view(bool bhsd, int device) const {
    if (name.empty()) return {};
    Tensor tensor;
    switch (shape.size()) {
      case 1: tensor = Tensor(data.get(), dtype, {shape[0]}); break;
      case 2: tensor = Tensor(data.get(), dtype, {shape[0], shape[1]}); break;
      case 3: tensor = Tensor(data.get(), dtype, {shape[0], shape[1], shape[2]}); break;
      default: tensor = Tensor(data.get(), dtype, {shape[0], shape[1], shape[2], shape[3]}); break;
    }
    if (bhsd && rows && shape.size() == 4) tensor = tensor.transposed(1, 2);
    return device < 0 ? tensor : tensor.on(Device::kCuda, device, on_device.get());
  }
};

// Everything that a run reads and writes. A tensor without a name is absent.
struct Tensors {
  Held q, k, v, dout, o, lse, dq, dk, dv, seqused_k, alibi_slopes, bias, mask, dropout_state, dbias, dlse, cu_seqlens_q, cu_seqlens_k, document_q,
      document_k;
  bool bhsd = false;

  bool packed() const { return !cu_seqlens_q.name.empty() || !cu_seqlens_k.name.empty(); }
  bool backward() const { return !dout.name.empty(); }
  std::vector<Held*> inputs() {
    return present({&q, &k, &v, &dout, &seqused_k, &alibi_slopes, &bias, &mask, &dlse, &cu_seqlens_q, &cu_seqlens_k, &document_q, &document_k});
  }
  std::vector<Held*> outputs() { return backward() ? present({&o, &lse, &dq, &dk, &dv, &dbias}) : std::vector<Held*>{&o, &lse}; }
  static std::vector<Held*> present(std::initializer_list<Held*> all) {
    std::vector<Held*> some;
    for (Held* held : all)
      if (!held->name.empty()) some.push_back(held);
    return some;
  }
  // `device`: a CUDA device, or -1 for host memory.
  ForwardTensors forward_views(int device) const {
    const auto at = [&](const Held& held) { return held.view(bhsd, device); };
    return {at(q), at(k), at(v), at(o), at(lse), {}, scores(device)};
  }
  BackwardTensors backward_views(int device) const {
    const auto at = [&](const Held& held) { return held.view(bhsd, device); };
    return {at(q), at(k), at(v), at(o), at(lse), at(dout), at(dq), at(dk), at(dv), scores(device), at(dbias), at(dlse)};
  }
  ScoreTensors scores(int device) const {
    const auto at = [&](const Held& held) { return held.view(bhsd, device); };
    return {at(seqused_k),    at(alibi_slopes), at(bias),       at(mask),      at(dropout_state),
            at(cu_seqlens_q), at(cu_seqlens_k), at(document_q), at(document_k)};
  }
};

// The most rows that one of packed sequences has. What their beginnings may be, the library says.
int64_t longest(const Held& cu_seqlens) {
  if (cu_seqlens.dtype != DType::kI32 || cu_seqlens.shape.size() != 1) return 0;
  int64_t most = 0;
  int32_t first = 0;
  for (int64_t n = 0; n < cu_seqlens.shape[0]; ++n) {
    int32_t next = 0;
    std::memcpy(&next, static_cast<const char*>(static_cast<const void*>(cu_seqlens.data.get())) + n * 4, sizeof next);
    if (n > 0) most = std::max(most, static_cast<int64_t>(next) - first);
    first = next;
  }
  return std::min<int64_t>(most, std::numeric_limits<int32_t>::max());
}

// The most keys that one uses: then cu_seqlens_k says only where sequences begin, and bias and mask may have more.
int64_t longest_used(const Held& seqused_k, const Held& bias, const Held& mask) {
  int64_t most = 0;
  for (const Held* pairs : {&bias, &mask})
    if (!pairs->shape.empty()) most = std::max(most, pairs->shape.back());
  if (seqused_k.dtype != DType::kI32 || seqused_k.shape.size() != 1) return most;
  for (int64_t n = 0; n < seqused_k.shape[0]; ++n) {
    int32_t keys = 0;
    std::memcpy(&keys, static_cast<const char*>(static_cast<const void*>(seqused_k.data.get())) + n * 4, sizeof keys);
    most = std::max<int64_t>(most, keys);
  }
  return std::min<int64_t>(most, std::numeric_limits<int32_t>::max());
}

// One of q, k, v, do or, not `rows`, of what scores depend on beside them, whose shapes the library checks.
Held describe(const safetensors::TensorEntry& entry, bool rows = true, bool packed = false) {
  Held held;
  held.name = entry.name;
  held.shape = entry.shape;
  held.rows = rows;
  if (!rows && (entry.shape.empty() || entry.shape.size() > 4))
    throw std::runtime_error(fmt::format("tensor '{}' has the shape {}; one to four dimensions are allowed", entry.name, show(entry.shape)));
  if (rows && packed && entry.shape.size() != 3)
    throw std::runtime_error(fmt::format(
        "tensor '{}' has the shape {}; with cu_seqlens_q and cu_seqlens_k it needs three dimensions: rows of all sequences, heads, headdim",
        entry.name, show(entry.shape)));
  if (rows && !packed && entry.shape.size() != 4)
    throw std::runtime_error(
        fmt::format("tensor '{}' has the shape {}; it needs four dimensions: batch, seqlen, heads, headdim (--layout says their order)", entry.name,
                    show(entry.shape)));
  for (const FileDType& known : kFileDTypes)
    if (entry.dtype == known.name && (!rows || known.dtype <= DType::kF64)) {
      held.dtype = known.dtype;
      return held;
    }
  if (!rows)
    throw std::runtime_error(
        fmt::format("tensor '{}' has dtype {}; what scores depend on is in F32, F16, BF16, F64, I32, U8 or BOOL. Convert the file first", entry.name,
                    entry.dtype));
  throw std::runtime_error(
      fmt::format("tensor '{}' has dtype {}; attention is computed in F32, F16, BF16, and F64 on backend reference. Convert the file first",
                  entry.name, entry.dtype));
}

// The shapes of all tensors, from those in the file.
Tensors describe(const safetensors::Reader& file, bool bhsd) {
  Tensors t;
  t.bhsd = bhsd;
  for (const auto& [held, name] : {std::pair{&t.cu_seqlens_q, "cu_seqlens_q"}, std::pair{&t.cu_seqlens_k, "cu_seqlens_k"}})
    if (const safetensors::TensorEntry* entry = file.find(name)) *held = describe(*entry, false);
  const bool packed = t.packed();
  if (packed && bhsd)
    throw std::runtime_error(
        "the input has packed sequences (cu_seqlens_q, cu_seqlens_k), whose tensors are (rows, heads, headdim); leave --layout out");
  for (const auto& [held, name] : {std::pair{&t.q, "q"}, std::pair{&t.k, "k"}, std::pair{&t.v, "v"}}) {
    const safetensors::TensorEntry* entry = file.find(name);
    if (!entry) {
      std::vector<std::string> names;
      for (const safetensors::TensorEntry& other : file.header().tensors) names.push_back(printable(other.name, 60));
      throw std::runtime_error(fmt::format("the input has no tensor '{}'; it needs q, k, v and, for gradients, do. It holds: {}", name,
                                           names.empty() ? "nothing" : fmt::format("{}", fmt::join(names, ", "))));
    }
    *held = describe(*entry, true, packed);
  }
  if (const safetensors::TensorEntry* entry = file.find("do")) t.dout = describe(*entry, true, packed);
  for (const auto& [held, name] : {std::pair{&t.seqused_k, "seqused_k"}, std::pair{&t.alibi_slopes, "alibi_slopes"}, std::pair{&t.bias, "bias"},
                                   std::pair{&t.mask, "mask"}, std::pair{&t.document_q, "document_q"}, std::pair{&t.document_k, "document_k"}})
    if (const safetensors::TensorEntry* entry = file.find(name)) *held = describe(*entry, false);

  if (const safetensors::TensorEntry* entry = file.find("dlse"); entry && t.backward()) t.dlse = describe(*entry, false);

  t.o.shape = t.q.shape;
  t.o.shape.back() = t.v.shape.back();
  if (packed)
    t.lse.shape = {t.q.shape[1], t.q.shape[0]};
  else
    t.lse.shape = {t.q.shape[0], t.q.shape[bhsd ? 1 : 2], t.q.shape[bhsd ? 2 : 1]};
  t.o.dtype = t.q.dtype;
  t.lse.dtype = t.q.dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  for (const auto& [gradient, of] : {std::pair{&t.dq, &t.q}, std::pair{&t.dk, &t.k}, std::pair{&t.dv, &t.v}}) {
    gradient->shape = of->shape;
    gradient->dtype = of->dtype;
  }
  for (const auto& [held, name] :
       {std::pair{&t.o, "o"}, std::pair{&t.lse, "lse"}, std::pair{&t.dq, "dq"}, std::pair{&t.dk, "dk"}, std::pair{&t.dv, "dv"}})
    held->name = name;
  if (!t.bias.name.empty() && t.backward()) {
    t.dbias.name = "dbias";
    t.dbias.shape = t.bias.shape;
    t.dbias.dtype = t.bias.dtype;
    t.dbias.rows = false;
  }
  return t;
}

// Found by size, before anything is allocated.
void require_memory(Tensors& t, size_t workspace_bytes) {
  double bytes = static_cast<double>(workspace_bytes);
  for (const Held* held : t.inputs()) bytes += static_cast<double>(held->bytes());
  for (const Held* held : t.outputs()) bytes += static_cast<double>(held->bytes());
  const auto available = static_cast<double>(cpu_info().memory_available_bytes);
  if (available > 0 && bytes > available)
    throw Error(ErrorCode::kOutOfMemory,
                fmt::format("inputs, outputs and workspace need {:.1f} MiB ({:.1f} MiB of workspace); {:.1f} MiB are available. Use fewer or "
                            "smaller tensors, or algorithm v2, whose workspace is small",
                            bytes / (1 << 20), static_cast<double>(workspace_bytes) / (1 << 20), available / (1 << 20)));
}

Json plan_json(const fattn_plan_info& plan) {
  return {{"backend", name_of(static_cast<Backend>(plan.backend))},
          {"algorithm", name_of(static_cast<Algorithm>(plan.algorithm))},
          {"isa", name_of(static_cast<Isa>(plan.cpu_isa))},
          {"threads", plan.num_threads},
          {"kernel", printable(plan.kernel)},
          {"why", printable(plan.why)},
          {"flops", plan.flops},
          {"workspace_bytes", plan.workspace_bytes}};
}

std::string explain(const Plan& plan) {
  const fattn_plan_info info = plan.info();
  return printable(info.kernel) + (*info.why ? " (" + printable(info.why) + ")" : "");
}

// Refuses outputs that would destroy what is read, or each other.
void refuse_same_file(const std::string& a, const char* a_name, const std::string& b, const char* b_name) {
  namespace fs = std::filesystem;
  if (a.empty() || b.empty() || a == "-" || b == "-") return;
  std::error_code error;
  const bool same =
      fs::exists(a, error) && fs::exists(b, error) ? fs::equivalent(a, b, error) : fs::weakly_canonical(a, error) == fs::weakly_canonical(b, error);
  if (same) throw std::runtime_error(fmt::format("{} and {} are the same file, '{}'; give them names of their own", a_name, b_name, printable(a)));
}

Table table_of(const char* title, const std::vector<Held*>& tensors) {
  Table table({Column::text("tensor").as_key(), Column::text("dtype"), Column::text("shape")}, title);
  for (const Held* held : tensors) table.add({held->name, file_name_of(held->dtype), show(held->shape)});
  return table;
}

// Fills `record` as it goes, so that a failure leaves what was known by then. Returns the exit code.
int run(const RunFlags& flags, Json& record) {
  Output out(flags.format, flags.json);
  const safetensors::Reader file(flags.input);
  Tensors t = describe(file, flags.layout == "bhsd");
  for (Held* held : t.inputs()) record["tensors"][held->name] = {{"dtype", file_name_of(held->dtype)}, {"shape", held->shape}};
  out.print(table_of("Read", t.inputs()));
  for (const safetensors::TensorEntry& other : file.header().tensors)
    if (!record["tensors"].contains(other.name))
      out.say(fmt::format("ignored  {}, which is none of q, k, v, do, seqused_k, alibi_slopes, bias, mask, cu_seqlens_q, cu_seqlens_k, document_q, "
                          "document_k and, with do, dlse",
                          printable(other.name, 200)),
              2);

  if (flags.p_dropout > 0) {
    t.dropout_state.name = "dropout_state";
    t.dropout_state.dtype = DType::kI64;
    t.dropout_state.shape = {2};
    t.dropout_state.allocate();
    const int64_t state[] = {flags.dropout_seed, flags.dropout_offset};
    std::memcpy(t.dropout_state.data.get(), state, sizeof state);
  }
  Options options = flags.options();
  if (t.packed()) {
    for (Held* held : Tensors::present({&t.cu_seqlens_q, &t.cu_seqlens_k, &t.seqused_k})) held->data = file.read(*file.find(held->name));
    options.max_seqlen_q = longest(t.cu_seqlens_q);
    options.max_seqlen_k = t.seqused_k.name.empty() ? longest(t.cu_seqlens_k) : longest_used(t.seqused_k, t.bias, t.mask);
  }
  const int device = flags.target.on_cuda() ? flags.target.device_index() : -1;
  const Plan forward(t.forward_views(device), options);
  std::optional<Plan> backward;
  if (t.backward()) backward.emplace(t.backward_views(device), options);
  const size_t workspace_bytes = std::max(forward.workspace_bytes(), backward ? backward->workspace_bytes() : 0);
  record["plan_fwd"] = plan_json(forward.info());
  if (backward) record["plan_bwd"] = plan_json(backward->info());
  require_memory(t, device < 0 ? workspace_bytes : 0);

  WholeFile output(flags.output);  // before the work: a folder that cannot be written is told at once
  for (Held* held : t.inputs()) held->data = file.read(*file.find(held->name));
  for (Held* held : t.outputs()) held->allocate();
  safetensors::Bytes workspace;
  cuda::Buffer device_workspace;
  if (device < 0) {
    workspace = safetensors::allocate(workspace_bytes);
  } else {
    for (Held* held : t.inputs()) {
      held->on_device = cuda::Buffer(device, held->bytes());
      held->on_device.copy_from(held->data.get(), held->bytes());
    }
    for (Held* held : t.outputs()) held->on_device = cuda::Buffer(device, held->bytes());
    if (flags.p_dropout > 0) {
      t.dropout_state.on_device = cuda::Buffer(device, t.dropout_state.bytes());
      t.dropout_state.on_device.copy_from(t.dropout_state.data.get(), t.dropout_state.bytes());
    }
    device_workspace = cuda::Buffer(device, workspace_bytes);
  }
  void* const memory = device < 0 ? workspace.get() : device_workspace.get();
  out.say("\nforward  " + explain(forward), 9);
  forward.execute(t.forward_views(device), memory, workspace_bytes);
  if (backward) {
    out.say("backward " + explain(*backward), 9);
    backward->execute(t.backward_views(device), memory, workspace_bytes);
  }

  if (device >= 0)
    for (Held* held : t.outputs()) held->on_device.copy_to(held->data.get(), held->bytes());

  if (flags.verify) {
    const auto rounding_of = [&](const Plan& plan) {
      return testing::rounding_of(device < 0 ? Device::kCpu : Device::kCuda, static_cast<Algorithm>(plan.info().algorithm));
    };
    std::vector<testing::TensorVerdict> verdicts = testing::verify(t.forward_views(-1), options, rounding_of(forward));
    if (backward)
      for (testing::TensorVerdict& verdict : testing::verify(t.backward_views(-1), options, rounding_of(*backward)))
        verdicts.push_back(std::move(verdict));
    record["verdicts"] = as_json(verdicts);
    bool passed = true;
    out.print(verdict_table("Verified against the float64 oracle", verdicts));
    for (const testing::TensorVerdict& verdict : verdicts) passed = passed && verdict.pass;
    if (!passed) {
      record["status"] = "check_failed";
      record["reason"] = "an error is above its bound";
      print_error("the result is wrong by more than its bound; nothing was written to '" + printable(flags.output) + "'");
      return kExitCheckFailed;
    }
  }

  std::vector<safetensors::TensorData> data;
  for (Held* held : t.outputs()) {
    record["tensors"][held->name] = {{"dtype", file_name_of(held->dtype)}, {"shape", held->shape}};
    data.push_back({held->name, file_name_of(held->dtype), held->shape, held->data.get()});
  }
  safetensors::write(output, data,
                     {{"producer", std::string("fattn ") + fattn_version()},
                      {"layout", flags.layout},
                      {"causal", flags.causal ? "true" : "false"},
                      {"window_left", std::to_string(flags.window_left)},
                      {"window_right", std::to_string(flags.window_right)},
                      {"softmax_scale", flags.softmax_scale ? fmt::format("{}", *flags.softmax_scale) : "1/sqrt(headdim)"},
                      {"softcap", fmt::format("{}", flags.softcap)},
                      {"p_dropout", fmt::format("{}", flags.p_dropout)},
                      {"dropout_seed", std::to_string(flags.dropout_seed)},
                      {"dropout_offset", std::to_string(flags.dropout_offset)}});
  out.print(table_of("Wrote", t.outputs()));
  record["status"] = "ok";
  return kExitFine;
}

const char* status_of(const Error& error) {
  switch (error.code()) {
    case ErrorCode::kUnsupported: return "unsupported";
    case ErrorCode::kOutOfMemory: return "out_of_memory";
    default: return "failed";
  }
}

Json begin_record(const RunFlags& flags) {
  return {{"fattn_run", 1},
          {"status", "failed"},
          {"reason", nullptr},
          {"input", printable(flags.input)},
          {"output", printable(flags.output)},
          {"device", flags.target.device},
          {"layout", flags.layout},
          {"causal", flags.causal},
          {"window_left", flags.window_left},
          {"window_right", flags.window_right},
          {"softmax_scale", flags.softmax_scale ? Json(*flags.softmax_scale) : Json(nullptr)},
          {"softcap", flags.softcap},
          {"p_dropout", flags.p_dropout},
          {"dropout_seed", flags.dropout_seed},
          {"dropout_offset", flags.dropout_offset},
          {"environment", measure::environment()},
          {"tensors", Json::object()}};
}

int run_and_record(const RunFlags& flags) {
  refuse_same_file(flags.input, "--input", flags.output, "--output");
  refuse_same_file(flags.input, "--input", flags.json, "--json");
  refuse_same_file(flags.output, "--output", flags.json, "--json");
  require_writable(flags.json);
  Json record = begin_record(flags);
  const auto failed = [&](const char* status, const char* reason) {
    record["status"] = status;
    record["reason"] = printable(reason);
    if (!flags.json.empty()) write_json(record, flags.json);
  };
  try {
    const int exit_code = run(flags, record);
    if (!flags.json.empty()) write_json(record, flags.json);
    return exit_code;
  } catch (const Error& error) {
    failed(status_of(error), error.what());
    throw;
  } catch (const std::bad_alloc&) {
    failed("out_of_memory", fmt::format("the allocator had no memory; {} bytes are free", cpu_info().memory_available_bytes).c_str());
    throw;
  } catch (const std::exception& error) {
    failed("failed", error.what());
    throw;
  }
}

}  // namespace

void add_run(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand("run", "Compute attention on the tensors of a safetensors file");
  auto flags = std::make_shared<RunFlags>();
  command
      ->add_option("--input,INPUT", flags->input,
                   "Safetensors file with q, k, v, for gradients do (the gradient of o) and perhaps dlse (that of lse), and any of seqused_k, "
                   "alibi_slopes, bias, mask, cu_seqlens_q and cu_seqlens_k, document_q and document_k")
      ->type_name("FILE")
      ->required();
  command
      ->add_option("--output,OUTPUT", flags->output,
                   "Safetensors file to write: o, lse and, if do is given, dq, dk, dv and a bias's dbias. Replaced if it exists")
      ->type_name("FILE")
      ->required();
  command
      ->add_option("--layout", flags->layout,
                   "Order of the dimensions: bshd is (batch, seqlen, heads, headdim), bhsd (batch, heads, seqlen, headdim)")
      ->transform(one_of({"bshd", "bhsd"}))
      ->type_name("NAME")
      ->capture_default_str();
  command->add_flag("--causal", flags->causal, "Query i sees the keys j <= i + seqlen_k - seqlen_q (aligned to the bottom right)");
  command->add_option("--window-left", flags->window_left, "Query i sees as many keys before its own position, i + seqlen_k - seqlen_q; -1: all")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--window-right", flags->window_right, "The same behind it; with --causal there are none")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--softcap", flags->softcap, "Scaled scores s become softcap * tanh(s / softcap); 0: they stay as they are")
      ->type_name("X")
      ->capture_default_str();
  command->add_option("--dropout", flags->p_dropout, "A weight becomes 0 with this probability, else is divided by 1 minus it")
      ->type_name("P")
      ->capture_default_str();
  command->add_option("--dropout-seed", flags->dropout_seed, "Seed of the random numbers: the same ones for the same seed and offset")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--dropout-offset", flags->dropout_offset, "Where their numbers begin, counted in heads of batch entries")
      ->type_name("N")
      ->capture_default_str();
  command->add_option("--softmax-scale", flags->softmax_scale, "Factor of the scores before the softmax [1/sqrt(headdim)]")->type_name("X");
  flags->target.add_to(*command);
  command->add_flag("--verify", flags->verify, "Judge the result against the float64 oracle (slow); exit 1 and write nothing if it fails");
  command->add_option("--json", flags->json, "Write what was done as JSON to a file, or - for stdout")->type_name("FILE|-")->group("Output");
  flags->format.add_to(*command);
  command->footer(
      "The file's dtype is what is computed, nothing is cast: F32, F16, BF16, or F64 on backend reference; q, k, v, do have one dtype. Outputs have "
      "the inputs' dtype and layout; lse is F32 (batch, heads, seqlen_q), the natural log-sum-exp of every row. heads of q is a multiple of heads of "
      "k and v (GQA, MQA).\n\n"
      "seqused_k, I32 (batch): a batch entry has its first seqused_k keys only.\n"
      "alibi_slopes, F32 (heads) or (batch, heads): adds -slope times the distance to the query's own position.\n"
      "bias (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), F32 or q's dtype: added to scores, -Inf hides.\n"
      "mask, U8 or BOOL, of the same shape: 0 hides. The dimensions of bias and mask have this order with either --layout.\n"
      "dlse, of the shape and dtype of lse: the gradient of lse, with do.\n"
      "cu_seqlens_q and cu_seqlens_k, I32 (batch + 1): where each of packed sequences begins, and the last one ends; with seqused_k cu_seqlens_k "
      "says only where they begin, in any order. q, k, v, do are (rows, heads, headdim) then, lse is (heads, rows), and bias and mask have the "
      "lengths of the longest sequences.\n"
      "document_q (batch, seqlen_q) and document_k (batch, seqlen_k), I32, packed (rows): a query sees the keys of its own document's id only.\n\n"
      "Examples:\n"
      "  fattn run examples/data/small.safetensors out.safetensors --causal --verify\n"
      "  fattn run --input in.safetensors --output out.safetensors --layout bhsd");
  command->callback([flags, &exit_code] { exit_code = run_and_record(*flags); });
}

}  // namespace fattn::cli
