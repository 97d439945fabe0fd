#include "lab/profile/attention.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <list>

#include "fattn/device.hpp"
#include "lab/profile/cupti_here.h"
#include "lab/profile/gpu_counters.h"
#include "lab/profile/gpu_trace.h"
#include "lab/profile/recorder.h"
#include "measure/library_plans.h"

namespace fattn::lab::profile {
namespace {

using measure::Addresses;
using measure::LibraryPlans;
using measure::Pass;

constexpr double kCountedSeconds = 0.05;  // counters see at least so much of calls
constexpr double kMostCountedCalls = 1000;

void take(const TraceEvent* events, size_t count, void* to) {
  auto& all = *static_cast<std::vector<TraceEvent>*>(to);
  if (static_cast<int64_t>(all.size() + count) <= kMostEventsOfASide) all.insert(all.end(), events, events + count);
}

// Memory of a call's tensors where the call computes, each by its name in the trace.
class Tensors {
 public:
  explicit Tensors(const measure::Placement& place) : place_(place) {}
  ~Tensors() {
    while (!taken_.empty()) give_back(taken_.back().name);
  }
  Tensors(const Tensors&) = delete;
  Tensors& operator=(const Tensors&) = delete;

  void* make(const char* name, int64_t bytes) {
    Taken& taken = taken_.emplace_back();
    taken.name = name;
    taken.bytes = bytes;
    if (place_.device == Device::kCuda)
      taken.buffer = cuda::Buffer(place_.index, static_cast<size_t>(bytes));
    else
      taken.pages = measure::Pages(static_cast<size_t>(bytes));
    note(taken, bytes);
    return taken.address();
  }
  // On the CPU the data is where it is; a GPU gets a copy.
  const void* input(const char* name, const measure::Pages& data) {
    if (data.size() == 0) return nullptr;
    const auto bytes = static_cast<int64_t>(data.size());
    if (place_.device == Device::kCuda) {
      void* const to = make(name, bytes);
      taken_.back().buffer.copy_from(data.data(), data.size());
      return to;
    }
    Taken& taken = taken_.emplace_back();
    taken.name = name;
    taken.bytes = bytes;
    note(taken, bytes);
    return data.data();
  }
  void give_back(const std::string& name) {
    const auto taken = std::find_if(taken_.begin(), taken_.end(), [&](const Taken& t) { return t.name == name; });
    if (taken == taken_.end()) return;
    note(*taken, -taken->bytes);
    taken_.erase(taken);
  }

 private:
  struct Taken {
    std::string name;
    int64_t bytes = 0;
    measure::Pages pages;
    cuda::Buffer buffer;
    void* address() const { return pages.size() > 0 ? pages.data() : buffer.get(); }
  };

  void note(const Taken& taken, int64_t bytes) const {
    TraceEvent event;
    event.kind = EventKind::kMemory;
    event.begin_ns = event.end_ns = now_ns();
    event.thread = this_thread();
    event.device = place_.device == Device::kCuda ? place_.index : -1;
    event.bytes = static_cast<double>(bytes);
    copy_text(event.name, sizeof event.name, taken.name.c_str());
    record(event);
  }

  const measure::Placement& place_;
  std::list<Taken> taken_;
};

const char* name_of_score_input(size_t i) {
  constexpr const char* kNames[] = {"seqused_k", "alibi_slopes", "bias", "mask", "dropout_state", "cu_seqlens", "documents", "block_table"};
  static_assert(std::size(kNames) == measure::kScoreInputs);
  return kNames[i];
}

// While it lives the library tells this profile.
class Listening {
 public:
  Listening() { fattn_set_trace(&kRecordingTrace); }
  ~Listening() { fattn_set_trace(nullptr); }
  Listening(const Listening&) = delete;
  Listening& operator=(const Listening&) = delete;
};

// One side's plans and memory.
class Calls {
 public:
  Calls(const AttentionRun& run, const measure::Inputs& inputs, bool grad)
      : run_(run), plans_(run.side, run.options, run.place), tensors_(run.place) {
    measure::make_library_contestant(run.side, run.options, run.place)->accept(run.spec, grad, run.memory_limit);  // is there memory for it?
    plans_.make(run.spec, grad);
    at_.q = tensors_.input("q", inputs.q);
    at_.k = tensors_.input("k", inputs.k);
    at_.v = tensors_.input("v", inputs.v);
    for (size_t i = 0; i < at_.scores.size(); ++i) at_.scores[i] = tensors_.input(name_of_score_input(i), inputs.scores[i]);
    at_.o = tensors_.make("o", run.spec.o_bytes());
    at_.lse = tensors_.make("lse", run.spec.lse_bytes());
  }

  // Outputs and the workspace of a pass; those of the one before go.
  void prepare(Pass pass, const measure::Inputs& inputs) {
    if (pass == Pass::kBackward) {
      if (workspace_bytes_ == 0 || pass_ != Pass::kForward) take_workspace(Pass::kForward);
      run_once(Pass::kForward);
      at_.dout = tensors_.input("dout", inputs.dout);
      at_.dq = tensors_.make("dq", run_.spec.q_bytes());
      at_.dk = tensors_.make("dk", run_.spec.k_bytes());
      at_.dv = tensors_.make("dv", run_.spec.v_bytes());
      if (run_.spec.dbias) at_.dbias = tensors_.make("dbias", run_.spec.bias_bytes());
    }
    take_workspace(pass);
    run_once(pass);  // pages are touched, kernels loaded, threads started
    wait();
  }

