// The table of drivers: the library's one mutable global beside the numbered entry points (entries.cpp).
// Touches the dynamic loader for third-party drivers. Its mutex is a leaf: nothing is called while it is held.
#include "registry.h"

#include <dlfcn.h>
#include <pthread.h>

#include <atomic>
#include <mutex>

namespace hal {
namespace {

std::atomic<uint32_t> forks{0};

struct Registry {
  std::mutex mutex;
  std::vector<const hal_driver*> drivers = builtin_drivers();
};

Registry& registry() {
  // Never destroyed: allocator callbacks may still arrive while the process exits.
  static Registry* const instance = [] {
    auto* made = new Registry;
    // A child must find the mutex open, whichever thread of the parent held it.
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     registry().mutex.unlock();
                     forks.fetch_add(1, std::memory_order_relaxed);
                   });
    return made;
  }();
  return *instance;
}

bool complete(const hal_driver& d) {
  return d.name && d.open && d.close && d.facts && d.granularity && d.memory_info && d.reserve && d.unreserve &&
         d.create && d.release && d.map && d.access && d.unmap && d.copy_to_host && d.copy_to_device && d.fill &&
         d.synchronize && d.host_register && d.host_unregister && d.is_capturing && d.classify && d.describe;
}

const hal_driver* find_locked(const Registry& table, const std::string& name) {
  for (const hal_driver* driver : table.drivers) {
    if (name == driver->name) return driver;
  }
  return nullptr;
}

}  // namespace

Status register_driver(const hal_driver* driver) {
  constexpr const char* kCall = "register driver";
  if (driver == nullptr) return Status::invalid(kCall, "the driver is null");
  if (driver->abi != HAL_DRIVER_ABI || driver->struct_size < sizeof(hal_driver)) {
    return Status::invalid(kCall, "the driver was built for another version of driver.h; build it again with this one");
  }
  if (!complete(*driver)) return Status::invalid(kCall, "the driver leaves a primitive or its name null");
  Registry& table = registry();
  std::lock_guard<std::mutex> lock(table.mutex);
  const hal_driver* known = find_locked(table, driver->name);
  if (known == driver) return {};
  if (known != nullptr) {
    return Status::bad_state(kCall, std::string("a driver named '") + driver->name + "' is registered already");
  }
  table.drivers.push_back(driver);
  return {};
}

Status load_driver(const char* path) {
  constexpr const char* kCall = "load driver";
  if (path == nullptr || *path == '\0') return Status::invalid(kCall, "no path given");
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);  // stays open: its functions are in the table for good
  if (library == nullptr) return Status::error(HAL_UNSUPPORTED, kCall, 0, dlerror());
  using Entry = const hal_driver* (*)();
  auto entry = reinterpret_cast<Entry>(dlsym(library, "hal_driver_entry"));
  if (entry == nullptr) {
    dlclose(library);
    return Status::error(HAL_UNSUPPORTED, kCall, 0, std::string(path) + " does not export hal_driver_entry");
  }
  return register_driver(entry());
}

const hal_driver* find_driver(const std::string& name) {
  Registry& table = registry();
  std::lock_guard<std::mutex> lock(table.mutex);
  return find_locked(table, name);
}

std::string driver_names() {
  Registry& table = registry();
  std::lock_guard<std::mutex> lock(table.mutex);
  std::string names;
  for (const hal_driver* driver : table.drivers) {
    if (!names.empty()) names += ',';
    names += driver->name;
  }
  return names;
}

uint32_t fork_generation() {
  registry();
  return forks.load(std::memory_order_relaxed);
}

}  // namespace hal
