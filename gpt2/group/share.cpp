#include "gpt2/group/share.h"

#include <string>

#include "gpt2/error.h"

namespace fattn::gpt2 {

Share share_of(const Launch& launch, int64_t context) {
  if (context < 1 || launch.ranks % context != 0) {
    std::string allowed;
    for (int i = 1; i <= launch.ranks; ++i)
      if (launch.ranks % i == 0) allowed += (allowed.empty() ? "" : ", ") + std::to_string(i);
    throw Error("--context-parallel " + std::to_string(context) + " does not divide the number of processes, which is " +
                std::to_string(launch.ranks) + "; allowed: " + allowed + ". torchrun, mpirun or srun start more of them");
  }
  const int ranks = static_cast<int>(context);
  return {launch.rank % ranks, ranks, launch.rank / ranks, launch.ranks / ranks};
}

}  // namespace fattn::gpt2
