#include "device_memory.h"

#include <algorithm>

namespace hal {

Status DeviceMemory::allocate(uint64_t bytes) {
  uint64_t step = 0;
  HAL_TRY(primitives_.granularity(bytes, &step));
  step = std::max(step, primitives_.facts().granularity);
  segment_.size = (bytes + step - 1) / step * step;
  segment_.chunks = cut_into_chunks(segment_.size, primitives_.facts().chunk);
  HAL_TRY(primitives_.reserve(segment_.size, primitives_.facts().alignment, 0, &segment_.address));
  Status status = map_chunks(primitives_, segment_);
  if (!status.ok()) free();
  return status;
}

void DeviceMemory::free() {
  if (segment_.address != 0 && !give_back(primitives_, segment_)) arena_.leave(std::move(segment_));
  segment_ = Segment();
}

bool give_back(Primitives& primitives, Segment& segment) {
  if (!take_down_chunks(primitives, segment).ok() && !segment.lost) return false;
  return segment.lost || primitives.unreserve(segment.address, segment.size).ok();
}

}  // namespace hal
