// The primitives of an AMD GPU. One mutex of the whole process is held around each virtual memory call, since such
// calls race with each other inside the runtime; it is the innermost lock.
#include "hip_device.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>

namespace hal {
namespace {

// hipDeviceAttribute_t
constexpr int32_t kIntegrated = 16, kRdmaWithVirtualMemory = 94;
constexpr int32_t kFirstRdmaAttribute = 70000000;

std::mutex& virtual_memory_mutex() {
  static std::mutex* const mutex = new std::mutex;  // allocator callbacks may still arrive while the process exits
  return *mutex;
}

using Locked = std::lock_guard<std::mutex>;

}  // namespace

const char* name_of(GiveBack way) {
  switch (way) {
    case GiveBack::kPlaceholder:
      return "placeholder";
    case GiveBack::kAnonRemap:
      return "anon-remap";
    default:
      return "plain";
  }
}

// HIP has no contexts but a current device for each thread, which is torch's as well.
int32_t HipDevice::make_current(uint64_t* previous) {
  int32_t current = 0;
  const int32_t code = hip_.get_device(&current);
  if (code != kVmmSuccess) return code;
  *previous = static_cast<uint64_t>(current);
  return current == device_ ? kVmmSuccess : hip_.set_device(device_);
}

void HipDevice::restore(uint64_t previous) {
  if (static_cast<int32_t>(previous) != device_) hip_.set_device(static_cast<int32_t>(previous));
}

int32_t HipDevice::reserve(uint64_t size, uint64_t alignment, hal_address hint, hal_address* out) {
  const Locked lock(virtual_memory_mutex());
  const int32_t code = reserve_somehow(size, alignment, hint, out);
  if (code == kVmmSuccess) reservations_[*out] = size;
  return code;
}

// Some stacks refuse any alignment, and call that out of memory; others ignore it. What is mapped needs the granularity
// alone.
int32_t HipDevice::reserve_somehow(uint64_t size, uint64_t alignment, hal_address hint, hal_address* out) {
  int32_t code = VmmDevice::reserve(size, alignment, hint, out);
  if (code != kVmmSuccess && alignment != 0) code = VmmDevice::reserve(size, 0, hint, out);
  if (code != kVmmSuccess || *out % facts_.granularity == 0) return code;
  VmmDevice::unreserve(*out, size);
  return kVmmInvalidValue;
}

int32_t HipDevice::unreserve(hal_address address, uint64_t size) {
  const Locked lock(virtual_memory_mutex());
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != size) return kVmmInvalidValue;
  const int32_t code = VmmDevice::unreserve(address, size);
  if (code == kVmmSuccess) reservations_.erase(found);
  return code;
}

int32_t HipDevice::create(uint64_t size, hal_handle* out) {
  const Locked lock(virtual_memory_mutex());
  const int32_t code = VmmDevice::create(size, out);
  if (code == kVmmSuccess) handles_[*out] = 0;
  return code;
}

// Only what is mapped nowhere: a range whose memory was released under its mapping cannot be freed any more.
int32_t HipDevice::release(hal_handle handle) {
  const Locked lock(virtual_memory_mutex());
  const auto found = handles_.find(handle);
  if (found == handles_.end() || found->second > 0) return kVmmInvalidValue;
  const int32_t code = VmmDevice::release(handle);
  if (code == kVmmSuccess) handles_.erase(found);
  return code;
}

int32_t HipDevice::map(hal_address address, uint64_t size, hal_handle handle) {
  const Locked lock(virtual_memory_mutex());
  const auto found = handles_.find(handle);
  if (found == handles_.end() || !is_reserved(address, size) || overlaps_mapping(address, size)) {
    return kVmmInvalidValue;
  }
  const int32_t code = VmmDevice::map(address, size, handle);
  if (code != kVmmSuccess) return code;
  mappings_[address] = {size, handle};
  ++found->second;
  return code;
}

// Some stacks refuse legal ranges while a mapping is not finished; waiting for the device once finishes it.
int32_t HipDevice::access(hal_address address, uint64_t size) {
  const Locked lock(virtual_memory_mutex());
  const int32_t code = VmmDevice::access(address, size);
  if (code != kVmmInvalidValue) return code;
  if (!is_capturing(nullptr)) synchronize(HAL_ALL_STREAMS);
  return VmmDevice::access(address, size);
}

