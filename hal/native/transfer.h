// Sleep and wake: transactions over many segments of one device. See sleep.cpp and wake.cpp.
#pragma once

#include <chrono>

#include "device.h"

namespace hal {

struct SleepRequest {
  Arena* arena;  // may be null when nothing is offloaded
  hal_segment_order* orders;
  size_t order_count;
  const hal_range* ranges;
  size_t range_count;
};

struct WakeRequest {
  hal_segment_order* orders;
  size_t order_count;
  int32_t fill;  // a byte, or -1: zero, and only where the platform does not scrub
};

Status sleep(hal_device& device, const SleepRequest& request, hal_transfer_report* report);
Status wake(hal_device& device, const WakeRequest& request, hal_transfer_report* report);

// Adds the time of its own life to `seconds`.
class Stopwatch {
 public:
  explicit Stopwatch(double* seconds) : seconds_(seconds) {}
  ~Stopwatch() { *seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count(); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

 private:
  double* seconds_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

}  // namespace hal
