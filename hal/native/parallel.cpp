// Threads of the standard library and nothing else.
#include "parallel.h"

#include <algorithm>
#include <system_error>
#include <vector>

namespace hal {

Task::Task(std::function<void()> body) {
  try {
    thread_ = std::thread(body);
  } catch (const std::system_error&) {
    body();
  }
}

void parallel_for(size_t count, size_t threads, const std::function<void(size_t)>& body) {
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < count; i = next++) body(i);
  };
  std::vector<Task> helpers;
  for (size_t helper = 1; helper < std::min(threads, count); ++helper) helpers.emplace_back(work);
  work();
}

size_t processors(size_t most) {
  return std::clamp<size_t>(std::thread::hardware_concurrency(), 1, most);
}

}  // namespace hal
