// Packed sequences one by one, as tensors of a single batch entry: what they must be is what each of them is alone.
#pragma once

#include <vector>

#include "fattn/problem.hpp"

namespace fattn::testing {

struct OneSequence {
  int64_t index, q_begin, seqlen_q, k_begin, seqlen_k;
};
std::vector<OneSequence> sequences_of(const ScoreTensors& scores);

// Its rows of q-, k- or lse-like tensors, and its part of a tensor over (batch, head, query, key); absent of absent ones.
Tensor queries_of(const Tensor& tensor, const OneSequence& one);
Tensor keys_of(const Tensor& tensor, const OneSequence& one);
Tensor lse_of(const Tensor& tensor, const OneSequence& one);
Tensor pairs_of(const Tensor& tensor, const OneSequence& one);

// `state` is memory for its dropout_state, whose offset is that of its heads.
ScoreTensors scores_of(const ScoreTensors& scores, const OneSequence& one, int64_t nheads, int64_t (&state)[4]);

}  // namespace fattn::testing
