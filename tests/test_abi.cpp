// The C ABI: the layout of its structs does not change by accident, names, errors and queries are as the header says.
#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "fattn/fattn.hpp"
#include "thrown.h"

// Sizes and offsets of version 9 on LP64 platforms. A change here is a new ABI version.
static_assert(sizeof(fattn_tensor) == 88 && offsetof(fattn_tensor, dtype) == 8 && offsetof(fattn_tensor, ndim) == 12 &&
              offsetof(fattn_tensor, device_type) == 16 && offsetof(fattn_tensor, shape) == 24 && offsetof(fattn_tensor, strides) == 56);
static_assert(sizeof(fattn_executor) == 24 && offsetof(fattn_executor, context) == 8 && offsetof(fattn_executor, parallel) == 16);
static_assert(sizeof(fattn_problem) == 2320 && offsetof(fattn_problem, pass) == 8 && offsetof(fattn_problem, cpu_isa) == 28 &&
              offsetof(fattn_problem, softmax_scale) == 32 && offsetof(fattn_problem, num_threads) == 40 &&
              offsetof(fattn_problem, deterministic) == 44 && offsetof(fattn_problem, cuda_level) == 48 &&
              offsetof(fattn_problem, has_window) == 52 && offsetof(fattn_problem, executor) == 56 && offsetof(fattn_problem, window_left) == 64 &&
              offsetof(fattn_problem, window_right) == 72 && offsetof(fattn_problem, softcap) == 80 && offsetof(fattn_problem, p_dropout) == 88 &&
              offsetof(fattn_problem, q) == 96 && offsetof(fattn_problem, o) == 360 && offsetof(fattn_problem, lse) == 448 &&
              offsetof(fattn_problem, weights) == 536 && offsetof(fattn_problem, dout) == 624 && offsetof(fattn_problem, dq) == 712 &&
              offsetof(fattn_problem, dv) == 888 && offsetof(fattn_problem, seqused_k) == 976 && offsetof(fattn_problem, alibi_slopes) == 1064 &&
              offsetof(fattn_problem, bias) == 1152 && offsetof(fattn_problem, mask) == 1240 && offsetof(fattn_problem, dropout_state) == 1328 &&
              offsetof(fattn_problem, dbias) == 1416 && offsetof(fattn_problem, dlse) == 1504 && offsetof(fattn_problem, cu_seqlens_q) == 1592 &&
              offsetof(fattn_problem, max_seqlen_q) == 1768 && offsetof(fattn_problem, document_q) == 1784 &&
              offsetof(fattn_problem, status) == 1960 && offsetof(fattn_problem, sinks) == 2048 && offsetof(fattn_problem, dsinks) == 2136 &&
              offsetof(fattn_problem, block_table) == 2224 && offsetof(fattn_problem, check) == 2312 &&
              offsetof(fattn_problem, batch_invariant) == 2316);
static_assert(sizeof(fattn_buffers) == 232 && offsetof(fattn_buffers, q) == 8 && offsetof(fattn_buffers, o) == 32 &&
              offsetof(fattn_buffers, dq) == 64 && offsetof(fattn_buffers, seqused_k) == 88 && offsetof(fattn_buffers, dbias) == 128 &&
              offsetof(fattn_buffers, dlse) == 136 && offsetof(fattn_buffers, cu_seqlens_q) == 144 && offsetof(fattn_buffers, document_q) == 160 &&
              offsetof(fattn_buffers, status) == 176 && offsetof(fattn_buffers, sinks) == 184 && offsetof(fattn_buffers, dsinks) == 192 &&
              offsetof(fattn_buffers, block_table) == 200 && offsetof(fattn_buffers, workspace) == 208 &&
              offsetof(fattn_buffers, workspace_bytes) == 216 && offsetof(fattn_buffers, stream) == 224);
static_assert(sizeof(fattn_plan_info) == 72 && offsetof(fattn_plan_info, cuda_level) == 20 && offsetof(fattn_plan_info, workspace_bytes) == 24 &&
              offsetof(fattn_plan_info, flops) == 32 && offsetof(fattn_plan_info, kernel) == 56);
