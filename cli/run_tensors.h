// The tensors of a run: as its file has them, in memory, and as the library takes them.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "fattn/fattn.hpp"
#include "files/safetensors/reader.h"
#include "files/safetensors/writer.h"

namespace fattn::cli {

const char* file_name_of(DType dtype);
std::string show(const std::vector<int64_t>& shape);

// A contiguous tensor with memory of its own, in the layout of the file.
struct Held {
  std::string name;
  DType dtype = DType::kF32;
  std::vector<int64_t> shape;
  bool rows = true;  // q, k, v and what has their shapes: four dimensions in the order of --layout
  files::safetensors::Bytes data;
  cuda::Buffer on_device;  // a copy, where a CUDA device computes

  uint64_t bytes() const;
  void allocate() { data = files::safetensors::allocate(bytes()); }
  // As the library sees it: (batch, seqlen, heads, headdim), without a copy; on a CUDA device (or, -1, in host memory). Absent without a name.
  Tensor view(bool bhsd, int device) const;
};

// Everything that a run reads and writes, in the order of kTensors. A tensor without a name is absent.
class RunTensors {
 public:
  bool bhsd = false;

  Held& operator[](std::string_view name) { return all_[tensor_index(name)]; }
  bool has(std::string_view name) const { return !all_[tensor_index(name)].name.empty(); }
  bool packed() const { return has("cu_seqlens_q") || has("cu_seqlens_k"); }
  bool backward() const { return has("dout"); }
  std::vector<Held*> inputs();  // of the file
  std::vector<Held*> outputs();
  // ForwardTensors or BackwardTensors. `device`: a CUDA device, or -1 for host memory.
  template <class Views>
  Views views(int device) const {
    Views views;
    for_each_tensor(views, [&](const TensorRow& row, Tensor& view) { view = all_[tensor_index(row.name)].view(bhsd, device); });
    return views;
  }

 private:
  std::vector<Held*> present(bool (*wanted)(const TensorRow&));

  std::array<Held, kTensorCount> all_;
};

// The shapes of all tensors, from those in the file. Throws std::runtime_error where one cannot be taken.
RunTensors describe(const files::safetensors::Reader& file, bool bhsd);

// Reads what says how long packed sequences are, and puts it into max_seqlen_q and max_seqlen_k.
void read_lengths(const files::safetensors::Reader& file, RunTensors& tensors, Options& options);

// The inputs that a file may have beside q, k, v and do, in words; `pair` joins the two of queries and keys.
std::string names_beside(const std::string& pair);

}  // namespace fattn::cli
