// Products of training, by cuBLASLt. A factor in fp32 beside one in 16 bits is rounded to its dtype, as tensor cores read both alike. What the
// library cannot write at once, a sum in 16 bits with something added to it, is written in fp32 for some of the rows at a time.
#include <optional>

#include "cpu/workspace_layout.h"
#include "fattn/error.hpp"
#include "ops/backends.h"
#include "ops/cuda/matmul.h"
#include "ops/cuda/pass.h"
#include "shared/text.h"

namespace fattn::ops::cuda {
namespace {

constexpr int64_t kMostSums = int64_t{16} << 20;  // of the workspace
constexpr int64_t kWhole = 8;                     // elements of 16 bits in 16 bytes

DType common_dtype(const Product& p) {
  if (p.a == p.b || p.b == DType::kF32) return p.a;
  if (p.a == DType::kF32) return p.b;
  throw Error(ErrorCode::kUnsupported, core::text("a product of ", name_of(p.a), " and ", name_of(p.b),
                                                  "; on a GPU both are of one dtype, or one is fp32, which is rounded to the other's"));
}

int64_t address(const void* p) { return static_cast<int64_t>(reinterpret_cast<uintptr_t>(p) % 16); }

class CudaProduct final : public Kernel<Product> {
 public:
  CudaProduct(const Product& p, const Device& device)
      : p_(p), dtype_(common_dtype(p)), gpu_(device), matmuls_(gpu_.device()), finish_(gpu_, DType::kF32, p.c) {
    if (p.a != dtype_ || p.b != dtype_) round_.emplace(gpu_, DType::kF32, dtype_);
    if (p.b != DType::kF32) widen_.emplace(gpu_, p.b, DType::kF32);
    product_at_ = layout_.add({static_cast<int64_t>(Matmul::kMostWorkspace)});
    const auto size = static_cast<int64_t>(size_of(dtype_));
    a_at_ = layout_.add({p.a != dtype_ ? p.rows : 0, p.inner, size});
    b_at_ = layout_.add({p.b != dtype_ ? p.inner : 0, p.columns, size});
    bias_at_ = layout_.add({p.columns, 4});
    if (p.c != DType::kF32) {
      rows_of_sums_ = std::clamp<int64_t>(kMostSums / p.columns, 1, p.rows);
      sums_at_ = layout_.add({rows_of_sums_, p.columns, 4});
    }
    Call call;  // what there is not is said now
    call.rows = p.c == DType::kF32 || p.c == dtype_ ? p.rows : rows_of_sums_;
    call.inner = p.inner;
    call.c_dtype = p.c == dtype_ ? p.c : DType::kF32;
    matmul_of(call);
  }
  size_t workspace_bytes() const override { return layout_.total(); }

  void execute(const Product::Buffers& b, void* workspace, void* stream) const override {
    check(b);
    const auto at = [&](size_t offset) { return static_cast<char*>(workspace) + offset; };
    const int64_t inner = b.inner > 0 ? b.inner : p_.inner;
    Call call;
    call.workspace = at(product_at_);
    call.stream = stream;
    call.rows = b.rows;
    call.inner = inner;
    call.a = rounded(p_.a, b.a, (p_.a_turned ? p_.rows : b.rows) * inner, at(a_at_), stream);
    call.b = rounded(p_.b, b.b, inner * p_.columns, at(b_at_), stream);
    const auto* add = b.add;
    // The bias in fp32.
    const auto bias = [&] {
      if (!b.bias || p_.b == DType::kF32) return static_cast<const float*>(b.bias);
      auto* to = reinterpret_cast<float*>(at(bias_at_));
      widen_->run(gpu_, b.bias, p_.columns, p_.columns, nullptr, nullptr, to, stream);
      return static_cast<const float*>(to);
    };
    if (p_.c == DType::kF32) {
      call.c_dtype = DType::kF32;
      call.c = b.c;
      call.add = add;
      call.bias = bias();
      if (!multiply(call)) finish_.run(gpu_, b.c, b.rows * p_.columns, p_.columns, static_cast<const float*>(call.bias), nullptr, b.c, stream);
      return;
    }
    // A sum that is rounded before its bias is added is rounded twice: where the library does that, it does not get the bias.
    const bool whole = p_.columns % kWhole == 0 && inner % kWhole == 0 && address(b.bias) == 0 && address(b.c) == 0;
    if (p_.c == dtype_ && !add && (!b.bias || (p_.b == p_.c && whole))) {
      call.c_dtype = p_.c;
      call.c = b.c;
      call.bias = b.bias;
      if (!b.bias || matmul_of(call)->adds_bias()) {
        multiply(call);
        return;
      }
    }
    const float* single = bias();
    call.c_dtype = DType::kF32;
    call.c = at(sums_at_);
    call.bias = nullptr;
    const auto* a = static_cast<const char*>(call.a);
    for (int64_t row = 0; row < b.rows; row += rows_of_sums_) {
      call.rows = std::min(rows_of_sums_, b.rows - row);
      call.a = a + row * (p_.a_turned ? 1 : p_.inner) * static_cast<int64_t>(size_of(dtype_));
      multiply(call);
      finish_.run(gpu_, call.c, call.rows * p_.columns, p_.columns, single, add ? add + row * p_.columns : nullptr,
                  static_cast<char*>(b.c) + row * p_.columns * static_cast<int64_t>(size_of(p_.c)), stream);
    }
  }

