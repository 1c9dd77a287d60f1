// The functions of libcuda.so.1, as the driver's header declares them, over the emulated machine.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <thread>
#include <utility>

#include "codes.h"
#include "machine.h"

using emu::Machine;

// The first line of every function; `needs` are emu::Need bits.
#define ENTER(needs)                                                                          \
  do {                                                                                        \
    if (const int32_t emu_code = Machine::instance().enter(__func__, needs)) return emu_code; \
  } while (false)

namespace {

constexpr unsigned kVirtualMemory = emu::kContext | emu::kCaptureSafe;
constexpr int32_t kRdmaWithVirtualMemory = 110;

struct Location {
  uint32_t type;  // 1: device
  int32_t id;
};

struct Properties {
  uint32_t type, handle_types;
  Location location;
  void* win32;
  uint8_t compression, rdma;
  uint16_t usage;
  uint8_t reserved[4];
};
static_assert(sizeof(Properties) == 32);

struct AccessDescription {
  Location location;
  uint32_t flags;
};
static_assert(sizeof(AccessDescription) == 12);

bool is_device(const Location& location) {
  return location.type == 1 && location.id >= 0 && location.id < Machine::instance().settings().devices;
}

bool is_pinned_device_memory(const Properties* properties) {
  return properties != nullptr && properties->type == 1 && is_device(properties->location);
}

int attribute(int32_t number) {
  const auto attributes = Machine::instance().settings().attributes;
  const auto found = attributes.find(number);
  return found == attributes.end() ? 0 : found->second;
}

bool is_multiple(uint64_t size) {
  return size != 0 && size % Machine::instance().settings().granularity == 0;
}

// Waits out the delay that tests may have set, so that queued work stays in flight for a while.
void delay() {
  std::this_thread::sleep_for(std::chrono::microseconds(Machine::instance().settings().delay_us));
}

// Queues a device operation on memory that must be accessible now and when its turn comes. A copy from or to pageable
// host memory is finished when the call returns.
int32_t queue(void* handle, uint64_t address, uint64_t size, uint32_t need, bool wait,
              std::function<int32_t(int device)> operation) {
  Machine& machine = Machine::instance();
  const auto stream = machine.find_stream(handle);
  if (stream == nullptr) return emu::kInvalidHandle;
  if (!machine.memory.accessible(stream->device(), address, size, need)) return emu::kInvalidValue;
  return machine.submit(
      stream,
      [device = stream->device(), operation = std::move(operation)] {
        delay();
        return operation(device);
      },
      wait);
}

template <typename Value>
int32_t queue_fill(uint64_t address, Value value, size_t count, void* stream) {
  return queue(stream, address, count * sizeof value, 2, false, [=](int device) {
    return Machine::instance().memory.fill(device, address, &value, sizeof value, count);
  });
}

// Distinct, stable identities: byte 0 tells emulated devices from others, the last byte is the ordinal.
void write_uuid(uint8_t* uuid, int32_t device, uint8_t kind) {
  std::memset(uuid, 0, 16);
  uuid[0] = 0xE0;
  uuid[1] = kind;
  uuid[15] = static_cast<uint8_t>(device);
}

}  // namespace

