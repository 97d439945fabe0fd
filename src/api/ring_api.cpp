// The C ABI's schedules of ring attention.
#include <memory>

#include "api/guard.h"
#include "fattn/fattn.h"
#include "ring/schedule.h"

struct fattn_ring {
  fattn::core::ring::Schedule schedule;
};

namespace {

using namespace fattn::core;

int64_t rows_of(const std::vector<ring::Range>& ranges) {
  int64_t rows = 0;
  for (const ring::Range& x : ranges) rows += x.count;
  return rows;
}

}  // namespace

fattn_status fattn_ring_create(const fattn_ring_problem* problem, fattn_ring** ring) {
  return guarded([&] {
    checked(ring, "ring") = nullptr;
    *ring = std::make_unique<fattn_ring>(fattn_ring{ring::make_schedule(sized(problem, "problem"))}).release();
  });
}

fattn_status fattn_ring_query(const fattn_ring* ring, fattn_ring_schedule* schedule) {
  return guarded([&] {
    const ring::Schedule& s = checked(ring, "ring").schedule;
    fattn_ring_schedule& to = sized(schedule, "schedule");
    to.nhops = static_cast<int32_t>(s.hops.size());
    to.rows_q = rows_of(s.held_q);
    to.rows_k = rows_of(s.held_k);
    to.nheld_q = static_cast<int64_t>(s.held_q.size());
    to.nheld_k = static_cast<int64_t>(s.held_k.size());
    to.nblocks = static_cast<int64_t>(s.blocks.size());
    to.held_q = s.held_q.data();
    to.held_k = s.held_k.data();
    to.sent = s.sent.data();
    to.received = s.received.data();
    to.hops = s.hops.data();
    to.blocks = s.blocks.data();
  });
}

void fattn_ring_destroy(fattn_ring* ring) { delete ring; }
