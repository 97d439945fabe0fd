// Between cache and DRAM: what a tensor is read again for comes from the cache as far as that holds what is touched in between, by all heads at work.
// A cache of C bytes keeps of R bytes that are gone through in turn the share C / R at best (with another policy than the last used first, or luck).
// A GPU's L2 keeps nothing of what all heads touch in turn, if that is more than it holds: so one H200 counted it (docs/results/profile).
#include "lab/memory/traffic.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "lab/memory/papers.h"

namespace fattn::lab {
namespace {

using measure::MovedTerm;
using measure::Pass;
using measure::ProblemSpec;

// Units of work of one head: blocks of a GPU, tasks of the CPU. Those at work are as many as there are workers, head by head.
double units_of_head(const std::string& algorithm, const ProblemSpec& s, Pass pass, bool cuda, const measure::CudaTiles& tiles) {
  const auto parts = [](int64_t n, int64_t part) { return std::max(1.0, std::ceil(static_cast<double>(n) / static_cast<double>(part))); };
  if (algorithm == "v1" && pass == Pass::kForward) return 1;
  if (pass == Pass::kForward) return parts(s.seqlen_q, cuda ? tiles.forward_rows : 64);
  return cuda ? parts(s.seqlen_k, tiles.backward_keys) : 1;
}

double heads_at_work(const std::string& algorithm, const ProblemSpec& s, Pass pass, const MemoryMachine& m, const measure::CudaTiles& tiles) {
  const double heads = static_cast<double>(s.batch * s.nheads);
  return std::clamp(std::ceil(m.workers / units_of_head(algorithm, s, pass, m.cuda, tiles)), 1.0, std::max(1.0, heads));
}

LevelTerm level_term(const MovedTerm& moved, double heads, double all_heads, const MemoryMachine& m) {
  LevelTerm t;
  t.moved = moved;
  t.reused_bytes = moved.reused_of_head * (moved.all_heads ? all_heads : heads);
  if (t.reused_bytes > m.cache_bytes) t.missed = m.cuda && moved.all_heads ? 1 : 1 - m.cache_bytes / t.reused_bytes;
  t.dram_bytes = moved.once + t.missed * moved.dram_of_missed * std::max(0.0, moved.bytes - moved.once);
  return t;
}

void add_on_chip(Traffic& t, const ProblemSpec& s, Pass pass, bool cuda, const measure::CudaTiles& tiles) {
  const double e = static_cast<double>(size_of(s.dtype)), d = static_cast<double>(s.headdim), dv = static_cast<double>(s.headdim_v);
  const bool forward = pass == Pass::kForward;
  const int64_t gpu_rows = t.algorithm == "v1" ? 16 : forward ? tiles.forward_rows : tiles.backward_rows;
  const int64_t gpu_keys = t.algorithm == "v1" ? 128 : forward ? tiles.forward_keys : tiles.backward_keys;
  const auto rows = static_cast<double>(std::min(s.seqlen_q, cuda ? gpu_rows : 64));
  const auto keys = static_cast<double>(std::min(s.seqlen_k, cuda ? gpu_keys : t.algorithm != "v2" || forward ? 128 : 96));
  if (t.algorithm == "standard" || t.algorithm.empty()) {
    t.on_chip = "tiles of a matrix product, as its library cuts them";
    return;
  }
  if (pass == Pass::kForward) {
    t.on_chip_bytes = e * (rows * d + keys * (d + dv)) + 4 * rows * dv;
    t.on_chip =
        fmt::format("q {:.0f} * {:.0f}, k and v {:.0f} * {:.0f} of {:.0f} bytes; o {:.0f} * {:.0f} in fp32", rows, d, keys, d + dv, e, rows, dv);
  } else {
    t.on_chip_bytes = e * (rows * (d + dv) + keys * (d + dv)) + 4 * keys * (d + dv);
    t.on_chip = fmt::format("q and dout {:.0f} * {:.0f}, k and v {:.0f} * {:.0f} of {:.0f} bytes; dk and dv {:.0f} * {:.0f} in fp32", rows, d + dv,
                            keys, d + dv, e, keys, d + dv);
  }
}

// FLOP of all products, and one exponential a pair of query and key. Standard attention skips no pair; as published it keeps the weights, so that
// its backward pass makes four products instead of five, and no exponentials.
void add_arithmetic(Traffic& t, const ProblemSpec& s, Pass pass) {
  const double of_pair = 2.0 * static_cast<double>(s.headdim + s.headdim_v);  // forward
  t.flops = measure::cost_of(s, pass).flops;
  t.exponentials = t.flops / of_pair / (pass == Pass::kBackward ? 2.5 : 1);
  if (t.algorithm != "standard") return;
  const double pairs = static_cast<double>(s.batch * s.nheads) * static_cast<double>(s.seqlen_q) * static_cast<double>(s.seqlen_k);
  const bool keeps = pass == Pass::kBackward && !t.by_our_loops;
  t.flops = pairs * of_pair * (pass == Pass::kForward ? 1 : keeps ? 2 : 2.5);
  t.exponentials = keeps ? 0 : pairs;
}

// Kernels of a GPU; on the CPU a call is one.
double starts_of(const std::string& algorithm, Pass pass, bool cuda) {
  if (!cuda) return 1;
  if (algorithm == "standard") return pass == Pass::kForward ? 3 : 7;
  return pass == Pass::kForward ? 1 : 3;
}

void add_limits(Traffic& t, const ProblemSpec& s, Pass pass, const MemoryMachine& m) {
  const auto limit = [&](const std::string& name, double work, const char* unit, double rate) {
    Limit l;
    l.name = name;
    if (rate > 0) {
      l.seconds = work / rate;
      l.arithmetic = fmt::format("{:.4g} {} / {:.4g} {}/s", work, unit, rate, unit);
    }
    t.limits.push_back(l);
  };
  limit(m.cuda ? "matrix unit" : "arithmetic", t.flops, "FLOP", m.flops_per_s(s.dtype));
  limit("exponentials", t.exponentials, "exp", m.exp_per_s);
  limit(m.cache + " bandwidth", t.moved_bytes, "bytes", m.cache_bytes_per_s);
  limit("DRAM bandwidth", t.dram_bytes, "bytes", m.dram_bytes_per_s);
  const double starts = starts_of(t.algorithm, pass, m.cuda);
  limit("latency", starts, m.cuda ? "launches" : "calls", m.start_s > 0 ? 1 / m.start_s : 0);
  for (size_t i = 0; i < t.limits.size(); ++i) {
    if (t.limits[i].seconds <= 0) continue;
    t.bound_known = true;
    if (t.limits[i].seconds > t.limits[t.binding].seconds) t.binding = i;
  }
}

}  // namespace

Traffic traffic_of(const std::string& algorithm, const ProblemSpec& spec, Pass pass, const MemoryMachine& machine, const measure::CudaTiles& tiles) {
  Traffic t;
  t.algorithm = algorithm;
  if (algorithm == "v3" && !machine.cuda) {
    t.reason = "algorithm v3 is for Hopper GPUs; it moves what v2 moves and overlaps products and softmax";
    return t;
  }
  t.papers = papers_terms(algorithm, spec, pass, machine.chip_bytes);
  for (const MovedTerm& term : t.papers) t.papers_bytes += term.bytes;
  const auto ours = machine.cuda ? measure::moved_terms(algorithm, spec, pass, tiles) : measure::moved_terms_cpu(algorithm, machine.isa, spec, pass);
  t.by_our_loops = ours.has_value();
  const double heads = heads_at_work(algorithm, spec, pass, machine, tiles), all = static_cast<double>(spec.batch * spec.nheads);
  for (const MovedTerm& term : ours ? *ours : t.papers) {
    t.terms.push_back(level_term(term, heads, all, machine));
    t.moved_bytes += term.bytes;
    t.dram_bytes += t.terms.back().dram_bytes;
  }
  add_arithmetic(t, spec, pass);
  add_on_chip(t, spec, pass, machine.cuda, tiles);
  add_limits(t, spec, pass, machine);
  return t;
}

}  // namespace fattn::lab
