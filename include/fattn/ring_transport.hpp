// What carries rows between the processes that share a sequence (fattn/ring.hpp).
#pragma once

#include <vector>

#include "fattn/types.hpp"

namespace fattn {

// Contiguous memory, of the tensors' device, that goes to a process or comes from one.
using RingPiece = fattn_piece;

class RingTransport {
 public:
  RingTransport() = default;
  RingTransport(const RingTransport&) = delete;
  RingTransport& operator=(const RingTransport&) = delete;
  virtual ~RingTransport() = default;

  virtual int rank() const = 0;
  virtual int ranks() const = 0;
  // Whose memory it exchanges.
  virtual Device device() const { return Device::kCpu; }
  virtual int device_index() const { return 0; }
  // Begins to send and receive all pieces, beside each other: behind the work so far on `stream` (null on a CPU) and beside what comes after it. Of
  // two processes what one sends to the other comes in the order in which it was given, piece by piece, in the same sizes. Throws Error.
  virtual void begin(const std::vector<RingPiece>& pieces, void* stream) = 0;
  // Of the calls of begin() that are not finished, the oldest: work on `stream` from here on sees what came and may write what was sent; on a CPU it
  // is there when this returns. Throws Error where another process is gone or does not answer.
  virtual void finish(void* stream) = 0;
  // Returns when everything that was finished has ended, or throws Error.
  virtual void settle() {}
};

}  // namespace fattn
