// Copy streams for devices whose memory the host reaches: ordered queues, executed slice by slice by a few threads.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace hal {

class CopyStreams {
 public:
  static constexpr uint32_t kAll = UINT32_MAX;

  explicit CopyStreams(uint32_t count) : queues_(count) {}
  ~CopyStreams();
  CopyStreams(const CopyStreams&) = delete;
  CopyStreams& operator=(const CopyStreams&) = delete;

  // Queued and done in order within a stream; both return an errno.
  int32_t copy(uint32_t stream, void* to, const void* from, uint64_t size);
  int32_t fill(uint32_t stream, void* to, uint8_t value, uint64_t size);
  // Waits for one stream, or for kAll.
  int32_t synchronize(uint32_t stream);

 private:
  struct Operation {
    char* to = nullptr;
    const char* from = nullptr;  // null: a fill
    uint8_t value = 0;
    uint64_t size = 0;
    uint64_t begun = 0, done = 0;  // bytes
  };

  int32_t enqueue(uint32_t stream, const Operation& operation);
  int32_t start_workers();
  void work();
  Operation* next_operation(size_t* queue);

  std::mutex mutex_;
  std::condition_variable queued_, finished_;
  // A deque keeps the operations where they are while others are queued behind them.
  std::vector<std::deque<Operation>> queues_;
  std::vector<std::thread> workers_;  // started with the first operation
  bool stopping_ = false;
};

}  // namespace hal
