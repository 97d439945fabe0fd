// Cross-entropy: a task has a block of rows and a chunk of the vocabulary, whose logits never leave its scratch.
#include <cmath>
#include <limits>

#include "ops/backends.h"
#include "ops/cpu/host.h"

namespace fattn::ops::cpu {
namespace {

constexpr int64_t kPanelsOfChunk = 32;  // 2048 tokens; a constant, so that sums are the same on every machine

// Of a row and a chunk.
struct Part {
  float largest, sum;
};

class CpuCrossEntropy final : public Kernel<CrossEntropy> {
 public:
  CpuCrossEntropy(const CrossEntropy& p, const Device& device) : p_(p), kernels_(kernels_of(device)), workers_(device) {
    panels_ = ceil_div(p.vocab, kColumns);
    chunks_ = ceil_div(panels_, kPanelsOfChunk);
    const bool pairs = kernels_.pairs && p.dtype == DType::kBF16;
    panel_elements_ = (pairs ? (p.width + 1) / 2 * 2 : p.width) * kColumns;
    logits_at_ = (kPanelScratch + 63) / 64 * 64;
    scratch_ = logits_at_ + kMostRows * kPanelsOfChunk * kColumns * sizeof(float);
    parts_at_ = layout_.add({p.rows, chunks_, static_cast<int64_t>(sizeof(Part))});
    targets_at_ = layout_.add({p.rows, static_cast<int64_t>(sizeof(float))});
    scratch_at_ = layout_.add({workers_.most(chunks_ * ceil_div(p.rows, kMostRows)), static_cast<int64_t>(scratch_)});
  }
  size_t workspace_bytes() const override { return layout_.total(); }

  void execute(const CrossEntropy::Buffers& b, void* workspace, void*) const override {
    check_targets(p_, b);
    char* const memory = static_cast<char*>(workspace);
    auto* parts = reinterpret_cast<Part*>(memory + parts_at_);
    auto* targets = reinterpret_cast<float*>(memory + targets_at_);
    workers_.run(chunks_ * ceil_div(b.rows, kMostRows), [&](int64_t i, int worker) {
      const int64_t chunk = i % chunks_, row = i / chunks_ * kMostRows, rows = std::min(kMostRows, b.rows - row);
      const int64_t first = chunk * kPanelsOfChunk * kColumns, tokens = std::min(kPanelsOfChunk * kColumns, p_.vocab - first);
      char* scratch = memory + scratch_at_ + static_cast<size_t>(worker) * scratch_;
      auto* logits = reinterpret_cast<float*>(scratch + logits_at_);
      PanelTask task{};
      task.x = bytes_at(b.x, row * p_.width, size_of(p_.dtype));
      task.rows = rows;
      task.in = p_.width;
      task.y_stride = kPanelsOfChunk * kColumns;
      task.y_dtype = kKernelF32;
      task.scratch = scratch;
      for (int64_t at = 0; at < tokens; at += kColumns) {
        task.panel = bytes_at(b.weight, (first + at) / kColumns * panel_elements_, size_of(p_.dtype));
        task.y = logits + at;
        task.columns = std::min(kColumns, tokens - at);
        kernels_.panel(kernel_dtype(p_.dtype), task);
      }
      for (int64_t r = 0; r < rows; ++r) {
        const float* line = logits + r * task.y_stride;
        Part& part = parts[(row + r) * chunks_ + chunk];
        kernels_.exp_sum(line, tokens, &part.largest, &part.sum);
        const int64_t target = b.target[row + r] - first;
        if (target >= 0 && target < tokens) targets[row + r] = line[target];
      }
    });
    for (int64_t r = 0; r < b.rows; ++r) {
      const Part* of_row = parts + r * chunks_;
      float largest = -std::numeric_limits<float>::infinity();
      for (int64_t c = 0; c < chunks_; ++c) largest = std::max(largest, of_row[c].largest);
      double sum = 0;
      for (int64_t c = 0; c < chunks_; ++c) sum += of_row[c].sum * std::exp(static_cast<double>(of_row[c].largest) - largest);
      const double lse = largest + std::log(sum);
      if (b.lse) b.lse[r] = static_cast<float>(lse);
      if (b.loss) b.loss[r] = b.target[r] < 0 ? 0.0f : static_cast<float>(lse - targets[r]);
    }
  }

 private:
  const CrossEntropy p_;
  const OpsKernels& kernels_;
  const Workers workers_;
  int64_t panels_ = 0, chunks_ = 0, panel_elements_ = 0;
  size_t logits_at_ = 0, scratch_ = 0, parts_at_ = 0, targets_at_ = 0, scratch_at_ = 0;
  core::WorkspaceLayout layout_;
};

}  // namespace

std::unique_ptr<const Kernel<CrossEntropy>> make(const CrossEntropy& p, const Device& device) { return std::make_unique<CpuCrossEntropy>(p, device); }

}  // namespace fattn::ops::cpu
