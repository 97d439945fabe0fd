// Who this process is among those of a run, and where they meet: what torchrun, mpirun, SLURM or a shell's variables say.
#pragma once

#include <functional>
#include <string>

namespace fattn::gpt2 {

struct Launch {
  int rank = 0, ranks = 1;  // of the run
  int local_rank = 0;       // on this machine: which GPU is whose
  int local_ranks = 0;      // on this machine; 0: not known
  std::string by;           // the variable that said so: "RANK"; empty: one process

  // Where rank 0 listens: at `host` and `port`, or as it writes into `file`.
  std::string host, file;
  int port = 0;

  bool several() const { return ranks > 1; }
};

// The value of an environment variable; null: it is not set.
using Environment = std::function<const char*(const char* name)>;

// `rendezvous`: FILE or HOST:PORT ([ADDRESS]:PORT of IPv6); empty: MASTER_ADDR, and the port behind MASTER_PORT. Throws Error where variables are
// missing or make no sense.
Launch launch_from(const Environment& environment, const std::string& rendezvous);
// Of this process.
Launch launch_from_environment(const std::string& rendezvous);

}  // namespace fattn::gpt2
