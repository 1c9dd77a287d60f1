// Allocating, freeing and handing out segments. Touches the driver through Primitives and never under its mutex.
#include "ledger.h"

#include <algorithm>
#include <utility>

#include "entries.h"

namespace hal {

Status Ledger::create_pool(const char* tag, uint64_t* pool, int* slot) {
  *pool = next_pool();
  *slot = claim_slot(device_, *pool);
  if (*slot < 0) {
    return Status::error(HAL_UNSUPPORTED, "pool create", 0,
                         "all " + std::to_string(HAL_POOL_SLOTS) +
                             " pool entry points are taken; destroy pools and free their segments");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  Pool& made = pools_[*pool];
  made.tag = tag;
  made.slot = *slot;
  return {};
}

Status Ledger::destroy_pool(uint64_t pool) {
  collect();
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pools_.find(pool);
  if (found == pools_.end() || found->second.destroyed) return Status::invalid("pool destroy", "there is no such pool");
  found->second.destroyed = true;
  ++found->second.segments;
  leave_pool(pool);
  return {};
}

// Called with the mutex held: one segment less; a destroyed pool gives its entry points back after its last one.
void Ledger::leave_pool(uint64_t pool) {
  const auto found = pools_.find(pool);
  if (--found->second.segments > 0 || !found->second.destroyed) return;
  release_slot(found->second.slot);
  pools_.erase(found);
}

uint64_t Ledger::chunk_limit() const {
  const hal_facts& facts = primitives_.facts();
  if (facts.chunk == 0) return 0;
  return std::max(facts.chunk / facts.granularity, uint64_t{1}) * facts.granularity;
}

Status Ledger::keep_margin(uint64_t size) {
  const uint64_t margin = margin_;
  if (margin == 0) return {};
  uint64_t free_bytes = 0, total_bytes = 0;
  HAL_TRY(primitives_.memory_info(&free_bytes, &total_bytes));
  if (free_bytes >= size && free_bytes - size >= margin) return {};
  return Status::error(HAL_OUT_OF_DEVICE_MEMORY, "allocate", 0,
                       "the margin of " + std::to_string(margin) + " bytes has to stay free", size);
}

Status Ledger::build(uint64_t size, Segment* segment) {
  constexpr uint64_t kLargest = uint64_t{1} << 62;
  if (size > kLargest) return Status::invalid("allocate", "the size is negative or beyond any device");
  uint64_t granularity = 0;
  HAL_TRY(primitives_.granularity(size, &granularity));
  segment->size = (std::max<uint64_t>(size, 1) + granularity - 1) / granularity * granularity;
  HAL_TRY(keep_margin(segment->size));
  const uint64_t alignment = std::max(primitives_.facts().alignment, granularity);
  hal_address address = 0;
  HAL_TRY(primitives_.reserve(segment->size, alignment, 0, &address));
  segment->address = address;
  segment->chunks = cut_into_chunks(segment->size, std::max(chunk_limit(), chunk_limit() == 0 ? 0 : granularity));
  return map_chunks(primitives_, *segment);
}

Status Ledger::allocate(uint64_t pool, uint64_t size, hal_address* address, void* stream) {
  if (!primitives_.is_capturing(stream)) collect();
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pools_.find(pool);
    if (found == pools_.end() || found->second.destroyed) return Status::invalid("allocate", "there is no such pool");
    ++found->second.segments;
  }
  Segment segment;
  segment.pool = pool;
  Status status = build(size, &segment);
  if (status.ok()) {
    *address = segment.address;
    insert(std::move(segment));
    return {};
  }
  primitives_.describe_shortage(&status, segment.size);
  if (segment.address != 0 && any_physical(segment)) {  // the undoing failed too: it is tried again later
    segment.free_pending = true;
    insert(std::move(segment));
    return status;
  }
  if (segment.address != 0 && !primitives_.unreserve(segment.address, segment.size).ok()) {
    segment.free_pending = true;
    insert(std::move(segment));
    return status;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  leave_pool(pool);
  return status;
}

void Ledger::insert(Segment&& segment) {
  std::lock_guard<std::mutex> lock(mutex_);
  segment.serial = next_serial_++;
  const hal_address address = segment.address;
  if (segment.free_pending) pending_.insert(address);
  segments_.emplace(address, std::move(segment));
}

Status Ledger::free(hal_address address, void* stream) {
  const bool capturing = primitives_.is_capturing(stream);
  Segment* segment = nullptr;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = segments_.find(address);
    if (found == segments_.end()) {
      return Status::error(HAL_INVALID, "free", 0, "no segment begins at this address", 0, address);
    }
    segment = &found->second;
    // During a capture the device cannot be waited for, and unmapping under running kernels is not safe.
    if (segment->busy || (capturing && segment->state == HAL_MAPPED)) {
      if (segment->free_pending) return Status::error(HAL_INVALID, "free", 0, "freed already", 0, address);
      segment->free_pending = true;
      pending_.insert(address);
      ++deferred_frees_;
      return {};
    }
    segment->busy = true;
  }
  Status status = finish_free(*segment);
  if (!capturing) collect();
  return status;
}

// Gives everything back that the segment holds of the device; may be called again after a failure.
Status Ledger::take_down(Segment& segment) {
  segment.backup.drop();
  const bool mapped =
      std::any_of(segment.chunks.begin(), segment.chunks.end(), [](const Chunk& c) { return c.mapped; });
  // Work that was launched before the free may still use the memory.
  if (mapped) HAL_TRY(primitives_.synchronize(HAL_ALL_STREAMS));
  HAL_TRY(unmap_chunks(primitives_, segment));
  return release_chunks(primitives_, segment);
}

// Frees a segment that the caller has made busy; what fails stays in the books, to be tried again.
Status Ledger::finish_free(Segment& segment) {
  Status status = take_down(segment);
  std::unique_lock<std::mutex> lock(mutex_);
  segment.backup_bytes = 0;
  if (status.ok()) {
    // Out of the map first: once the range is given back another thread may get the same address.
    auto node = segments_.extract(segment.address);
    pending_.erase(node.key());
    lock.unlock();
    if (!node.mapped().lost) status = primitives_.unreserve(node.key(), node.mapped().size);
    lock.lock();
    if (status.ok()) {
      leave_pool(node.mapped().pool);
      return {};
    }
    segments_.insert(std::move(node));
  }
  segment.busy = false;
  segment.free_pending = true;
  pending_.insert(segment.address);
  return status;
}

void Ledger::collect() {
  hal_address after = 0;
  for (;;) {
    Segment* segment = nullptr;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      auto next = pending_.upper_bound(after);
      while (next != pending_.end() && segments_.at(*next).busy) ++next;
      if (next == pending_.end()) return;
      segment = &segments_.at(*next);
      after = *next;
      segment->busy = true;
    }
    if (primitives_.is_capturing(nullptr)) {
      std::lock_guard<std::mutex> lock(mutex_);
      segment->busy = false;
      return;
    }
    const uint64_t pool = segment->pool;
    Status status = finish_free(*segment);
    if (!status.ok()) keep_error(pool, std::move(status));
  }
}

