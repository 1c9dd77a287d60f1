// The cpu driver dressed as an accelerator: the host cannot reach its memory, host memory can be pinned, graphs can be
// captured. Registered as "far".
#pragma once

#include <atomic>
#include <map>
#include <mutex>

#include "machine.h"

extern "C" const hal_driver* hal_cpu_driver();

namespace far {

inline std::atomic<bool> capturing{false};
inline std::atomic<int> synchronizations{0}, largest_registration_mib{0};
inline std::mutex mutex;
inline std::map<void*, uint64_t> registered;

inline int32_t facts(void* context, hal_facts* out) {
  const int32_t code = hal_cpu_driver()->facts(context, out);
  out->yes &= ~(1u << HAL_FACT_HOST_ACCESS);
  out->yes |= 1u << HAL_FACT_PIN_HOST;
  return code;
}

inline int32_t host_register(void*, void* host, uint64_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  if (!registered.emplace(host, size).second) return EEXIST;
  largest_registration_mib = std::max(largest_registration_mib.load(), static_cast<int>(size / MiB));
  return 0;
}

inline int32_t host_unregister(void*, void* host, uint64_t size) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = registered.find(host);
  if (found == registered.end() || found->second != size) return EINVAL;
  registered.erase(found);
  return 0;
}

inline size_t registrations() {
  std::lock_guard<std::mutex> lock(mutex);
  return registered.size();
}

inline int32_t synchronize(void* context, uint32_t stream) {
  if (capturing) return EPERM;
  ++synchronizations;
  return hal_cpu_driver()->synchronize(context, stream);
}

inline int32_t is_capturing(void*, void*) {
  return capturing ? 1 : 0;
}

inline void use() {
  static hal_driver driver = [] {
    hal_driver made = *hal_cpu_driver();
    made.name = "far";
    made.facts = facts;
    made.host_register = host_register;
    made.host_unregister = host_unregister;
    made.synchronize = synchronize;
    made.is_capturing = is_capturing;
    return made;
  }();
  OK(hal_register_driver(&driver, &status));
}

}  // namespace far
