// Products with packed weights, and packing.
#include <cstring>

#include "ops/backends.h"
#include "ops/cpu/host.h"

namespace fattn::ops::cpu {
namespace {

KernelActivation kernel_activation(Activation a) { return a == Activation::kNone ? kPlain : a == Activation::kGeluTanh ? kGeluByTanh : kGeluByErf; }

// Rows of a block: as equal as they can be, in sixes.
int64_t rows_of_block(int64_t rows) { return ceil_div(ceil_div(rows, ceil_div(rows, kMostRows)), 6) * 6; }

int64_t padded_in(const Linear& p, bool pairs) { return pairs && p.dtype == DType::kBF16 ? (p.in + 1) / 2 * 2 : p.in; }

class CpuLinear final : public Kernel<Linear> {
 public:
  CpuLinear(const Linear& p, const Device& device) : p_(p), kernels_(kernels_of(device)), workers_(device) {
    panels_ = ceil_div(p.out, kColumns);
    panel_elements_ = padded_in(p, kernels_.pairs) * kColumns;
  }
  size_t workspace_bytes() const override {
    core::WorkspaceLayout layout;
    layout.add({workers_.most(panels_ * ceil_div(p_.rows, rows_of_block(p_.rows))), static_cast<int64_t>(kPanelScratch)});
    return layout.total();
  }
  void execute(const Linear::Buffers& b, void* workspace, void*) const override {
    const size_t size = size_of(p_.dtype), y_size = size_of(p_.y);
    const int64_t block = rows_of_block(b.rows);
    workers_.run(panels_ * ceil_div(b.rows, block), [&](int64_t i, int worker) {
      const int64_t panel = i % panels_, row = i / panels_ * block, column = panel * kColumns;
      PanelTask task{};
      task.x = bytes_at(b.x, row * p_.in, size);
      task.panel = bytes_at(b.weight, panel * panel_elements_, size);
      task.bias = bytes_at(b.bias, column, size);
      task.y = bytes_at(b.y, row * p_.out + column, y_size);
      task.rows = std::min(block, b.rows - row);
      task.in = p_.in;
      task.columns = std::min(kColumns, p_.out - column);
      task.y_stride = p_.out;
      task.y_dtype = kernel_dtype(p_.y);
      task.activation = kernel_activation(p_.activation);
      task.accumulate = p_.accumulate;
      task.scratch = bytes_at(workspace, worker, kPanelScratch);
      kernels_.panel(kernel_dtype(p_.dtype), task);
    });
  }

 private:
  const Linear p_;
  const OpsKernels& kernels_;
  const Workers workers_;
  int64_t panels_ = 0, panel_elements_ = 0;
};

// One panel. In pairs, neighbouring inputs lie side by side.
template <class Element>
void pack_panel(const Element* weight, bool in_by_out, int64_t in, int64_t padded, int64_t stride, int64_t first, int64_t columns, bool pairs,
                Element* to) {
  std::memset(to, 0, static_cast<size_t>(padded * kColumns) * sizeof(Element));
  const auto place = [&](int64_t i, int64_t c) { return pairs ? (i / 2 * kColumns + c) * 2 + i % 2 : i * kColumns + c; };
  if (in_by_out) {
    for (int64_t i = 0; i < in; ++i)
      for (int64_t c = 0; c < columns; ++c) to[place(i, c)] = weight[i * stride + first + c];
    return;
  }
  constexpr int64_t kSquare = 16;  // inputs at a time, so that what is written stays in the nearest cache
  for (int64_t begin = 0; begin < in; begin += kSquare)
    for (int64_t c = 0; c < columns; ++c)
      for (int64_t i = begin; i < std::min(in, begin + kSquare); ++i) to[place(i, c)] = weight[(first + c) * stride + i];
}

}  // namespace

std::unique_ptr<const Kernel<Linear>> make(const Linear& problem, const Device& device) { return std::make_unique<CpuLinear>(problem, device); }

size_t packed_bytes(const Linear& p, const Device& device) {
  core::WorkspaceLayout layout;
  layout.add({ceil_div(p.out, kColumns), kColumns, padded_in(p, kernels_of(device).pairs), static_cast<int64_t>(size_of(p.dtype))});
  return layout.total();
}

void pack(const Linear& p, const Device& device, const void* weight, bool in_by_out, int64_t given, void* packed) {
  const bool pairs = kernels_of(device).pairs && p.dtype == DType::kBF16;
  const int64_t padded = padded_in(p, pairs), stride = in_by_out ? given : p.in;
  Workers(device).run(ceil_div(p.out, kColumns), [&](int64_t panel, int) {
    const int64_t first = panel * kColumns, columns = std::clamp<int64_t>(given - first, 0, kColumns);
    if (size_of(p.dtype) == 4)
      pack_panel(static_cast<const uint32_t*>(weight), in_by_out, p.in, padded, stride, first, columns, pairs,
                 static_cast<uint32_t*>(packed) + panel * padded * kColumns);
    else
      pack_panel(static_cast<const uint16_t*>(weight), in_by_out, p.in, padded, stride, first, columns, pairs,
                 static_cast<uint16_t*>(packed) + panel * padded * kColumns);
  });
}

}  // namespace fattn::ops::cpu
