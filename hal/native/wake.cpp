// Wake as a transaction: create, map, copy or fill, synchronize, commit.
//
// Segments with backups are copied in batches; those without contents are mapped and filled in between, while copies
// are in flight. A failure at any point takes down what this wake had mapped: everything is asleep as before, the
// backups whole, and the same call can be made again.
#include <algorithm>

#include "fill.h"
#include "transition.h"

namespace hal {
namespace {

class Wake {
 public:
  Wake(hal_device& device, const WakeRequest& request, hal_transfer_report* report)
      : primitives_(device.primitives),
        request_(request),
        report_(*report),
        transition_(device, request.orders, request.order_count) {}

  Status run() {
    plan();
    Status status = guarded("wake", [&] { return forward(); });
    movers_.clear();
    if (status.ok()) {
      commit();
    } else {
      roll_back();
      primitives_.describe_shortage(&status, needed_);
      report_.rolled_back = 1;
    }
    transition_.release();
    return status;
  }

 private:
  void plan();
  Status forward();
  Status restore_backed();
  Status start(size_t batch);
  Status finish(size_t batch);
  Status map_empty(size_t batches_left);
  Status map(Item& item);
  Status fill(Item& item);
  Status synchronize();
  Mover& mover(Arena* arena);
  Status leave_out(bool* left_out);
  void roll_back();
  void commit();

