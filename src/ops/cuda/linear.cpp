// Few rows are read by a kernel of our own, more are cuBLASLt's. Weights are packed on the host: (out, in), rows filled up with zeros.
#include "ops/cuda/linear.h"

#include <algorithm>
#include <cstring>

#include "cpu/executor.h"
#include "device/cpu_info.h"
#include "fattn/error.hpp"
#include "ops/backends.h"
#include "ops/norm_linear.h"
#include "shared/text.h"

namespace fattn::ops::cuda {
namespace {

constexpr int64_t kBiasCtas = 1024;
constexpr int64_t kWhole = 8;  // elements of 16 bits in 16 bytes

// LayerNorm, product, keys and values in one kernel, for few rows.
class CudaNormLinear final : public Kernel<NormLinear> {
 public:
  CudaNormLinear(const NormLinear& p, const Device& device)
      : p_(p),
        gpu_(device),
        few_(gpu_, p.linear, {true, p.nheads > 0 && !p.rotary}),
        turned_(p.rotary && p.nheads > 0 ? make(keys_values_of(p), device) : nullptr),
        apart_(make(norm_of(p), device), make(p.linear, device), p.nheads > 0 ? make(keys_values_of(p), device) : nullptr) {}
  size_t workspace_bytes() const override { return apart_.workspace_bytes(); }
  void execute(const NormLinear::Buffers& b, void* workspace, void* stream) const override {
    if (b.rows > few_.most_rows()) return apart_.execute(b, workspace, stream);
    const int64_t headdim = p_.nheads > 0 ? p_.headdim : 0;
    few_.launch({b.x, b.select, b.norm_weight, b.norm_bias, b.weight, b.bias, b.y, reinterpret_cast<const long long*>(b.slot), b.k, b.v,
                 static_cast<int>(b.rows), static_cast<int>(p_.linear.out), static_cast<int>(p_.nheads * headdim),
                 static_cast<int>(p_.nheads_k * headdim), static_cast<float>(p_.epsilon)},
                stream);
    if (turned_) turned_->execute({b.rows, b.y, b.position, b.slot, b.k, b.v}, workspace, stream);
  }

