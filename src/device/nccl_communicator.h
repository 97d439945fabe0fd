// One process's part of a group that exchanges over NCCL. Its calls do not block: whoever waits asks again and again whether the group is alive, and
// a process that is gone ends the wait by an error.
#pragma once

#include <cstddef>
#include <functional>
#include <span>

#include "device/cuda_device.h"
#include "device/nccl.h"
#include "fattn/fattn.h"

namespace fattn::core {

class NcclCommunicator {
 public:
  // Throws where the wait shall end: another process of the group is gone.
  using Alive = std::function<void()>;

  // Made by one of the group, told to all. Throws kUnsupported where there is no NCCL.
  static NcclId new_id();

  // Returns when all `ranks` processes are there. `device` null: memory of the host, which a stand-in for tests alone takes. Throws Error, or what
  // `alive` throws.
  NcclCommunicator(CudaDevice* device, const NcclId& id, int rank, int ranks, Alive alive);
  ~NcclCommunicator();  // ends at once, if something has failed
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  // x becomes the sum of all processes' x, in the order of `stream`; all of them get the same bits. Every process calls it as often and with as many
  // numbers.
  void sum(float* x, size_t count, CUstream stream);
  // Sends and receives all pieces beside each other, in the order of `stream`. What one process sends to another comes in the order given.
  void exchange(std::span<const fattn_piece> pieces, CUstream stream);
  // Until `event`, which is recorded behind the sums, has come (null: memory of the host). Throws as the constructor does.
  void wait(CUevent event);

 private:
  // Asks NCCL and the group whether all is well; false: a call of NCCL is not done.
  bool settled();
  template <class Done>
  void wait_until(const Done& done);
  // A call of NCCL that may return before it is done; nothing may be put behind it until then.
  template <class Call>
  void finish_call(const char* what, const Call& call);
  void end() noexcept;

  CudaDevice* device_;
  Alive alive_;
  ncclComm communicator_ = nullptr;
  bool failed_ = false;
};

}  // namespace fattn::core