// One mapping: one call over several leaves the range in use for ever on some stacks.
int32_t HipDevice::unmap(hal_address address, uint64_t size) {
  const Locked lock(virtual_memory_mutex());
  const auto found = mappings_.find(address);
  if (found == mappings_.end() || found->second.size != size) return kVmmInvalidValue;
  const int32_t code = VmmDevice::unmap(address, size);
  if (code != kVmmSuccess) return code;
  --handles_[found->second.handle];
  mappings_.erase(found);
  return code;
}

// One at a time: with gigabytes of them in flight right after the mapping, devices have been seen to fault.
int32_t HipDevice::fill(hal_address device, uint8_t value, uint64_t size, uint32_t stream) {
  const int32_t code = VmmDevice::fill(device, value, size, stream);
  return code != kVmmSuccess ? code : synchronize(stream);
}

int32_t HipDevice::vacate(hal_address address, uint64_t size, hal_address* got) {
  const Locked lock(virtual_memory_mutex());
  if (reservations_.count(address) == 0 || overlaps_mapping(address, size)) return kVmmInvalidValue;
  if (give_back_ == GiveBack::kPlaceholder) return reserve_again(address, size, got);
  if (give_back_ == GiveBack::kPlain) return kVmmSuccess;
  constexpr int kInaccessible = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  void* const at = mmap(reinterpret_cast<void*>(address), size, PROT_NONE, kInaccessible, -1, 0);
  return at == MAP_FAILED ? int32_t{kHipRemapFailed} : int32_t{kVmmSuccess};
}

int32_t HipDevice::reserve_again(hal_address address, uint64_t size, hal_address* got) {
  const int32_t code = VmmDevice::unreserve(address, size);
  if (code != kVmmSuccess) return code;
  reservations_.erase(address);
  hal_address at = 0;
  if (VmmDevice::reserve(size, 0, address, &at) == kVmmSuccess && at == address) {
    reservations_[address] = size;
    return kVmmSuccess;
  }
  if (at != 0) VmmDevice::unreserve(at, size);
  *got = at;
  return kHipAddressLost;
}

bool HipDevice::is_reserved(hal_address address, uint64_t size) const {
  auto next = reservations_.upper_bound(address);
  if (next == reservations_.begin()) return false;
  const auto& [start, length] = *--next;
  return address + size <= start + length;
}

bool HipDevice::overlaps_mapping(hal_address address, uint64_t size) const {
  const auto next = mappings_.lower_bound(address + size);
  if (next == mappings_.begin()) return false;
  const auto& [start, mapping] = *std::prev(next);
  return start + mapping.size > address;
}

int32_t HipDevice::attribute(int32_t number) const {
  int32_t value = 0;
  return hip_.device_attribute(&value, number, device_) == kVmmSuccess ? value : 0;
}

// The name that management libraries know the device by: its PCI address, else its UUID, else "".
std::string HipDevice::management_id() const {
  char pci[sizeof facts_.device_uuid] = "";
  HipUuid uuid{};
  if (hip_.pci_bus_id != nullptr && hip_.pci_bus_id(pci, sizeof pci, device_) == kVmmSuccess) return pci;
  if (hip_.device_uuid == nullptr || hip_.device_uuid(&uuid, device_) != kVmmSuccess) return "";
  return "GPU-" + std::string(uuid.digits, sizeof uuid.digits);
}

int32_t HipDevice::read_facts(int32_t version, const VmmOptions& options, std::string* why) {
  properties_.rdma_capable = version >= kFirstRdmaAttribute && attribute(kRdmaWithVirtualMemory) != 0;
  set_fact(HAL_FACT_RDMA, properties_.rdma_capable != 0, "this HIP runtime does not offer RDMA with virtual memory");
  set_fact(HAL_FACT_SCRUBS, false, "amdgpu before Linux 6.14 hands out memory with old bytes");
  set_fact(HAL_FACT_UNIFIED_MEMORY, attribute(kIntegrated) != 0, "the device has memory of its own");
  set_fact(HAL_FACT_PARK, false, "ROCm has no call to checkpoint a process");
  hip_.device_name(facts_.device_name, sizeof facts_.device_name, device_);
  std::snprintf(facts_.device_uuid, sizeof facts_.device_uuid, "%s", management_id().c_str());
  return read_common_facts(options, why);
}

void HipDevice::set_found(bool gives_back, bool free_is_truthful, const std::string& why_not) {
  set_fact(HAL_FACT_VMM, gives_back, why_not);
  set_fact(HAL_FACT_FREE_TRUTHFUL, free_is_truthful, "hipMemGetInfo does not move with what is allocated");
}

void HipDevice::set_version(const std::string& text) {
  std::snprintf(facts_.version, sizeof facts_.version, "%s", text.c_str());
}

}  // namespace hal
