// Read, plan, refuse what cannot fit, compute, verify, write: in this order, so that nothing is written that is not whole.
#include "cli/run.h"

#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "cli/json_output.h"
#include "cli/output.h"
#include "cli/run_tensors.h"
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
  bool causal = false, verify = false, fp32_outputs = false;
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

// Found by size, before anything is allocated.
void require_memory(RunTensors& t, size_t workspace_bytes) {
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

// o, which the backward pass takes in q's dtype, or with one the gradients of q, k and v.
void widen_outputs(RunTensors& t) {
  if (t["q"].dtype != DType::kF16 && t["q"].dtype != DType::kBF16)
    throw std::runtime_error(
        fmt::format("--fp32-outputs: q is {}; outputs are wider than inputs of F16 and BF16. Leave it out", file_name_of(t["q"].dtype)));
  if (!t.backward()) t["o"].dtype = DType::kF32;
  for (const char* name : {"dq", "dk", "dv"})
    if (t.backward()) t[name].dtype = DType::kF32;
}

// Fills `record` as it goes, so that a failure leaves what was known by then. Returns the exit code.
int run(const RunFlags& flags, Json& record) {
  Output out(flags.format, flags.json);
  const safetensors::Reader file(flags.input);
  RunTensors t = describe(file, flags.layout == "bhsd");
  if (flags.fp32_outputs) widen_outputs(t);
  for (Held* held : t.inputs()) record["tensors"][held->name] = {{"dtype", file_name_of(held->dtype)}, {"shape", held->shape}};
  out.print(table_of("Read", t.inputs()));
  for (const safetensors::TensorEntry& other : file.header().tensors)
    if (!record["tensors"].contains(other.name))
      out.say(fmt::format("ignored  {}, which is none of q, k, v, do, {} and, with do, dlse", printable(other.name, 200), names_beside(", ")), 2);

  Held& dropout_state = t["dropout_state"];
  if (flags.p_dropout > 0) {
    dropout_state.name = "dropout_state";
    dropout_state.dtype = DType::kI64;
    dropout_state.shape = {2};
    dropout_state.allocate();
    const int64_t state[] = {flags.dropout_seed, flags.dropout_offset};
    std::memcpy(dropout_state.data.get(), state, sizeof state);
  }
  Options options = flags.options();
  if (t.packed()) read_lengths(file, t, options);
  const int device = flags.target.on_cuda() ? flags.target.device_index() : -1;
  const Plan forward(t.views<ForwardTensors>(device), options);
  std::optional<Plan> backward;
  if (t.backward()) backward.emplace(t.views<BackwardTensors>(device), options);
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
      dropout_state.on_device = cuda::Buffer(device, dropout_state.bytes());
      dropout_state.on_device.copy_from(dropout_state.data.get(), dropout_state.bytes());
    }
    device_workspace = cuda::Buffer(device, workspace_bytes);
  }
  void* const memory = device < 0 ? workspace.get() : device_workspace.get();
  out.say("\nforward  " + explain(forward), 9);
  forward.execute(t.views<ForwardTensors>(device), memory, workspace_bytes);
  if (backward) {
    out.say("backward " + explain(*backward), 9);
    backward->execute(t.views<BackwardTensors>(device), memory, workspace_bytes);
  }

  if (device >= 0)
    for (Held* held : t.outputs()) held->on_device.copy_to(held->data.get(), held->bytes());

  if (flags.verify) {
    const auto rounding_of = [&](const Plan& plan) {
      return testing::rounding_of(device < 0 ? Device::kCpu : Device::kCuda, static_cast<Algorithm>(plan.info().algorithm));
    };
    std::vector<testing::TensorVerdict> verdicts = testing::verify(t.views<ForwardTensors>(-1), options, rounding_of(forward));
    if (backward)
      for (testing::TensorVerdict& verdict : testing::verify(t.views<BackwardTensors>(-1), options, rounding_of(*backward)))
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
      ->add_option(
          "--input,INPUT", flags->input,
          "Safetensors file with q, k, v, for gradients do (the gradient of o) and perhaps dlse (that of lse), and any of " + names_beside(" and "))
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
  command->add_flag("--fp32-outputs", flags->fp32_outputs, "Of inputs of 16 bits o in F32, or with do dq, dk and dv: not rounded once more");
  command->add_flag("--verify", flags->verify, "Judge the result against the float64 oracle (slow); exit 1 and write nothing if it fails");
  command->add_option("--json", flags->json, "Write what was done as JSON to a file, or - for stdout")->type_name("FILE|-")->group("Output");
  flags->format.add_to(*command);
  command->footer(
      "The file's dtype is what is computed, nothing is cast: F32, F16, BF16, or F64 on backend reference; q, k, v, do have one dtype. Outputs have "
      "the inputs' dtype (but for --fp32-outputs) and layout; lse is F32 (batch, heads, seqlen_q), the natural log-sum-exp of every row. heads of q "
      "is a multiple of heads of "
      "k and v (GQA, MQA).\n\n"
      "seqused_k, I32 (batch): a batch entry has its first seqused_k keys only.\n"
      "alibi_slopes, F32 (heads) or (batch, heads): adds -slope times the distance to the query's own position.\n"
      "bias (batch or 1, heads or 1, seqlen_q or 1, seqlen_k), F32 or q's dtype: added to scores, -Inf hides.\n"
      "mask, U8 or BOOL, of the same shape: 0 hides. The dimensions of bias and mask have this order with either --layout.\n"
      "sinks, F32 (heads), F64 with F64: a logit of each head that joins the softmax's sum and has no value; lse counts it.\n"
      "dlse, of the shape and dtype of lse: the gradient of lse, with do.\n"
      "cu_seqlens_q and cu_seqlens_k, I32 (batch + 1): where each of packed sequences begins, and the last one ends; with seqused_k cu_seqlens_k "
      "says only where they begin, in any order. q, k, v, do are (rows, heads, headdim) then, lse is (heads, rows), and bias and mask have the "
      "lengths of the longest sequences.\n"
      "block_table, I32 (batch, columns): k and v are a paged cache, (pages, page_size, heads, headdim) in the order of --layout, key j of a batch "
      "entry is row j % page_size of page block_table[entry, j / page_size], and seqused_k says how many keys it has. Without do. With cu_seqlens_q "
      "and without cu_seqlens_k queries alone are packed.\n"
      "document_q (batch, seqlen_q) and document_k (batch, seqlen_k), I32, packed (rows): a query sees the keys of its own document's id only.\n\n"
      "Examples:\n"
      "  fattn run examples/data/small.safetensors out.safetensors --causal --verify\n"
      "  fattn run --input in.safetensors --output out.safetensors --layout bhsd");
  command->callback([flags, &exit_code] { exit_code = run_and_record(*flags); });
}

}  // namespace fattn::cli
