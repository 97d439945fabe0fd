// Sequences that several processes share: which rows are this one's, and what carries keys and values between them.
#pragma once

#include <cstdint>
#include <vector>

#include "fattn/ring.hpp"
#include "gpt2/config.h"

namespace fattn::gpt2 {

// A network's part. One process has whole sequences.
struct Context {
  int rank = 0, ranks = 1;
  RingTransport* transport = nullptr;  // of these ranks; null: there is nothing but plans
};

class ContextRows {
 public:
  // Throws Error where a rank would have no rows.
  ContextRows(const Config& config, int64_t seqlen, const Context& context);

  const RingSequence& sequence() const { return sequence_; }
  int64_t count() const { return count_; }  // of each sequence
  // Of (sequences, seqlen) numbers those of this process's rows, (sequences, count()).
  void take(const int32_t* from, int64_t sequences, int32_t* to) const;
  // Where these rows are among all of a batch.
  void places(int64_t sequences, int32_t* to) const;
  // Of (sequences, seqlen) targets those of this process's rows that are not -1.
  int64_t targets(const int32_t* from, int64_t sequences) const;

 private:
  RingSequence sequence_;
  std::vector<fattn_ring_range> held_;
  int64_t count_ = 0;
};

// The transport as plans see it: ranks and device are known before there is one, which only passes need.
class ContextTransport : public RingTransport {
 public:
  ContextTransport(const Context& context, Device device, int index) : context_(context), device_(device), index_(index) {}
  int rank() const override { return context_.rank; }
  int ranks() const override { return context_.ranks; }
  Device device() const override { return device_; }
  int device_index() const override { return index_; }
  void begin(const std::vector<RingPiece>& pieces, void* stream) override { real().begin(pieces, stream); }
  void finish(void* stream) override { real().finish(stream); }
  void settle() override { real().settle(); }

 private:
  RingTransport& real() const;

  const Context context_;
  const Device device_;
  const int index_;
};

}  // namespace fattn::gpt2
