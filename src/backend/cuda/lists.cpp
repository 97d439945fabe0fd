#include "backend/cuda/lists.h"

#include <vector>

#include "backend/cuda/call_params.h"
#include "fattn/error.hpp"
#include "shared/text.h"

namespace fattn::core::cuda {
namespace {

const int* ints(const void* list) { return static_cast<const int*>(list); }

// On the host, with the same stride.
std::vector<int32_t> copy_of(CudaDevice& device, const void* list, int64_t count, int64_t stride, CUstream stream) {
  std::vector<int32_t> copy(static_cast<size_t>(count > 0 ? (count - 1) * stride + 1 : 0));
  if (!copy.empty())
    device.check(cuda_driver().memcpyDtoHAsync(copy.data(), reinterpret_cast<CUdeviceptr>(list), copy.size() * sizeof copy[0], stream),
                 "copying seqused_k, cu_seqlens or block_table to look at them (check = sync)");
  return copy;
}

}  // namespace

void require_good_lists(CudaDevice& device, const Problem& p, const fattn_buffers& b, CUstream stream) {
  const bool paged = p.paged && !p.empty() && p.seqlen_k > 0;
  if (!p.packed && !p.uses_lengths() && !paged) return;
  int captured = 0;  // CUstreamCaptureStatus
  if (cuda_driver().streamIsCapturing) device.check(cuda_driver().streamIsCapturing(stream, &captured), "asking whether the stream is captured");
  if (captured != 0)
    throw Error(ErrorCode::kInvalidArgument,
                "check is sync, which waits for the stream, and the stream is being captured; set check to none, or ask for status");
  std::vector<int32_t> of_q, of_k, lengths, pages;
  if (p.packed) {
    of_q = copy_of(device, b.cu_seqlens_q, p.batch + 1, p.cu_seqlens_q_stride, stream);
    if (!p.paged) of_k = copy_of(device, b.cu_seqlens_k, p.batch + 1, p.cu_seqlens_k_stride, stream);
  }
  if (p.uses_lengths()) lengths = copy_of(device, b.seqused_k, p.batch, p.seqused_k_stride, stream);
  // Rows of the table, the last without what is behind its columns.
  if (paged) pages = copy_of(device, b.block_table, (p.batch - 1) * p.block_table_stride + p.seqlen_k / p.page_size, 1, stream);
  device.check(cuda_driver().streamSynchronize(stream), "waiting for seqused_k, cu_seqlens or block_table to look at them (check = sync)");
  fattn_buffers host = b;
  host.cu_seqlens_q = of_q.data();
  host.cu_seqlens_k = of_k.data();
  host.seqused_k = lengths.data();
  host.block_table = pages.data();
  validate_host_values(p, host);
}

jit::Request list_status_request(const ListStatusKey& key) {
  const char* const entry = "fattn_list_status";
  const bool paged = key.paged != 0;
  return {
      .entry = entry,
      .source = text("// which list is out of range\n#include \"kernels/list_status.h\"\nextern \"C\" __global__ void __launch_bounds__(",
                     kListStatusThreads, ") ", entry, "(const __grid_constant__ fattn::ListStatusParams p",
                     paged ? ", const __grid_constant__ fattn::Pages pages" : "", ") {\n  fattn::list_status(p", paged ? ", pages" : "", ");\n}\n"),
      .arch = key.arch};
}

ListStatusCall list_status_params(const Problem& p, const fattn_buffers& b) {
  ListStatusCall call{};
  ListStatusParams& params = call.lists;
  params.status = static_cast<int*>(b.status);
  if (p.packed) {
    params.of_q = {ints(b.cu_seqlens_q), p.cu_seqlens_q_stride, p.total_q, static_cast<int>(p.seqlen_q)};
    if (!p.paged) params.of_k = {ints(b.cu_seqlens_k), p.cu_seqlens_k_stride, p.total_k, static_cast<int>(p.seqlen_k)};
  }
  params.lengths = p.uses_lengths() ? ints(b.seqused_k) : nullptr;
  params.length_stride = p.seqused_k_stride;
  params.batch = static_cast<int>(p.batch);
  params.seqlen_k = static_cast<int>(p.seqlen_k);
  if (p.paged && !p.empty()) call.pages = page_params(p, b);
  return call;
}

}  // namespace fattn::core::cuda