extern "C" {

#pragma GCC visibility push(default)

// ---- process and devices

int32_t cuInit(uint32_t flags) {
  ENTER(emu::kNothing);
  return flags != 0 ? int32_t{emu::kInvalidValue} : Machine::instance().initialize();
}

int32_t cuDriverGetVersion(int32_t* version) {
  ENTER(emu::kNothing);
  *version = Machine::instance().settings().driver_version;
  return emu::kSuccess;
}

int32_t cuGetErrorName(int32_t code, const char** out) {
  const emu::CodeText* found = emu::find_code(code);
  *out = found == nullptr ? nullptr : found->name;
  return found == nullptr ? emu::kInvalidValue : emu::kSuccess;
}

int32_t cuGetErrorString(int32_t code, const char** out) {
  const emu::CodeText* found = emu::find_code(code);
  *out = found == nullptr ? nullptr : found->text;
  return found == nullptr ? emu::kInvalidValue : emu::kSuccess;
}

int32_t cuDeviceGetCount(int32_t* count) {
  ENTER(emu::kInitialized);
  *count = Machine::instance().settings().devices;
  return emu::kSuccess;
}

int32_t cuDeviceGet(int32_t* device, int32_t ordinal) {
  ENTER(emu::kInitialized);
  if (ordinal < 0 || ordinal >= Machine::instance().settings().devices) return emu::kInvalidDevice;
  *device = ordinal;
  return emu::kSuccess;
}

int32_t cuDeviceGetAttribute(int32_t* value, int32_t number, int32_t) {
  ENTER(emu::kInitialized);
  *value = attribute(number);
  return emu::kSuccess;
}

int32_t cuDeviceGetName(char* name, int32_t size, int32_t device) {
  ENTER(emu::kInitialized);
  std::snprintf(name, static_cast<size_t>(size), "Emulated GPU %d", device);
  return emu::kSuccess;
}

int32_t cuDeviceGetUuid(uint8_t* uuid, int32_t device) {
  ENTER(emu::kInitialized);
  write_uuid(uuid, device, 0);
  return emu::kSuccess;
}

int32_t cuDeviceGetUuid_v2(uint8_t* uuid, int32_t device) {
  ENTER(emu::kInitialized);
  write_uuid(uuid, device, Machine::instance().settings().mig ? 1 : 0);
  return emu::kSuccess;
}

int32_t cuDeviceGetPCIBusId(char* id, int32_t size, int32_t device) {
  ENTER(emu::kInitialized);
  std::snprintf(id, static_cast<size_t>(size), "0000:%02x:00.0", device + 1);
  return emu::kSuccess;
}

int32_t cuDeviceTotalMem_v2(size_t* bytes, int32_t device) {
  ENTER(emu::kInitialized);
  *bytes = Machine::instance().settings().capacity[device];
  return emu::kSuccess;
}

// ---- contexts

int32_t cuDevicePrimaryCtxRetain(void** context, int32_t device) {
  ENTER(emu::kInitialized);
  return Machine::instance().retain_context(device, context);
}

int32_t cuDevicePrimaryCtxRelease_v2(int32_t device) {
  ENTER(emu::kInitialized);
  return Machine::instance().release_context(device);
}

int32_t cuCtxGetCurrent(void** context) {
  ENTER(emu::kInitialized);
  *context = Machine::instance().current_context();
  return emu::kSuccess;
}

int32_t cuCtxSetCurrent(void* context) {
  ENTER(emu::kInitialized);
  return Machine::instance().make_current(context);
}

int32_t cuCtxGetDevice(int32_t* device) {
  ENTER(emu::kContext);
  *device = Machine::instance().current_device().ordinal;
  return emu::kSuccess;
}

int32_t cuCtxSynchronize(void) {
  ENTER(emu::kContext);
  return Machine::instance().synchronize_device();
}

int32_t cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
  ENTER(emu::kContext);
  Machine& machine = Machine::instance();
  const int device = machine.current_device().ordinal;
  const emu::Settings settings = machine.settings();
  const uint64_t gone = settings.taken[device] + machine.memory.use(device).used_bytes;
  *total = settings.capacity[device];
  *free_bytes = *total > gone ? *total - gone : 0;
  return emu::kSuccess;
}

// ---- virtual memory

int32_t cuMemGetAllocationGranularity(size_t* bytes, const Properties* properties, int32_t option) {
  ENTER(emu::kInitialized);
  if (bytes == nullptr || !is_pinned_device_memory(properties) || option < 0 || option > 1) return emu::kInvalidValue;
  *bytes = Machine::instance().settings().granularity;
  return emu::kSuccess;
}

int32_t cuMemAddressReserve(uint64_t* out, size_t size, size_t alignment, uint64_t hint, unsigned long long flags) {
  ENTER(kVirtualMemory);
  const emu::Settings settings = Machine::instance().settings();
  if (out == nullptr || flags != 0 || !is_multiple(size) || (alignment & (alignment - 1)) != 0)
    return emu::kInvalidValue;
  return Machine::instance().memory.reserve(size, std::max<uint64_t>(alignment, settings.granularity),
                                            settings.ignore_hints ? 0 : hint, out);
}

int32_t cuMemAddressFree(uint64_t address, size_t size) {
  ENTER(kVirtualMemory);
  return Machine::instance().memory.unreserve(address, size);
}

