// Streams: ordered queues that each have a thread, so that work is really in flight after the call that queued it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace emu {

struct Capture {
  enum Status : int32_t { kNone = 0, kActive = 1, kInvalidated = 2 };
  Status status = kNone;
  int32_t mode = 0;
  std::thread::id owner;
};

class Stream : public std::enable_shared_from_this<Stream> {
 public:
  using Operation = std::function<int32_t()>;

  // The first operation that fails puts its code into `sticky` (of the device), where it stays.
  Stream(int device, bool blocking, std::atomic<int32_t>* sticky);

  int device() const { return device_; }
  bool blocking() const { return blocking_; }  // synchronizes with the default stream
  void enqueue(Operation operation);
  // Returns when everything that was queued before this call has finished.
  void wait();
  uint64_t queued() const;

  Capture capture;  // guarded by the machine's mutex

 private:
  void work();

  const int device_;
  const bool blocking_;
  std::atomic<int32_t>* const sticky_;
  mutable std::mutex mutex_;
  std::condition_variable progress_;
  std::deque<Operation> operations_;
  uint64_t enqueued_ = 0, finished_ = 0;
  bool working_ = false;
};

}  // namespace emu
