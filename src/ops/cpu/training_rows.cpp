// What training does row by row, or column by column: activations, LayerNorm's and the embedding's gradients, rotary positions, dropout.
#include <cmath>
#include <cstring>
#include <vector>

#include "device_abi/dropout.h"
#include "ops/backends.h"
#include "ops/cpu/host.h"
#include "ops/cpu/turn.h"

namespace fattn::ops::cpu {
namespace {

// Columns of a task, where a task has all rows: sums are in the order of rows then.
constexpr int64_t kColumnsOfTask = 64;
// Rows whose sums are added to others; a constant, so that sums are the same on every machine.
constexpr int64_t kMostParts = 64;

KernelActivation kernel_activation(Activation a) { return a == Activation::kGeluTanh ? kGeluByTanh : kGeluByErf; }

template <class Task>
void by_columns(const Workers& workers, int64_t width, const Task& task) {
  workers.run(ceil_div(width, kColumnsOfTask),
              [&](int64_t i, int) { task(i * kColumnsOfTask, std::min(kColumnsOfTask, width - i * kColumnsOfTask)); });
}

class CpuColumnSums final : public Kernel<ColumnSums> {
 public:
  CpuColumnSums(const ColumnSums& p, const Device& device) : p_(p), kernels_(kernels_of(device)), workers_(device) {}
  void execute(const ColumnSums::Buffers& b, void*, void*) const override {
    by_columns(workers_, p_.columns, [&](int64_t begin, int64_t count) {
      kernels_.column_sums(kernel_dtype(p_.x), bytes_at(b.x, begin, size_of(p_.x)), p_.columns, b.rows, count, b.to + begin);
    });
  }

 private:
  const ColumnSums p_;
  const OpsKernels& kernels_;
  const Workers workers_;
};

class CpuActivate final : public Kernel<Activate> {
 public:
  CpuActivate(const Activate& p, const Device& device) : p_(p), kernels_(kernels_of(device)), workers_(device) {}
  void execute(const Activate::Buffers& b, void*, void*) const override {
    by_rows(workers_, b.rows, [&](int64_t begin, int64_t end) {
      const int64_t at = begin * p_.width;
      const size_t size = size_of(p_.dtype);
      kernels_.activate(kernel_dtype(p_.dtype), kernel_activation(p_.activation), bytes_at(b.x, at, size), (end - begin) * p_.width,
                        bytes_at(b.y, at, size));
    });
  }

 private:
  const Activate p_;
  const OpsKernels& kernels_;
  const Workers workers_;
};

class CpuActivationGradient final : public Kernel<ActivationGradient> {
 public:
  CpuActivationGradient(const ActivationGradient& p, const Device& device) : p_(p), kernels_(kernels_of(device)), workers_(device) {}
  void execute(const ActivationGradient::Buffers& b, void*, void*) const override {
    by_rows(workers_, b.rows, [&](int64_t begin, int64_t end) {
      const int64_t at = begin * p_.width;
      const size_t size = size_of(p_.dtype);
      kernels_.activation_gradient(kernel_dtype(p_.dtype), kernel_activation(p_.activation), bytes_at(b.x, at, size), bytes_at(b.dy, at, size),
                                   (end - begin) * p_.width, bytes_at(b.dx, at, size), b.y ? bytes_at(b.y, at, size) : nullptr);
    });
  }

