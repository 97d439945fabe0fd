// Host side of kernels/decode: which problems it is better for than the forward kernels, the tile and the split of the keys for each, the source of a
// specialisation, and what the launches need.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "backend/cuda/kernel_kind.h"
#include "backend/cuda/target.h"
#include "device/cuda_device.h"
#include "device_abi/attention_params.h"
#include "device_abi/decode_work.h"
#include "jit/jit.h"
#include "problem/problem.h"

namespace fattn::core::cuda {

// Names as in kernels/decode/shape.h.
struct DecodeTile {
  int row_tiles = 0, row_warps = 0, teams = 0, block_n = 0, stages = 0;
  bool queries_in_registers = false;
  int ctas = 0;  // that a multiprocessor is to hold

  constexpr int rows() const { return 16 * row_tiles * row_warps; }
  constexpr int threads() const { return 32 * row_warps * teams; }
  int shared_bytes(int headdim, int headdim_v, bool shares) const;
};

// A row of the table of tiles (tiles/decode.h): for max(headdim, headdim_v) up to `headdim`.
struct DecodeRow {
  int headdim = 0;
  DecodeTile tile = {};
};
std::span<const DecodeRow> decode_rows();

// Tells one specialisation from another; 64 bytes without padding.
struct DecodeKey {
  KernelKind kind = KernelKind::kDecode;
  int32_t arch = 0;
  int32_t dtype = 0;  // DType
  int32_t headdim = 0, headdim_v = 0;
  int32_t row = 0;  // of the table
  int32_t sinks = 0;
  int32_t paged = 0;
  int32_t fp32_out = 0;
  int32_t shares = 0;
  std::array<int32_t, 6> reserved{};
};
static_assert(sizeof(DecodeKey) == 64);

struct DecodePlan {
  DecodeKey key;
  DecodeTile tile;
  int rows = 0, row_tiles = 0;
  int splits = 0;  // CTAs that share the keys of a sequence, or with key.shares those of all sequences by their lengths (device_abi/decode_shares.h)
  int64_t grid = 0, combine_grid = 0;  // combine_grid 0: the keys are not split
  int shared_bytes = 0;
  int64_t stats_offset = 0, parts_offset = 0, workspace_bytes = 0;
  bool early() const { return key.arch >= 90; }  // each kernel comes up while the one before it in the stream ends
  DecodeKey combine_key() const;
};

// Whether the kernels can compute the problem, with pointers that are multiples of 16.
bool decode_can(const Problem& problem, const DecodeTarget& target);
// Whether they are the ones to take, rather than a forward kernel: few rows a key head, or few tiles of queries for the device, and many keys; or no
// other kernel has all that the problem asks for.
bool decode_takes(const Problem& problem, const DecodeTarget& target);

// Whether the device shares the sequences among CTAs by their lengths.
bool decode_shares(const Problem& problem);

// For problems that decode_can() compute.
DecodePlan plan_decode(const Problem& problem, const DecodeTarget& target);
// With a row of the table and a number of splits that it need not have chosen, as the search for them tries them.
DecodePlan plan_decode(const Problem& problem, const DecodeTarget& target, int row, int splits);

// The parameters of both kernels, and where they are, in order; the last is of those with pages alone.
struct DecodeParams {
  FeatureParams call;  // the kernels are told its AttentionParams
  DecodeWork work;
  Pages pages;
  std::array<void*, 3> pointers() { return {&call, &work, &pages}; }
};
DecodeParams decode_params(const Problem& problem, const DecodePlan& plan, const fattn_buffers& buffers);

jit::Request decode_request(const DecodeKey& key);

}  // namespace fattn::core::cuda
