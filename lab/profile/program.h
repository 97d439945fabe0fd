// What the processes of a program left, together.
#pragma once

#include <vector>

#include "lab/profile/profile.h"

namespace fattn::lab::profile {

// The events of all lanes, by their beginning.
std::vector<TraceEvent> all_events(const Profile& profile);
// Operations and the number of calls of the library, of all of them.
void summarise(const Profile& profile, PassProfile& pass);

// Of traces alone, without a watch from outside: one side, from the first event to the last.
void finish_recording(Profile& profile);

}  // namespace fattn::lab::profile
