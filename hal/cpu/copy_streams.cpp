// A small scheduler over host memory. Its mutex guards the queues and is never held while bytes move.
#include "copy_streams.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "parallel.h"

namespace hal {
namespace {

constexpr uint64_t kSlice = 4u << 20;  // bytes that one thread moves at a time
constexpr size_t kWorkers = 8;

}  // namespace

CopyStreams::~CopyStreams() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  queued_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

int32_t CopyStreams::copy(uint32_t stream, void* to, const void* from, uint64_t size) {
  Operation operation;
  operation.to = static_cast<char*>(to);
  operation.from = static_cast<const char*>(from);
  operation.size = size;
  return enqueue(stream, operation);
}

int32_t CopyStreams::fill(uint32_t stream, void* to, uint8_t value, uint64_t size) {
  Operation operation;
  operation.to = static_cast<char*>(to);
  operation.value = value;
  operation.size = size;
  return enqueue(stream, operation);
}

int32_t CopyStreams::enqueue(uint32_t stream, const Operation& operation) {
  if (stream >= queues_.size()) return EINVAL;
  if (operation.size == 0) return 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const int32_t code = start_workers();
    if (code != 0) return code;
    queues_[stream].push_back(operation);
  }
  queued_.notify_all();
  return 0;
}

int32_t CopyStreams::start_workers() {
  if (!workers_.empty()) return 0;
  try {
    while (workers_.size() < processors(kWorkers)) workers_.emplace_back([this] { work(); });
  } catch (const std::system_error&) {
    if (workers_.empty()) return EAGAIN;
  }
  return 0;
}

// The operation at the head of a queue that has bytes nobody has begun; those behind it wait, to keep the order.
CopyStreams::Operation* CopyStreams::next_operation(size_t* queue) {
  for (*queue = 0; *queue < queues_.size(); ++*queue) {
    auto& operations = queues_[*queue];
    if (!operations.empty() && operations.front().begun < operations.front().size) return &operations.front();
  }
  return nullptr;
}

void CopyStreams::work() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    size_t queue = 0;
    Operation* operation = nullptr;
    queued_.wait(lock, [&] { return stopping_ || (operation = next_operation(&queue)) != nullptr; });
    if (operation == nullptr) return;
    const uint64_t begin = operation->begun;
    const uint64_t bytes = std::min(kSlice, operation->size - begin);
    operation->begun += bytes;
    const Operation slice = *operation;
    lock.unlock();
    if (slice.from != nullptr) {
      std::memcpy(slice.to + begin, slice.from + begin, bytes);
    } else {
      std::memset(slice.to + begin, slice.value, bytes);
    }
    lock.lock();
    operation->done += bytes;
    if (operation->done < operation->size) continue;
    queues_[queue].pop_front();
    if (!queues_[queue].empty()) queued_.notify_all();
    finished_.notify_all();
  }
}

int32_t CopyStreams::synchronize(uint32_t stream) {
  std::unique_lock<std::mutex> lock(mutex_);
  if (stream != kAll && stream >= queues_.size()) return EINVAL;
  finished_.wait(lock, [&] {
    if (stream != kAll) return queues_[stream].empty();
    return std::all_of(queues_.begin(), queues_.end(), [](const auto& queue) { return queue.empty(); });
  });
  return 0;
}

}  // namespace hal