 private:
  const NormLinear p_;
  const Gpu gpu_;
  const Product few_;
  std::unique_ptr<const Kernel<KeysValues>> turned_;
  const NormThenLinear apart_;
};

template <class T>
void pack_rows(const Linear& p, const T* weight, bool in_by_out, int64_t given, int64_t begin, int64_t end, T* packed) {
  const int64_t stride = packed_stride(p);
  constexpr int64_t kBlock = 64;  // columns that are turned together stay in the cache
  for (int64_t o = begin; o < end; ++o) std::memset(packed + o * stride, 0, static_cast<size_t>(stride) * sizeof(T));
  end = std::min(end, given);
  if (!in_by_out) {
    for (int64_t o = begin; o < end; ++o) std::memcpy(packed + o * stride, weight + o * p.in, static_cast<size_t>(p.in) * sizeof(T));
    return;
  }
  for (int64_t from = 0; from < p.in; from += kBlock)
    for (int64_t o = begin; o < end; ++o)
      for (int64_t i = from; i < std::min(p.in, from + kBlock); ++i) packed[o * stride + i] = weight[i * given + o];
}

}  // namespace

CudaLinear::CudaLinear(const Linear& p, const Device& device)
    : problem_(p),
      gpu_(device),
      few_(gpu_, p, {}),
      odd_(few_.most_rows() > 0 && p.y != DType::kF32 && (p.in % kWhole != 0 || p.out % kWhole != 0)),
      matmuls_(gpu_.device()) {
  bias_.kind = KernelKind::kBias;
  bias_.arch = gpu_.arch();
  bias_.dtype = static_cast<int32_t>(p.dtype);
  bias_.y = p.y == p.dtype && p.dtype != DType::kF32 ? ProductY::kElement : ProductY::kSingle;
  bias_.activation = static_cast<int32_t>(p.activation);
  if (p.accumulate && p.activation != Activation::kNone)
    throw Error(ErrorCode::kUnsupported, "a product with an activation does not add to its output on a GPU");
  if (p.rows <= few_.most_rows() || odd_) return;
  gpu_.load(bias_);
  matmul_of(p.rows, BiasOf::kProduct);  // what there is not is said now
}

std::shared_ptr<const Matmul> CudaLinear::matmul_of(int64_t rows, BiasOf bias) const {
  const Linear& p = problem_;
  MatmulShape s;
  s.rows = rows, s.columns = p.out, s.inner = p.in;
  s.b_turned = true;
  s.dtype = p.dtype, s.c = p.y;
  s.a_stride = p.in, s.b_stride = packed_stride(p), s.c_stride = p.out;
  s.a_alignment = alignment_of({p.in * static_cast<int64_t>(size_of(p.dtype))});
  s.c_alignment = alignment_of({p.out * static_cast<int64_t>(size_of(p.y))});
  s.activation = p.activation;
  s.bias = bias;
  return matmuls_.of(s);
}

void CudaLinear::by_few(const Linear::Buffers& b, void* stream) const {
  const auto size = static_cast<int64_t>(size_of(problem_.dtype));
  for (int64_t row = 0; row < b.rows; row += few_.most_rows())
    execute({std::min(few_.most_rows(), b.rows - row), static_cast<const char*>(b.x) + row * problem_.in * size, b.weight, b.bias,
             static_cast<char*>(b.y) + row * problem_.out * size},
            nullptr, stream);
}

void CudaLinear::execute(const Linear::Buffers& b, void* workspace, void* stream) const {
  if (b.rows <= few_.most_rows())
    return few_.launch({b.x, nullptr, nullptr, nullptr, b.weight, b.bias, b.y, nullptr, nullptr, nullptr, static_cast<int>(b.rows),
                        static_cast<int>(problem_.out), static_cast<int>(problem_.out), 1, 0},
                       stream);
  if (odd_) return by_few(b, stream);
  // The library's bias is in the dtype of y.
  const void* bias = problem_.y == problem_.dtype ? b.bias : b.bias_single;
  const std::shared_ptr<const Matmul> matmul = matmul_of(b.rows, bias ? BiasOf::kProduct : b.bias ? BiasOf::kWhoAsks : BiasOf::kNobody);
  const bool bias_is_left = b.bias && !(bias && matmul->adds_bias());
  // A sum that is rounded before its bias is added is rounded twice.
  if (bias_is_left && problem_.y != DType::kF32 && few_.most_rows() > 0) return by_few(b, stream);
  matmul->run({b.x, b.weight, bias, problem_.accumulate ? b.y : nullptr, b.y}, workspace, stream_of(stream));
  if (!bias_is_left && matmul->activates()) return;
  const BiasParams params{b.y, bias_is_left ? b.bias : nullptr, b.rows * problem_.out, static_cast<int>(problem_.out)};
  gpu_.launch(bias_, std::min<int64_t>(kBiasCtas, (params.count + kOpsThreads - 1) / kOpsThreads), kOpsThreads, 0, &params, stream);
}

std::unique_ptr<const Kernel<Linear>> make(const Linear& p, const Device& device) { return std::make_unique<CudaLinear>(p, device); }
std::unique_ptr<const Kernel<NormLinear>> make(const NormLinear& p, const Device& device) { return std::make_unique<CudaNormLinear>(p, device); }

int64_t rows_alike(const Linear& p, const Device& device) { return std::max<int64_t>(1, std::min(p.rows, CudaLinear(p, device).few_rows())); }

size_t packed_bytes(const Linear& p, const Device&) { return static_cast<size_t>(packed_rows(p) * packed_stride(p)) * size_of(p.dtype); }

void pack(const Linear& p, const Device& device, const void* weight, bool in_by_out, int64_t given, void* packed) {
  const int threads = device.threads > 0 ? device.threads : core::cpu_info().usable_threads;
  const int64_t rows = packed_rows(p), share = (rows + threads - 1) / threads;
  core::run_workers(std::nullopt, threads, [&](int worker) {
    const int64_t begin = std::min(rows, worker * share), end = std::min(rows, begin + share);
    if (p.dtype == DType::kF32)
      pack_rows(p, static_cast<const float*>(weight), in_by_out, given, begin, end, static_cast<float*>(packed));
    else
      pack_rows(p, static_cast<const uint16_t*>(weight), in_by_out, given, begin, end, static_cast<uint16_t*>(packed));
  });
}

}  // namespace fattn::ops::cuda
