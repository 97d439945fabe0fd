#include "plan/plan.h"

#include <algorithm>
#include <initializer_list>
#include <limits>
#include <string>

#include "plan/architectures.h"
#include "plan/features.h"
#include "shared/text.h"

namespace fattn::core {
namespace {

[[noreturn]] void unsupported(const std::string& reason) { throw Error(ErrorCode::kUnsupported, reason); }

void require_features(const Problem& p, Way way) {
  if (const std::string why = lacks(p, way); !why.empty()) unsupported(why);
}

int choose_threads(const Problem& p, const CpuInfo& cpu) {
  if (p.num_threads > 0) return p.num_threads;
  return p.executor ? p.executor->concurrency : cpu.usable_threads;
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0 ? 1 : 0); }
// No more than 64 bits hold: k and v, whose strides may be 0, may have any sizes.
int64_t product(std::initializer_list<int64_t> factors) {
  int64_t n = 1;
  for (const int64_t f : factors)
    if (__builtin_mul_overflow(n, f, &n)) return std::numeric_limits<int64_t>::max();
  return n;
}
constexpr int64_t kTile = 64;  // query rows of a tile of the CPU kernels

// Enough tasks to keep many cores busy; a constant, so that the split does not depend on the machine.
constexpr int64_t kTasksWanted = 64;

// Blocks of up to 4 tiles share each K/V block (widening of 16-bit K and V is then a few per cent of the work).
void split_forward(const Problem& p, CpuPlan& plan) {
  plan.path = CpuPlan::Path::kForward;
  const int64_t tiles = ceil_div(p.seqlen_q, kTile);
  const bool amx = plan.isa == Isa::kAmx && p.dtype == DType::kBF16;
  const int64_t most = amx ? 8 : 4;  // AMX packs V anew for every task
  const int64_t all_tiles = p.packed ? p.nheads * ceil_div(p.total_q, kTile) : p.batch * p.nheads * tiles;
  const int64_t per_task = std::clamp<int64_t>(all_tiles / kTasksWanted, 1, std::min(most, std::max<int64_t>(tiles, 1)));
  plan.rows = kTile * per_task;
  plan.block_k = amx ? std::clamp<int64_t>(ceil_div(std::min<int64_t>(p.seqlen_k, 1024), 128) * 128, 128, 1024) : 96;
}

constexpr int64_t kTasksOfWorker = 4;  // so that none waits long for the last

// Few queries: all heads of a group share each read of K and V. Chunks of 256 to 2048 keys.
void split_decode(const Problem& p, CpuPlan& plan) {
  plan.path = CpuPlan::Path::kDecode;
  plan.rows = p.group() * p.seqlen_q;
  int64_t keys = p.seqlen_k - first_key_of_decode(p.mask(), p);
  // A shorter batch entry may begin deeper in a block of random numbers, and go through more of what it does not see.
  if (p.dropout_below > 0 && p.mask().begins() && (p.packed || p.has_seqused_k)) keys = std::min(p.seqlen_k, keys + kDropoutBlock - 1);
  const int64_t entries = p.packed && p.seqlen_k > 0 ? std::clamp<int64_t>(p.total_k / p.seqlen_k, 1, std::max<int64_t>(p.batch, 1)) : p.batch;
  const int64_t wanted = ceil_div(product({entries, p.nheads_k, keys}), 2 * kTasksWanted);
  plan.task_k = std::clamp<int64_t>(ceil_div(std::min<int64_t>(wanted, 2048), 64) * 64, 256, 2048);
  plan.splits = std::max<int64_t>(1, ceil_div(keys, plan.task_k));
  plan.block_k = 32;
  // Where the heads of a key lie side by side, a task that takes all of them reads memory from front to back, as processors
  // foresee it. It takes fewer if workers would be idle: company changes no bit of what a head gets.
  constexpr int64_t kMostRows = 4096;  // what a task sums up for all its heads stays in the L2 cache
  const bool side_by_side = p.k.head < p.k.row && p.v.head < p.v.row;
  plan.heads = side_by_side ? std::clamp<int64_t>(p.nheads_k, 1, std::max<int64_t>(1, kMostRows / std::max<int64_t>(1, plan.rows))) : 1;
  while (plan.heads > 1 && product({p.batch, plan.splits, ceil_div(p.nheads_k, plan.heads)}) < kTasksOfWorker * plan.threads)
    plan.heads = ceil_div(plan.heads, 2);
}

// K, V, dK and dV of a super-block take up to 640 KB in fp32, so that they stay in an L2 cache of 1 MB with the query
// tile: 576 keys at headdim 64.
void split_backward(const Problem& p, CpuPlan& plan) {
  plan.path = CpuPlan::Path::kBackward;
  plan.rows = kTile;
  const bool amx = plan.isa == Isa::kAmx && p.dtype == DType::kBF16;
  plan.block_k = amx ? 128 : 96;
  const int64_t width = std::max(p.headdim, p.headdim_v);
  plan.task_k = std::clamp<int64_t>(640 * 1024 / 16 / width / plan.block_k * plan.block_k, plan.block_k, 6 * plan.block_k);
  // Key heads are independent; where they are few, each super-block of keys is a task of its own.
  int64_t units = p.backward_units();
  // Of packed sequences one may have most of the rows: as many count as the longest has room for.
  if (p.packed && !p.shares_dbias_of_batch() && p.seqlen_k > 0)
    units = std::min(units, ceil_div(p.total_k, p.seqlen_k) * (units / std::max<int64_t>(p.batch, 1)));
  // A super-block may end where a document does, in its second half.
  const bool cut = p.has_documents && p.dropout_below == 0 && !p.shares_dbias_of_batch();
  plan.splits = units < kTasksWanted ? std::max<int64_t>(1, ceil_div(p.seqlen_k, cut ? plan.task_k / 2 + 1 : plan.task_k)) : 1;
}

// Algorithm v1 has blocks of ceil(M / 4 d) keys and min(ceil(M / 4 d), d) queries for a cache of M numbers (Dao et al. 2022, Algorithm 1). M is 256
// KiB of fp32, which the L2 cache of nearly every processor holds, and a constant, so that the split does not depend on the machine.
constexpr int64_t kCacheOfV1 = 64 * 1024;

void plan_v1(const Problem& p, Plan& plan) {
  CpuPlan& c = plan.cpu;
  const int64_t width = std::max(p.headdim, p.headdim_v);
  c.path = p.backward ? CpuPlan::Path::kBackward : CpuPlan::Path::kForward;
  c.block_k = ceil_div(kCacheOfV1, 4 * width);
  c.rows = std::min(c.block_k, width);
  // What has more than vectors of fp32 has no use for it here.
  plan.kernel = text("cpu v1 ", p.backward ? "backward " : "forward ", name_of(p.dtype), " ", name_of(c.isa == Isa::kAmx ? Isa::kAvx512 : c.isa));
  plan.why = text("asked for; blocks of ", c.block_k, " keys and of ", c.rows, " query rows, a task has a ", p.backward ? "key head" : "head");
}

constexpr int64_t kDecodeRows = 8;    // seqlen_q up to which the decode kernels are used
constexpr int64_t kMostGroup = 4096;  // query heads of a key head, likewise: all their rows are in the scratch memory of a task

void plan_cpu(const Problem& p, Plan& plan) {
  CpuPlan& c = plan.cpu;
  // Tiles of AMX choose how their 16 rows round by the scores of all of them.
  if (p.batch_invariant && c.isa == Isa::kAmx) c.isa = Isa::kAvx512Bf16;
  // Their weights are relative to a maximum of before, so that the greatest is rounded, too: 1.2 to 1.3 times FlashAttention-2's error, which an
  // output of 16 bits hides and one of fp32 does not.
  if (p.fp32_out && !p.backward && c.isa == Isa::kAmx) c.isa = Isa::kAvx512Bf16;
  if (p.backward)
    split_backward(p, c);
  else if (!p.batch_invariant && p.seqlen_q <= kDecodeRows && p.group() <= kMostGroup)
    split_decode(p, c);
  else
    split_forward(p, c);
  const char* path = c.path == CpuPlan::Path::kForward ? "forward" : c.path == CpuPlan::Path::kDecode ? "decode" : "backward";
  // AMX multiplies bf16 only; what else its kernel table does is done in AVX-512.
  const bool tiles = c.isa != Isa::kAmx || (p.dtype == DType::kBF16 && c.path != CpuPlan::Path::kDecode);
  plan.kernel = text("cpu v2 ", path, " ", name_of(p.dtype), " ", name_of(tiles ? c.isa : Isa::kAvx512));
  switch (c.path) {
    case CpuPlan::Path::kForward: plan.why = text("tasks of ", c.rows, " query rows, steps of ", c.block_k, " keys"); break;
    case CpuPlan::Path::kDecode:
      plan.why = text("seqlen_q ", p.seqlen_q, " <= ", kDecodeRows, ": the ", c.rows, " rows of a key head together, ", c.splits, " chunks of ",
                      c.task_k, " keys, ", c.heads, " key heads a task");
      break;
    case CpuPlan::Path::kBackward:
      plan.why = text("super-blocks of ", c.task_k, " keys, steps of ", c.block_k, " keys, ", c.splits, " tasks of a key head");
      break;
  }
}

// What no device like this computes, whatever the algorithm; which dtypes and sizes their kernels take, the backend's planners say.
void plan_cuda(const Problem& p, const CudaDeviceInfo& gpu, Plan& plan) {
  const std::string device = text("CUDA device ", gpu.index, " (", gpu.name, ", compute capability ", gpu.major, ".", gpu.minor, ")");
  const bool standard = p.algorithm == Algorithm::kStandard || (p.algorithm == Algorithm::kAuto && p.want_weights);
  if (p.want_weights && !standard)
    unsupported(text("algorithm ", name_of(p.algorithm), " never has the weights in memory; ask for algorithm standard to get them"));
  constexpr int64_t kMost = int64_t{1} << 30;  // CTAs are counted in 32 bits
  if (p.batch > kMost || p.nheads > kMost || p.batch * p.nheads > kMost)
    unsupported(text("batch is ", p.batch, " and nheads ", p.nheads, "; backend cuda computes up to 2^30 of both together. Split the batch"));
  const Architecture* known = architecture_for(gpu.capability());
  if (!known)
    unsupported(
        text(device,
             ": the kernels are for capability 7.5, 8.x, 9.0, 10.x and 12.x, of Jetson boards for Orin (8.7) alone. Use another device, or copy "
             "the tensors to the host"));
  const int arch = known->capability;
  const int level = p.cuda_level != 0 ? p.cuda_level : arch >= 80 ? 80 : 75;
  if (level > arch) unsupported(text("cuda_level is ", level, ", which ", device, " cannot run; leave it at 0"));
  constexpr int kHopper = 90;
  if (p.algorithm == Algorithm::kV3) {
    if (gpu.capability() != kHopper) unsupported(text("algorithm v3 is for compute capability 9.0, and this is ", device, "; ask for v2 or auto"));
    if (p.cuda_level != 0) unsupported(text("cuda_level is ", p.cuda_level, ", which is of algorithm v2; leave it at 0 or ask for v2"));
  }
  if ((standard || p.algorithm == Algorithm::kV1) && p.cuda_level != 0)
    unsupported(text("cuda_level is ", p.cuda_level, ", which is of algorithm v2; leave it at 0 or ask for v2"));
  plan.algorithm = p.algorithm;
  plan.cuda.level = level;
  plan.cuda.arch = arch;
}

}  // namespace

