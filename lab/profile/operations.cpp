#include "lab/profile/operations.h"

#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "measure/traffic.h"

namespace fattn::lab::profile {
namespace {

double seconds_of(int64_t ns) { return static_cast<double>(ns) * 1e-9; }

// Time while at least one interval was open; they come by their beginning.
class Union {
 public:
  void add(int64_t begin, int64_t end) {
    if (begin > end_)
      total_ += end - begin;
    else if (end > end_)
      total_ += end - end_;
    end_ = std::max(end_, end);
  }
  int64_t total() const { return total_; }

 private:
  int64_t end_ = -1, total_ = 0;
};

bool takes_time(EventKind kind) { return kind != EventKind::kMemory; }

// What is inside of others on the same thread is taken off their time. Streams have no insides.
std::vector<int64_t> self_times(const std::vector<TraceEvent>& events) {
  std::vector<int64_t> self(events.size());
  std::map<int32_t, std::vector<size_t>> open;  // of each thread
  for (size_t i = 0; i < events.size(); ++i) {
    const TraceEvent& e = events[i];
    if (!takes_time(e.kind)) continue;
    self[i] = e.end_ns - e.begin_ns;
    if (e.device >= 0) continue;
    std::vector<size_t>& around = open[e.thread];
    while (!around.empty() && events[around.back()].end_ns <= e.begin_ns) around.pop_back();
    if (!around.empty()) self[around.back()] -= self[i];
    around.push_back(i);
  }
  for (int64_t& ns : self) ns = std::max<int64_t>(ns, 0);
  return self;
}

}  // namespace

const char* name_of(EventKind kind) {
  switch (kind) {
    case EventKind::kCall: return "call";
    case EventKind::kPart: return "part";
    case EventKind::kRange: return "range";
    case EventKind::kKernel: return "kernel";
    case EventKind::kCopy: return "copy";
    case EventKind::kSet: return "set";
    case EventKind::kDriver: return "driver";
    case EventKind::kMemory: return "memory";
    case EventKind::kOperator: return "operator";
  }
  return "unknown";
}

std::vector<Operation> operations_of(const std::vector<TraceEvent>& events) {
  const std::vector<int64_t> self = self_times(events);
  struct Found {
    Operation operation;
    Union wall;
  };
  std::map<std::tuple<EventKind, std::string, std::string>, Found> found;
  for (size_t i = 0; i < events.size(); ++i) {
    const TraceEvent& e = events[i];
    if (!takes_time(e.kind)) continue;
    // Calls of other shapes are other operations; a part's detail says nothing of its own.
    const bool by_detail = e.kind == EventKind::kCall || e.kind == EventKind::kOperator || e.kind == EventKind::kKernel;
    Found& f = found[{e.kind, e.name, by_detail ? e.detail : ""}];
    Operation& o = f.operation;
    if (o.times == 0) o.kind = e.kind, o.name = e.name, o.detail = e.detail;
    ++o.times;
    o.seconds += seconds_of(e.end_ns - e.begin_ns);
    o.self_seconds += seconds_of(self[i]);
    o.flops += e.flops;
    o.bytes += e.bytes;
    o.memory_bytes = std::max(o.memory_bytes, e.kind == EventKind::kCall ? static_cast<double>(e.workspace_bytes) : 0);
    f.wall.add(e.begin_ns, e.end_ns);
  }
  double host = 0, gpu = 0;
  std::vector<Operation> all;
  for (auto& [key, f] : found) {
    f.operation.wall_seconds = seconds_of(f.wall.total());
    (f.operation.on_gpu() ? gpu : host) += f.operation.self_seconds;
    all.push_back(std::move(f.operation));
  }
  for (Operation& o : all) {
    o.queued = o.kind == EventKind::kCall && gpu > 0;
    const double whole = o.on_gpu() ? gpu : host;
    o.share = whole > 0 ? o.self_seconds / whole : 0;
  }
  sort_operations(all, SortBy::kTime);
  return all;
}

Totals totals_of(const std::vector<Operation>& operations) {
  Totals totals;
  for (const Operation& o : operations) {
    (o.on_gpu() ? totals.gpu_seconds : totals.host_seconds) += o.self_seconds;
    if (o.kind != EventKind::kCall) continue;
    totals.flops += o.flops;
    totals.bytes += o.bytes;
    totals.memory_bytes = std::max(totals.memory_bytes, o.memory_bytes);
  }
  return totals;
}

void sort_operations(std::vector<Operation>& operations, SortBy by) {
  const auto key = [by](const Operation& o) {
    switch (by) {
      case SortBy::kTimes: return static_cast<double>(o.times);
      case SortBy::kFlops: return o.flops;
      case SortBy::kBytes: return o.bytes;
      case SortBy::kMemory: return o.memory_bytes;
      default: return o.self_seconds;
    }
  };
  std::stable_sort(operations.begin(), operations.end(),
                   [&](const Operation& a, const Operation& b) { return by == SortBy::kName ? a.name < b.name : key(a) > key(b); });
}

void keep_first(std::vector<Operation>& operations, size_t top) {
  std::set<std::string> calls;  // that are kept
  size_t kept = 0;
  for (size_t i = 0; i < operations.size(); ++i) {
    const bool new_call = operations[i].kind == EventKind::kCall && calls.insert(operations[i].name).second;
    if (i >= top && !new_call) continue;
    if (kept != i) operations[kept] = std::move(operations[i]);
    ++kept;
  }
  operations.resize(kept);
}

void add_costs(std::vector<Operation>& operations, const measure::ProblemSpec& s, measure::Pass pass, const std::string& algorithm, Isa isa,
               int64_t calls) {
  const double pairs =
      static_cast<double>(s.batch) * static_cast<double>(s.nheads) * static_cast<double>(s.seqlen_q) * static_cast<double>(s.seqlen_k);
  const double d = static_cast<double>(s.headdim), dv = static_cast<double>(s.headdim_v), matrix = pairs * static_cast<double>(size_of(s.dtype));
  const auto q = static_cast<double>(s.q_bytes()), k = static_cast<double>(s.k_bytes()), v = static_cast<double>(s.v_bytes()),
             o = static_cast<double>(s.o_bytes());
  const double rows = static_cast<double>(s.batch) * static_cast<double>(s.nheads) * static_cast<double>(s.seqlen_q);
  struct Part {
    const char* name;
    double flops, bytes;
  };
  // Of algorithm standard, which computes every pair, hidden or not: its matrices are written and read by each of its parts.
  const Part parts[] = {{"s = q k^T", 2 * pairs * d, q + k + matrix},      {"p = softmax(s)", 0, 2 * matrix},
                        {"o = p v", 2 * pairs * dv, matrix + v + o},       {"delta = rowsum(o dout)", 2 * rows * dv, 2 * o},
                        {"dp = dout v^T", 2 * pairs * dv, o + v + matrix}, {"gradient of softmax", 0, 4 * matrix},
                        {"dq = ds k", 2 * pairs * d, matrix + k + q},      {"dv = p^T dout", 2 * pairs * dv, matrix + o + v},
                        {"dk = ds^T q", 2 * pairs * d, matrix + q + k}};
  const auto times = static_cast<double>(calls);
  for (Operation& operation : operations) {
    if (operation.kind != EventKind::kPart) continue;
    for (const Part& part : parts)
      if (operation.name == part.name && (algorithm == "standard" || operation.name == "delta = rowsum(o dout)"))
        operation.flops = part.flops * times, operation.bytes = part.bytes * times;
    const bool fused = operation.name == "tiles of queries" || operation.name == "chunks of keys" || operation.name == "super-blocks of keys" ||
                       operation.name == "heads forward" || operation.name == "heads backward";
    if (!fused) continue;
    operation.flops = measure::cost_of(s, pass).flops * times;
    if (const std::optional<double> moved = measure::moved_bytes_cpu(algorithm, isa, s, pass)) operation.bytes = *moved * times;
  }
}

void add_gpu_costs(std::vector<Operation>& operations, const measure::ProblemSpec& spec, measure::Pass pass, int64_t calls) {
  Operation* longest = nullptr;
  for (Operation& operation : operations)
    if (operation.kind == EventKind::kKernel && (longest == nullptr || operation.self_seconds > longest->self_seconds)) longest = &operation;
  // Standard attention's products are kernels of another library, several to a call.
  const bool fused = longest != nullptr && longest->name.rfind("fattn_v", 0) == 0;
  if (fused) longest->flops = measure::cost_of(spec, pass).flops * static_cast<double>(calls);
}

}  // namespace fattn::lab::profile