 private:
  const ActivationGradient p_;
  const OpsKernels& kernels_;
  const Workers workers_;
};

// Sums over rows are those of parts, one after another.
class CpuLayerNormGradient final : public Kernel<LayerNormGradient> {
 public:
  CpuLayerNormGradient(const LayerNormGradient& p, const Device& device) : p_(p), kernels_(kernels_of(device)), workers_(device) {
    part_rows_ = std::max(kRowsOfTask, ceil_div(p.rows, kMostParts));
    sums_ = layout_.add({ceil_div(p.rows, part_rows_), 2, p.width, 4});
  }
  size_t workspace_bytes() const override { return layout_.total(); }
  void execute(const LayerNormGradient::Buffers& b, void* workspace, void*) const override {
    auto* sums = reinterpret_cast<float*>(static_cast<char*>(workspace) + sums_);
    const int64_t parts = ceil_div(b.rows, part_rows_), width = p_.width;
    workers_.run(parts, [&](int64_t part, int) {
      float* own = sums + part * 2 * width;
      std::memset(own, 0, static_cast<size_t>(2 * width) * sizeof(float));
      const int64_t row = part * part_rows_, at = row * width, rows = std::min(part_rows_, b.rows - row);
      kernels_.norm_gradient(kernel_dtype(p_.dtype),
                             {b.x + at, b.dy + at, b.weight, b.dx + at, own, own + width, rows, width, static_cast<float>(p_.epsilon)});
      if (b.rounded) kernels_.narrow(kernel_dtype(p_.dtype), b.dx + at, rows * width, bytes_at(b.rounded, at, size_of(p_.dtype)));
    });
    by_columns(workers_, width, [&](int64_t begin, int64_t count) {
      kernels_.column_sums(kKernelF32, sums + begin, 2 * width, parts, count, b.dweight + begin);
      kernels_.column_sums(kKernelF32, sums + width + begin, 2 * width, parts, count, b.dbias + begin);
    });
  }

 private:
  const LayerNormGradient p_;
  const OpsKernels& kernels_;
  const Workers workers_;
  int64_t part_rows_ = 0;
  core::WorkspaceLayout layout_;
  size_t sums_ = 0;
};

class CpuEmbeddingGradient final : public Kernel<EmbeddingGradient> {
 public:
  CpuEmbeddingGradient(const EmbeddingGradient& p, const Device& device) : p_(p), kernels_(kernels_of(device)), workers_(device) {}
  void execute(const EmbeddingGradient::Buffers& b, void*, void*) const override {
    check_rows(p_, b);
    by_columns(workers_, p_.width, [&](int64_t begin, int64_t count) {
      for (int64_t r = 0; r < b.rows; ++r) {
        const float* from = b.dx + r * p_.width + begin;
        kernels_.add_to(from, count, b.dtokens + b.ids[r] * p_.width + begin);
        if (p_.positions > 0) kernels_.add_to(from, count, b.dpositions + b.position[r] * p_.width + begin);
      }
    });
  }

 private:
  const EmbeddingGradient p_;
  const OpsKernels& kernels_;
  const Workers workers_;
};

class CpuRotary final : public Kernel<Rotary> {
 public:
  CpuRotary(const Rotary& p, const Device& device) : p_(p), workers_(device), turn_(p.nheads, p.headdim, p.dtype, p.theta) {}
  void execute(const Rotary::Buffers& b, void*, void*) const override {
    by_rows(workers_, b.rows, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) turn_(bytes_at(b.x, r * p_.stride, size_of(p_.dtype)), p_.back ? -b.position[r] : b.position[r]);
    });
  }

 private:
  const Rotary p_;
  const Workers workers_;
  const Turn turn_;
};

