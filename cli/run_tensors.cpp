#include "cli/run_tensors.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <utility>

#include "cli/sanitize.h"

namespace fattn::cli {
namespace {

struct FileDType {
  const char* name;  // in the file
  DType dtype;
};
constexpr FileDType kFileDTypes[] = {{"F32", DType::kF32}, {"F16", DType::kF16}, {"BF16", DType::kBF16}, {"F64", DType::kF64},
                                     {"I32", DType::kI32}, {"U8", DType::kU8},   {"BOOL", DType::kU8},   {"I64", DType::kI64}};

// Whether a file has it for a run to read. The state of dropout comes from flags.
bool is_read(const TensorRow& row) {
  return (row.role == TensorRole::kInput || row.role == TensorRole::kList || row.role == TensorRole::kTerm || row.role == TensorRole::kRow) &&
         std::string_view(row.name) != "dropout_state";
}

const char* name_in_file(const TensorRow& row) { return std::string_view(row.name) == "dout" ? "do" : row.name; }

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
Held describe(const files::safetensors::TensorEntry& entry, bool rows = true, bool packed = false) {
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

// The inputs, as the file has them.
void describe_inputs(const files::safetensors::Reader& file, RunTensors& t) {
  for (const char* name : {"cu_seqlens_q", "cu_seqlens_k"})
    if (const files::safetensors::TensorEntry* entry = file.find(name)) t[name] = describe(*entry, false);
  const bool packed = t.packed(), paged = file.find("block_table") != nullptr;
  if (packed && t.bhsd)
    throw std::runtime_error(
        "the input has packed sequences (cu_seqlens_q, cu_seqlens_k), whose tensors are (rows, heads, headdim); leave --layout out");
  for (const TensorRow& row : kTensors) {
    if (!is_read(row)) continue;
    const bool rows = row.dims == TensorDims::kRows;
    if (const files::safetensors::TensorEntry* entry = file.find(name_in_file(row))) {
      const bool of_gradients = row.pass == TensorPass::kBackward && !rows;  // of no use without do
      const std::string_view name = row.name;
      if (!of_gradients || t.backward()) t[row.name] = describe(*entry, rows, packed && !(paged && (name == "k" || name == "v")));
    } else if (rows && row.pass == TensorPass::kBoth) {
      std::vector<std::string> names;
      for (const files::safetensors::TensorEntry& other : file.header().tensors) names.push_back(printable(other.name, 60));
      throw std::runtime_error(fmt::format("the input has no tensor '{}'; it needs q, k, v and, for gradients, do. It holds: {}", row.name,
                                           names.empty() ? "nothing" : fmt::format("{}", fmt::join(names, ", "))));
    }
  }
}

}  // namespace

const char* file_name_of(DType dtype) {
  for (const FileDType& known : kFileDTypes)
    if (known.dtype == dtype) return known.name;
  return "";
}

std::string show(const std::vector<int64_t>& shape) { return fmt::format("({})", fmt::join(shape, ", ")); }

uint64_t Held::bytes() const {
  uint64_t n = size_of(dtype);
  for (int64_t d : shape) n *= static_cast<uint64_t>(d);
  return n;
}

Tensor Held::view(bool bhsd, int device) const {
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

std::vector<Held*> RunTensors::inputs() { return present(is_read); }
std::vector<Held*> RunTensors::outputs() {
  return present([](const TensorRow& row) { return row.role == TensorRole::kResult || row.role == TensorRole::kOutput; });
}
std::vector<Held*> RunTensors::present(bool (*wanted)(const TensorRow&)) {
  std::vector<Held*> some;
  for (size_t i = 0; i < kTensorCount; ++i)
    if (wanted(kTensors[i]) && !all_[i].name.empty()) some.push_back(&all_[i]);
  return some;
}

RunTensors describe(const files::safetensors::Reader& file, bool bhsd) {
  RunTensors t;
  t.bhsd = bhsd;
  describe_inputs(file, t);
  const auto like = [&](const char* name, const char* of) {
    t[name].name = name;
    t[name].shape = t[of].shape;
    t[name].dtype = t[of].dtype;
    t[name].rows = t[of].rows;
  };
  like("o", "q");
  t["o"].shape.back() = t["v"].shape.back();
  like("lse", "q");
  const std::vector<int64_t> q = t["q"].shape;
  t["lse"].shape = t.packed() ? std::vector{q[1], q[0]} : std::vector{q[0], q[bhsd ? 1 : 2], q[bhsd ? 2 : 1]};
  if (t["q"].dtype != DType::kF64) t["lse"].dtype = DType::kF32;
  if (!t.backward()) return t;
  for (const auto& [gradient, of] :
       {std::pair{"dq", "q"}, std::pair{"dk", "k"}, std::pair{"dv", "v"}, std::pair{"dbias", "bias"}, std::pair{"dsinks", "sinks"}})
    if (t.has(of)) like(gradient, of);
  return t;
}

void read_lengths(const files::safetensors::Reader& file, RunTensors& t, Options& options) {
  for (const char* name : {"cu_seqlens_q", "cu_seqlens_k", "seqused_k"})
    if (t.has(name)) t[name].data = file.read(*file.find(name));
  options.max_seqlen_q = longest(t["cu_seqlens_q"]);
  options.max_seqlen_k = t.has("seqused_k") ? longest_used(t["seqused_k"], t["bias"], t["mask"]) : longest(t["cu_seqlens_k"]);
}

std::string names_beside(const std::string& pair) {
  std::string names;
  for (const TensorRow& row : kTensors) {
    if (!is_read(row) || row.role == TensorRole::kInput) continue;
    const std::string name = row.name, of_queries = name.substr(0, name.size() - 1) + "q";
    const bool second = name.back() == 'k' && names.size() >= of_queries.size() &&
                        names.compare(names.size() - of_queries.size(), std::string::npos, of_queries) == 0;
    names += (names.empty() ? "" : second ? pair : ", ") + name;
  }
  return names;
}

}  // namespace fattn::cli