  void run_once(Pass pass) { plans_.execute(pass, at_, workspace_, workspace_bytes_); }
  void wait() const {
    if (run_.place.device == Device::kCuda) check(fattn_cuda_synchronize(run_.place.index));
  }
  measure::Identity identity() const { return plans_.identity(); }

 private:
  void take_workspace(Pass pass) {
    tensors_.give_back("workspace");
    workspace_bytes_ = plans_.workspace_bytes(pass);
    workspace_ = workspace_bytes_ > 0 ? tensors_.make("workspace", static_cast<int64_t>(workspace_bytes_)) : nullptr;
    pass_ = pass;
  }

  const AttentionRun& run_;
  LibraryPlans plans_;
  Tensors tensors_;
  Addresses at_;
  void* workspace_ = nullptr;
  size_t workspace_bytes_ = 0;
  Pass pass_ = Pass::kForward;
};

std::vector<TraceEvent> between(const std::vector<TraceEvent>& events, int64_t begin, int64_t end) {
  std::vector<TraceEvent> inside;
  for (const TraceEvent& e : events)
    if (e.begin_ns >= begin && e.begin_ns < end && e.kind != EventKind::kMemory && e.kind != EventKind::kRange) inside.push_back(e);
  sort_events(inside);
  return inside;
}

// What the model says beside a counter of the same bytes.
void add_models(std::vector<Counter>& counters, const Traffic& traffic) {
  for (Counter& counter : counters) {
    if (counter.name == "memory_bytes" || counter.name == "dram_bytes") {
      counter.model = traffic.dram_bytes;
      counter.model_words = "between the last cache and DRAM, by the model of `fattn memory`";
    }
    if (counter.name == "l2_bytes") {
      counter.model = traffic.moved_bytes;
      counter.model_words = "between multiprocessors and L2, by the model of `fattn memory`";
    }
  }
}

}  // namespace

Side profile_attention(const AttentionRun& run, const measure::Inputs& inputs, const std::vector<Pass>& passes, Lane& lane,
                       std::vector<std::string>& notes, const std::function<void()>& done) {
  Side side;
  side.name = run.side;
  lane.name = "fattn profile";
  lane.process = getpid();
  record_to(take, &lane.events);
  MemoryWatch memory;
  const size_t first = lane.events.size();
  std::string failed;
  try {
    begin_range(run.side.c_str());
    Calls calls(run, inputs, std::find(passes.begin(), passes.end(), Pass::kBackward) != passes.end());
    const std::string algorithm = calls.identity().algorithm;
    for (const Pass pass : passes) {
      PassProfile& profile = side.passes.emplace_back();
      profile.pass = name_of(pass);
      profile.calls = run.calls;
      profile.threads = calls.identity().threads;
      calls.prepare(pass, inputs);
      // Allocations are in the trace already, by their names.
      const std::string gpu_refused = run.cupti ? start_gpu_trace(*run.cupti, {true, false}) : "";
      if (!gpu_refused.empty() && std::find(notes.begin(), notes.end(), gpu_refused) == notes.end()) notes.push_back(gpu_refused);
      const int64_t begin = now_ns();
      {
        const Listening listening;
        const Range range(pass == Pass::kForward ? "forward calls" : "backward calls");
        for (int i = 0; i < run.calls; ++i) calls.run_once(pass);
        calls.wait();
      }
      const int64_t end = now_ns();
      if (run.cupti) stop_gpu_trace();
      profile.seconds = static_cast<double>(end - begin) * 1e-9;
      flush_events();
      profile.operations = operations_of(between(lane.events, begin, end));
      if (run.place.device == Device::kCpu) add_costs(profile.operations, run.spec, pass, algorithm, calls.identity().isa, run.calls);
      if (run.place.device == Device::kCuda) add_gpu_costs(profile.operations, run.spec, pass, run.calls);
      done();
      if (run.perf) {
        const double once = profile.seconds / run.calls;
        const double counted = std::clamp(std::ceil(kCountedSeconds / std::max(once, 1e-9)), static_cast<double>(run.calls), kMostCountedCalls);
        run.perf->start();
        for (int i = 0; i < static_cast<int>(counted); ++i) calls.run_once(pass);
        run.perf->stop();
        profile.counters = run.perf->read(counted);
      }
      if (run.cupti) {
        profile.counters = count_on_gpu(*run.cupti, run.place.index, driver_library(), [&] {
          calls.run_once(pass);
          calls.wait();
        });
      }
      if (!run.spec.windowed() && !run.spec.has_terms() && run.spec.softcap == 0 && run.spec.dtype != DType::kF64) {
        profile.traffic = traffic_of(algorithm, run.spec, pass, memory_machine(run.place.name()), cuda_tiles(run.spec, pass, run.options, run.place));
        if (profile.traffic->reason.empty()) add_models(profile.counters, *profile.traffic);
      }
      done();
    }
  } catch (const std::exception& error) {
    failed = error.what();
  }
  end_range();
  record_to(nullptr, nullptr);
  side.memory.samples = memory.stop();
  for (size_t i = 0; i < passes.size() && !failed.empty(); ++i) {
    if (i == side.passes.size()) side.passes.emplace_back().pass = name_of(passes[i]);
    if (side.passes[i].operations.empty()) side.passes[i].reason = failed;
  }
  sort_events(lane.events);
  side.memory.changes = memory_changes({lane.events.begin() + static_cast<std::ptrdiff_t>(std::min(first, lane.events.size())), lane.events.end()});
  return side;
}

}  // namespace fattn::lab::profile
