// One sequence over several processes, a GPU each: causal attention, forward and backward, of which each has a part of the rows.
//   mpirun -n 2 ring /tmp/id 65536
//   torchrun --no-python --nproc-per-node 2 ring /tmp/id 65536
// /tmp/id is a file that is not there yet, in a folder that all processes see: one tells the others by it how they find each other. By itself the
// program is one process, on the CPU where there is no GPU. Some rows of o of each process are checked in float64.
#include <fattn/fattn.hpp>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kHeads = 4, kHeadsK = 2, kHeaddim = 64;

// What torchrun, Open MPI, MPICH or Slurm say of this process.
int from_environment(std::initializer_list<const char*> names, int otherwise) {
  for (const char* name : names)
    if (const char* value = std::getenv(name)) return std::atoi(value);
  return otherwise;
}

// Rank 0 writes the id, whole or not at all; the others wait for it.
fattn::GroupId shared_id(const std::filesystem::path& path, int rank) {
  fattn::GroupId id{};
  if (rank == 0) {
    if (std::filesystem::exists(path)) throw fattn::Error(fattn::ErrorCode::kInvalidArgument, path.string() + " is there already; name a new file");
    id = fattn::new_group_id();
    const std::filesystem::path temporary = path.string() + ".new";
    std::ofstream(temporary, std::ios::binary).write(reinterpret_cast<const char*>(id.data()), static_cast<std::streamsize>(id.size()));
    std::filesystem::rename(temporary, path);
    return id;
  }
  for (int waited = 0; !std::filesystem::exists(path); ++waited) {
    if (waited == 3000)
      throw fattn::Error(fattn::ErrorCode::kInvalidArgument, "no " + path.string() + " after 30 seconds; is it in a folder that all processes see?");
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  std::ifstream(path, std::ios::binary).read(reinterpret_cast<char*>(id.data()), static_cast<std::streamsize>(id.size()));
  return id;
}

// Element d of head h at a position of tensor `which`: every process can tell those of all rows. Between -1 and 1.
float number(int which, int64_t position, int64_t h, int64_t d) {
  uint64_t x = static_cast<uint64_t>(((position * 8 + h) * 128 + d) * 4 + which) + 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<float>(x >> 40) * 0x1p-23f - 1;
}

// The rows that a rank holds, of `heads` heads.
std::vector<float> rows_of(const std::vector<fattn_ring_range>& held, int which, int64_t heads) {
  std::vector<float> x;
  for (const fattn_ring_range& range : held)
    for (int64_t position = range.first; position < range.first + range.count; ++position)
      for (int64_t h = 0; h < heads; ++h)
        for (int64_t d = 0; d < kHeaddim; ++d) x.push_back(number(which, position, h, d));
  return x;
}

// The largest error of row `position` of o, a row of kHeads * kHeaddim numbers.
double error_of(const float* o, int64_t position) {
  double worst = 0;
  for (int64_t h = 0; h < kHeads; ++h) {
    std::vector<double> weights, sums(kHeaddim, 0.0);
    double total = 0;
    for (int64_t j = 0; j <= position; ++j) {
      double score = 0;
      for (int64_t d = 0; d < kHeaddim; ++d) score += static_cast<double>(number(0, position, h, d)) * number(1, j, h / (kHeads / kHeadsK), d);
      weights.push_back(std::exp(score / std::sqrt(static_cast<double>(kHeaddim))));
      total += weights.back();
    }
    for (int64_t j = 0; j <= position; ++j)
      for (int64_t d = 0; d < kHeaddim; ++d)
        sums[static_cast<size_t>(d)] += weights[static_cast<size_t>(j)] / total * number(2, j, h / (kHeads / kHeadsK), d);
    for (int64_t d = 0; d < kHeaddim; ++d) {
      const double error = std::fabs(sums[static_cast<size_t>(d)] - static_cast<double>(o[h * kHeaddim + d]));
      if (!(error <= worst)) worst = std::isnan(error) ? HUGE_VAL : error;
    }
  }
  return worst;
}

// Memory of a GPU, or of the host where there is none, 256 bytes aligned.
class Memory {
 public:
  Memory(bool gpu, int device, size_t bytes) {
    if (gpu)
      buffer_ = fattn::cuda::Buffer(device, std::max<size_t>(bytes, 1));
    else
      host_.resize(bytes + 255);
    gpu_ = gpu;
  }
  Memory(bool gpu, int device, const std::vector<float>& from) : Memory(gpu, device, from.size() * sizeof(float)) {
    if (gpu)
      buffer_.copy_from(from.data(), from.size() * sizeof(float));
    else
      std::copy_n(reinterpret_cast<const char*>(from.data()), from.size() * sizeof(float), static_cast<char*>(get()));
  }
  void* get() { return gpu_ ? buffer_.get() : reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(host_.data()) + 255) / 256 * 256); }
  std::vector<float> read(size_t count) {
    std::vector<float> to(count);
    if (gpu_)
      buffer_.copy_to(to.data(), count * sizeof(float));
    else
      std::copy_n(static_cast<const float*>(get()), count, to.data());
    return to;
  }

 private:
  bool gpu_ = false;
  fattn::cuda::Buffer buffer_;
  std::vector<char> host_;
};

