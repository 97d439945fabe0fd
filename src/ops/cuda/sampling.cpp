// The next token of each row, drawn on the device with the numbers that the host would draw it with.
#include <cstddef>

#include "device_abi/ops_params.h"
#include "fattn/error.hpp"
#include "ops/backends.h"
#include "ops/cuda/kernels.h"
#include "shared/text.h"

namespace fattn::ops::cuda {
namespace {

// Shares are summed up in parts of 14 bits, in 32.
constexpr int64_t kMostVocab = (int64_t{1} << 18) - 1;

static_assert(sizeof(DrawChoice) == sizeof(Choice) && offsetof(DrawChoice, top_k) == offsetof(Choice, top_k) &&
              offsetof(DrawChoice, repetition_penalty) == offsetof(Choice, repetition_penalty) &&
              offsetof(DrawChoice, seed) == offsetof(Choice, seed) && offsetof(DrawChoice, position) == offsetof(Choice, position) &&
              offsetof(DrawChoice, seen) == offsetof(Choice, seen) && offsetof(DrawChoice, seen_count) == offsetof(Choice, seen_count));

class CudaSampling final : public Kernel<Sampling> {
 public:
  CudaSampling(const Sampling& p, const Device& device) : p_(p), gpu_(device) {
    if (p.vocab > kMostVocab)
      throw Error(ErrorCode::kUnsupported, core::text("a vocabulary of ", p.vocab, " tokens; on a GPU at most ", kMostVocab, " are drawn from"));
    key_.kind = KernelKind::kDraw;
    key_.arch = gpu_.arch();
    gpu_.load(key_);
  }
  size_t workspace_bytes() const override { return static_cast<size_t>(p_.rows * ((p_.vocab + 31) / 32)) * sizeof(unsigned); }
  void execute(const Sampling::Buffers& b, void* workspace, void* stream) const override {
    const Advance& a = b.advance;
    const DrawParams params{b.logits,
                            p_.stride,
                            reinterpret_cast<DrawChoice*>(const_cast<Choice*>(b.choice)),
                            b.token,
                            static_cast<unsigned*>(workspace),
                            static_cast<int>(b.rows),
                            static_cast<int>(p_.vocab),
                            {a.ids, a.position, a.used, reinterpret_cast<long long*>(a.slot), a.seen, a.seen_stride}};
    gpu_.launch(key_, b.rows, kDrawThreads, 0, &params, stream);
  }

 private:
  const Sampling p_;
  const Gpu gpu_;
  KernelKey key_;
};

}  // namespace

std::unique_ptr<const Kernel<Sampling>> make(const Sampling& p, const Device& device) { return std::make_unique<CudaSampling>(p, device); }

}  // namespace fattn::ops::cuda