static_assert(sizeof(fattn_cpu_info) == 224 && offsetof(fattn_cpu_info, l1d_bytes) == 24 && offsetof(fattn_cpu_info, vendor) == 64 &&
              offsetof(fattn_cpu_info, model) == 96);
static_assert(sizeof(fattn_library_info) == 1192 && offsetof(fattn_library_info, reason) == 680);
static_assert(sizeof(fattn_env_info) == 808 && offsetof(fattn_env_info, value) == 296);
static_assert(sizeof(fattn_cuda_info) == 288 && offsetof(fattn_cuda_info, memory_bytes) == 48 && offsetof(fattn_cuda_info, name) == 64 &&
              offsetof(fattn_cuda_info, pci_bus_id) == 192 && offsetof(fattn_cuda_info, uuid) == 224);
static_assert(sizeof(fattn_feature_info) == 168 && offsetof(fattn_feature_info, feature) == 8 && offsetof(fattn_feature_info, way) == 104);
static_assert(sizeof(fattn_ring_problem) == 88 && offsetof(fattn_ring_problem, seqlen_q) == 40 && sizeof(fattn_ring_range) == 16 &&
              sizeof(fattn_ring_hop) == 48 && sizeof(fattn_ring_block) == 80 && offsetof(fattn_ring_block, side) == 76 &&
              sizeof(fattn_ring_schedule) == 96 && offsetof(fattn_ring_schedule, held_q) == 48);
static_assert(FATTN_ABI_VERSION == 9);
// The list of tensors has all of them: nothing else but max_seqlen_q and max_seqlen_k lies between the first and the last in fattn_problem.
static_assert(fattn::kTensorCount * sizeof(fattn_tensor) == offsetof(fattn_problem, check) - offsetof(fattn_problem, q) - 2 * sizeof(int64_t));
static_assert(fattn::kTensorCount * sizeof(void*) == offsetof(fattn_buffers, workspace) - offsetof(fattn_buffers, q));

