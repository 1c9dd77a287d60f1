// Taking segments for a transition and giving them back. Touches the ledger, and the driver only to wait.
#include "transition.h"

namespace hal {

void Transition::acquire(hal_segment_order* orders, size_t count) {
  items_.reserve(count);
  outcomes_.reserve(count);
  for (size_t i = 0; i < count; ++i) {
    hal_segment_order& order = orders[i];
    order.copied_bytes = order.released_bytes = order.mapped_bytes = order.filled_bytes = order.unchanged_bytes = 0;
    order.skipped = 1;  // until something is done for it
    order.state = -1;
    Segment* segment = device_.ledger.acquire(order.address, order.serial);
    if (segment == nullptr) continue;
    order.state = segment->state;
    Item item;
    item.segment = segment;
    item.order = &order;
    item.end = segment->state;
    items_.push_back(std::move(item));
  }
}

void Transition::release() {
  outcomes_.clear();
  for (const Item& item : items_) {
    item.order->state = item.end;
    outcomes_.push_back({item.segment, item.end});
  }
  items_.clear();
  device_.ledger.release(outcomes_);
}

void Transition::quiesce() {
  for (uint32_t stream = 0; stream < device_.primitives.facts().streams; ++stream) {
    // The failure that led here is the one to report; a device that cannot be waited for any more adds nothing to it.
    static_cast<void>(device_.primitives.synchronize(stream).ok());
  }
}

Status refuse_during_capture(Primitives& primitives, const char* call) {
  if (!primitives.is_capturing(nullptr)) return {};
  return Status::error(HAL_BUSY, call, 0, "a graph is being captured on this device; call again when the capture ends");
}

uint64_t physical_bytes(const Segment& segment) {
  uint64_t bytes = 0;
  for (const Chunk& chunk : segment.chunks) bytes += chunk.handle != 0 ? chunk.size : 0;
  return bytes;
}

std::vector<std::vector<Item*>> make_batches(const std::vector<Item*>& items) {
  std::vector<std::vector<Item*>> batches;
  uint64_t bytes = kBatchBytes;
  for (Item* item : items) {
    if (bytes >= kBatchBytes) {
      batches.emplace_back();
      bytes = 0;
    }
    batches.back().push_back(item);
    bytes += item->segment->backup.bytes();
  }
  return batches;
}

}  // namespace hal
