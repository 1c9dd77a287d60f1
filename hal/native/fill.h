// What memory without contents gets, so that it never shows the bytes of somebody else.
#pragma once

#include "segment.h"

namespace hal {

struct FillRule {
  int32_t value = -1;   // a byte, or -1: zero, and only where the platform does not scrub
  bool reused = false;  // the physical memory is not fresh from the driver, so nobody has scrubbed it
};

// Queues the filling of all that `segment`'s backup does not cover, on the copy streams; adds to `filled` (bytes).
Status fill_gaps(Primitives& primitives, Segment& segment, const FillRule& rule, uint64_t* filled);

}  // namespace hal
