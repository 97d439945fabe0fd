#include "backend/cuda/sinks_gradient.h"

#include "backend/cuda/limits.h"
#include "shared/text.h"

namespace fattn::core::cuda {

jit::Request sinks_gradient_request(const SinksGradientKey& key) {
  const bool sum = key.kind == KernelKind::kSinksGradientSum;
  const auto dtype = static_cast<DType>(key.dtype);
  const char* const function = sum ? "sinks_gradient_sum" : "sinks_gradient";
  const char* const element = dtype == DType::kF32 ? "float" : dtype == DType::kBF16 ? "fattn::bf16" : "fattn::f16";
  jit::Request request;
  request.entry = text("fattn_", function);
  request.arch = key.arch;
  request.source =
      text("// the gradient of sinks, ", sum ? "sums of rows" : name_of(dtype), "\n#include \"kernels/sinks_gradient.h\"\nstruct Spec {\n",
           "  using Element = ", element, ";\n};\nextern \"C\" __global__ void __launch_bounds__(", kSinksThreads, ") ", request.entry,
           "(const __grid_constant__ fattn::SinksGradientParams p) {\n  fattn::", function, "<Spec>(p);\n}\n");
  return request;
}

int64_t sinks_gradient_parts(const Problem& p) { return ceil_div(p.dense_batch() * p.dense_rows(), kSinksRows); }

SinksGradientParams sinks_gradient_params(const Problem& p, const fattn_buffers& b, int64_t parts_offset) {
  SinksGradientParams params{};
  params.o = b.o;
  params.dout = b.dout;
  params.lse = static_cast<const float*>(b.lse);
  params.dlse = p.has_dlse ? static_cast<const float*>(b.dlse) : nullptr;
  params.sinks = static_cast<const float*>(b.sinks);
  params.dsinks = static_cast<float*>(b.dsinks);
  params.parts = reinterpret_cast<float*>(static_cast<char*>(b.workspace) + parts_offset);
  const auto strides_of = [](const Strides& s) { return SinksStrides{s.batch, s.row, s.head}; };
  params.o_strides = strides_of(p.o);
  params.dout_strides = strides_of(p.dout);
  params.lse_strides = strides_of(p.lse);
  params.dlse_strides = strides_of(p.dlse);
  params.sinks_stride = p.sinks_stride;
  params.dsinks_stride = p.dsinks_stride;
  params.rows = p.dense_rows();
  params.all_rows = p.dense_batch() * p.dense_rows();
  params.headdim_v = static_cast<int>(p.headdim_v);
  return params;
}

}  // namespace fattn::core::cuda