int32_t cuMemCreate(uint64_t* handle, size_t size, const Properties* properties, unsigned long long flags) {
  ENTER(kVirtualMemory);
  if (handle == nullptr || flags != 0 || !is_pinned_device_memory(properties) || !is_multiple(size)) {
    return emu::kInvalidValue;
  }
  if (properties->rdma != 0 && attribute(kRdmaWithVirtualMemory) == 0) return emu::kNotSupported;
  const emu::Settings settings = Machine::instance().settings();
  const int device = properties->location.id;
  const uint64_t taken = std::min(settings.taken[device], settings.capacity[device]);
  return Machine::instance().memory.create(device, size, settings.capacity[device] - taken, settings.poison,
                                           properties->rdma != 0, handle);
}

int32_t cuMemRelease(uint64_t handle) {
  ENTER(kVirtualMemory);
  return Machine::instance().memory.release(handle);
}

int32_t cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags) {
  ENTER(kVirtualMemory);
  if (flags != 0 || offset != 0 || !is_multiple(size)) return emu::kInvalidValue;
  return Machine::instance().memory.map(address, size, handle);
}

int32_t cuMemSetAccess(uint64_t address, size_t size, const AccessDescription* descriptions, size_t count) {
  ENTER(kVirtualMemory);
  if (descriptions == nullptr || count == 0) return emu::kInvalidValue;
  for (size_t i = 0; i < count; ++i) {
    if (!is_device(descriptions[i].location)) return emu::kInvalidValue;
    const int32_t code =
        Machine::instance().memory.set_access(address, size, descriptions[i].location.id, descriptions[i].flags);
    if (code != emu::kSuccess) return code;
  }
  return emu::kSuccess;
}

int32_t cuMemUnmap(uint64_t address, size_t size) {
  ENTER(kVirtualMemory);
  return Machine::instance().memory.unmap(address, size);
}

// ---- copies and fills

int32_t cuMemcpyDtoHAsync_v2(void* host, uint64_t device_address, size_t size, void* stream) {
  ENTER(emu::kContext);
  const bool pageable = !Machine::instance().is_registered(reinterpret_cast<uint64_t>(host), size);
  return queue(stream, device_address, size, 1, pageable,
               [=](int device) { return Machine::instance().memory.copy_out(device, host, device_address, size); });
}

int32_t cuMemcpyHtoDAsync_v2(uint64_t device_address, const void* host, size_t size, void* stream) {
  ENTER(emu::kContext);
  const bool pageable = !Machine::instance().is_registered(reinterpret_cast<uint64_t>(host), size);
  return queue(stream, device_address, size, 2, pageable,
               [=](int device) { return Machine::instance().memory.copy_in(device, device_address, host, size); });
}

int32_t cuMemsetD8Async(uint64_t address, uint8_t value, size_t count, void* stream) {
  ENTER(emu::kContext);
  return queue_fill(address, value, count, stream);
}

int32_t cuMemsetD32Async(uint64_t address, uint32_t value, size_t count, void* stream) {
  ENTER(emu::kContext);
  if (address % sizeof value != 0) return emu::kInvalidValue;
  return queue_fill(address, value, count, stream);
}

// ---- streams and captures

int32_t cuStreamCreate(void** stream, uint32_t flags) {
  ENTER(kVirtualMemory);
  return Machine::instance().create_stream(flags, stream);
}

int32_t cuStreamDestroy_v2(void* stream) {
  ENTER(emu::kInitialized);
  return Machine::instance().destroy_stream(stream);
}

int32_t cuStreamSynchronize(void* handle) {
  ENTER(emu::kContext);
  const auto stream = Machine::instance().find_stream(handle);
  if (stream == nullptr) return emu::kInvalidHandle;
  stream->wait();
  return Machine::instance().current_device().sticky.load();
}

int32_t cuStreamIsCapturing(void* stream, int32_t* status) {
  ENTER(emu::kContext);
  return Machine::instance().query_capture(stream, status);
}

int32_t cuThreadExchangeStreamCaptureMode(int32_t* mode) {
  ENTER(emu::kInitialized);
  return Machine::instance().exchange_capture_mode(mode);
}

// ---- host memory

int32_t cuMemHostRegister_v2(void* host, size_t size, uint32_t) {
  ENTER(kVirtualMemory);
  return Machine::instance().register_host(reinterpret_cast<uint64_t>(host), size);
}

int32_t cuMemHostUnregister(void* host) {
  ENTER(kVirtualMemory);
  return Machine::instance().unregister_host(reinterpret_cast<uint64_t>(host));
}

#pragma GCC visibility pop

}  // extern "C"
