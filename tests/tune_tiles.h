// What the searches for tiles of algorithm v3 (tune_v3_*.cpp) share: flags, problems, compilation by several processes, candidates that take turns.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend/cuda/v3_common.h"
#include "device/cuda_device.h"
#include "fattn/error.hpp"
#include "gpu_problem.h"
#include "jit/jit.h"
#include "problem/problem.h"
#include "tune_record.h"

namespace fattn::test {

struct SearchFlags {
  std::vector<int> headdims = {64, 96, 128, 192, 256}, seqlens = {512, 1024, 2048, 4096, 8192, 16384};
  std::vector<bool> masks = {false, true};
  int rounds = 5, jobs = 1;
  bool compile_only = false;
  std::string json;
};

// `own` is given a flag that is none of these, and its value: whether it is one of the program's, with a value that it may have.
template <class Own>
bool parse_search(int argc, char** argv, const char* program, SearchFlags& to, const Own& own) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    bool known = true;
    if (flag == "--compile-only") {
      to.compile_only = true;
      continue;
    }
    if (flag == "--headdim")
      to.headdims = numbers_in(value);
    else if (flag == "--seqlen")
      to.seqlens = numbers_in(value);
    else if (flag == "--mask" && (value == "full" || value == "causal"))
      to.masks = {value == "causal"};
    else if (flag == "--rounds")
      to.rounds = std::clamp(std::atoi(value.c_str()), 1, 1000);
    else if (flag == "--jobs")
      to.jobs = std::clamp(std::atoi(value.c_str()), 1, 256);
    else if (flag == "--json")
      to.json = value;
    else
      known = own(flag, value);
    const auto positive = [](const std::vector<int>& all) { return !all.empty() && *std::min_element(all.begin(), all.end()) > 0; };
    if (!known || value.empty() || !positive(to.headdims) || !positive(to.seqlens)) {
      std::fprintf(stderr, "%s: '%s' is no flag or '%s' not its value; the flags are explained in tests/%s.cpp\n", program, flag.c_str(),
                   value.c_str(), program);
      return false;
    }
    ++i;
  }
  return true;
}

// batch * seqlen = 16384, nheads * headdim = 2048.
inline Case search_case(DType dtype, int headdim, int seqlen, bool causal) {
  constexpr int kTokens = 16384, kWidth = 2048;
  const int nheads = std::max(1, kWidth / headdim);
  return shape(dtype, std::max(1, kTokens / seqlen), seqlen, seqlen, nheads, nheads, headdim, causal);
}

inline core::Problem forward_problem_of(const Case& c) {
  core::Problem p;
  p.dtype = c.dtype;
  p.batch = c.batch, p.seqlen_q = c.seqlen_q, p.seqlen_k = c.seqlen_k, p.nheads = c.nheads, p.nheads_k = c.nheads_k;
  p.headdim = c.headdim, p.headdim_v = c.headdim_v;
  p.causal = c.causal;
  p.window_left = c.window_left;
  p.softcap = c.softcap;
  p.softmax_scale = 1 / std::sqrt(static_cast<double>(c.headdim));
  p.q = p.k = p.v = p.o = {c.seqlen_q * c.nheads * c.headdim, c.nheads * c.headdim, c.headdim};
  p.lse = {c.nheads * c.seqlen_q, 1, c.seqlen_q};
  p.want_lse = true;
  return p;
}

struct SearchKernel {
  core::jit::Request request;
  int registers;     // a thread's at launch, which its warps count on; 0: any
  std::string name;  // for people
};

// Whether the kernel is what it should be; compiles it if it is in no cache. Says why not.
inline bool compiles(const SearchKernel& kernel) {
  try {
    const core::jit::Resources r = core::jit::build(kernel.request).resources;
    const bool has_registers = kernel.registers == 0 || r.registers == kernel.registers;
    if (r.known && !r.degraded && r.spill_store_bytes + r.spill_load_bytes + r.stack_bytes == 0 && has_registers) return true;
    std::fprintf(stderr, "%s: %s%d bytes of spills, %d of stack, %d registers\n", kernel.name.c_str(), r.degraded ? "serialised, " : "",
                 r.spill_store_bytes + r.spill_load_bytes, r.stack_bytes, r.registers);
  } catch (const Error& e) {
    std::fprintf(stderr, "%s: %s\n", kernel.name.c_str(), e.what());
  }
  return false;
}

