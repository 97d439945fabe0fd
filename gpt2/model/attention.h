// Attention of new rows against the cache of their sequences, by the C functions of fattn.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "fattn/fattn.hpp"
#include "gpt2/model/block.h"
#include "gpt2/model/model.h"

namespace fattn::gpt2 {

// New rows of one sequence: `count` of them, behind `past` that are in the cache. Those of all sequences lie one behind another.
struct Span {
  int64_t sequence = 0, past = 0, count = 0;
};

class Attention {
 public:
  struct Options {
    int64_t batch = 1, context = 1, rows = 1;
    Algorithm algorithm = Algorithm::kAuto;
    bool alone = false;  // each sequence in a call of its own, so that no other changes how its work is split
    // Of a cache in pages, 0 of another: tokens of a page, pages, and pages of a sequence at most.
    int64_t page_size = 0, pages = 0, columns = 0;
  };
  Attention(const Config& config, DType dtype, const Compute& compute, const Options& options);

  // What steps will need; a shape that needs more gets it when it comes.
  size_t workspace_bytes() const { return workspace_bytes_; }

  // Of each sequence of the batch: `used` its tokens with the new ones, `table` its pages.
  struct Lists {
    const int32_t *used = nullptr, *table = nullptr;
  };
  // q is in qkv, the projection's rows; k and v are a layer's cache, (batch, context, n_kv_head, headdim), or (pages, page_size, n_kv_head, headdim).
  // The cache holds the new rows already. Steps of one token, and all steps of a cache in pages, look at the lists.
  void execute(int64_t layer, const std::vector<Span>& spans, const Lists& lists, const void* qkv, const void* k, const void* v, void* o,
               std::byte* workspace, const MemorySpace& space);
  // Steps of one token take lengths from a list, so that one plan serves them all.
  bool takes_lengths() const { return takes_lengths_; }

 private:
  // Sequences side by side in the cache and in the rows, with the same number of rows; `keys` 0: their lengths are on a list.
  struct Shape {
    int64_t sequences = 1, queries = 1, keys = 0;
    double scale = 1;
    auto key() const { return std::tuple(sequences, queries, keys, scale); }
  };
  ForwardTensors tensors(const Shape& shape, const Lists& lists, const void* qkv, const void* k, const void* v, void* o) const;
  const Plan& plan(const Shape& shape);
  double scale_of(int64_t layer) const;

  const Config& config_;
  const DType dtype_;
  const Options options_;
  fattn::Options attention_;
  bool takes_lengths_ = false;
  std::map<std::tuple<int64_t, int64_t, int64_t, double>, Plan> plans_;
  size_t workspace_bytes_ = 0;
  std::optional<int> gpu_;
  Block more_;
};

}  // namespace fattn::gpt2
