// The processes that train one model together: each has the whole of it and a share of every step's batches, or of their rows, and gradients are
// summed over all.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fattn/ring_transport.hpp"
#include "gpt2/group/control.h"
#include "gpt2/group/share.h"
#include "gpt2/model/model.h"
#include "gpt2/train/gradient_exchange.h"

namespace fattn::gpt2 {

// What all must have alike: {"--seqlen", "512"}.
using Facts = std::vector<std::pair<std::string, std::string>>;

class Group {
 public:
  // Returns when all ranks are there. Throws Error, as Control does.
  explicit Group(const ControlOptions& options);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  int rank() const { return control_.rank(); }
  int ranks() const { return control_.ranks(); }
  bool leads() const { return rank() == 0; }
  Control& control() { return control_; }

  // Throws Error, on all ranks, with the first difference to rank 0 and the rank that has it.
  void agree(const Facts& mine);
  // Who shares sequences: processes whose work that is agree on it. Without it every process has whole ones.
  void share(const Share& share) { share_ = share; }
  const Share& share() const { return share_; }
  // NCCL's part: before gradients(). `bucket_bytes`: gradients of so many bytes at least are summed at a time.
  void connect(const Compute& compute, int64_t bucket_bytes);
  GradientExchange& gradients();
  // Between the processes that share sequences with this one, by their ranks among each other. There from the beginning, to work from connect() on.
  RingTransport& context() { return *context_; }
  // What every rank has brought, by ranks.
  std::vector<std::vector<double>> all(const std::vector<double>& mine);

 private:
  class Sums;
  class Rows;
  Control control_;
  Share share_;
  std::unique_ptr<RingTransport> context_;
  std::unique_ptr<Sums> sums_;
};

}  // namespace fattn::gpt2