 private:
  // One product by the library: a and b are of dtype_, the bias is in that of c.
  struct Call {
    const void *a = nullptr, *b = nullptr, *bias = nullptr;
    const float* add = nullptr;
    void *c = nullptr, *workspace = nullptr, *stream = nullptr;
    DType c_dtype = DType::kF32;
    int64_t rows = 0, inner = 0;
  };

  void check(const Product::Buffers& b) const {
    if (b.inner < 0 || b.inner > p_.inner || (b.inner > 0 && b.inner < p_.inner && (!p_.a_turned || p_.b_turned)))
      throw Error(ErrorCode::kInvalidArgument, core::text("an inner dimension of ", b.inner, " in a product of ", p_.inner,
                                                          "; allowed: less of it only where the first factor is turned and the second is not"));
    if (b.add && b.add == b.c && p_.c != DType::kF32)
      throw Error(ErrorCode::kInvalidArgument, "what is added to a product in 16 bits cannot be the product itself");
  }

  const void* rounded(DType dtype, const void* x, int64_t count, void* room, void* stream) const {
    if (dtype == dtype_) return x;
    round_->run(gpu_, x, count, count, nullptr, nullptr, room, stream);
    return room;
  }

  std::shared_ptr<const Matmul> matmul_of(const Call& call) const {
    const auto size = static_cast<int64_t>(size_of(dtype_)), c_size = static_cast<int64_t>(size_of(call.c_dtype));
    MatmulShape s;
    s.rows = call.rows, s.columns = p_.columns, s.inner = call.inner;
    s.a_turned = p_.a_turned, s.b_turned = p_.b_turned;
    s.dtype = dtype_, s.c = call.c_dtype;
    s.a_stride = p_.a_turned ? p_.rows : p_.inner;
    s.b_stride = p_.b_turned ? p_.inner : p_.columns;
    s.c_stride = p_.columns;
    s.a_alignment = alignment_of({s.a_stride * size, address(call.a)});
    s.b_alignment = alignment_of({s.b_stride * size, address(call.b)});
    s.c_alignment = alignment_of({s.c_stride * c_size, address(call.c), address(call.add)});
    s.bias = call.bias ? BiasOf::kProduct : BiasOf::kNobody;
    return matmuls_.of(s);
  }

  // Whether the bias, if there is one, is in it.
  bool multiply(const Call& call) const {
    const std::shared_ptr<const Matmul> matmul = matmul_of(call);
    matmul->run({call.a, call.b, call.bias, call.add, call.c, static_cast<float>(p_.alpha)}, call.workspace, stream_of(call.stream));
    return !call.bias || matmul->adds_bias();
  }

  const Product p_;
  const DType dtype_;  // that both factors are multiplied in
  const Gpu gpu_;
  const Matmuls matmuls_;
  const Convert finish_;
  std::optional<Convert> round_, widen_;
  core::WorkspaceLayout layout_;
  size_t product_at_ = 0, a_at_ = 0, b_at_ = 0, bias_at_ = 0, sums_at_ = 0;
  int64_t rows_of_sums_ = 0;
};

}  // namespace

std::unique_ptr<const Kernel<Product>> make(const Product& p, const Device& device) { return std::make_unique<CudaProduct>(p, device); }

}  // namespace fattn::ops::cuda
