// Where the fp32 backward kernel of v2 keeps things in shared memory. Include-free, used by the host too.
#pragma once

namespace fattn {

// One specialisation's split of the work. A CTA owns block_n keys of one key head and walks over blocks of block_m queries. Where the gradients of a
// row are too wide for the registers, `parts` CTAs own the same keys and compute the same P and dS, each for its share of the columns of dV, dK and
// dQ.
struct BackwardF32Tile {
  int width, width_v;  // headdim and headdim_v as padded inside
  int block_m, block_n;
  int key_groups;  // pairs of warps; each owns block_n / key_groups keys, one warp their P and dV, the other their dS and dK
  int chunk;       // queries of one step of a warp
  int parts;
  int query_stages = 1;  // 2: q and dout are split before (BackwardF32Parts), and a block comes while the one before is computed

  constexpr int warps() const { return 2 * key_groups; }
  constexpr int threads() const { return 32 * warps(); }

  // All warps compute dQ of a block: how many of them side by side along its rows, the others along the CTA's columns, as square as they
  // can, because the operands are read from shared memory. 0: they cannot share it out in tiles of 16 x 16.
  constexpr int dq_row_warps() const {
    int best = 0, best_reads = 0;
    for (int rows = 1; rows <= warps(); ++rows) {
      if (warps() % rows != 0 || block_m % (16 * rows) != 0 || width / parts % (16 * (warps() / rows)) != 0) continue;
      const int reads = block_m / rows + width / parts / (warps() / rows);
      if (best == 0 || reads < best_reads) best = rows, best_reads = reads;
    }
    return best;
  }

  // Bytes of the parts of shared memory, in their order. An operand is two tiles of fp16, which take what fp32 takes.
  constexpr int k_bytes() const { return 4 * block_n * width; }
  constexpr int v_bytes() const { return 4 * block_n * width_v; }
  constexpr int q_bytes() const { return 4 * block_m * width; }
  constexpr int dout_bytes() const { return 4 * block_m * width_v; }
  constexpr int ds_bytes() const { return 4 * block_m * block_n; }
  constexpr int p_bytes() const { return ds_bytes(); }
  constexpr int row_bytes() const { return 4 * block_m; }  // lse or row_sum

  constexpr int v_offset() const { return k_bytes(); }
  constexpr int q_offset() const { return v_offset() + v_bytes(); }
  constexpr int dout_offset() const { return q_offset() + query_stages * q_bytes(); }
  constexpr int ds_offset() const { return dout_offset() + query_stages * dout_bytes(); }
  constexpr int p_offset() const { return ds_offset() + ds_bytes(); }
  constexpr int lse_offset() const { return p_offset() + p_bytes(); }
  constexpr int row_sum_offset() const { return lse_offset() + query_stages * row_bytes(); }
  constexpr int greatest_offset() const { return row_sum_offset() + query_stages * row_bytes(); }          // two numbers a warp
  constexpr int inverse_offset() const { return greatest_offset() + 8 * warps(); }                         // two numbers
  constexpr int query_inverse_offset() const { return inverse_offset() + 8; }                              // with two stages: two numbers of each
  constexpr int infinite_offset() const { return query_inverse_offset() + (query_stages == 2 ? 16 : 0); }  // a word a group of keys: one bit a key
  constexpr int shared_bytes() const { return infinite_offset() + 4 * key_groups; }
  // Of packed sequences behind all that: where the CTA's own begins and ends, four numbers.
  constexpr int sequence_offset() const { return (shared_bytes() + 15) / 16 * 16; }
  constexpr int packed_shared_bytes() const { return sequence_offset() + 16; }
};

// q and dout in two parts, in the workspace: block i of block_m queries of head h of batch entry b is number (b * nheads + h) * blocks + i, two tiles
// as they are in shared memory. Zeros fill what the tensors do not have. Of packed sequences (kernels/v2/workspace.h) `blocks` is packed_blocks(),
// and the number of a block of sequence n whose rows begin at `begin` is h * blocks + begin / block_m + n + i.
struct BackwardF32Parts {
  unsigned char *q, *dout;
  float* inverses;  // of each block that of q, then that of dout: what undoes the factor, a power of two
  int blocks;       // of a head
};

inline constexpr int kBackwardF32SplitThreads = 256;  // of a CTA of kernels/v2/backward_f32_split.h

}  // namespace fattn