  Primitives& primitives_;
  const WakeRequest& request_;
  hal_transfer_report& report_;
  Transition transition_;
  std::vector<Item*> backed_, empty_;
  size_t mapped_empty_ = 0;
  std::vector<std::vector<Item*>> batches_;
  std::vector<std::pair<Arena*, std::unique_ptr<Mover>>> movers_;
  std::vector<Item*> reused_;    // their physical memory is not fresh from the driver
  uint64_t needed_ = 0;          // bytes of device memory
  uint64_t spare_ = UINT64_MAX;  // of device memory beyond that, as far as is known
};

void Wake::plan() {
  for (Item& item : transition_.items()) {
    Segment& segment = *item.segment;
    if (segment.state == HAL_MAPPED) continue;
    item.order->skipped = 0;
    needed_ += segment.size - physical_bytes(segment);
    (segment.backup.arena() != nullptr ? backed_ : empty_).push_back(&item);
  }
  uint64_t free_bytes = 0, total = 0;
  const bool known = primitives_.has(HAL_FACT_FREE_TRUTHFUL) && primitives_.memory_info(&free_bytes, &total).ok();
  if (known) spare_ = free_bytes - std::min(free_bytes, needed_);
}

Status Wake::forward() {
  const Stopwatch watch(&report_.copy_seconds);
  for (Item& item : transition_.items()) HAL_TRY(reclaim_range(primitives_, *item.segment));
  HAL_TRY(restore_backed());
  HAL_TRY(map_empty(0));
  return synchronize();
}

// Keeps kLanes batches in flight: while they are copied the next is created and mapped.
Status Wake::restore_backed() {
  // A batch goes through one mover, so segments of one arena stand together.
  std::stable_sort(backed_.begin(), backed_.end(), [](const Item* a, const Item* b) {
    return std::less<>()(a->segment->backup.arena(), b->segment->backup.arena());
  });
  for (size_t begin = 0; begin < backed_.size();) {
    size_t end = begin + 1;
    while (end < backed_.size() && backed_[end]->segment->backup.arena() == backed_[begin]->segment->backup.arena()) {
      ++end;
    }
    const auto first = backed_.begin();
    for (auto& batch : make_batches({first + static_cast<long>(begin), first + static_cast<long>(end)})) {
      batches_.push_back(std::move(batch));
    }
    begin = end;
  }
  for (size_t i = 0; i < batches_.size() + kLanes; ++i) {
    if (i < batches_.size()) {
      for (Item* item : batches_[i]) HAL_TRY(map(*item));
    }
    if (i >= kLanes) HAL_TRY(finish(i - kLanes));
    if (i >= batches_.size()) continue;
    HAL_TRY(start(i));
    HAL_TRY(map_empty(batches_.size() - i - 1));
  }
  return {};
}

Status Wake::start(size_t batch) {
  Batch jobs;
  for (Item* item : batches_[batch]) {
    bool left_out = false;
    HAL_TRY(leave_out(&left_out));
    if (!left_out) jobs.push_back({item->segment->address, &item->segment->backup.pieces()});
    HAL_TRY(fill(*item));
  }
  return mover(batches_[batch].front()->segment->backup.arena()).start(std::move(jobs), batch % kLanes);
}

Status Wake::finish(size_t batch) {
  if (batch >= batches_.size()) return {};
  return mover(batches_[batch].front()->segment->backup.arena()).finish(batch % kLanes);
}

Mover& Wake::mover(Arena* arena) {
  for (auto& [of, made] : movers_) {
    if (of == arena) return *made;
  }
  movers_.emplace_back(arena, Mover::make(primitives_, *arena, Direction::ToDevice, {nullptr, spare_}));
  return *movers_.back().second;
}

// The fault point "restore": with code 0 one segment's copy is left out silently, which verification has to find.
Status Wake::leave_out(bool* left_out) {
  int32_t code = 0;
  *left_out = primitives_.faults().fires("restore", &code);
  if (!*left_out || code == 0) return {};
  return Status::error(HAL_DRIVER_ERROR, "restore", code, "a fault point made it fail");
}

// Maps a fair share of the segments without contents: all that are left when no batch is.
Status Wake::map_empty(size_t batches_left) {
  const size_t left = empty_.size() - mapped_empty_;
  for (size_t share = (left + batches_left) / (batches_left + 1); share > 0; --share) {
    Item& item = *empty_[mapped_empty_++];
    HAL_TRY(map(item));
    HAL_TRY(fill(item));
  }
  return {};
}

Status Wake::map(Item& item) {
  item.touched = true;
  if (any_physical(*item.segment)) reused_.push_back(&item);
  return map_chunks(primitives_, *item.segment);
}

Status Wake::fill(Item& item) {
  FillRule rule;
  rule.value = request_.fill;
  rule.reused = std::find(reused_.begin(), reused_.end(), &item) != reused_.end();
  return fill_gaps(primitives_, *item.segment, rule, &item.order->filled_bytes);
}

Status Wake::synchronize() {
  const Stopwatch watch(&report_.synchronize_seconds);
  for (uint32_t stream = 0; stream < primitives_.facts().streams; ++stream) HAL_TRY(primitives_.synchronize(stream));
  return {};
}

// What cannot be taken down now stays in the segment's books; the next wake uses it, its free takes it down.
void Wake::roll_back() {
  transition_.quiesce();
  for (const std::vector<Item*>* items : {&backed_, &empty_}) {
    for (Item* item : *items) {
      Segment& segment = *item->segment;
      if (item->touched || any_physical(segment)) static_cast<void>(take_down_chunks(primitives_, segment).ok());
      item->order->filled_bytes = 0;
    }
  }
}

void Wake::commit() {
  for (const std::vector<Item*>* items : {&backed_, &empty_}) {
    for (Item* item : *items) {
      Segment& segment = *item->segment;
      item->end = HAL_MAPPED;
      item->order->copied_bytes = segment.backup.bytes();
      item->order->mapped_bytes = segment.size;
      report_.copied_bytes += item->order->copied_bytes;
      report_.mapped_bytes += segment.size;
      report_.filled_bytes += item->order->filled_bytes;
      report_.host_bytes += segment.backup.stored_bytes();
      if (item->order->retain == 0) segment.backup.drop();
    }
  }
}

}  // namespace

Status wake(hal_device& device, const WakeRequest& request, hal_transfer_report* report) {
  *report = hal_transfer_report{};
  const Stopwatch watch(&report->total_seconds);
  std::lock_guard<std::mutex> lock(device.transition);
  HAL_TRY(refuse_during_capture(device.primitives, "wake"));
  return Wake(device, request, report).run();
}

}  // namespace hal
