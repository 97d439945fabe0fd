// What this machine can do at most, measured in the same run: arithmetic by instruction set, and memory reads.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "fattn/types.hpp"

namespace fattn::measure {

struct Peak {
  std::string name;  // "FMA, 512 bit"
  double rate = 0;   // FLOP/s of all threads together; 0: not measured
};

struct Peaks {
  std::string device = "cpu";  // or a CUDA device: its matrix peak is `bf16`, of all 16-bit dtypes; isa and threads mean nothing
  Isa isa = Isa::kAuto;
  int threads = 0;
  Peak fma;    // fp32
  Peak bf16;   // the instruction set's own bf16 products; rate 0 if it has none
  Peak split;  // of a CUDA device: fp32 products made of three 16-bit ones, a third of the matrix peak
  // The same of the best instruction set here, which other programs use whatever was chosen for the library.
  double best_fma_rate = 0, best_bf16_rate = 0;
  double read_bytes_per_s = 0;
  std::string problem;  // why some of a CUDA device's are not known; empty: all are

  // What a result in this dtype is a share of: bf16 products where the instruction set has them and the dtype is bf16; the
  // fp32 FMA peak for everything else (the CPU computes fp16 in fp32); on a CUDA device the matrix peak for both 16-bit dtypes
  // and, where it is the higher, a third of it for fp32.
  const Peak& of(DType dtype) const;
  // No result of anybody in this dtype can be above it. For 16-bit types the highest peak that the machine has.
  double ceiling(DType dtype) const;
};

// kBrief where calls need last no time: the peaks shall not take most of it.
enum class PeakPains { kUsual, kBrief };
// Arithmetic only: about 0.2 s, kBrief a tenth of that. `isa` as a plan reports it; kAuto: the one that the library picks here.
Peaks measure_peaks(Isa isa, int threads, PeakPains pains = PeakPains::kUsual);
// Of a CUDA device: about 0.1 s.
Peaks measure_cuda_peaks(int device);
// Of two measurements around the benchmark: the higher of each.
Peaks higher(const Peaks& before, const Peaks& after);

// Bytes a second that `threads` read together from arrays twice the last-level cache, within 256 and 512 MiB and a quarter
// of the memory available. On a machine whose last-level cache is larger than that, part of it comes from there. kBrief: from 32 MiB, which a cache
// may hold; most of the time goes into writing the arrays first.
double measure_read_bandwidth(int threads, PeakPains pains = PeakPains::kUsual);

nlohmann::ordered_json to_json(const Peaks& peaks);

}  // namespace fattn::measure
