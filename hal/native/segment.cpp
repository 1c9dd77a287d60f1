// Building and taking down a segment's physical memory. Touches the driver only through Primitives; takes no lock.
#include "segment.h"

#include <algorithm>

namespace hal {
namespace {

Status map_chunk(Primitives& primitives, hal_address base, Chunk& chunk) {
  if (chunk.handle == 0) HAL_TRY(primitives.create(chunk.size, &chunk.handle));
  if (!chunk.mapped) {
    HAL_TRY(primitives.map(base + chunk.offset, chunk.size, chunk.handle));
    chunk.mapped = true;
  }
  return {};
}

Status map_missing(Primitives& primitives, Segment& segment) {
  HAL_TRY(reclaim_range(primitives, segment));
  for (Chunk& chunk : segment.chunks) HAL_TRY(map_chunk(primitives, segment.address, chunk));
  if (!any_unmapped(segment)) return {};
  HAL_TRY(primitives.access(segment.address, segment.size));
  for (Chunk& chunk : segment.chunks) chunk.accessible = true;
  return {};
}

Status unmap_chunk(Primitives& primitives, hal_address base, Chunk& chunk) {
  if (!chunk.mapped) return {};
  HAL_TRY(primitives.unmap(base + chunk.offset, chunk.size));
  chunk.mapped = chunk.accessible = false;
  return {};
}

Status release_chunk(Primitives& primitives, Chunk& chunk) {
  if (chunk.handle == 0 || chunk.mapped) return {};
  HAL_TRY(primitives.release(chunk.handle, chunk.size));
  chunk.handle = 0;
  return {};
}

// Takes back what `map_chunk` added to `before`; a step of the undoing that fails stays recorded in the chunk.
void undo_chunk(Primitives& primitives, hal_address base, const Chunk& before, Chunk& chunk) {
  if (!before.mapped && !unmap_chunk(primitives, base, chunk).ok()) return;
  if (before.handle == 0 && !release_chunk(primitives, chunk).ok()) return;
}

}  // namespace

std::vector<Chunk> cut_into_chunks(uint64_t size, uint64_t limit) {
  const uint64_t step = limit == 0 ? size : limit;
  std::vector<Chunk> chunks;
  for (uint64_t offset = 0; offset < size; offset += step) {
    Chunk chunk;
    chunk.offset = offset;
    chunk.size = std::min(step, size - offset);
    chunks.push_back(chunk);
  }
  return chunks;
}

Status map_chunks(Primitives& primitives, Segment& segment) {
  const std::vector<Chunk> before = segment.chunks;
  Status status = map_missing(primitives, segment);
  if (status.ok()) return {};
  for (size_t undo = before.size(); undo-- > 0;) {
    undo_chunk(primitives, segment.address, before[undo], segment.chunks[undo]);
  }
  return status;
}

Status unmap_chunks(Primitives& primitives, Segment& segment) {
  for (Chunk& chunk : segment.chunks) HAL_TRY(unmap_chunk(primitives, segment.address, chunk));
  return {};
}

Status release_chunks(Primitives& primitives, Segment& segment) {
  for (Chunk& chunk : segment.chunks) HAL_TRY(release_chunk(primitives, chunk));
  return {};
}

Status reclaim_range(Primitives& primitives, Segment& segment) {
  if (segment.lost) HAL_TRY(primitives.reserve_again(segment.address, segment.size));
  segment.lost = false;
  return {};
}

Status vacate_range(Primitives& primitives, Segment& segment) {
  if (segment.lost || any_physical(segment)) return {};
  Status status = primitives.vacate(segment.address, segment.size);
  segment.lost = status.kind() == HAL_ADDRESS_LOST;
  return status;
}

Status take_down_chunks(Primitives& primitives, Segment& segment) {
  HAL_TRY(unmap_chunks(primitives, segment));
  HAL_TRY(release_chunks(primitives, segment));
  return vacate_range(primitives, segment);
}

bool any_physical(const Segment& segment) {
  return std::any_of(segment.chunks.begin(), segment.chunks.end(), [](const Chunk& c) { return c.handle != 0; });
}

bool any_unmapped(const Segment& segment) {
  return std::any_of(segment.chunks.begin(), segment.chunks.end(), [](const Chunk& c) { return !c.accessible; });
}

}  // namespace hal
