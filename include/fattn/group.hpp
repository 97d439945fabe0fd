// The processes that share a sequence, a GPU each, over NCCL: what carries the rows of RingPlan.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "fattn/error.hpp"
#include "fattn/ring_transport.hpp"
#include "fattn/types.hpp"

namespace fattn {

using GroupId = std::array<unsigned char, FATTN_GROUP_ID_BYTES>;

// One process makes it and tells it to all others. Throws Error: kUnsupported where there is no NCCL, with what to do.
inline GroupId new_group_id() {
  GroupId id{};
  check(fattn_group_id(id.data()));
  return id;
}

class Group : public RingTransport {
 public:
  // Returns when all ranks are there. `device` is a CUDA device of this process. `timeout`: seconds that a process waits for another. Throws Error.
  Group(int device, int rank, int ranks, const GroupId& id, double timeout = 30) : Group(Device::kCuda, device, rank, ranks, id.data(), timeout) {}
  // A process by itself, whatever its tensors' device.
  Group() : Group(Device::kCpu, 0, 0, 1, nullptr, 30) {}

  int rank() const override { return rank_; }
  int ranks() const override { return ranks_; }
  Device device() const override { return type_; }
  int device_index() const override { return index_; }
  void begin(const std::vector<RingPiece>& pieces, void* stream) override {
    check(fattn_group_begin(raw_.get(), pieces.data(), static_cast<int32_t>(pieces.size()), stream));
  }
  void finish(void* stream) override { check(fattn_group_finish(raw_.get(), stream)); }
  void settle() override { check(fattn_group_wait(raw_.get())); }

 protected:
  Group(Device type, int device, int rank, int ranks, const void* id, double timeout) : type_(type), index_(device), rank_(rank), ranks_(ranks) {
    fattn_group_options options{};
    options.struct_size = sizeof options;
    options.rank = rank;
    options.nranks = ranks;
    options.device_type = static_cast<int32_t>(type);
    options.device_index = device;
    options.timeout = timeout;
    options.id = id;
    fattn_group* raw = nullptr;
    check(fattn_group_create(&options, &raw));
    raw_.reset(raw);
  }

 private:
  struct Destroy {
    void operator()(fattn_group* group) const { fattn_group_destroy(group); }
  };
  std::unique_ptr<fattn_group, Destroy> raw_;
  Device type_;
  int index_, rank_, ranks_;
};

}  // namespace fattn
