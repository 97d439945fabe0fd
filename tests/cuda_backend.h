// What the tests of launches by the CUDA backend share: stubs of driver and NVRTC that note what they are given, and a problem in their memory.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "device_abi/attention_params.h"
#include "device_abi/sequence_rest_params.h"
#include "fattn/attention.hpp"
#include "fattn/device.hpp"
#include "jit_test.h"
#include "stub/cuda_stub.h"
#include "thrown.h"

namespace fattn::test::launches {

using test::error_thrown_by;

inline const bool stubs_are_set = use_stubs(FATTN_STUB_CUDA_PATH);

inline const CudaStub& stub() {
  static const CudaStub loaded(FATTN_STUB_CUDA_PATH);
  return loaded;
}

// What the last launch of a kernel was given, and in which order kernels were launched.
inline AttentionParams last;
inline std::vector<std::string> launched;
inline PairParams last_pairs;  // of kernels that have features of pairs
inline void note_pairs(const void* argument) {
  std::memcpy(static_cast<void*>(&last_pairs), argument, sizeof last_pairs);
  launched.emplace_back("pairs");
}
inline SequenceRestParams last_rest;
inline void note_rest(const void* argument) {
  std::memcpy(static_cast<void*>(&last_rest), argument, sizeof last_rest);
  launched.emplace_back("rest");
}
template <char kWhich>
void note(const void* argument) {
  std::memcpy(&last, argument, sizeof last);
  launched.emplace_back(1, kWhich);
}

// A problem in the memory of the stub's device.
struct OnDevice {
  static constexpr int64_t kBatch = 2, kSeqlen = 100, kHeads = 4, kHeadsK = 2, kHeaddim = 64;
  cuda::Buffer memory[9];
  ForwardTensors forward;
  BackwardTensors backward;

  explicit OnDevice(DType dtype = DType::kBF16) {
    int next = 0;
    const auto make = [&](DType type, std::initializer_list<int64_t> shape) {
      const Tensor t(nullptr, type, shape);
      cuda::Buffer& buffer = memory[next++] = cuda::Buffer(0, static_cast<size_t>(t.size()) * size_of(type) + 64);
      return t.on(Device::kCuda, 0, buffer.get());
    };
    const auto q = [&] { return make(dtype, {kBatch, kSeqlen, kHeads, kHeaddim}); };
    const auto k = [&] { return make(dtype, {kBatch, kSeqlen, kHeadsK, kHeaddim}); };
    forward = {q(), k(), k(), q(), make(DType::kF32, {kBatch, kHeads, kSeqlen}), {}};
    const Tensor dout = q(), dq = q(), dk = k(), dv = k();
    backward = {forward.q, forward.k, forward.v, forward.o, forward.lse, dout, dq, dk, dv};
  }
};

class CudaBackend : public ::testing::Test {
 protected:
  void SetUp() override {
    stub().set("registers", 168);  // of every kernel; no less than the warps of v3 count on
    stub().kernel("fattn_v2_fwd", note<'f'>, sizeof last);
    stub().kernel("fattn_v3_fwd", note<'3'>, sizeof last);
    stub().kernel("fattn_v3_fwd_f32", note<'W'>, sizeof last);
    stub().kernel("fattn_v3_f32_split", note<'s'>, sizeof last);
    stub().kernel("fattn_v2_bwd_f32_prepare", note<'p'>, sizeof last);
    stub().kernel("fattn_v2_bwd_f32_split", note<'S'>, sizeof last);
    stub().kernel("fattn_v2_bwd_f32", note<'b'>, sizeof last);
    stub().kernel("fattn_v2_bwd_f32_finish", note<'e'>, sizeof last);
    stub().kernel("fattn_decode", note<'d'>, sizeof last);
    stub().kernel("fattn_decode_combine", note<'c'>, sizeof last);
    stub().kernel("fattn_v2_bwd_prepare", note<'p'>, sizeof last);
    stub().kernel("fattn_v2_bwd", note<'b'>, sizeof last);
    stub().kernel("fattn_v2_bwd_finish", note<'e'>, sizeof last);
    stub().kernel("fattn_v1_fwd", note<'1'>, sizeof last);
    stub().kernel("fattn_v1_bwd", note<'o'>, sizeof last);
    stub().kernel("fattn_v3_bwd_prepare", note<'P'>, sizeof last);
    stub().kernel("fattn_v3_bwd", note<'B'>, sizeof last);
    stub().kernel("fattn_v3_bwd_finish", note<'E'>, sizeof last);
    stub().kernel("fattn_v2_dbias_zero", note<'z'>, sizeof last);
    stub().kernel("fattn_v2_dbias_finish", note<'Z'>, sizeof last);
    launched.clear();
  }
  const test::CacheFolder folder_;
};

}  // namespace fattn::test::launches
