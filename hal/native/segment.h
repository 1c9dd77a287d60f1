// One range of device addresses and the physical memory behind it, with steps that can be stopped and taken up again.
//
// A segment's chunks say at every moment what the driver really holds for it, also after a failure in the middle, so
// that any step can be finished or undone later. Whoever uses these functions owns the segment (see ledger.h).
#pragma once

#include <cstdint>
#include <vector>

#include "backup.h"
#include "primitives.h"

namespace hal {

struct Chunk {
  uint64_t offset = 0, size = 0;
  hal_handle handle = 0;  // 0: no physical memory
  bool mapped = false;
  bool accessible = false;  // only while mapped
};

struct Segment {
  hal_address address = 0;
  uint64_t size = 0;
  uint64_t pool = 0;
  uint64_t serial = 0;  // unique for ever, so a reused address is another segment
  hal_segment_state state = HAL_MAPPED;
  bool busy = false;          // owned by a transition or by a free that is under way
  bool free_pending = false;  // freed, and the free could not be completed yet
  bool lost = false;          // asleep, and its range is not reserved any more: whoever has it may give it back
  uint64_t backup_bytes = 0;
  std::vector<Chunk> chunks;
  Backup backup;  // whole while ASLEEP_BACKED; while MAPPED a retained one, kept for its space
};

// Cuts [0, size) into chunks of at most `limit` bytes (0: one chunk).
std::vector<Chunk> cut_into_chunks(uint64_t size, uint64_t limit);

// Creates, maps and gives access to what is missing, having reserved a lost range again; a failure leaves every chunk
// as it was before the call.
Status map_chunks(Primitives& primitives, Segment& segment);
// Unmaps what is mapped, one mapping at a time, and stops at the first failure; physical memory stays.
Status unmap_chunks(Primitives& primitives, Segment& segment);
// Releases physical memory that is not mapped and stops at the first failure.
Status release_chunks(Primitives& primitives, Segment& segment);

// Reserves the range of a lost segment again; HAL_ADDRESS_LOST while somebody else has it.
Status reclaim_range(Primitives& primitives, Segment& segment);
// Lets go of what the driver still holds for the range of a segment without physical memory. HAL_ADDRESS_LOST: the
// segment is lost, its memory is given back all the same.
Status vacate_range(Primitives& primitives, Segment& segment);

// All three: unmaps, releases and vacates.
Status take_down_chunks(Primitives& primitives, Segment& segment);

bool any_physical(const Segment& segment);
bool any_unmapped(const Segment& segment);

}  // namespace hal
