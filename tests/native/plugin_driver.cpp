// A driver in a shared object of its own, as a vendor outside this repository would ship one; its device is never
// there.
#include <cstdio>

#include "driver.h"

namespace {

constexpr int32_t kNotThere = 1;

int32_t open_nothing(int32_t, const char*, void**, char* why, size_t why_size) {
  std::snprintf(why, why_size, "no such card; put one in");
  return kNotThere;
}

// Of any primitive's signature: without a device none is ever called.
template <typename... Arguments>
int32_t absent(Arguments...) {
  return kNotThere;
}

hal_kind classify(int32_t) {
  return HAL_UNSUPPORTED;
}
void describe(int32_t, char* text, size_t size) {
  std::snprintf(text, size, "not there");
}

hal_driver make_driver() {
  hal_driver driver{};
  driver.abi = HAL_DRIVER_ABI;
  driver.struct_size = sizeof driver;
  driver.name = "plugin";
  driver.open = open_nothing;
  driver.close = [](void*) {};
  driver.facts = absent;
  driver.granularity = absent;
  driver.memory_info = absent;
  driver.reserve = absent;
  driver.unreserve = absent;
  driver.create = absent;
  driver.release = absent;
  driver.map = absent;
  driver.access = absent;
  driver.unmap = absent;
  driver.copy_to_host = absent;
  driver.copy_to_device = absent;
  driver.fill = absent;
  driver.synchronize = absent;
  driver.host_register = absent;
  driver.host_unregister = absent;
  driver.is_capturing = absent;
  driver.classify = classify;
  driver.describe = describe;
  return driver;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const hal_driver* hal_driver_entry() {
  static const hal_driver driver = make_driver();
  return &driver;
}
