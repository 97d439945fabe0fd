// Products of matrices that are not packed: tiles of c, by OpenBLAS where it is there, else by panels of our own. What is not fp32 is widened a block
// of a tile at a time. The tiles depend on the sizes alone. Where an instruction set is asked for, products are by it: OpenBLAS chooses its own.
#include "cpu/openblas.h"
#include "cpu/subnormals.h"
#include "ops/backends.h"
#include "ops/cpu/host.h"

namespace fattn::ops::cpu {
namespace {

constexpr int kRowMajor = 101, kAsItIs = 111, kTurned = 112;  // of CBLAS

// A tile is as large as it may be, so that a factor is read seldom, yet there are some for every worker.
constexpr int64_t kLargest = 512, kSmallest = 64, kFewTiles = 6, kMostWork = int64_t{1} << 26;
// Of the inner dimension, where a factor is copied: the copies of a tile stay in an L2 cache of 2 MiB.
constexpr int64_t kInner = 384;
// A tile by panels, as of linear.cpp.
constexpr int64_t kPanelRows = kMostRows, kPanelColumns = 4 * kColumns;

struct Tiles {
  int64_t rows, columns;
};
Tiles tiles_for(const Product& p) {
  Tiles t{kLargest, kLargest};
  const auto halve = [&] { t.rows >= t.columns ? t.rows /= 2 : t.columns /= 2; };
  while (t.rows * t.columns > 128 * 256 && t.rows * t.columns * p.inner > kMostWork) halve();
  while (t.rows * t.columns > kSmallest * kSmallest && ceil_div(p.rows, t.rows) * ceil_div(p.columns, t.columns) < kFewTiles) halve();
  return {std::min(t.rows, p.rows), std::min(t.columns, p.columns)};
}

class CpuProduct final : public Kernel<Product> {
 public:
  CpuProduct(const Product& p, const Device& device)
      : p_(p), kernels_(kernels_of(device)), workers_(device), blas_(core::openblas()), panels_(!blas_ || device.isa != Isa::kAuto) {
    tile_ = panels_ ? Tiles{kPanelRows, kPanelColumns} : tiles_for(p);
    copies_a_ = panels_ || p.a != DType::kF32;
    copies_b_ = panels_ || p.b != DType::kF32;
    step_ = copies_a_ || copies_b_ ? kInner : p.inner;
    tiles_ = ceil_div(p.rows, tile_.rows) * ceil_div(p.columns, tile_.columns);
    core::WorkspaceLayout scratch;
    a_at_ = scratch.add({copies_a_ ? tile_.rows * kInner : 0, 4});
    b_at_ = scratch.add({copies_b_ ? ceil_div(tile_.columns, kColumns) * kColumns * kInner : 0, 4});
    c_at_ = scratch.add({p.c != DType::kF32 ? tile_.rows * tile_.columns : 0, 4});
    panel_at_ = scratch.add({panels_ ? static_cast<int64_t>(kPanelScratch) : 0});
    scratch_ = scratch.total();
    core::WorkspaceLayout layout;
    layout.add({workers_.most(tiles_), static_cast<int64_t>(scratch_)});
    workspace_ = layout.total();
  }
  size_t workspace_bytes() const override { return workspace_; }

  void execute(const Product::Buffers& b, void* workspace, void*) const override {
    if (b.add == nullptr || b.add != b.c || p_.c == DType::kF32) return run(b, workspace);
    throw Error(ErrorCode::kInvalidArgument, "what is added to a product in 16 bits cannot be the product itself");
  }

 private:
  // A tile of c.
  struct Tile {
    int64_t row, column, rows, columns;
    char* scratch;
  };