// A task has 16 rows, whose random numbers come together, unless their places are elsewhere.
class CpuDropout final : public Kernel<Dropout> {
 public:
  CpuDropout(const Dropout& p, const Device& device) : p_(p), workers_(device) {
    below_ = static_cast<unsigned>(std::lround(p.p * 65536));
    scale_ = 65536.0f / static_cast<float>(65536 - below_);
  }
  void execute(const Dropout::Buffers& given, void*, void*) const override {
    const Dropout::Buffers b = with_changing(given);
    const int64_t blocks = ceil_div(p_.width, core::kDropoutBlock);
    workers_.run(ceil_div(b.rows, kRows), [&](int64_t task, int) {
      const int64_t row = task * kRows, rows = std::min(kRows, b.rows - row);
      for (int64_t block = 0; block < blocks; ++block) {
        uint64_t kept[kRows] = {};
        if (b.place)
          for (int64_t r = 0; r < rows; ++r) kept[r] = word(b, static_cast<unsigned>(b.place[row + r]), block);
        else
          words(b, row, block, kept);
        const int64_t column = block * core::kDropoutBlock, columns = std::min<int64_t>(core::kDropoutBlock, p_.width - column);
        for (int64_t r = 0; r < rows; ++r) {
          const int64_t at = (row + r) * p_.width + column;
          for (int64_t c = 0; c < columns; ++c) {
            const float x = (kept[r] >> c & 1) != 0 ? b.x[at + c] * scale_ : 0.0f;
            b.out[at + c] = b.add ? b.add[at + c] + x : x;
          }
        }
      }
    });
  }

 private:
  static constexpr int64_t kRows = 16;

  // A bit a pair, of a row and the one 8 rows from it.
  unsigned pairs_of(const Dropout::Buffers& b, unsigned row, int64_t block, unsigned call) const {
    return core::dropout_kept(core::dropout_planes(b.seed, b.stream, core::dropout_query(row), static_cast<unsigned>(block), call), below_);
  }
  // Of these the ones of the first row (half 0) or the second, each at its column of the block.
  static uint64_t columns_of(unsigned bits, unsigned half, unsigned call) {
    uint64_t columns = 0;
    for (unsigned odd = 0; odd < 2; ++odd)
      for (unsigned eight = 0; eight < 8; ++eight)
        columns |= static_cast<uint64_t>(bits >> (8 * half + 16 * odd + eight) & 1) << (8 * eight + 2 * call + odd);
    return columns;
  }
  // A bit a column of the block: it stays.
  void words(const Dropout::Buffers& b, int64_t row, int64_t block, uint64_t (&kept)[kRows]) const {
    for (unsigned pair = 0; pair < 8; ++pair)
      for (unsigned call = 0; call < core::kDropoutCalls; ++call) {
        const unsigned bits = pairs_of(b, static_cast<unsigned>(row) + pair, block, call);
        for (unsigned half = 0; half < 2; ++half) kept[pair + 8 * half] |= columns_of(bits, half, call);
      }
  }
  uint64_t word(const Dropout::Buffers& b, unsigned place, int64_t block) const {
    uint64_t kept = 0;
    for (unsigned call = 0; call < core::kDropoutCalls; ++call) kept |= columns_of(pairs_of(b, place, block, call), place / 8 % 2, call);
    return kept;
  }

  const Dropout p_;
  const Workers workers_;
  unsigned below_ = 0;
  float scale_ = 1;
};

}  // namespace

std::unique_ptr<const Kernel<ColumnSums>> make(const ColumnSums& p, const Device& device) { return std::make_unique<CpuColumnSums>(p, device); }
std::unique_ptr<const Kernel<Activate>> make(const Activate& p, const Device& device) { return std::make_unique<CpuActivate>(p, device); }
std::unique_ptr<const Kernel<ActivationGradient>> make(const ActivationGradient& p, const Device& device) {
  return std::make_unique<CpuActivationGradient>(p, device);
}
std::unique_ptr<const Kernel<LayerNormGradient>> make(const LayerNormGradient& p, const Device& device) {
  return std::make_unique<CpuLayerNormGradient>(p, device);
}
std::unique_ptr<const Kernel<EmbeddingGradient>> make(const EmbeddingGradient& p, const Device& device) {
  return std::make_unique<CpuEmbeddingGradient>(p, device);
}
std::unique_ptr<const Kernel<Rotary>> make(const Rotary& p, const Device& device) { return std::make_unique<CpuRotary>(p, device); }
std::unique_ptr<const Kernel<Dropout>> make(const Dropout& p, const Device& device) { return std::make_unique<CpuDropout>(p, device); }

}  // namespace fattn::ops::cpu
