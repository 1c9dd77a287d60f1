// Fills through the driver, in bounded steps. Takes no lock.
#include "fill.h"

#include <algorithm>

#include "step_sizes.h"

namespace hal {
namespace {

// A step ends where the next physical piece begins.
Status fill_range(Primitives& primitives, const Segment& segment, Range range, uint8_t value, uint32_t stream) {
  const uint64_t piece = std::min(kLargestFill, segment.chunks.front().size);
  for (uint64_t offset = range.offset; offset < range.offset + range.size;) {
    const uint64_t step = std::min(piece - offset % piece, range.offset + range.size - offset);
    HAL_TRY(primitives.fill(segment.address + offset, value, step, stream));
    offset += step;
  }
  return {};
}

}  // namespace

Status fill_gaps(Primitives& primitives, Segment& segment, const FillRule& rule, uint64_t* filled) {
  if (rule.value < 0 && primitives.has(HAL_FACT_SCRUBS) && !rule.reused) return {};
  const auto value = static_cast<uint8_t>(std::max(rule.value, 0));
  const auto stream = static_cast<uint32_t>(segment.serial % primitives.facts().streams);
  uint64_t offset = 0;
  const auto fill_up_to = [&](uint64_t end) {
    *filled += end - offset;
    return fill_range(primitives, segment, {offset, end - offset}, value, stream);
  };
  for (const Range& live : segment.backup.ranges()) {
    HAL_TRY(fill_up_to(live.offset));
    offset = live.offset + live.size;
  }
  return fill_up_to(segment.size);
}

}  // namespace hal
