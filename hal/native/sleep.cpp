// Sleep as a transaction: reserve all host memory, synchronize the device, copy, release, commit.
//
// An offloaded segment is released once its own copy is complete, a discarded one only after every copy is. A failure
// maps again and restores. Where that is not possible any more (another process took the memory) the transition ends
// asleep: what has a whole backup sleeps, what could not be copied stays mapped with its contents. Nothing is lost.
#include <algorithm>

#include "fill.h"
#include "transition.h"

namespace hal {
namespace {

class Sleep {
 public:
  Sleep(hal_device& device, const SleepRequest& request, hal_transfer_report* report)
      : primitives_(device.primitives),
        request_(request),
        report_(*report),
        transition_(device, request.orders, request.order_count) {}

  Status run() {
    HAL_TRY(plan());
    Status status = guarded("sleep", [&] { return forward(); });
    if (!status.ok()) recover();
    if (status.ok() && !lost_.ok()) {
      report_.ended_asleep = 1;
      status = std::move(lost_);
    }
    mover_.reset();
    commit();
    return status;
  }

 private:
  Status plan();
  Status plan_offload(Item& item);
  Status ranges_of(const Item& item, uint32_t first, uint32_t count, std::vector<Range>* out) const;
  Status forward();
  Status reserve_host();
  void learn();
  bool encodes() const { return request_.arena != nullptr && request_.arena->encodes(); }
  Status copy_and_release();
  Status start(size_t batch);
  Status finish(size_t batch);
  Status release(size_t batch);
  Status release_discarded();
  Status vacate(Segment& segment);
  void recover();
  bool roll_back();
  bool restore(Item& item);
  Status copy_back(Segment& segment);
  void finish_asleep();
  void commit();

