#include "gpt2/group/launch.h"

#include <charconv>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "files/printable.h"
#include "gpt2/error.h"

namespace fattn::gpt2 {
namespace {

using files::printable;

constexpr int kMostRanks = 4096;
constexpr int kMostPorts = 65535;

// The variables of each way to start, the first whose rank is set counts. In a batch script of SLURM the rank is set, but no step is under way.
struct Starter {
  const char *rank, *ranks, *local_rank, *local_ranks;
};
constexpr Starter kStarters[] = {
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"},
    {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"},
    {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"},
    {"SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", nullptr},
};

std::optional<int> whole_number(const char* text) {
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto [at, error] = std::from_chars(text, end, value);
  return error == std::errc() && at == end && at != text ? std::optional<int>(value) : std::nullopt;
}

int number_in(const Environment& environment, const char* name, int least, int most) {
  const char* text = environment(name);
  const std::optional<int> value = text ? whole_number(text) : std::nullopt;
  if (value && *value >= least && *value <= most) return *value;
  throw Error(std::string("the environment variable ") + name + " is '" + printable(text ? text : "", 40) + "'; allowed: " + std::to_string(least) +
              " to " + std::to_string(most));
}

bool is_set(const Environment& environment, const char* name) {
  const char* text = name ? environment(name) : nullptr;
  return text && *text;
}

void read_ranks(const Environment& environment, Launch& launch) {
  for (const Starter& s : kStarters) {
    const bool in_step = std::strncmp(s.rank, "SLURM", 5) != 0 || is_set(environment, s.ranks);
    if (!is_set(environment, s.rank) || !in_step) continue;
    if (!is_set(environment, s.ranks))
      throw Error(std::string("the environment variable ") + s.rank + " is set, " + s.ranks +
                  " is not: set both, or neither to train in one process");
    launch.by = s.rank;
    launch.ranks = number_in(environment, s.ranks, 1, kMostRanks);
    launch.rank = number_in(environment, s.rank, 0, launch.ranks - 1);
    launch.local_rank = is_set(environment, s.local_rank) ? number_in(environment, s.local_rank, 0, launch.ranks - 1) : launch.rank;
    if (is_set(environment, s.local_ranks)) launch.local_ranks = number_in(environment, s.local_ranks, 1, kMostRanks);
    return;
  }
  if (is_set(environment, "WORLD_SIZE") && number_in(environment, "WORLD_SIZE", 1, kMostRanks) > 1)
    throw Error("the environment variable WORLD_SIZE is set, RANK is not: set both, or neither to train in one process");
}

// HOST:PORT; false: it is none, but a file's name.
bool read_place(const std::string& text, Launch& launch) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || text.find('/') != std::string::npos) return false;
  const std::optional<int> port = whole_number(text.c_str() + colon + 1);
  if (!port) return false;
  std::string host = text.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  if (host.empty() || *port < 1 || *port > kMostPorts)
    throw Error("--rendezvous '" + printable(text, 200) + "' is no place to meet; give HOST:PORT with a port from 1 to 65535, or a file's name");
  launch.host = host;
  launch.port = *port;
  return true;
}

}  // namespace

Launch launch_from(const Environment& environment, const std::string& rendezvous) {
  Launch launch;
  read_ranks(environment, launch);
  if (!launch.several()) return launch;
  const bool named = is_set(environment, "MASTER_ADDR");
  if (named) launch.host = environment("MASTER_ADDR");
  if (!rendezvous.empty()) {
    if (!read_place(rendezvous, launch)) launch.file = rendezvous;
    return launch;
  }
  if (!named || !is_set(environment, "MASTER_PORT"))
    throw Error("this is one of " + std::to_string(launch.ranks) + " processes (" + launch.by +
                "), but where they meet is not known: give --rendezvous " +
                "FILE in a folder that all of them see, or HOST:PORT of rank 0; or set MASTER_ADDR and MASTER_PORT (mpirun -x MASTER_ADDR=...)");
  launch.port = number_in(environment, "MASTER_PORT", 1, kMostPorts - 1) + 1;  // the starter itself may listen on MASTER_PORT
  return launch;
}

Launch launch_from_environment(const std::string& rendezvous) {
  return launch_from([](const char* name) -> const char* { return std::getenv(name); }, rendezvous);
}

}  // namespace fattn::gpt2