void Ledger::keep_error(uint64_t pool, Status status) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pools_.find(pool);
  if (found != pools_.end() && found->second.first_error.ok()) found->second.first_error = std::move(status);
}

Status Ledger::take_error(uint64_t pool) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = pools_.find(pool);
  if (found == pools_.end()) return Status::invalid("pool error", "there is no such pool");
  return std::exchange(found->second.first_error, Status());
}

Segment* Ledger::acquire(hal_address address, uint64_t serial) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = segments_.find(address);
  if (found == segments_.end()) return nullptr;
  Segment& segment = found->second;
  if (segment.busy || segment.free_pending || (serial != 0 && segment.serial != serial)) return nullptr;
  segment.busy = true;
  return &segment;
}

void Ledger::release(const std::vector<Outcome>& outcomes) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Outcome& outcome : outcomes) {
      outcome.segment->state = outcome.state;
      outcome.segment->backup_bytes = outcome.segment->backup.bytes();
      outcome.segment->busy = false;
    }
  }
  collect();
}

std::vector<Backup> Ledger::take_retained(const Arena* arena) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Backup> retained;
  for (auto& [address, segment] : segments_) {
    if (segment.busy || segment.state != HAL_MAPPED || segment.backup.arena() != arena) continue;
    retained.push_back(std::move(segment.backup));
    segment.backup_bytes = 0;
  }
  return retained;
}

size_t Ledger::list(uint64_t pool, hal_segment* out, size_t capacity) {
  std::lock_guard<std::mutex> lock(mutex_);
  size_t count = 0;
  for (const auto& [address, segment] : segments_) {
    if (pool != 0 && segment.pool != pool) continue;
    if (count < capacity) {
      out[count] = {address,
                    segment.size,
                    segment.pool,
                    segment.serial,
                    segment.backup_bytes,
                    segment.state,
                    segment.free_pending ? 1 : 0};
    }
    ++count;
  }
  return count;
}

void Ledger::count(hal_counters* out) {
  primitives_.count(out);
  std::lock_guard<std::mutex> lock(mutex_);
  out->segments = segments_.size();
  out->asleep_bytes = 0;
  for (const auto& [address, segment] : segments_) {
    if (segment.state != HAL_MAPPED) out->asleep_bytes += segment.size;
  }
  out->pools = 0;
  for (const auto& [id, pool] : pools_) out->pools += pool.destroyed ? 0 : 1;
  out->deferred_frees = deferred_frees_;
}

bool Ledger::empty() {
  std::lock_guard<std::mutex> lock(mutex_);
  return segments_.empty();
}

void Ledger::close_pools() {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto& [id, pool] : pools_) release_slot(pool.slot);
  pools_.clear();
}

}  // namespace hal
