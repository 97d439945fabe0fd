// Tiles of the decode kernel.
#pragma once

#include "backend/cuda/decode.h"

namespace fattn::core::cuda {

// For each width and number of rows: with the shared memory of an SM of capability 9.0, half of it, and what the smallest have.
// clang-format off
inline constexpr DecodeRow kDecodeTable[] = {
    {.headdim = 64, .tile = {.row_tiles = 1, .row_warps = 1, .teams = 8, .block_n = 32, .stages = 3, .queries_in_registers = true, .ctas = 1}},
    {.headdim = 64, .tile = {.row_tiles = 1, .row_warps = 1, .teams = 4, .block_n = 32, .stages = 3, .queries_in_registers = true, .ctas = 2}},
    {.headdim = 64, .tile = {.row_tiles = 1, .row_warps = 1, .teams = 4, .block_n = 32, .stages = 2, .queries_in_registers = true, .ctas = 2}},
    {.headdim = 64, .tile = {.row_tiles = 2, .row_warps = 1, .teams = 8, .block_n = 32, .stages = 3, .queries_in_registers = true, .ctas = 1}},
    {.headdim = 64, .tile = {.row_tiles = 2, .row_warps = 1, .teams = 4, .block_n = 32, .stages = 3, .queries_in_registers = true, .ctas = 2}},
    {.headdim = 64, .tile = {.row_tiles = 2, .row_warps = 1, .teams = 4, .block_n = 32, .stages = 2, .queries_in_registers = true, .ctas = 2}},
    {.headdim = 64, .tile = {.row_tiles = 2, .row_warps = 2, .teams = 4, .block_n = 32, .stages = 6, .queries_in_registers = true, .ctas = 1}},
    {.headdim = 64, .tile = {.row_tiles = 2, .row_warps = 2, .teams = 2, .block_n = 32, .stages = 6, .queries_in_registers = true, .ctas = 2}},
    {.headdim = 64, .tile = {.row_tiles = 2, .row_warps = 2, .teams = 2, .block_n = 32, .stages = 4, .queries_in_registers = true, .ctas = 2}},
    {.headdim = 128, .tile = {.row_tiles = 1, .row_warps = 1, .teams = 8, .block_n = 16, .stages = 3, .queries_in_registers = true, .ctas = 1}},
    {.headdim = 128, .tile = {.row_tiles = 1, .row_warps = 1, .teams = 4, .block_n = 16, .stages = 3, .queries_in_registers = true, .ctas = 2}},
    {.headdim = 128, .tile = {.row_tiles = 1, .row_warps = 1, .teams = 4, .block_n = 16, .stages = 2, .queries_in_registers = true, .ctas = 2}},
    {.headdim = 128, .tile = {.row_tiles = 2, .row_warps = 1, .teams = 8, .block_n = 16, .stages = 3, .ctas = 1}},
    {.headdim = 128, .tile = {.row_tiles = 2, .row_warps = 1, .teams = 4, .block_n = 16, .stages = 3, .ctas = 2}},
    {.headdim = 128, .tile = {.row_tiles = 2, .row_warps = 1, .teams = 4, .block_n = 16, .stages = 2, .ctas = 2}},
    {.headdim = 128, .tile = {.row_tiles = 2, .row_warps = 2, .teams = 4, .block_n = 32, .stages = 3, .ctas = 1}},
    {.headdim = 128, .tile = {.row_tiles = 2, .row_warps = 2, .teams = 2, .block_n = 32, .stages = 3, .ctas = 2}},
    {.headdim = 128, .tile = {.row_tiles = 2, .row_warps = 2, .teams = 2, .block_n = 32, .stages = 2, .ctas = 2}},
    {.headdim = 256, .tile = {.row_tiles = 1, .row_warps = 1, .teams = 4, .block_n = 16, .stages = 3, .ctas = 1}},
    {.headdim = 256, .tile = {.row_tiles = 1, .row_warps = 1, .teams = 2, .block_n = 16, .stages = 3, .ctas = 2}},
    {.headdim = 256, .tile = {.row_tiles = 1, .row_warps = 1, .teams = 2, .block_n = 16, .stages = 2, .ctas = 2}},
    {.headdim = 256, .tile = {.row_tiles = 1, .row_warps = 2, .teams = 4, .block_n = 16, .stages = 3, .ctas = 1}},
    {.headdim = 256, .tile = {.row_tiles = 1, .row_warps = 2, .teams = 2, .block_n = 16, .stages = 3, .ctas = 2}},
    {.headdim = 256, .tile = {.row_tiles = 1, .row_warps = 2, .teams = 2, .block_n = 16, .stages = 2, .ctas = 1}},
    {.headdim = 256, .tile = {.row_tiles = 1, .row_warps = 4, .teams = 2, .block_n = 16, .stages = 6, .ctas = 1}},
    {.headdim = 256, .tile = {.row_tiles = 1, .row_warps = 4, .teams = 1, .block_n = 16, .stages = 6, .ctas = 2}},
    {.headdim = 256, .tile = {.row_tiles = 1, .row_warps = 4, .teams = 1, .block_n = 16, .stages = 4, .ctas = 1}},
};
// clang-format on

}  // namespace fattn::core::cuda
