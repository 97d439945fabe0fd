#include "device/libraries.h"

#include "device/cublaslt.h"
#include "device/cuda_driver.h"
#include "device/nccl.h"

namespace fattn::core {

std::vector<LibraryStatus> library_status() {
  const CudaDriver& cuda = cuda_driver();
  const CublasLt& products = cublaslt();
  const Nccl exchanges = open_nccl(nccl_candidates(), false);
  return {{"CUDA driver", "memory and kernels of NVIDIA GPUs", cuda.path, cuda.reason},
          {"cuBLASLt", "matrix products of algorithm standard on NVIDIA GPUs", products.path, products.reason},
          {"NCCL", "sums over the GPUs of a training run", exchanges.path, exchanges.reason}};
}

}  // namespace fattn::core