  Primitives& primitives_;
  const SleepRequest& request_;
  hal_transfer_report& report_;
  std::unique_ptr<Growth> growth_;  // before transition_: backups are given back before a failed growth is undone
  Transition transition_;
  std::vector<Item*> offloaded_, discarded_, dropped_;
  std::vector<Item*> late_;  // whose contents no backup has whole: released when every copy is done
  std::vector<std::vector<Item*>> batches_;
  std::unique_ptr<Mover> mover_;
  Status lost_;                 // the first address that was lost: its segment sleeps, and so does everything else
  bool discards_lost_ = false;  // contents of a discarded segment are gone: there is no way back
};

// Sorted, rounded out to `step`, and without overlaps.
std::vector<Range> normalize(std::vector<Range> ranges, uint64_t size, uint64_t step) {
  std::sort(ranges.begin(), ranges.end(), [](const Range& a, const Range& b) { return a.offset < b.offset; });
  std::vector<Range> merged;
  for (const Range& range : ranges) {
    if (range.size == 0) continue;
    const uint64_t begin = range.offset / step * step;
    const uint64_t end = std::min(size, (range.offset + range.size + step - 1) / step * step);
    if (!merged.empty() && begin <= merged.back().offset + merged.back().size) {
      Range& last = merged.back();
      last.size = std::max(last.offset + last.size, end) - last.offset;
    } else {
      merged.push_back({begin, end - begin});
    }
  }
  return merged;
}

// A discard that keeps some ranges: they are backed up, the rest of the contents is given up with the discarded
// segments.
bool keeps_part(const hal_segment_order& order) {
  return order.action == HAL_DISCARD && order.range_count > 0;
}

// Sorts the segments by what is to be done; refuses a malformed request before anything is changed.
Status Sleep::plan() {
  for (Item& item : transition_.items()) {
    const int32_t action = item.order->action;
    if (action < HAL_OFFLOAD || action > HAL_DROP_BACKUP) return Status::invalid("sleep", "there is no such action");
    if (action == HAL_OFFLOAD || keeps_part(*item.order)) HAL_TRY(plan_offload(item));
  }
  for (Item& item : transition_.items()) {
    const bool mapped = item.segment->state == HAL_MAPPED;
    const int32_t action = item.order->action;
    const bool backed = action == HAL_OFFLOAD || keeps_part(*item.order);
    if (backed && mapped) offloaded_.push_back(&item);
    if (action == HAL_DISCARD && !backed && mapped) discarded_.push_back(&item);
    if (action == HAL_DISCARD && mapped) late_.push_back(&item);
    if (action != HAL_DROP_BACKUP) continue;
    if (item.segment->state == HAL_ASLEEP_BACKED) dropped_.push_back(&item);
    if (mapped) item.segment->backup.drop();  // a retained one, which nothing depends on
  }
  return {};
}

Status Sleep::plan_offload(Item& item) {
  const hal_segment_order& order = *item.order;
  const uint64_t size = item.segment->size;
  std::vector<Range> live, clean;
  HAL_TRY(ranges_of(item, order.first_range, order.range_count, &live));
  HAL_TRY(ranges_of(item, order.first_clean, order.clean_count, &clean));
  if (order.range_count == 0 && order.nothing_live == 0) live.push_back({0, size});
  item.live = normalize(std::move(live), size, backup_alignment());  // what the arena copies
  item.clean = normalize(std::move(clean), size, 1);
  if (!item.live.empty() && request_.arena == nullptr) return Status::invalid("sleep", "offloading needs an arena");
  return {};
}

Status Sleep::ranges_of(const Item& item, uint32_t first, uint32_t count, std::vector<Range>* out) const {
  const uint64_t size = item.segment->size;
  if (uint64_t{first} + count > request_.range_count) {
    return Status::invalid("sleep", "an order names ranges that the request does not have");
  }
  for (uint32_t i = first; i < first + count; ++i) {
    const hal_range& range = request_.ranges[i];
    if (range.offset > size || range.size > size - range.offset) {
      return Status::error(HAL_INVALID, "sleep", 0, "a range ends beyond its segment", size, item.order->address);
    }
    out->push_back({range.offset, range.size});
  }
  return {};
}

Status Sleep::forward() {
  {
    const Stopwatch watch(&report_.host_seconds);
    HAL_TRY(reserve_host());
  }
  {
    const Stopwatch watch(&report_.synchronize_seconds);
    HAL_TRY(primitives_.synchronize(HAL_ALL_STREAMS));
  }
  const Stopwatch watch(&report_.copy_seconds);
  HAL_TRY(copy_and_release());
  if (growth_ != nullptr && encodes()) growth_->stop_early();
  if (growth_ != nullptr) HAL_TRY(growth_->wait());
  HAL_TRY(release_discarded());
  if (growth_ != nullptr) growth_->keep();
  learn();
  for (Item* item : offloaded_) item->end = HAL_ASLEEP_BACKED;
  for (Item* item : discarded_) item->end = HAL_ASLEEP_DISCARDED;
  for (Item* item : dropped_) item->end = HAL_ASLEEP_DISCARDED;
  return {};
}

void Sleep::learn() {
  if (!encodes()) return;
  uint64_t plain = 0, stored = 0;
  for (const Item* item : offloaded_) {
    plain += item->segment->backup.bytes();
    stored += item->segment->backup.stored_bytes();
  }
  request_.arena->learn(plain, stored);
}

// Takes the room of every backup before anything else is changed. A backup that a wake has retained is written again
// in place when the live ranges are still the same, but for what it has already.
Status Sleep::reserve_host() {
  uint64_t bytes = 0;
  std::vector<Item*> fresh;
  for (Item* item : offloaded_) {
    Backup& backup = item->segment->backup;
    if (backup.arena() == request_.arena && backup.ranges() == item->live) {
      backup.mark_clean(item->clean);
      // What is encoded anew has another size, so such a backup stays as a whole or not at all.
      if (!encodes() || backup.clean_bytes() == backup.bytes()) continue;
    }
    backup.drop();
    fresh.push_back(item);
    for (const Range& range : item->live) bytes += range.size;
  }
  if (bytes > 0 || (encodes() && !offloaded_.empty())) HAL_TRY(request_.arena->reserve(bytes, false, &growth_));
  for (Item* item : fresh) {
    if (!item->live.empty()) item->segment->backup = Backup(request_.arena, item->live);
  }
  return {};
}

// Keeps kLanes batches in flight: while one is released the next are being copied.
Status Sleep::copy_and_release() {
  batches_ = make_batches(offloaded_);
  if (request_.arena != nullptr)
    mover_ = Mover::make(primitives_, *request_.arena, Direction::ToBackup, {growth_.get()});
  for (size_t i = 0; i < batches_.size() + kLanes; ++i) {
    if (i >= kLanes) HAL_TRY(finish(i - kLanes));
    if (i < batches_.size()) HAL_TRY(start(i));
    if (i >= kLanes) HAL_TRY(release(i - kLanes));
  }
  return {};
}

Status Sleep::start(size_t batch) {
  if (mover_ == nullptr) return {};
  Batch jobs;
  for (Item* item : batches_[batch]) jobs.push_back({item->segment->address, &item->segment->backup.pieces()});
  return mover_->start(std::move(jobs), batch % kLanes);
}

Status Sleep::finish(size_t batch) {
  if (batch >= batches_.size()) return {};
  if (mover_ != nullptr) HAL_TRY(mover_->finish(batch % kLanes));
  for (Item* item : batches_[batch]) item->copied = true;
  return {};
}

Status Sleep::release(size_t batch) {
  if (batch >= batches_.size()) return {};
  for (Item* item : batches_[batch]) {
    if (keeps_part(*item->order)) continue;
    HAL_TRY(unmap_chunks(primitives_, *item->segment));
    HAL_TRY(release_chunks(primitives_, *item->segment));
    HAL_TRY(vacate(*item->segment));
  }
  return {};
}

// A lost address is no reason to stop: the memory is given back, and to undo the rest would not bring the address back.
Status Sleep::vacate(Segment& segment) {
  Status status = vacate_range(primitives_, segment);
  if (status.kind() != HAL_ADDRESS_LOST) return status;
  if (lost_.ok()) lost_ = std::move(status);
  return {};
}

// Unmaps all before it releases any: until the first release the contents are still there and can be mapped again.
Status Sleep::release_discarded() {
  for (Item* item : late_) HAL_TRY(unmap_chunks(primitives_, *item->segment));
  for (Item* item : late_) {
    const uint64_t before = physical_bytes(*item->segment);
    Status status = release_chunks(primitives_, *item->segment);
    discards_lost_ = discards_lost_ || physical_bytes(*item->segment) < before;
    if (!status.ok()) return status;
    HAL_TRY(vacate(*item->segment));
  }
  return {};
}

void Sleep::recover() {
  mover_.reset();
  transition_.quiesce();
  if (roll_back()) {
    report_.rolled_back = 1;
  } else {
    finish_asleep();
    report_.ended_asleep = 1;
  }
}

bool Sleep::roll_back() {
  if (discards_lost_) return false;
  for (Item* item : late_) {
    if (!map_chunks(primitives_, *item->segment).ok()) return false;
  }
  for (Item* item : offloaded_) {
    if (any_unmapped(*item->segment) && !restore(*item)) return false;
  }
  return true;
}

bool Sleep::restore(Item& item) {
  if (!map_chunks(primitives_, *item.segment).ok()) return false;
  const bool restored = copy_back(*item.segment).ok();
  if (!restored) transition_.quiesce();
  return restored;
}

Status Sleep::copy_back(Segment& segment) {
  uint64_t filled = 0;
  HAL_TRY(fill_gaps(primitives_, segment, FillRule(), &filled));
  if (segment.backup.arena() != nullptr) {
    const std::unique_ptr<Mover> back = Mover::make(primitives_, *segment.backup.arena(), Direction::ToDevice);
    HAL_TRY(back->start({{segment.address, &segment.backup.pieces()}}, 0));
    HAL_TRY(back->finish(0));
  }
  return primitives_.synchronize(HAL_ALL_STREAMS);
}

// What cannot be taken down now stays in the segment's books; its wake uses it, its free takes it down.
void Sleep::finish_asleep() {
  const auto take_down = [&](Segment& segment) { static_cast<void>(take_down_chunks(primitives_, segment).ok()); };
  for (Item* item : offloaded_) {
    if (!item->copied) continue;
    take_down(*item->segment);
    item->end = HAL_ASLEEP_BACKED;
  }
  for (Item* item : discarded_) {
    take_down(*item->segment);
    item->end = HAL_ASLEEP_DISCARDED;
  }
}

void Sleep::commit() {
  const auto settle = [&](Item* item, hal_segment_state before) {
    Backup& backup = item->segment->backup;
    if (item->end != HAL_ASLEEP_BACKED) backup.drop();
    if (item->end == before) return;
    item->order->skipped = 0;
    item->order->unchanged_bytes = backup.clean_bytes();
    item->order->copied_bytes = backup.bytes() - item->order->unchanged_bytes;
    item->order->released_bytes =
        before == HAL_MAPPED ? item->segment->size - physical_bytes(*item->segment) : uint64_t{0};
    report_.copied_bytes += item->order->copied_bytes;
    report_.unchanged_bytes += item->order->unchanged_bytes;
    report_.host_bytes += backup.stored_bytes();
    report_.released_bytes += item->order->released_bytes;
  };
  for (Item* item : offloaded_) settle(item, HAL_MAPPED);
  for (Item* item : discarded_) settle(item, HAL_MAPPED);
  for (Item* item : dropped_) {
    if (item->end == HAL_ASLEEP_DISCARDED) settle(item, HAL_ASLEEP_BACKED);
  }
  transition_.release();
}

}  // namespace

Status sleep(hal_device& device, const SleepRequest& request, hal_transfer_report* report) {
  *report = hal_transfer_report{};
  const Stopwatch watch(&report->total_seconds);
  std::lock_guard<std::mutex> lock(device.transition);
  HAL_TRY(refuse_during_capture(device.primitives, "sleep"));
  return Sleep(device, request, report).run();
}

}  // namespace hal
