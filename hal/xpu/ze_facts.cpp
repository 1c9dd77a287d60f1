// What a device says of itself and what a probe of one page says. Touches the device only while it is opened.
#include <algorithm>
#include <cstdio>
#include <type_traits>
#include <vector>

#include "ze_device.h"

namespace hal {
namespace {

constexpr uint64_t kSmallest = 4096;

}  // namespace

void ZeDevice::set_fact(hal_fact fact, bool yes, const std::string& why_not) {
  const uint32_t bit = 1u << fact;
  facts_.yes = yes ? facts_.yes | bit : facts_.yes & ~bit;
  std::snprintf(facts_.why_not[fact], sizeof facts_.why_not[fact], "%s", yes ? "" : why_not.c_str());
}

void ZeDevice::read_names(const ZeDeviceProperties& properties) {
  std::snprintf(facts_.device_name, sizeof facts_.device_name, "%.63s", properties.name);
  std::snprintf(facts_.device_uuid, sizeof facts_.device_uuid, "%s", handles_.management_id.c_str());
  uint32_t api = 0;
  ZeDriverProperties driver;
  if (handles_.driver == nullptr || api_.api_version(handles_.driver, &api) != kZeSuccess ||
      api_.driver_properties(handles_.driver, &driver) != kZeSuccess) {
    std::snprintf(facts_.version, sizeof facts_.version, "Level Zero");
    return;
  }
  std::snprintf(facts_.version, sizeof facts_.version, "Level Zero %u.%u, driver %u.%u.%u", api >> 16, api & 0xffff,
                driver.version >> 24, driver.version >> 16 & 0xff, driver.version & 0xffff);
}

void ZeDevice::read_memory() {
  uint32_t count = 0;
  if (api_.memory_properties(handles_.device, &count, nullptr) != kZeSuccess) return;
  std::vector<ZeMemoryProperties> memories(count);
  if (api_.memory_properties(handles_.device, &count, memories.data()) != kZeSuccess) return;
  for (const ZeMemoryProperties& memory : memories) total_ += memory.total;
}

// The calls with which SYCL pins host memory: extensions of Intel's driver, which wants its own handle and not the
// loader's.
void ZeDevice::find_import_calls() {
  if (handles_.driver == nullptr || api_.extension == nullptr) return;
  real_driver_ = handles_.driver;
  if (api_.translate != nullptr) api_.translate(kZelDriver, handles_.driver, &real_driver_);
  const auto find = [this](const char* name, auto& slot) {
    void* function = nullptr;
    if (api_.extension(handles_.driver, name, &function) == kZeSuccess) {
      slot = reinterpret_cast<std::remove_reference_t<decltype(slot)>>(function);
    }
  };
  find("zexDriverImportExternalPointer", import_host_);
  find("zexDriverReleaseImportedPointer", release_host_);
  if (release_host_ == nullptr) import_host_ = nullptr;
}

std::string ZeDevice::probe_page() {
  const std::string missing = missing_virtual_memory(api_);
  if (!missing.empty()) return missing;
  const uint64_t size = page_size(kSmallest);
  const auto failure = [](const char* call, int32_t code) {
    return code == kZeSuccess ? std::string() : std::string(call) + " failed with " + ze_name(code);
  };
  hal_address address = 0;
  std::string wrong = failure("zeVirtualMemReserve", reserve(size, size, 0, &address));
  if (!wrong.empty()) return wrong;
  hal_handle handle = 0;
  wrong = failure("zePhysicalMemCreate", create(size, &handle));
  if (wrong.empty()) {
    wrong = failure("zeVirtualMemMap", map(address, size, handle));
    if (wrong.empty()) wrong = failure("zeVirtualMemUnmap", unmap(address, size));
    const std::string undone = failure("zePhysicalMemDestroy", release(handle, size));
    if (wrong.empty()) wrong = undone;
  }
  const std::string given_back = failure("zeVirtualMemFree", unreserve(address, size));
  return wrong.empty() ? given_back : wrong;
}

// The largest physical piece: what was asked for, else what the device allows, in whole pages.
int32_t ZeDevice::choose_chunk(uint64_t asked, uint64_t allowed, std::string* why) {
  const uint64_t largest = asked != 0 ? asked : allowed;
  const uint64_t page = (facts_.yes >> HAL_FACT_VMM & 1u) != 0 ? page_size(std::max(largest, kSmallest)) : kSmallest;
  if (asked % page != 0) {
    *why = "option chunk must be a multiple of its page size, " + std::to_string(page) + " bytes";
    return kZeInvalidArgument;
  }
  facts_.chunk = largest / page * page;
  return kZeSuccess;
}

int32_t ZeDevice::read_facts(uint64_t chunk, std::string* why) {
  ZeDeviceProperties properties;
  const int32_t code = api_.device_properties(handles_.device, &properties);
  if (code != kZeSuccess) {
    *why = "zeDeviceGetProperties failed with " + ze_name(code);
    return code;
  }
  read_names(properties);
  read_memory();
  find_import_calls();
  const std::string no_vmm = probe_page();
  facts_.granularity = facts_.alignment = no_vmm.empty() ? page_size(kSmallest) : kSmallest;
  facts_.streams = kStreams;
  set_fact(HAL_FACT_VMM, no_vmm.empty(), no_vmm + "; update the GPU driver");
  set_fact(HAL_FACT_PIN_HOST, import_host_ != nullptr, "the driver has no extension to import host memory");
  set_fact(HAL_FACT_SCRUBS, false, "Level Zero does not promise that fresh physical memory is zero");
  set_fact(HAL_FACT_FREE_TRUTHFUL, false,
           "Level Zero does not tell what is free: it is the total less what is held here");
  set_fact(HAL_FACT_HOST_ACCESS, false, "the host cannot read device addresses");
  set_fact(HAL_FACT_UNIFIED_MEMORY, (properties.flags & kZeIntegrated) != 0, "the device has memory of its own");
  set_fact(HAL_FACT_RDMA, false, "Level Zero has no physical memory for RDMA");
  set_fact(HAL_FACT_PARK, false, "Level Zero has no process checkpoint");
  return choose_chunk(chunk, properties.largest_allocation, why);
}

}  // namespace hal
