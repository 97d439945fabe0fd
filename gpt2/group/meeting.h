// How the processes of a run find each other: rank 0 listens, the others come and say who they are.
#pragma once

#include <vector>

#include "gpt2/group/connection.h"
#include "gpt2/group/launch.h"

namespace fattn::gpt2 {

// Of rank 0 the connections to ranks 1, 2, ...; of the others the one to rank 0. Throws Error as Control's constructor says.
std::vector<Connection> meet(const Launch& launch, double seconds);

}  // namespace fattn::gpt2
