// Touches threads only. A stream's thread lives while the stream has work and keeps the stream alive for that long.
#include "streams.h"

#include <utility>

#include "codes.h"

namespace emu {

Stream::Stream(int device, bool blocking, std::atomic<int32_t>* sticky)
    : device_(device), blocking_(blocking), sticky_(sticky) {}

void Stream::enqueue(Operation operation) {
  const std::lock_guard<std::mutex> lock(mutex_);
  operations_.push_back(std::move(operation));
  ++enqueued_;
  if (std::exchange(working_, true)) return;
  std::thread([self = shared_from_this()] { self->work(); }).detach();
}

void Stream::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (!operations_.empty()) {
    const Operation operation = std::move(operations_.front());
    operations_.pop_front();
    lock.unlock();
    // After a sticky error the device does nothing more.
    if (sticky_->load() == kSuccess) {
      const int32_t code = operation();
      int32_t none = kSuccess;
      if (code != kSuccess) sticky_->compare_exchange_strong(none, code);
    }
    lock.lock();
    ++finished_;
    progress_.notify_all();
  }
  working_ = false;
}

void Stream::wait() {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t until = enqueued_;
  progress_.wait(lock, [&] { return finished_ >= until; });
}

uint64_t Stream::queued() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return enqueued_ - finished_;
}

}  // namespace emu
