// Lists in device memory, offsets of packed sequences, numbers of used keys and of pages, which the host does not know: looked at before a pass, by
// it or by a kernel, where the caller asks for that.
#pragma once

#include <array>
#include <cstdint>

#include "backend/cuda/kernel_kind.h"
#include "device/cuda_device.h"
#include "device_abi/attention_params.h"
#include "device_abi/list_status_params.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// Copies them, waits for the stream, and throws what the CPU backend would. Of problems without lists nothing is done. A captured stream cannot be
// waited for, which is an error as well.
void require_good_lists(CudaDevice& device, const Problem& problem, const fattn_buffers& buffers, CUstream stream);

// 64 bytes without padding.
struct ListStatusKey {
  KernelKind kind = KernelKind::kListStatus;
  int32_t arch = 0;
  int32_t paged = 0;
  std::array<int32_t, 13> reserved{};
};
static_assert(sizeof(ListStatusKey) == 64);
jit::Request list_status_request(const ListStatusKey& key);

// What the kernel is told; the second of those of paged caches alone.
struct ListStatusCall {
  ListStatusParams lists;
  Pages pages;  // without a table: nobody reads them
  std::array<void*, 2> pointers() { return {&lists, &pages}; }
};
ListStatusCall list_status_params(const Problem& problem, const fattn_buffers& buffers);

}  // namespace fattn::core::cuda
