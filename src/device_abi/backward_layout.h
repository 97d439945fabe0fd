// Where the v2 backward kernels keep things: shared memory of the main kernel and the fp32 accumulator of dq. Include-free, used by the host too.
#pragma once

namespace fattn {

// One specialisation's split of the work. A CTA owns block_n keys of one key head and walks over blocks of block_m queries.
struct BackwardTile {
  int width, width_v;  // headdim and headdim_v as padded inside
  int block_m, block_n;
  int key_groups;   // groups of warps; each owns block_n / key_groups keys
  int group_warps;  // of each role in a group; they split the queries of a block, and then the columns of dK and dV
  int chunk;        // queries of one step of a warp
  bool pipelined;   // two stages of Q, dO and dS: one barrier a block; otherwise one stage and two barriers

  constexpr int role_warps() const { return key_groups * group_warps; }  // one half computes P and dV, the other dS and dK
  constexpr int warps() const { return 2 * role_warps(); }
  constexpr int threads() const { return 32 * warps(); }
  constexpr int stages() const { return pipelined ? 2 : 1; }

  // All warps compute dQ of a block: how many of them side by side along its rows, the others along its columns, as square as they
  // can, because the operands are read from shared memory. 0: they cannot share it out in tiles of 16 x 16.
  constexpr int dq_row_warps() const {
    int best = 0, best_reads = 0;
    for (int rows = 1; rows <= warps(); ++rows) {
      if (warps() % rows != 0 || block_m % (16 * rows) != 0 || width % (16 * (warps() / rows)) != 0) continue;
      const int reads = block_m / rows + width / (warps() / rows);
      if (best == 0 || reads < best_reads) best = rows, best_reads = reads;
    }
    return best;
  }

  // Bytes of the parts of shared memory, in their order.
  constexpr int k_bytes() const { return 2 * block_n * width; }
  constexpr int v_bytes() const { return 2 * block_n * width_v; }
  constexpr int q_bytes() const { return 2 * block_m * width; }       // a stage
  constexpr int dout_bytes() const { return 2 * block_m * width_v; }  // a stage
  constexpr int ds_bytes() const { return 2 * block_m * block_n; }    // a stage
  constexpr int p_bytes() const { return ds_bytes(); }
  constexpr int row_bytes() const { return 4 * block_m; }  // lse or row_sum, a stage

  constexpr int v_offset() const { return k_bytes(); }
  constexpr int q_offset() const { return v_offset() + v_bytes(); }
  constexpr int dout_offset() const { return q_offset() + stages() * q_bytes(); }
  constexpr int ds_offset() const { return dout_offset() + stages() * dout_bytes(); }
  constexpr int p_offset() const { return ds_offset() + stages() * ds_bytes(); }
  constexpr int lse_offset() const { return p_offset() + p_bytes(); }
  constexpr int row_sum_offset() const { return lse_offset() + stages() * row_bytes(); }
  constexpr int shared_bytes() const { return row_sum_offset() + stages() * row_bytes(); }
};

// The kernels before and after it: threads of a CTA, and queries of a CTA of the first.
inline constexpr int kPrepareThreads = 256, kPrepareRows = 64, kFinishThreads = 256;

// dq_accum is (batch, nheads, blocks of 16 queries, blocks of 8 columns, 128): each block of 16 x 8 in the order in which a warp holds it
// as accumulators of mma, so that a warp adds 512 neighbouring bytes.
inline constexpr int kDqAccumRows = 16;

constexpr long long dq_accum_blocks(long long seqlen_q) { return (seqlen_q + kDqAccumRows - 1) / kDqAccumRows; }

// Of packed sequences every head has as many blocks of `rows` queries as they may begin: kernels/v2/workspace.h.
constexpr unsigned packed_blocks(long long total, int batch, int rows) { return static_cast<unsigned>(total / rows + batch); }

// Elements of one (batch, head).
constexpr long long dq_accum_head(long long seqlen_q, int width) { return dq_accum_blocks(seqlen_q) * kDqAccumRows * width; }

}  // namespace fattn