namespace fattn {
namespace {

struct Attention {
  float q[8] = {1, 2, 3, 4, 5, 6, 7, 8}, k[8] = {1, 0, 1, 0, 0, 1, 0, 1}, v[8] = {1, 2, 3, 4, 5, 6, 7, 8}, o[8] = {};
  ForwardTensors tensors() {
    ForwardTensors t;
    t.q = Tensor(q, DType::kF32, {1, 2, 1, 4});
    t.k = Tensor(k, DType::kF32, {1, 2, 1, 4});
    t.v = Tensor(v, DType::kF32, {1, 2, 1, 4});
    t.o = Tensor(o, DType::kF32, {1, 2, 1, 4});
    return t;
  }
};

TEST(AbiSmall, Versions) {
  EXPECT_EQ(fattn_abi_version(), FATTN_ABI_VERSION);
  EXPECT_STREQ(fattn_version(), FATTN_VERSION_STRING);
}

TEST(AbiSmall, StatusNames) {
  const char* names[] = {"ok", "invalid_argument", "unsupported", "out_of_memory", "workspace", "abi", "internal", "device", "compile"};
  for (int32_t i = 0; i < 9; ++i) EXPECT_STREQ(fattn_status_name(i), names[i]);
  EXPECT_STREQ(fattn_status_name(9), "unknown");
  EXPECT_STREQ(fattn_status_name(-1), "unknown");
}

TEST(AbiSmall, LastErrorBelongsToTheThread) {
  EXPECT_EQ(fattn_execute(nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  const std::string mine = fattn_last_error();
  EXPECT_NE(mine.find("problem is a null pointer"), std::string::npos) << mine;
  std::thread([] {
    EXPECT_STREQ(fattn_last_error(), "");
    EXPECT_EQ(fattn_plan_execute(nullptr, nullptr), FATTN_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(std::string(fattn_last_error()).find("is a null pointer"), std::string::npos) << fattn_last_error();
  }).join();
  EXPECT_EQ(fattn_last_error(), mine);
}

TEST(AbiSmall, NullPointersAreErrors) {
  EXPECT_EQ(fattn_supported(nullptr, nullptr, 0), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fattn_plan_query(nullptr, nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fattn_query_cpu(nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fattn_query_library(0, nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(fattn_query_environment(0, nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  Attention a;
  const fattn_problem p = describe(a.tensors(), {});
  EXPECT_EQ(fattn_plan_create(&p, nullptr), FATTN_ERROR_INVALID_ARGUMENT);
  fattn_plan* plan = nullptr;
  EXPECT_EQ(fattn_plan_create(nullptr, &plan), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(plan, nullptr);
  fattn_plan_destroy(nullptr);
}

// A library of one version and a caller of another must not read each other's structs wrongly.
TEST(AbiSmall, StructsOfAnotherSizeAreErrors) {
  Attention a;
  fattn_problem p = describe(a.tensors(), {});
  for (uint32_t size : {0u, 8u, static_cast<uint32_t>(sizeof p) - 8, static_cast<uint32_t>(sizeof p) + 8}) {
    p.struct_size = size;
    EXPECT_EQ(fattn_execute(&p), FATTN_ERROR_ABI);
    const std::string message = fattn_last_error();
    EXPECT_NE(message.find("struct_size is " + std::to_string(size)), std::string::npos) << message;
    EXPECT_NE(message.find(std::to_string(sizeof p)), std::string::npos) << message;
  }
  p = describe(a.tensors(), {});
  for (uint32_t version : {0u, 1u, 2u, 0xffffffffu}) {
    p.abi_version = version;
    EXPECT_EQ(fattn_supported(&p, nullptr, 0), FATTN_ERROR_ABI);
    EXPECT_NE(std::string(fattn_last_error()).find("ABI version " + std::to_string(version)), std::string::npos) << fattn_last_error();
  }
  p = describe(a.tensors(), {});
  fattn_plan* plan = nullptr;
  ASSERT_EQ(fattn_plan_create(&p, &plan), FATTN_OK);
  fattn_plan_info info{};
  EXPECT_EQ(fattn_plan_query(plan, &info), FATTN_ERROR_ABI);
  fattn_buffers buffers{};
  EXPECT_EQ(fattn_plan_execute(plan, &buffers), FATTN_ERROR_ABI);
  fattn_plan_destroy(plan);

  fattn_cpu_info cpu{};
  EXPECT_EQ(fattn_query_cpu(&cpu), FATTN_ERROR_ABI);
  fattn_library_info library{};
  EXPECT_EQ(fattn_query_library(0, &library), FATTN_ERROR_ABI);
  fattn_env_info variable{};
  EXPECT_EQ(fattn_query_environment(0, &variable), FATTN_ERROR_ABI);
  fattn_executor executor{};
  executor.concurrency = 1;
  executor.parallel = [](void*, int32_t, void (*)(void*, int32_t), void*) -> int32_t { return 0; };
  p.executor = &executor;
  EXPECT_EQ(fattn_execute(&p), FATTN_ERROR_ABI);
  EXPECT_NE(std::string(fattn_last_error()).find("executor.struct_size"), std::string::npos) << fattn_last_error();
}

TEST(AbiSmall, SupportedSaysWhy) {
  Attention a;
  fattn_problem p = describe(a.tensors(), {});
  char reason[256] = "old text";
  EXPECT_EQ(fattn_supported(&p, reason, sizeof reason), FATTN_OK);
  EXPECT_STREQ(reason, "");

  p.pass = 9;
  char short_reason[8] = "1234567";
  EXPECT_EQ(fattn_supported(&p, short_reason, sizeof short_reason), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(std::string(short_reason), std::string(fattn_last_error()).substr(0, 7));
  EXPECT_EQ(fattn_supported(&p, short_reason, 1), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(short_reason, "");
}

// The scores of 2^22 rows and keys that are one row each, in algorithm standard: a workspace that no machine has.
TEST(Abi, WantOfMemorySaysAskedAndFree) {
  Attention a;
  fattn_problem p = describe(a.tensors(), {});
  p.algorithm = FATTN_ALGORITHM_STANDARD;
  p.backend = FATTN_BACKEND_CPU;
  constexpr int64_t kRows = int64_t{1} << 22;
  std::vector<float> rows(static_cast<size_t>(kRows));
  p.q = Tensor(a.q, DType::kF32, {1, kRows, 1, 1}, {1, 0, 1, 1}).raw();
  p.k = Tensor(a.k, DType::kF32, {1, kRows, 1, 1}, {1, 0, 1, 1}).raw();
  p.v = Tensor(a.v, DType::kF32, {1, kRows, 1, 1}, {1, 0, 1, 1}).raw();
  p.o = Tensor(rows.data(), DType::kF32, {1, kRows, 1, 1}).raw();
  char reason[256];
  if (fattn_supported(&p, reason, sizeof reason) != FATTN_OK) GTEST_SKIP() << reason;  // no OpenBLAS
  ASSERT_EQ(fattn_execute(&p), FATTN_ERROR_OUT_OF_MEMORY);
  const std::string message = fattn_last_error();
  EXPECT_EQ(message.find("no memory for a workspace of "), 0u) << message;
  EXPECT_NE(message.find(" bytes are free; use a smaller problem"), std::string::npos) << message;
  EXPECT_GT(std::stoll(message.substr(29)), kRows * kRows) << message;
}

TEST(AbiSmall, QueriesEndWithAnError) {
  EXPECT_GE(environment().size(), 5u);
  EXPECT_LE(environment().size(), 7u);
  for (const fattn_env_info& e : environment()) {
    EXPECT_EQ(std::string(e.name).substr(0, 6), "FATTN_");
    EXPECT_NE(std::string(e.meaning), "");
  }
  fattn_env_info info{};
  info.struct_size = sizeof info;
  EXPECT_EQ(fattn_query_environment(-1, &info), FATTN_ERROR_INVALID_ARGUMENT);
  const fattn_cpu_info cpu = cpu_info();
  EXPECT_GE(cpu.usable_threads, 1);
  EXPECT_GE(cpu.logical_cpus, cpu.usable_threads);
  EXPECT_TRUE(available(cpu, static_cast<Isa>(cpu.isa_default)));
}

// The table is whole, and the library refuses what it says is missing.
TEST(AbiSmall, SupportTable) {
  const std::vector<std::vector<fattn_feature_info>> table = features();
  ASSERT_GE(table.size(), 10u);
  for (const auto& row : table) {
    ASSERT_EQ(row.size(), table[0].size());
    EXPECT_EQ(std::string(row[0].way), "backend reference");
    EXPECT_EQ(row[0].supported, 1) << row[0].feature;  // the oracle has everything
    for (size_t way = 0; way < row.size(); ++way) {
      EXPECT_STREQ(row[way].feature, row[0].feature);
      EXPECT_STREQ(row[way].way, table[0][way].way);
    }
  }
  Attention a;
  Options options;
  options.backend = Backend::kCpu;
  options.algorithm = Algorithm::kStandard;
  options.softcap = 1;
  for (const auto& row : table)
    if (std::string(row[0].feature) == "softcap") {
      EXPECT_EQ(static_cast<bool>(supported(describe(a.tensors(), options))), row[1].supported == 1);
    }
  fattn_feature_info info{};
  EXPECT_EQ(fattn_query_feature(0, 0, &info), FATTN_ERROR_ABI);
  info.struct_size = sizeof info;
  EXPECT_EQ(fattn_query_feature(-1, 0, &info), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(fattn_last_error()).find("feature -1 of way 0; allowed: 0 to"), std::string::npos) << fattn_last_error();
}

// Of tensors that are nowhere, (1, 64, 2, 64) and bf16.
fattn_problem problem_on(Backend backend, Algorithm algorithm, bool backward) {
  Options options;
  options.backend = backend;
  options.algorithm = algorithm;
  options.causal = true;
  const Tensor x(nullptr, DType::kBF16, {1, 64, 2, 64}), lse(nullptr, DType::kF32, {1, 2, 64});
  if (!backward) {
    ForwardTensors t;
    t.q = t.k = t.v = t.o = x;
    t.lse = lse;
    return describe(t, options);
  }
  BackwardTensors t;
  t.q = t.k = t.v = t.o = t.dout = t.dq = t.dk = t.dv = x;
  t.lse = lse;
  return describe(t, options);
}

// Each option of the list is one of the support table, and a problem that has it is refused by the ways that the table says, with its text.
TEST(AbiSmall, ListOfOptions) {
  const std::vector<std::vector<fattn_feature_info>> table = features();
  ASSERT_EQ(table.size(), kOptionCount);
  struct Asked {
    Backend backend;
    Algorithm algorithm;
    size_t way;
  };
  for (size_t i = 0; i < kOptionCount; ++i) {
    EXPECT_STREQ(table[i][0].feature, kOptions[i].text);
    EXPECT_EQ(option_index(kOptions[i].name), i);
    for (const Asked& asked :
         {Asked{Backend::kReference, Algorithm::kAuto, 0}, Asked{Backend::kCpu, Algorithm::kV1, 2}, Asked{Backend::kCpu, Algorithm::kV2, 3}}) {
      bool computed = true;
      std::string reason;
      for (const bool backward : {false, true}) {
        fattn_problem p = problem_on(asked.backend, asked.algorithm, backward);
        kOptions[i].add(p);
        const Support answer = supported(p);
        if (backward && kOptions[i].forward_only) {
          EXPECT_FALSE(answer);
          continue;
        }
        computed = computed && answer;
        reason += answer.reason;
      }
      EXPECT_EQ(computed, table[i][asked.way].supported == 1) << kOptions[i].name << ", " << table[i][asked.way].way << ": " << reason;
      if (!computed && std::string(kOptions[i].name) != "dbias") {  // with which comes a bias
        EXPECT_NE(reason.find(std::string("does not compute ") + kOptions[i].text), std::string::npos) << reason;
      }
    }
  }
  EXPECT_EQ(option_index("softcup"), kOptionCount);
  // All of them fit together.
  for (const bool backward : {false, true}) {
    fattn_problem p = problem_on(Backend::kReference, Algorithm::kAuto, backward);
    for (const OptionRow& option : kOptions)
      if (!backward || !option.forward_only) option.add(p);
    const Support answer = supported(p);
    EXPECT_TRUE(answer) << answer.reason;
  }
}

// What a GPU would compute that need not be there: the reason is that of planning.
TEST(AbiSmall, SupportedOnArchitectures) {
  const auto on = [](Algorithm algorithm, bool backward, std::initializer_list<const char*> with, int arch) {
    fattn_problem p = problem_on(Backend::kCuda, algorithm, backward);
    for (const char* name : with) kOptions[option_index(name)].add(p);
    for (const TensorRow& row : kTensors)
      if ((p.*row.described).ndim > 0) (p.*row.described).device_type = FATTN_DEVICE_CUDA;
    return supported_on(p, arch);
  };
  EXPECT_TRUE(on(Algorithm::kV3, false, {"softcap"}, 90));
  EXPECT_TRUE(on(Algorithm::kV3, false, {"dropout"}, 90));
  const Support both = on(Algorithm::kV3, false, {"softcap", "dropout"}, 90);
  EXPECT_FALSE(both);
  EXPECT_NE(both.reason.find("algorithm v3 was asked for: algorithm v3's forward pass has no registers for dropout with softcap"), std::string::npos)
      << both.reason;
  EXPECT_TRUE(on(Algorithm::kV2, false, {"softcap", "dropout"}, 80));
  EXPECT_FALSE(on(Algorithm::kV2, true, {"softcap", "dbias"}, 80));
  EXPECT_FALSE(on(Algorithm::kV3, false, {}, 80));
  EXPECT_FALSE(on(Algorithm::kV2, false, {}, 33));
  EXPECT_THROW(on(Algorithm::kV2, false, {}, -1), Error);
  char reason[64] = "old text";
  EXPECT_EQ(fattn_supported_on(nullptr, 80, reason, sizeof reason), FATTN_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(reason, "problem is a null pointer");
}

TEST(AbiSmall, PlanInfoIsFilled) {
  Attention a;
  const Plan plan(a.tensors(), {});
  const fattn_plan_info info = plan.info();
  EXPECT_NE(info.backend, FATTN_BACKEND_AUTO);
  EXPECT_NE(info.algorithm, FATTN_ALGORITHM_AUTO);
  EXPECT_GE(info.num_threads, 1);
  EXPECT_EQ(info.flops, 2.0 * (4 + 4) * 4);
  EXPECT_EQ(info.bytes, 4.0 * 8 * 4);
  EXPECT_STRNE(info.kernel, "");
}

// Whether the views of `tensors` come to the members of the C structs that have their names, and no others do.
template <class Tensors>
void expect_described(bool backward) {
  Tensors tensors;
  std::array<float, kTensorCount> memory{};
  size_t views = 0;
  for_each_tensor(tensors, [&](const TensorRow& row, Tensor& view) {
    view = Tensor(&memory[tensor_index(row.name)], DType::kF32, {1});
    ++views;
  });
  const fattn_problem p = describe(tensors, {});
  EXPECT_EQ(p.pass, backward ? FATTN_BACKWARD : FATTN_FORWARD);
  size_t described = 0;
  for (size_t i = 0; i < kTensorCount; ++i) {
    const TensorRow& row = kTensors[i];
    EXPECT_EQ((p.*row.described).data, row.in(backward) ? &memory[i] : nullptr) << row.name;
    described += (p.*row.described).ndim > 0;
    fattn_buffers b{};
    row.pointer.set(b, &memory[i]);
    for (const TensorRow& other : kTensors) EXPECT_EQ(other.pointer.get(b), &other == &row ? &memory[i] : nullptr) << row.name << " " << other.name;
  }
  EXPECT_EQ(described, views);
  const Tensors elsewhere = each_tensor(tensors, [](const Tensor& view) { return view.on(Device::kCuda, 3, nullptr); });
  for_each_tensor(elsewhere, [](const TensorRow& row, const Tensor& view) {
    EXPECT_EQ(view.device_index(), 3) << row.name;
    EXPECT_EQ(view.data(), nullptr) << row.name;
  });
}

TEST(AbiSmall, ListOfTensors) {
  expect_described<ForwardTensors>(false);
  expect_described<BackwardTensors>(true);
  EXPECT_STREQ(kTensors[tensor_index("bias")].name, "bias");
  EXPECT_THROW(tensor_index("biases"), Error);
  for (const char* name : {"o", "lse"}) {  // results of one pass, inputs of the other
    EXPECT_TRUE(kTensors[tensor_index(name)].written(false));
    EXPECT_FALSE(kTensors[tensor_index(name)].written(true));
  }
}

TEST(AbiSmall, TensorsOfTheCppApi) {
  float x[24] = {};
  const Tensor t(x, DType::kF32, {2, 3, 4});
  EXPECT_EQ(t.stride(0), 12);
  EXPECT_EQ(t.stride(1), 4);
  EXPECT_EQ(t.stride(2), 1);
  EXPECT_EQ(t.size(), 24);
  const Tensor s = t.transposed(0, 1);
  EXPECT_EQ(s.shape(0), 3);
  EXPECT_EQ(s.stride(0), 4);
  EXPECT_EQ(test::thrown_by([&] { t.transposed(0, 3); }), "transposed(0, 3) of a fattn::Tensor of 3 dimensions; they are counted from 0");
  EXPECT_EQ(test::thrown_by([&] {
              Tensor(x, DType::kF32, {1, 1, 1, 1, 1});
            }),
            "a fattn::Tensor is made with 5 dimensions; allowed: up to 4. Merge some of them");
  EXPECT_EQ(test::thrown_by([&] {
              Tensor(x, DType::kF32, {2, 3}, {3});
            }),
            "a fattn::Tensor is made with 2 dimensions and 1 strides; allowed: as many. Give each dimension its stride, in elements");
  EXPECT_FALSE(Tensor());
}

}  // namespace
}  // namespace fattn
