// Fuzzes config.json and the index of shards: any bytes give an error in printable text, or sizes whose products fit and names inside the folder.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <string_view>

#include "files/printable.h"
#include "gpt2/config.h"
#include "gpt2/memory.h"
#include "gpt2/weights/shards.h"
#include "gpt2/weights/tensors.h"

namespace {

using namespace fattn::gpt2;

void require(bool condition) {
  if (!condition) std::abort();
}

template <class Call>
void accepted_or_refused(const Call& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {  // any other kind is a fault
    const std::string message = error.what();
    require(!message.empty() && message.size() < 5000 && fattn::files::printable(message, 5000) == message);
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  accepted_or_refused([&] {
    const Config config = parse_config(input);
    int64_t sum = 0;
    for (const TensorSpec& tensor : tensors_of(config)) {
      int64_t n = 4;
      for (const int64_t extent : tensor.shape) require(extent > 0 && !__builtin_mul_overflow(n, extent, &n));
      require(!__builtin_add_overflow(sum, n, &sum));
    }
    require(sum == 4 * parameters_of(config));
    const std::string written = to_json(config, fattn::DType::kBF16);
    require(to_json(parse_config(written), fattn::DType::kBF16) == written);
    parse_config(with_dtype(input, fattn::DType::kF16));
    memory_of(config, fattn::DType::kF32, {}, {.batch = 1, .context = 1});
  });
  accepted_or_refused([&] {
    for (const auto& [tensor, file] : parse_shard_index(input)) require(!file.empty() && file.find('/') == std::string::npos && file[0] != '.');
  });
  return 0;
}
