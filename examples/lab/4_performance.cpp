// Chapter 4 in C++: operations and bytes of a plan, the rates that a call reaches, how time grows, and which limit is near.
#include <array>
#include <memory>
#include <numeric>

#include "lab.h"

using course::Matrix;
using course::Values;

namespace {

struct Call {
  double seconds, flops, bytes;
};

Call measured(int64_t queries, int64_t keys, int64_t headdim) {
  const Matrix q = course::random_matrix(queries, headdim, 1), k = course::random_matrix(keys, headdim, 2),
               v = course::random_matrix(keys, headdim, 3);
  Matrix o(queries, headdim);
  fattn::ForwardTensors t;
  t.q = q.tensor(), t.k = k.tensor(), t.v = v.tensor(), t.o = o.tensor();
  const fattn::Plan plan(t, fattn::Options());  // made once, executed many times
  const fattn_plan_info info = plan.info();
  std::vector<char> workspace(plan.workspace_bytes() + 64);
  void* aligned = workspace.data();
  size_t room = workspace.size();
  std::align(64, plan.workspace_bytes(), aligned, room);
  return {course::seconds_of([&] { plan.execute(t, aligned, plan.workspace_bytes()); }, 15), info.flops, info.bytes};
}

// Bytes a second of one thread that adds up numbers which no cache holds.
double read_rate() {
  const Values numbers(size_t{1} << 26, 1.0F);
  volatile float sum = 0;
  return static_cast<double>(numbers.size() * sizeof(float)) / course::seconds_of(
                                                                   [&] {
                                                                     float parts[16] = {};
                                                                     for (size_t i = 0; i < numbers.size(); i += 16)
                                                                       for (size_t j = 0; j < 16; ++j) parts[j] += numbers[i + j];
                                                                     sum = std::accumulate(parts, parts + 16, 0.0F);
                                                                   },
                                                                   3);
}

}  // namespace

int main() {
  return course::run([] {
    const double memory = read_rate();
    std::printf("one thread reads memory at %.1f GB/s\n\n%8s %8s %8s %11s %9s %8s %10s\n", memory / 1e9, "queries", "keys", "headdim", "time",
                "GFLOP/s", "GB/s", "FLOP/byte");
    bool right = true;
    std::vector<double> logs_n, logs_t;
    for (const auto& [queries, keys, headdim] :
         {std::array<int64_t, 3>{64, 64, 64}, {512, 512, 64}, {1024, 1024, 64}, {2048, 2048, 64}, {2048, 2048, 128}, {1, 65536, 64}}) {
      const Call call = measured(queries, keys, headdim);
      std::printf("%8lld %8lld %8lld %8.3f ms %9.1f %8.1f %10.1f\n", static_cast<long long>(queries), static_cast<long long>(keys),
                  static_cast<long long>(headdim), 1e3 * call.seconds, call.flops / call.seconds / 1e9, call.bytes / call.seconds / 1e9,
                  call.flops / call.bytes);
      right = right && call.seconds > 0 && call.flops == 4.0 * static_cast<double>(queries * keys * headdim);
      if (queries == keys && headdim == 64 && queries >= 512) logs_n.push_back(std::log(queries)), logs_t.push_back(std::log(call.seconds));
    }
    // The slope of log t over log N, least squares.
    const auto mean = [](const std::vector<double>& x) { return std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(x.size()); };
    double above = 0, below = 0;
    for (size_t i = 0; i < logs_n.size(); ++i) {
      above += (logs_n[i] - mean(logs_n)) * (logs_t[i] - mean(logs_t));
      below += (logs_n[i] - mean(logs_n)) * (logs_n[i] - mean(logs_n));
    }
    std::printf(
        "\ntime grows as N^%.2f from 512 to 2048: the arithmetic does as N^2, memory is what does not.\n"
        "A long row does hundreds of operations for each byte, and arithmetic is its limit; one query does about one, and memory is.\n"
        "`fattn calibrate` and `fattn memory --explain` say which, and by how much.\n",
        above / below);
    return right;
  });
}