  void run(const Product::Buffers& b, void* workspace) const {
    const int64_t across = ceil_div(p_.columns, tile_.columns), tiles = ceil_div(b.rows, tile_.rows) * across;
    const auto all = [&] {
      workers_.run(tiles, [&](int64_t i, int worker) {
        const core::SubnormalsAreZero zero;
        const int64_t row = i / across * tile_.rows, column = i % across * tile_.columns;
        compute(b, {row, column, std::min(tile_.rows, b.rows - row), std::min(tile_.columns, p_.columns - column),
                    bytes_at(workspace, worker, scratch_)});
      });
    };
    if (panels_) return all();
    const core::OneBlasThread one(blas_);
    all();
  }

  void compute(const Product::Buffers& b, const Tile& t) const {
    const bool direct = p_.c == DType::kF32;
    float* c = direct ? static_cast<float*>(b.c) + t.row * p_.columns + t.column : reinterpret_cast<float*>(t.scratch + c_at_);
    const int64_t stride = direct ? p_.columns : tile_.columns;
    const bool begun = begin(b, t, c, stride);
    const int64_t inner = b.inner > 0 ? b.inner : p_.inner;
    for (int64_t i = 0; i < inner; i += step_) {
      const int64_t n = std::min(step_, inner - i);
      if (panels_)
        multiply_panels(b, t, i, n, c, stride, begun || i > 0);
      else
        multiply_blas(b, t, i, n, c, stride, begun || i > 0);
    }
    for (int64_t r = 0; !direct && r < t.rows; ++r)
      kernels_.narrow(kernel_dtype(p_.c), c + r * stride, t.columns, bytes_at(b.c, (t.row + r) * p_.columns + t.column, size_of(p_.c)));
  }

  // What the product is added to; false: nothing.
  bool begin(const Product::Buffers& b, const Tile& t, float* c, int64_t stride) const {
    if (!b.bias && !b.add) return false;
    const float* add = b.add ? b.add + t.row * p_.columns + t.column : nullptr;
    const void* bias = b.bias ? bytes_at(b.bias, t.column, size_of(p_.b)) : nullptr;
    for (int64_t r = 0; r < t.rows; ++r) {
      float* to = c + r * stride;
      if (bias) {
        const float* from = add ? add + r * p_.columns : nullptr;
        if (from == to) {
          for (int64_t i = 0; i < t.columns; i += kColumns) {
            float some[kColumns];
            const int64_t n = std::min(kColumns, t.columns - i);
            kernels_.widen(kernel_dtype(p_.b), bytes_at(bias, i, size_of(p_.b)), n, some);
            kernels_.add_to(some, n, to + i);
          }
        } else {
          kernels_.widen(kernel_dtype(p_.b), bias, t.columns, to);
          if (from) kernels_.add_to(from, t.columns, to);
        }
      } else if (add + r * p_.columns != to) {
        kernels_.widen(kKernelF32, add + r * p_.columns, t.columns, to);
      }
    }
    return true;
  }

  void multiply_blas(const Product::Buffers& b, const Tile& t, int64_t i, int64_t n, float* c, int64_t stride, bool adds) const {
    const Factor a = factor(b.a, p_.a, p_.a_turned, p_.a_turned ? p_.rows : p_.inner, t.row, t.rows, i, n, copies_a_ ? t.scratch + a_at_ : nullptr);
    const Factor w =
        factor(b.b, p_.b, !p_.b_turned, p_.b_turned ? p_.inner : p_.columns, t.column, t.columns, i, n, copies_b_ ? t.scratch + b_at_ : nullptr);
    blas_.sgemm(kRowMajor, p_.a_turned ? kTurned : kAsItIs, p_.b_turned ? kTurned : kAsItIs, static_cast<int>(t.rows), static_cast<int>(t.columns),
                static_cast<int>(n), static_cast<float>(p_.alpha), a.data, static_cast<int>(a.stride), w.data, static_cast<int>(w.stride),
                adds ? 1.0f : 0.0f, c, static_cast<int>(stride));
  }

