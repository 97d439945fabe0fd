// The C ABI's exchanges between processes.
#include <cstring>
#include <memory>

#include "api/guard.h"
#include "device/process_group.h"
#include "fattn/fattn.h"
#include "shared/text.h"

struct fattn_group {
  explicit fattn_group(const fattn::core::ProcessGroup::Options& options) : group(options) {}
  fattn::core::ProcessGroup group;
};

namespace {
using namespace fattn::core;
using fattn::Error;
using fattn::ErrorCode;
}  // namespace

fattn_status fattn_group_id(void* id) {
  return guarded([&] {
    static_assert(sizeof(NcclId) == FATTN_GROUP_ID_BYTES);
    if (!id) throw Error(ErrorCode::kInvalidArgument, "id is a null pointer; pass memory of FATTN_GROUP_ID_BYTES bytes");
    const NcclId made = NcclCommunicator::new_id();
    std::memcpy(id, &made, sizeof made);
  });
}

fattn_status fattn_group_create(const fattn_group_options* options, fattn_group** group) {
  return guarded([&] {
    checked(group, "group") = nullptr;
    const fattn_group_options& given = sized(options, "options");
    ProcessGroup::Options o;
    o.rank = given.rank;
    o.ranks = given.nranks;
    if (given.timeout != 0) o.timeout_s = given.timeout;
    if (given.device_type != FATTN_DEVICE_CPU && given.device_type != FATTN_DEVICE_CUDA)
      throw Error(ErrorCode::kInvalidArgument,
                  text("device_type is ", given.device_type, "; allowed: FATTN_DEVICE_CUDA (1), and, for one process, FATTN_DEVICE_CPU (0)"));
    if (given.device_type == FATTN_DEVICE_CUDA) {
      o.device = &cuda_device(given.device_index);
      o.device->require_usable();
    }
    if (given.nranks > 1) {
      if (!given.id) throw Error(ErrorCode::kInvalidArgument, "id is a null pointer; one process calls fattn_group_id and tells all others");
      std::memcpy(&o.id, given.id, sizeof o.id);
    }
    *group = std::make_unique<fattn_group>(o).release();
  });
}

fattn_status fattn_group_begin(fattn_group* group, const fattn_piece* pieces, int32_t npieces, void* stream) {
  return guarded([&] {
    fattn_group& g = checked(group, "group");
    if (npieces < 0 || (npieces > 0 && !pieces))
      throw Error(ErrorCode::kInvalidArgument,
                  text("npieces is ", npieces, pieces ? "" : " and pieces a null pointer", "; pass an array of 0 or more"));
    g.group.begin({pieces, static_cast<size_t>(npieces)}, static_cast<CUstream>(stream));
  });
}

fattn_status fattn_group_finish(fattn_group* group, void* stream) {
  return guarded([&] { checked(group, "group").group.finish(static_cast<CUstream>(stream)); });
}

fattn_status fattn_group_wait(fattn_group* group) {
  return guarded([&] { checked(group, "group").group.wait(); });
}

void fattn_group_destroy(fattn_group* group) { delete group; }