// Fills the cache, in processes of their own; throws if one of them ends early. What does not compile is found by who asks for it then.
inline void compile_all(const std::vector<SearchKernel>& all, int jobs) {
  const size_t step = static_cast<size_t>(jobs);
  for (size_t job = 0; job < step; ++job) {
    const pid_t child = fork();
    if (child < 0) throw std::runtime_error("cannot start a process");
    if (child > 0) continue;
    for (size_t i = job; i < all.size(); i += step) {
      try {
        core::jit::build(all[i].request);
      } catch (const Error&) {
      }
    }
    _exit(0);
  }
  int status = 0, any = 0;
  while (wait(&status) > 0) any |= status;
  if (any != 0) throw std::runtime_error("a process that compiles ended early");
}

// The greatest difference() of several pieces of a large tensor, evenly spread over it; NaN if there is one.
inline double difference_of_pieces(const Tensor& a, const Tensor& b, int pieces) {
  const int64_t size = a.size(), length = std::min<int64_t>(size, 1 << 17);
  double most = 0;
  for (int i = 0; i < pieces; ++i) {
    const int64_t first = (size - length) * i / std::max(1, pieces - 1);
    const auto piece = [&](const Tensor& of) {
      return Tensor(nullptr, of.dtype(), {length})
          .on(Device::kCuda, 0, static_cast<char*>(of.data()) + static_cast<size_t>(first) * size_of(of.dtype()));
    };
    const double wrong = difference(piece(a), piece(b));
    if (std::isnan(wrong)) return wrong;
    most = std::max(most, wrong);
  }
  return most;
}

template <class Plan>
struct Candidate {
  Plan plan;
  bool of_table = false;
  std::vector<double> seconds;
  double median() const {
    std::vector<double> all = seconds;
    std::nth_element(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2), all.end());
    return all[all.size() / 2];
  }
};

constexpr double kTurnSeconds = 0.2;  // how long a turn lasts

// Forgets what was measured before. A turn is one launch, or as many as take `turn_seconds`, of which the second half counts: where a GPU is at its
// limit of power its clock follows who runs for as long as that, and candidates that take turns launch by launch would share one clock.
template <class Plan, class Launch>
void take_turns(std::vector<Candidate<Plan>>& all, int rounds, const cuda::Stream& stream, const Launch& launch, double turn_seconds = 0) {
  cuda::Event begin(0), end(0);
  const auto seconds_of = [&](const Plan& plan, int launches) {
    begin.record(stream.get());
    for (int i = 0; i < launches; ++i) launch(plan);
    end.record(stream.get());
    return begin.seconds_to(end) / launches;
  };
  for (Candidate<Plan>& c : all) c.seconds.clear();
  std::vector<size_t> order(all.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::mt19937 random(1);
  for (int round = -1; round < rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);  // who ran before leaves its heat: up to 2 %
    for (const size_t next : order) {
      Candidate<Plan>& c = all[next];
      double seconds = seconds_of(c.plan, 1);
      const int half = round < 0 ? 0 : static_cast<int>(turn_seconds / 2 / seconds);
      if (half > 0) {
        seconds_of(c.plan, half);
        seconds = seconds_of(c.plan, half);
      }
      if (round >= 0) c.seconds.push_back(seconds);  // the first round warms up
    }
  }
}

// The fastest `count`, in order, and the table's.
template <class Plan>
void keep_fastest(std::vector<Candidate<Plan>>& all, size_t count) {
  std::stable_sort(all.begin(), all.end(), [](const Candidate<Plan>& a, const Candidate<Plan>& b) { return a.median() < b.median(); });
  for (size_t i = all.size(); i-- > count;)
    if (!all[i].of_table) all.erase(all.begin() + static_cast<std::ptrdiff_t>(i));
}

// On the GPU: search(headdim, causal, seqlen, file) for each problem, where file(record) puts a record of what was measured into the file.
template <class Search>
int search_all(const char* program, const SearchFlags& flags, DType dtype, const Search& search) {
  std::string reason;
  if (core::cuda_device_count(&reason) == 0) throw std::runtime_error(reason);
  const core::CudaDeviceInfo& gpu = core::cuda_device(0).info();
  if (gpu.capability() != core::cuda::kV3Arch) throw std::runtime_error("algorithm v3 is for compute capability 9.0; " + gpu.name + " is another");
  nlohmann::ordered_json record = record_of_search(program, gpu.name, flags.rounds, dtype == DType::kF16 ? "fp16" : "bf16");
  const auto file = [&](const nlohmann::ordered_json& problem) {
    record["problems"].push_back(problem);
    std::fflush(stdout);
    if (!flags.json.empty()) write_whole(flags.json, record);  // after each, so that nothing is lost
  };
  for (const int headdim : flags.headdims)
    for (const bool causal : flags.masks)
      for (const int seqlen : flags.seqlens) search(headdim, causal, seqlen, file);
  return 0;
}

}  // namespace fattn::test
