// The C ABI's merge, rotary embeddings and append.
#include "api/guard.h"
#include "fattn/fattn.h"
#include "rows/rows.h"

fattn_status fattn_merge(const fattn_merge_problem* problem) {
  using namespace fattn::core;
  return guarded([&] { rows::merge(sized(problem, "problem"), false); });
}

fattn_status fattn_merge_backward(const fattn_merge_problem* problem) {
  using namespace fattn::core;
  return guarded([&] { rows::merge(sized(problem, "problem"), true); });
}

fattn_status fattn_rotary(const fattn_rotary_problem* problem) {
  using namespace fattn::core;
  return guarded([&] { rows::rotary(sized(problem, "problem")); });
}

fattn_status fattn_append(const fattn_append_problem* problem) {
  using namespace fattn::core;
  return guarded([&] { rows::append(sized(problem, "problem")); });
}
