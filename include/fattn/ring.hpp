// Attention of sequences that several processes share (ring attention, Liu et al. 2023): each has some rows of q, k and v and gets the same rows of
// o. Keys and values of the next process travel while a block is computed; results of blocks are merged, and gradients summed, in fp32.
//
//   RingPlan plan(transport, {seqlen, seqlen}, tensors, options);   // every process, with its own rows (ring_schedule() says which)
//   plan.execute(tensors, workspace, plan.workspace_bytes(), stream);
#pragma once

#include "fattn/ring_execute.hpp"
#include "fattn/ring_plan.hpp"