  struct Factor {
    const float* data;
    int64_t stride;
  };
  // Outputs [first, first + count) and inner [i, i + n) of a factor, in fp32, in the order it has: where it lies, or a copy. `outputs_last`: the
  // inner dimension is the slow one.
  Factor factor(const void* data, DType dtype, bool outputs_last, int64_t stride, int64_t first, int64_t count, int64_t i, int64_t n,
                char* copy) const {
    const int64_t lines = outputs_last ? n : count, length = outputs_last ? count : n;
    const int64_t begin = outputs_last ? i * stride + first : first * stride + i;
    if (!copy) return {static_cast<const float*>(data) + begin, stride};
    auto* to = reinterpret_cast<float*>(copy);
    for (int64_t line = 0; line < lines; ++line)
      kernels_.widen(kernel_dtype(dtype), bytes_at(data, begin + line * stride, size_of(dtype)), length, to + line * length);
    return {to, length};
  }

  // Rows of a side by side, b in panels: an inner dimension that is the fast one is turned in squares.
  void multiply_panels(const Product::Buffers& b, const Tile& t, int64_t i, int64_t n, float* c, int64_t stride, bool adds) const {
    auto *a = reinterpret_cast<float*>(t.scratch + a_at_), *w = reinterpret_cast<float*>(t.scratch + b_at_);
    if (p_.a_turned)
      turned(b.a, p_.a, p_.rows, i, n, t.row, t.rows, a, n);
    else
      copied(b.a, p_.a, p_.inner, t.row, t.rows, i, n, a, n);
    const auto alpha = static_cast<float>(p_.alpha);
    for (int64_t k = 0; alpha != 1.0f && k < t.rows * n; ++k) a[k] *= alpha;
    PanelTask task{};
    task.x = a;
    task.rows = t.rows;
    task.in = n;
    task.y_stride = stride;
    task.y_dtype = kKernelF32;
    task.activation = kPlain;
    task.accumulate = adds;
    task.scratch = t.scratch + panel_at_;
    for (int64_t at = 0; at < t.columns; at += kColumns) {
      task.columns = std::min(kColumns, t.columns - at);
      if (task.columns < kColumns) std::fill(w, w + n * kColumns, 0.0f);
      if (p_.b_turned)
        turned(b.b, p_.b, p_.inner, t.column + at, task.columns, i, n, w, kColumns);
      else
        copied(b.b, p_.b, p_.columns, i, n, t.column + at, task.columns, w, kColumns);
      task.panel = w;
      task.y = c + at;
      kernels_.panel(kKernelF32, task);
    }
  }
  void copied(const void* from, DType dtype, int64_t stride, int64_t first, int64_t lines, int64_t begin, int64_t length, float* to,
              int64_t to_stride) const {
    for (int64_t l = 0; l < lines; ++l)
      kernels_.widen(kernel_dtype(dtype), bytes_at(from, (first + l) * stride + begin, size_of(dtype)), length, to + l * to_stride);
  }
  // Lines become columns of `to`.
  void turned(const void* from, DType dtype, int64_t stride, int64_t first, int64_t lines, int64_t begin, int64_t length, float* to,
              int64_t to_stride) const {
    float some[kColumns];
    for (int64_t at = 0; at < length; at += kColumns) {
      const int64_t n = std::min(kColumns, length - at);
      for (int64_t l = 0; l < lines; ++l) {
        kernels_.widen(kernel_dtype(dtype), bytes_at(from, (first + l) * stride + begin + at, size_of(dtype)), n, some);
        for (int64_t k = 0; k < n; ++k) to[(at + k) * to_stride + l] = some[k];
      }
    }
  }

  const Product p_;
  const OpsKernels& kernels_;
  const Workers workers_;
  const core::OpenBlas& blas_;
  const bool panels_;
  bool copies_a_ = false, copies_b_ = false;
  Tiles tile_{};
  int64_t step_ = 0, tiles_ = 0;
  size_t a_at_ = 0, b_at_ = 0, c_at_ = 0, panel_at_ = 0, scratch_ = 0, workspace_ = 0;
};

}  // namespace

std::unique_ptr<const Kernel<Product>> make(const Product& p, const Device& device) { return std::make_unique<CpuProduct>(p, device); }

}  // namespace fattn::ops::cpu