int run(int argc, char** argv) {
  const int rank = from_environment({"RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID"}, 0);
  const int ranks = argc > 1 ? from_environment({"WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"}, 1) : 1;
  const int device = from_environment({"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"}, 0);
  const bool gpu = ranks > 1 || fattn::cuda::count() > 0;
  const int64_t seqlen = argc > 2 ? std::atoll(argv[2]) : 300;

  std::unique_ptr<fattn::Group> group;
  if (ranks > 1)
    group = std::make_unique<fattn::Group>(device, rank, ranks, shared_id(argv[1], rank));
  else
    group = std::make_unique<fattn::Group>();

  fattn::RingSequence sequence;
  sequence.seqlen_q = sequence.seqlen_k = seqlen;
  fattn::Options options;
  options.causal = true;
  const fattn::RingSchedule held = fattn::ring_schedule(sequence, rank, ranks);  // which rows are mine

  const auto tensor = [&](Memory& memory, int64_t heads) {
    return fattn::Tensor(nullptr, fattn::DType::kF32, {1, held.rows_q, heads, kHeaddim})
        .on(gpu ? fattn::Device::kCuda : fattn::Device::kCpu, device, memory.get());
  };
  const size_t q_bytes = static_cast<size_t>(held.rows_q * kHeads * kHeaddim) * sizeof(float), k_bytes = q_bytes / (kHeads / kHeadsK);
  Memory q(gpu, device, rows_of(held.held_q, 0, kHeads)), k(gpu, device, rows_of(held.held_k, 1, kHeadsK));
  Memory v(gpu, device, rows_of(held.held_k, 2, kHeadsK)), dout(gpu, device, rows_of(held.held_q, 3, kHeads));
  Memory o(gpu, device, q_bytes), lse(gpu, device, q_bytes / kHeaddim), dq(gpu, device, q_bytes), dk(gpu, device, k_bytes), dv(gpu, device, k_bytes);
  const fattn::Tensor lse_view =
      fattn::Tensor(nullptr, fattn::DType::kF32, {1, kHeads, held.rows_q}).on(gpu ? fattn::Device::kCuda : fattn::Device::kCpu, device, lse.get());
  const fattn::ForwardTensors forward{tensor(q, kHeads), tensor(k, kHeadsK), tensor(v, kHeadsK), tensor(o, kHeads), lse_view, {}};
  const fattn::BackwardTensors backward{forward.q,          forward.k,           forward.v,          forward.o, lse_view, tensor(dout, kHeads),
                                        tensor(dq, kHeads), tensor(dk, kHeadsK), tensor(dv, kHeadsK)};

  fattn::RingPlan forward_plan(*group, sequence, forward, options), backward_plan(*group, sequence, backward, options);
  const size_t bytes = std::max(forward_plan.workspace_bytes(), backward_plan.workspace_bytes());
  Memory workspace(gpu, device, bytes);
  forward_plan.execute(forward, workspace.get(), bytes);
  backward_plan.execute(backward, workspace.get(), bytes);

  const std::vector<float> result = o.read(q_bytes / sizeof(float));
  double worst = 0;
  int64_t row = 0, checked = 0;
  for (const fattn_ring_range& range : held.held_q) {
    for (const int64_t i : {int64_t{0}, range.count / 2, range.count - 1}) {
      if (range.count == 0) continue;
      const double error = error_of(result.data() + (row + i) * kHeads * kHeaddim, range.first + i);
      if (!(error <= worst)) worst = std::isnan(error) ? HUGE_VAL : error;
      ++checked;
    }
    row += range.count;
  }
  std::printf("rank %d of %d: %lld of %lld rows, workspace %.1f MiB, largest error of %lld rows %.2g\n", rank, ranks,
              static_cast<long long>(held.rows_q), static_cast<long long>(seqlen), static_cast<double>(bytes) / 1048576.0,
              static_cast<long long>(checked), worst);
  if (rank == 0 && ranks > 1) std::filesystem::remove(argv[1]);
  return worst < 1e-5 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ring: %s\n", error.what());
    return 2;
  }
}
