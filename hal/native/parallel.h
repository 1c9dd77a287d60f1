// Short-lived helper threads: a task that can be waited for, and a loop spread over the processors.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <thread>

namespace hal {

// Runs `body` on a thread of its own, or at once where the system gives no thread; waits for it in `join`.
class Task {
 public:
  Task() = default;
  explicit Task(std::function<void()> body);
  ~Task() { join(); }
  Task(Task&&) = default;
  Task& operator=(Task&& other) {
    join();
    thread_ = std::move(other.thread_);
    return *this;
  }
  void join() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  std::thread thread_;
};

// Calls body(0) … body(count - 1), on at most `threads` threads, and returns when all are done.
void parallel_for(size_t count, size_t threads, const std::function<void(size_t)>& body);

// Processors of this machine, at most `most` and at least 1.
size_t processors(size_t most);

}  // namespace hal