Backend choose_backend(Backend asked, DType dtype, Device device, int device_index) {
  if (device == Device::kCuda) {
    if (asked == Backend::kAuto || asked == Backend::kCuda) return Backend::kCuda;
    unsupported(text("backend ", name_of(asked), " computes in host memory, and the tensors are on CUDA device ", device_index,
                     "; ask for backend cuda or auto, or copy them to the host"));
  }
  if (asked == Backend::kCuda) unsupported("backend cuda computes in device memory, and the tensors are on the CPU; copy them to a CUDA device");
  return asked != Backend::kAuto ? asked : dtype == DType::kF64 ? Backend::kReference : Backend::kCpu;
}

Plan make_plan(const Problem& p, const CpuInfo& cpu, const CudaDeviceInfo& (*gpu)(int index)) {
  Plan plan;
  plan.problem = p;
  plan.cost = cost_of(p);

  if (p.paged && p.backward)
    unsupported("the backward pass does not compute a paged cache (block_table); give k and v as they were written, without block_table");
  plan.backend = choose_backend(p.backend, p.dtype, p.device, p.device_index);
  if (plan.backend == Backend::kCuda) {
    plan_cuda(p, gpu(p.device_index), plan);
    return plan;
  }
  if (plan.backend == Backend::kReference) {
    if (p.algorithm != Algorithm::kAuto && p.algorithm != Algorithm::kStandard)
      unsupported("backend reference has algorithm standard only; ask for standard or auto, or for backend cpu");
    require_features(p, Way::kReference);
    plan.kernel = "reference float64";
    plan.why = p.backend == Backend::kReference ? "asked for" : "fp64 runs on backend reference only";
    return plan;
  }

  if (p.dtype == DType::kF64) unsupported("backend cpu computes fp32, fp16 and bf16; fp64 runs on backend reference only");
  if (p.algorithm == Algorithm::kV3) unsupported("algorithm v3 is for Hopper GPUs; backend cpu has standard, v1 and v2. Ask for one of them or auto");
  plan.algorithm = p.algorithm != Algorithm::kAuto ? p.algorithm : p.want_weights ? Algorithm::kStandard : Algorithm::kV2;
  const bool standard = plan.algorithm == Algorithm::kStandard, v1 = plan.algorithm == Algorithm::kV1;
  require_features(p, standard ? Way::kCpuStandard : v1 ? Way::kCpuV1 : Way::kCpuV2);
  plan.cpu.isa = choose_isa(p.cpu_isa, cpu);
  plan.cpu.threads = choose_threads(p, cpu);
  if (standard) {
    plan.kernel = text("cpu standard ", p.backward ? "backward " : "forward ", name_of(p.dtype));
    plan.why = p.algorithm == Algorithm::kStandard ? "asked for" : "the weights are wanted, which only standard attention has";
    return plan;
  }
  if (p.want_weights)
    unsupported(text("algorithm ", name_of(plan.algorithm), " never has the weights in memory; ask for algorithm standard to get them"));
  v1 ? plan_v1(p, plan) : plan_cpu(p, plan);
  return plan;
}

}  // namespace fattn::core
