// Makes new chunks ready in the background: touches their pages with several threads and registers them with the
// device, in the order in which they will be used, so that copies into the first need not wait for the last.
#include <algorithm>

#include "arena.h"
#include "step_sizes.h"

namespace hal {
namespace {

constexpr size_t kTouchThreads = 16;

void touch_pages(uint64_t begin, uint64_t end) {
  for (uint64_t page = begin; page < end; page += 4096) *static_cast<volatile char*>(Arena::host(page)) = 0;
}

}  // namespace

Growth::~Growth() {
  cancelled_ = true;
  task_.join();
  if (kept_) return;
  for (uint64_t position : chunks_) arena_.remove_chunk(position);
}

Status Growth::wait() {
  task_.join();
  for (uint64_t position : chunks_) HAL_TRY(arena_.wait_ready(position));
  return {};
}

Status Growth::add(uint64_t bytes) {
  task_.join();
  uint64_t size = std::max(bytes, kLargestChunk), position = 0;
  if (!arena_.check_limit(size, bytes).ok()) {
    size = bytes;
    HAL_TRY(arena_.check_limit(size, bytes));
  }
  const bool prepare = arena_.file() == nullptr && arena_.pinned_;
  HAL_TRY(arena_.add_chunk(size, prepare ? Arena::Readiness::Pending : Arena::Readiness::Ready, &position));
  chunks_.push_back(position);
  if (!prepare) return {};
  touch(position);
  return pin(position);
}

void Growth::stop_early() {
  cancelled_ = true;
  task_.join();
  const auto unused = [&](uint64_t position) { return !arena_.ready(position) && arena_.remove_chunk(position); };
  chunks_.erase(std::remove_if(chunks_.begin(), chunks_.end(), unused), chunks_.end());
}

void Growth::prepare_in_background() {
  std::sort(chunks_.begin(), chunks_.end());  // Arena::take goes by position
  task_ = Task([this] { prepare_chunks(); });
}

void Growth::prepare_chunks() {
  Task ahead;
  if (!chunks_.empty()) touch(chunks_[0]);
  for (size_t i = 0; i < chunks_.size(); ++i) {
    if (cancelled_) return finish_chunk(chunks_[i], Arena::Readiness::Failed, false);
    if (i + 1 < chunks_.size()) ahead = Task([this, next = chunks_[i + 1]] { touch(next); });
    Status status = pin(chunks_[i]);
    ahead.join();
    if (!status.ok()) return;
  }
}

void Growth::touch(uint64_t position) {
  uint64_t size;
  {
    std::lock_guard<std::mutex> lock(arena_.mutex_);
    size = arena_.chunks_.at(position).size;
  }
  parallel_for((size + kTouchSlice - 1) / kTouchSlice, processors(kTouchThreads), [&](size_t slice) {
    const uint64_t begin = slice * kTouchSlice;
    if (!cancelled_) touch_pages(position + begin, position + std::min(size, begin + kTouchSlice));
  });
}

// Registers one touched chunk; where that fails it stays pageable, or all that is left fails if it has to be pinned.
Status Growth::pin(uint64_t position) {
  uint64_t size;
  bool wanted;
  {
    std::lock_guard<std::mutex> lock(arena_.mutex_);
    size = arena_.chunks_.at(position).size;
    wanted = arena_.pinned_ && (arena_.require_pinned_ || !arena_.fell_back_);
  }
  Status status;
  if (wanted) status = arena_.primitives_.host_register(Arena::host(position), size);
  if (status.ok() || !arena_.require_pinned_) {
    if (!status.ok()) {
      std::lock_guard<std::mutex> lock(arena_.mutex_);
      arena_.fell_back_ = true;
    }
    finish_chunk(position, Arena::Readiness::Ready, wanted && status.ok());
    return {};
  }
  const hal_status& detail = *status.detail();
  Status failure = Status::error(HAL_HOST_MEMORY, detail.call, detail.code,
                                 std::string("host memory could not be pinned: ") + detail.text, size, detail.address);
  failure.set_memory(size, kUnknownBytes, arena_.budget_);
  {
    std::lock_guard<std::mutex> lock(arena_.mutex_);
    arena_.pin_failure_ = std::move(failure);
  }
  finish_chunk(position, Arena::Readiness::Failed, false);
  return status;
}

void Growth::finish_chunk(uint64_t position, Arena::Readiness readiness, bool registered) {
  {
    std::lock_guard<std::mutex> lock(arena_.mutex_);
    Arena::HeldChunk& chunk = arena_.chunks_.at(position);
    chunk.readiness = readiness;
    chunk.registered = registered;
    if (registered) arena_.pinned_bytes_ += chunk.size;
    if (readiness == Arena::Readiness::Failed) {  // nothing comes after it any more
      for (uint64_t other : chunks_) {
        Arena::HeldChunk& later = arena_.chunks_.at(other);
        if (later.readiness == Arena::Readiness::Pending) later.readiness = Arena::Readiness::Failed;
      }
    }
  }
  arena_.changed_.notify_all();
}

}  // namespace hal
