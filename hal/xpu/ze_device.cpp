// The primitives of Level Zero. Holds a queue's lock while it uses the queue's list, and no other.
#include "ze_device.h"

#include <cstdio>
#include <vector>

namespace hal {
namespace {

constexpr uint64_t kUsualPage = 2u << 20;

void* pointer(hal_address address) {
  return reinterpret_cast<void*>(address);
}

}  // namespace

ZeDevice::~ZeDevice() {
  for (Queue& queue : queues_) {
    if (queue.list == nullptr) continue;
    wait_for(queue);
    api_.list_destroy(queue.list);
  }
  if (handles_.owns_context) api_.context_destroy(handles_.context);
}

uint64_t ZeDevice::page_size(uint64_t size) const {
  size_t bytes = 0;
  const int32_t code = api_.page_size(handles_.context, handles_.device, size, &bytes);
  return code == kZeSuccess && bytes != 0 ? bytes : kUsualPage;
}

void ZeDevice::memory_info(uint64_t* free_bytes, uint64_t* total_bytes) const {
  const uint64_t held = held_.load();
  *total_bytes = total_;
  *free_bytes = held < total_ ? total_ - held : 0;
}

int32_t ZeDevice::reserve(uint64_t size, uint64_t alignment, hal_address hint, hal_address* out) const {
  void* at = nullptr;
  const int32_t code = api_.reserve(handles_.context, pointer(hint), size, &at);
  if (code != kZeSuccess) return code;
  *out = reinterpret_cast<hal_address>(at);
  if (alignment == 0 || *out % alignment == 0) return kZeSuccess;
  api_.unreserve(handles_.context, at, size);  // there is no way to ask for more than the page that `size` has
  return kZeUnsupportedAlignment;
}

int32_t ZeDevice::unreserve(hal_address address, uint64_t size) const {
  return api_.unreserve(handles_.context, pointer(address), size);
}

// Drivers move memory to the host when the device is full, and answer success: what cannot fit is refused here.
bool ZeDevice::take_room(uint64_t size) {
  const uint64_t held = held_.fetch_add(size);
  if (total_ == 0 || (size <= total_ && held <= total_ - size)) return true;
  held_ -= size;
  return false;
}

int32_t ZeDevice::create(uint64_t size, hal_handle* out) {
  if (!take_room(size)) return kZeOutOfDeviceMemory;
  ZePhysicalDescription description;
  description.size = size;
  ZeHandle physical = nullptr;
  const int32_t code = api_.create(handles_.context, handles_.device, &description, &physical);
  if (code == kZeSuccess) {
    *out = reinterpret_cast<hal_handle>(physical);
  } else {
    held_ -= size;
  }
  return code;
}

int32_t ZeDevice::release(hal_handle handle, uint64_t size) {
  const int32_t code = api_.destroy(handles_.context, reinterpret_cast<ZeHandle>(handle));
  if (code == kZeSuccess) held_ -= size;
  return code;
}

// A mapping is readable and writable from the start, as SYCL's are: to change the access of a mapping is less travelled
// ground in the drivers.
int32_t ZeDevice::map(hal_address address, uint64_t size, hal_handle handle) const {
  return api_.map(handles_.context, pointer(address), size, reinterpret_cast<ZeHandle>(handle), 0, kZeReadWrite);
}

int32_t ZeDevice::unmap(hal_address address, uint64_t size) const {
  return api_.unmap(handles_.context, pointer(address), size);
}

uint32_t ZeDevice::copy_group() const {
  uint32_t count = 0;
  if (api_.queue_groups(handles_.device, &count, nullptr) != kZeSuccess) return 0;
  std::vector<ZeQueueGroup> groups(count);
  if (api_.queue_groups(handles_.device, &count, groups.data()) != kZeSuccess) return 0;
  for (uint32_t ordinal = 0; ordinal < groups.size(); ++ordinal) {
    if ((groups[ordinal].flags & kZeCanCopy) != 0 && groups[ordinal].queues > 0) return ordinal;
  }
  return 0;
}

int32_t ZeDevice::make_list(ZeHandle* out) const {
  ZeQueueDescription description;
  description.ordinal = copy_group();
  description.mode = api_.list_synchronize != nullptr ? kZeAsynchronous : kZeSynchronous;
  return api_.list_create(handles_.context, handles_.device, &description, out);
}

template <typename Append>
int32_t ZeDevice::append(uint32_t stream, Append&& append) {
  if (stream >= kStreams) return kZeInvalidArgument;
  Queue& queue = queues_[stream];
  const std::lock_guard<std::mutex> lock(queue.mutex);
  if (queue.list == nullptr) {
    const int32_t code = make_list(&queue.list);
    if (code != kZeSuccess) return code;
  }
  // What is in a list may run in any order between barriers.
  const int32_t code = api_.append_barrier(queue.list, nullptr, 0, nullptr);
  return code != kZeSuccess ? code : append(queue.list);
}

int32_t ZeDevice::copy(void* to, const void* from, uint64_t size, uint32_t stream) {
  return append(stream, [&](ZeHandle list) { return api_.append_copy(list, to, from, size, nullptr, 0, nullptr); });
}

int32_t ZeDevice::fill(hal_address address, uint8_t value, uint64_t size, uint32_t stream) {
  return append(stream, [&](ZeHandle list) {
    return api_.append_fill(list, pointer(address), &value, sizeof value, size, nullptr, 0, nullptr);
  });
}

int32_t ZeDevice::wait_for(Queue& queue) const {
  if (queue.list == nullptr || api_.list_synchronize == nullptr) return kZeSuccess;
  return api_.list_synchronize(queue.list, UINT64_MAX);
}

// Level Zero cannot wait for queues that it is not shown. Those of torch are waited for above, by torch itself, before
// a transition begins (torch_memory.py); torch also waits for them before it frees memory.
int32_t ZeDevice::synchronize(uint32_t stream) {
  if (stream != HAL_ALL_STREAMS && stream >= kStreams) return kZeInvalidArgument;
  int32_t first_error = kZeSuccess;
  for (uint32_t number = 0; number < kStreams; ++number) {
    if (stream != HAL_ALL_STREAMS && stream != number) continue;
    const std::lock_guard<std::mutex> lock(queues_[number].mutex);
    const int32_t code = wait_for(queues_[number]);
    if (first_error == kZeSuccess) first_error = code;
  }
  return first_error;
}

int32_t ZeDevice::host_register(void* host, uint64_t size) const {
  return import_host_ == nullptr ? kZeUnsupportedFeature : import_host_(real_driver_, host, size);
}

int32_t ZeDevice::host_unregister(void* host) const {
  return release_host_ == nullptr ? kZeUnsupportedFeature : release_host_(real_driver_, host);
}

}  // namespace hal
