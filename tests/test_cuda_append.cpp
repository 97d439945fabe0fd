// Append on a GPU without one: the host's side on stubs of driver and NVRTC, whose launches run the kernel thread by thread.
#include <algorithm>

#include "cuda_backend.h"
#include "emulated/device.h"
//
#include "append_problems.h"
#include "kernels/rows/append.h"

namespace fattn {
namespace {

using namespace test;
using test::launches::launched;
using test::launches::stub;

struct Four {
  static constexpr int kUnit = 4;
};
struct One {
  static constexpr int kUnit = 1;
};
struct Early : Four {
  static constexpr bool kDependent = true;
};
bool in_fours = false, early = false;  // of the next launch
long long threads = 0;                 // of the last one

void run_append(const void* argument) {
  AppendParams p;
  std::memcpy(&p, argument, sizeof p);
  launched.emplace_back("append");
  const long long ctas = 2 * p.of_new.all + p.of_q.all + (p.seqused_k != nullptr || p.status != nullptr ? 1 : 0);
  threads = ctas * kRowsThreads;
  emulated::run(ctas, kRowsThreads, [&] { early ? rows::append<Early>(p) : in_fours ? rows::append<Four>(p) : rows::append<One>(p); });
}

// Whether rows of a tensor of a GPU, whose memory begins at a multiple of 256 bytes, lie at multiples of four elements.
bool takes_fours(const RowTensor& t) {
  const Tensor view = t.view();
  for (int i = 0; view && i + 1 < view.ndim(); ++i)
    if (view.shape(i) > 1 && view.stride(i) % 4 != 0) return false;
  return !view || view.shape(view.ndim() - 1) % 4 == 0;
}
bool takes_fours(const Append& a) {
  const bool angles = !a.cos.view() || a.cos.shape()[1] % 4 == 0;
  const RowTensor* const all[] = {&a.k, &a.v, &a.k_cache, &a.v_cache, &a.q, &a.q_out};
  return angles && std::all_of(std::begin(all), std::end(all), [](const RowTensor* t) { return takes_fours(*t); });
}

class CudaAppend : public ::testing::Test {
 protected:
  void SetUp() override {
    stub().kernel("fattn_append", run_append, sizeof(AppendParams));
    launched.clear();
  }
  void run(const Append& a) {
    device_ = {};
    in_fours = takes_fours(a);
    a.run([&](const RowTensor& t) { return device_.put(t); });
    device_.fetch();
  }
  const CacheFolder folder_;
  DeviceTensors device_;
};

TEST_F(CudaAppend, IsAsPlainIndexing) {
  int fours = 0, ones = 0;
  for (uint64_t seed = 0; seed < 80; ++seed) {
    const Append a = random_append(seed), expected = a.wide();
    append_by_indexing(expected);
    run(a);
    expect_appended(a, expected, "seed " + std::to_string(seed));
    if (HasFatalFailure()) return;
    ++(in_fours ? fours : ones);
  }
  EXPECT_GE(fours, 8);
  EXPECT_GE(ones, 8);
}

// A paged problem of decode with everything, all good.
Append step() {
  Append a;
  a.k = RowTensor(DType::kF32, {4, 2, 1, 4}), a.v = RowTensor(DType::kF32, {4, 2, 1, 3}), a.q = RowTensor(DType::kF32, {4, 2, 2, 4});
  a.k_cache = RowTensor(DType::kF32, {9, 3, 1, 4}), a.v_cache = RowTensor(DType::kF32, {9, 3, 1, 3}), a.q_out = RowTensor(DType::kF32, {4, 2, 2, 4});
  a.cos = RowTensor(DType::kF32, {7, 1}), a.sin = RowTensor(DType::kF32, {7, 1});
  for (const RowTensor& t : {a.k, a.v, a.q, a.cos, a.sin}) t.fill([](int64_t) { return 1.0; });
  for (const RowTensor& t : {a.k_cache, a.v_cache}) t.fill([](int64_t) { return 5.0; });
  a.cache_seqlens = list(DType::kI64, {0, 1, 2, 4});
  a.block_table = RowTensor(DType::kI32, {4, 2});
  a.block_table.fill([](int64_t i) { return static_cast<double>(i); });
  a.seqused_k = list(DType::kI32, {0, 0, 0, 0});
  a.status = list(DType::kI32, {9, 9});
  return a;
}

// A kernel that comes up while the one before it ends may be early: each thread waits, whatever it does.
TEST_F(CudaAppend, WaitsForTheKernelBeforeWhereItComesUpEarly) {
  Append usual = step(), dependent = step();
  usual.k_cache = RowTensor(DType::kF32, {9, 3, 1, 4}), dependent.k_cache = usual.k_cache;
  for (const RowTensor& t : {usual.k_cache, dependent.k_cache}) t.fill([](int64_t) { return 5.0; });
  emulated::waited = 0;
  run(usual);
  EXPECT_EQ(emulated::waited, 0);
  early = true;
  run(dependent);
  early = false;
  EXPECT_GT(threads, 0);
  EXPECT_EQ(emulated::waited, threads);
  EXPECT_EQ(dependent.status.at(0), 0);
}

// What has gone wrong in sequence 2 is said, nothing of it is written that should not be, and all others are as they are without it.
TEST_F(CudaAppend, NumbersOutOfRangeWriteNothing) {
  Append good = step();
  run(good);
  EXPECT_EQ(good.status.at(0), 0);
  EXPECT_EQ(good.status.at(1), 0);
  const auto length_of = [](double length) { return [length](const Append& a) { a.cache_seqlens.set(2, length); }; };
  struct Bad {
    std::function<void(Append&)> change;
    int code;
    int64_t written;  // new keys of the sequence
  };
  const Bad all[] = {{length_of(5), 3, 0},
                     {length_of(-1), 3, 0},
                     {length_of(9e18), 3, 0},
                     {[](Append& a) { a.block_table.set(4, 9); }, 4, 1},  // keys 2 and 3: on pages 4 and 5
                     {[](Append& a) { a.block_table.set(5, -1); }, 4, 1},
                     {[](Append& a) { a.block_table.set(4, -1), a.block_table.set(5, 1 << 30); }, 4, 0},
                     {[](Append& a) {
                        a.positions = list(DType::kI64, {0, 1, 6, 4});
                      },
                      6, 2},
                     {[](Append& a) {
                        a.positions = list(DType::kI64, {0, 1, -3, 4});
                      },
                      6, 2},
                     {[](Append& a) {
                        a.positions = list(DType::kI64, {0, 1, std::numeric_limits<int64_t>::min(), 4});
                      },
                      6, 2}};
  for (const Bad& bad : all) {
    Append a = step();
    bad.change(a);
    run(a);
    const std::string what = "code " + std::to_string(bad.code);
    EXPECT_EQ(a.status.at(0), bad.code);
    EXPECT_EQ(a.status.at(1), 2);
    for (int64_t n = 0; n < 4; ++n) EXPECT_EQ(a.seqused_k.at(n), n == 2 && bad.code != 6 ? -1 : good.seqused_k.at(n)) << what;
    int64_t changed = 0;
    for (int64_t row = 0; row < 27; ++row) {
      const bool of_two = row / 3 == 4 || row / 3 == 5;
      bool is_new = true;
      for (int64_t d = 0; d < 3; ++d) {
        is_new = is_new && a.v_cache.at(row * 3 + d) == 1;
        if (!of_two) {
          EXPECT_EQ(a.v_cache.at(row * 3 + d), good.v_cache.at(row * 3 + d)) << what;
        }
      }
      changed += of_two && is_new ? 1 : 0;
      for (int64_t d = 0; !of_two && d < 4; ++d) EXPECT_EQ(a.k_cache.at(row * 4 + d), good.k_cache.at(row * 4 + d)) << what;
    }
    EXPECT_EQ(changed, bad.written) << what;
    for (int64_t i = 0; i < a.q_out.size(); ++i) {  // each position of its own where that is what is wrong
      const bool may_be_nan = i / 16 == 2, must_be_nan = may_be_nan && (bad.code != 6 || a.positions.at(2) < -2 || i / 8 % 2 == 1);
      if (must_be_nan) {
        EXPECT_TRUE(std::isnan(a.q_out.at(i))) << what << ", " << i;
      }
      if (!may_be_nan) {
        EXPECT_EQ(a.q_out.at(i), good.q_out.at(i)) << what;
      }
    }
    EXPECT_TRUE(a.k_cache.intact() && a.v_cache.intact() && a.q_out.intact());
  }
}

TEST_F(CudaAppend, ListsOfPackedSequencesAndEntries) {
  const auto packed = [] {
    Append a = step();
    a.k = RowTensor(DType::kF32, {8, 1, 4}), a.v = RowTensor(DType::kF32, {8, 1, 3});
    a.k_cache = RowTensor(DType::kF32, {9, 6, 1, 4}), a.v_cache = RowTensor(DType::kF32, {9, 6, 1, 3});
    a.q = RowTensor(DType::kF32, {8, 2, 4}), a.q_out = RowTensor(DType::kF32, {8, 2, 4});
    a.block_table = {};
    for (const RowTensor& t : {a.k, a.v, a.q}) t.fill([](int64_t) { return 1.0; });
    for (const RowTensor& t : {a.k_cache, a.v_cache}) t.fill([](int64_t) { return 5.0; });
    a.cu_seqlens_new = list(DType::kI32, {0, 2, 4, 6, 8}), a.cu_seqlens_q = list(DType::kI32, {0, 2, 4, 6, 8});
    a.cache_batch_idx = list(DType::kI32, {8, 0, 2, 1});
    return a;
  };
  const Append good = packed();
  run(good);
  EXPECT_EQ(good.status.at(0), 0);
  EXPECT_EQ(good.v_cache.at(8 * 18), 1);
  struct Bad {
    std::function<void(Append&)> change;
    int code;
    int64_t where;
  };
  const Bad all[] = {{[](Append& a) { a.cache_batch_idx.set(1, 9); }, 5, 1}, {[](Append& a) { a.cache_batch_idx.set(3, -1); }, 5, 3},
                     {[](Append& a) { a.cu_seqlens_new.set(4, 9); }, 2, 3},  {[](Append& a) { a.cu_seqlens_new.set(2, 1 << 30); }, 2, 1},
                     {[](Append& a) { a.cu_seqlens_new.set(0, -5); }, 2, 0}, {[](Append& a) { a.cu_seqlens_new.set(0, 1); }, 2, 0},
                     {[](Append& a) { a.cu_seqlens_new.set(1, 5); }, 2, 0},  {[](Append& a) { a.cu_seqlens_q.set(4, 9); }, 1, 3},
                     {[](Append& a) { a.cu_seqlens_q.set(0, -5); }, 1, 0},   {[](Append& a) { a.cu_seqlens_q.set(0, 1); }, 1, 0}};
  for (const Bad& bad : all) {
    Append a = packed();
    bad.change(a);
    run(a);
    EXPECT_EQ(a.status.at(0), bad.code);
    EXPECT_EQ(a.status.at(1), bad.where) << "code " << bad.code;
    if (bad.code != 1) {
      EXPECT_EQ(a.seqused_k.at(bad.where), -1);
    }
    EXPECT_TRUE(a.k_cache.intact() && a.v_cache.intact() && a.q_out.intact());
  }
}

// Nothing is new, so that no page is needed.
TEST_F(CudaAppend, ATableWithoutColumns) {
  Append a = step();
  a.k = RowTensor(DType::kF32, {4, 0, 1, 4}), a.v = RowTensor(DType::kF32, {4, 0, 1, 3});
  a.k_cache = RowTensor(DType::kF32, {2, 3, 1, 4}), a.v_cache = RowTensor(DType::kF32, {2, 3, 1, 3});
  a.cache_seqlens = list(DType::kI64, {0, 0, 0, 0}), a.block_table = RowTensor(DType::kI32, {4, 0});
  a.options.q_positions = QueryPositions::kFirst;
  device_ = {};
  in_fours = false;
  a.run([&](const RowTensor& t) { return t.view() && t.size() == 0 ? t.view().on(Device::kCuda, 0, nullptr) : device_.put(t); });
  device_.fetch();
  EXPECT_EQ(a.status.at(0), 0);
  for (int64_t n = 0; n < 4; ++n) EXPECT_EQ(a.seqused_k.at(n), 0);
  for (int64_t i = 0; i < a.q_out.size(); ++i) EXPECT_FALSE(std::isnan(a.q_out.at(i)));
}

TEST_F(CudaAppend, OffsetsOfAnyKindGiveASequenceAllOrNothing) {
  int good = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    const Append a = any_offsets(seed);
    run(a);
    expect_all_or_nothing(a, "seed " + std::to_string(seed));
    if (HasFatalFailure()) return;
    good += a.status.at(0) == 0 ? 1 : 0;
  }
  EXPECT_GE(good, 5);
  EXPECT_LE(good, 30);
}

// The host knows a number that no list says, and refuses it before a launch.
TEST_F(CudaAppend, RefusedInWords) {
  Append a = step();
  a.block_table = {}, a.cache_seqlens = {};
  a.k_cache = RowTensor(DType::kF32, {4, 9, 1, 4}), a.v_cache = RowTensor(DType::kF32, {4, 9, 1, 3});
  const auto on_device = [&](const RowTensor& t) { return device_.put(t); };
  a.options.cache_seqlen = 8;
  expect_message([&] { a.run(on_device); }, "cache_seqlen is 8, and 2 keys are new; allowed: 0 to 7");
  a.options.cache_seqlen = 6;
  expect_message([&] { a.run(on_device); }, "cache_seqlen is 6, for a sequence of 2 rows; cos has 7 rows");
  a.options.cache_seqlen = 0;
  expect_message(
      [&] { a.run([&](const RowTensor& t) { return t.same_memory(a.v_cache) ? t.view().on(Device::kCuda, 0, t.data()) : device_.put(t); }); },
      "v_cache is at ");
  expect_message([&] { a.run([&](const RowTensor& t) { return t.same_memory(a.v) ? t.view() : device_.put(t); }); },
                 "v is on the CPU but k is on CUDA device 0");
  EXPECT_TRUE(launched.empty());
}

}  // namespace
}  // namespace fattn
