// The functions of libamdhip64.so, as HIP's headers declare them from 5.3 on, over a libcuda: structures, values and
// error numbers are the same, so they pass straight through.
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "cuda.h"
#include "runtime.h"

using emuhip::Code;
using emuhip::Cuda;
using emuhip::Runtime;

// The first lines of every function that needs the device.
#define ENTER(driver)           \
  const Cuda* driver = nullptr; \
  if (const Code enter_code = emuhip::enter(&driver)) return enter_code

namespace {

constexpr Code kSuccess = 0, kInvalidValue = 1;

struct CodeText {
  Code code;
  const char *name, *text;
};

constexpr CodeText kCodes[] = {
    {0, "hipSuccess", "no error"},
    {1, "hipErrorInvalidValue", "invalid argument"},
    {2, "hipErrorOutOfMemory", "out of memory"},
    {3, "hipErrorNotInitialized", "initialization error"},
    {100, "hipErrorNoDevice", "no ROCm-capable device is detected"},
    {101, "hipErrorInvalidDevice", "invalid device ordinal"},
    {201, "hipErrorInvalidContext", "invalid device context"},
    {400, "hipErrorInvalidHandle", "invalid resource handle"},
    {700, "hipErrorIllegalAddress", "an illegal memory access was encountered"},
    {712, "hipErrorHostMemoryAlreadyRegistered", "part or all of the requested memory range is already mapped"},
    {713, "hipErrorHostMemoryNotRegistered", "pointer does not correspond to a registered memory region"},
    {719, "hipErrorLaunchFailure", "unspecified launch failure"},
    {801, "hipErrorNotSupported", "operation not supported"},
    {900, "hipErrorStreamCaptureUnsupported", "operation not permitted when stream is capturing"},
    {901, "hipErrorStreamCaptureInvalidated", "operation failed due to a previous error during capture"},
    {906, "hipErrorStreamCaptureImplicit", "operation would have resulted in a disallowed implicit dependency"},
    {999, "hipErrorUnknown", "unknown error"},
};

const CodeText* find_code(Code code) {
  for (const CodeText& entry : kCodes) {
    if (entry.code == code) return &entry;
  }
  return nullptr;
}

// hipDeviceAttribute_t -> CUdevice_attribute; 0 for what HIP does not know here.
int32_t cuda_attribute(int32_t attribute) {
  switch (attribute) {
    case 16:
      return 18;  // integrated
    case 89:
      return 102;  // virtual memory management
    case 94:
      return 110;  // RDMA with virtual memory
    default:
      return 0;
  }
}

uint64_t number(const void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}

}  // namespace

extern "C" {

#pragma GCC visibility push(default)

// ---- devices

Code hipInit(uint32_t flags) {
  Code code = kSuccess;
  emuhip::cuda(&code);
  return flags != 0 ? kInvalidValue : code;
}

Code hipRuntimeGetVersion(int32_t* version) {
  *version = Runtime::instance().version();
  return kSuccess;
}

Code hipGetDeviceCount(int32_t* count) {
  Code code = kSuccess;
  *count = 0;
  const Cuda* driver = emuhip::cuda(&code);
  return driver == nullptr ? code : driver->device_count(count);
}

Code hipGetDevice(int32_t* device) {
  *device = emuhip::current_device();
  return kSuccess;
}

Code hipSetDevice(int32_t device) {
  return emuhip::set_current_device(device);
}

Code hipDeviceGetAttribute(int32_t* value, int32_t attribute, int32_t device) {
  ENTER(driver);
  const int32_t known = cuda_attribute(attribute);
  return known == 0 ? kInvalidValue : driver->device_attribute(value, known, device);
}

Code hipDeviceGetName(char* name, int32_t size, int32_t device) {
  ENTER(driver);
  return driver->device_name(name, size, device);
}

Code hipDeviceGetUuid(char* digits, int32_t device) {
  ENTER(driver);
  uint8_t uuid[16];
  if (const Code code = driver->device_uuid(uuid, device)) return code;
  char text[17];
  for (int i = 0; i < 8; ++i) std::snprintf(text + 2 * i, 3, "%02x", uuid[8 + i]);
  std::memcpy(digits, text, 16);
  return kSuccess;
}

Code hipDeviceGetPCIBusId(char* id, int32_t size, int32_t device) {
  ENTER(driver);
  return driver->pci_bus_id(id, size, device);
}

Code hipDeviceSynchronize(void) {
  ENTER(driver);
  const Code code = driver->synchronize();
  if (code == kSuccess) Runtime::instance().synchronized();
  return code;
}

Code hipMemGetInfo(size_t* free_bytes, size_t* total) {
  ENTER(driver);
  return Runtime::instance().memory_info(*driver, free_bytes, total);
}

const char* hipGetErrorName(Code code) {
  const CodeText* found = find_code(code);
  return found == nullptr ? "hipErrorUnknown" : found->name;
}

const char* hipGetErrorString(Code code) {
  const CodeText* found = find_code(code);
  return found == nullptr ? "unknown error" : found->text;
}

// ---- virtual memory

Code hipMemGetAllocationGranularity(size_t* bytes, const void* properties, int32_t option) {
  ENTER(driver);
  return driver->granularity(bytes, properties, option);
}

Code hipMemAddressReserve(void** out, size_t size, size_t alignment, void* hint, unsigned long long flags) {
  ENTER(driver);
  if (out == nullptr || size == 0 || flags != 0) return kInvalidValue;
  uint64_t address = 0;
  const Code code = Runtime::instance().reserve(*driver, &address, size, alignment, number(hint));
  if (code == kSuccess) *out = reinterpret_cast<void*>(address);
  return code;
}

Code hipMemAddressFree(void* address, size_t size) {
  ENTER(driver);
  return address == nullptr || size == 0 ? kInvalidValue
                                         : Runtime::instance().unreserve(*driver, number(address), size);
}

Code hipMemCreate(void** handle, size_t size, const void* properties, unsigned long long flags) {
  ENTER(driver);
  if (handle == nullptr || properties == nullptr || size == 0 || flags != 0) return kInvalidValue;
  uint64_t made = 0;
  const Code code = Runtime::instance().create(*driver, &made, size, properties);
  if (code == kSuccess) *handle = reinterpret_cast<void*>(made);
  return code;
}

Code hipMemRelease(void* handle) {
  ENTER(driver);
  return handle == nullptr ? kInvalidValue : Runtime::instance().release(*driver, number(handle));
}

Code hipMemMap(void* address, size_t size, size_t offset, void* handle, unsigned long long flags) {
  ENTER(driver);
  if (address == nullptr || handle == nullptr || size == 0 || offset != 0 || flags != 0) return kInvalidValue;
  return Runtime::instance().map(*driver, number(address), size, number(handle));
}

Code hipMemUnmap(void* address, size_t size) {
  ENTER(driver);
  return address == nullptr || size == 0 ? kInvalidValue : Runtime::instance().unmap(*driver, number(address), size);
}

Code hipMemSetAccess(void* address, size_t size, const void* descriptions, size_t count) {
  ENTER(driver);
  if (address == nullptr || size == 0 || descriptions == nullptr || count == 0) return kInvalidValue;
  return Runtime::instance().access(*driver, number(address), size, descriptions, count);
}

// ---- copies, fills, streams

Code hipMemcpyDtoHAsync(void* host, void* device, size_t size, void* stream) {
  ENTER(driver);
  return driver->to_host(host, number(device), size, stream);
}

Code hipMemcpyHtoDAsync(void* device, const void* host, size_t size, void* stream) {
  ENTER(driver);
  return driver->to_device(number(device), host, size, stream);
}

Code hipMemsetD8Async(void* device, unsigned char value, size_t count, void* stream) {
  ENTER(driver);
  return driver->fill_bytes(number(device), value, count, stream);
}

Code hipMemsetD32Async(void* device, int32_t value, size_t count, void* stream) {
  ENTER(driver);
  return driver->fill_words(number(device), static_cast<uint32_t>(value), count, stream);
}

Code hipStreamCreateWithFlags(void** stream, uint32_t flags) {
  ENTER(driver);
  return driver->stream_create(stream, flags);
}

Code hipStreamDestroy(void* stream) {
  ENTER(driver);
  return driver->stream_destroy(stream);
}

Code hipStreamSynchronize(void* stream) {
  ENTER(driver);
  return driver->stream_synchronize(stream);
}

Code hipStreamIsCapturing(void* stream, int32_t* status) {
  ENTER(driver);
  return driver->stream_is_capturing(stream, status);
}

Code hipThreadExchangeStreamCaptureMode(int32_t* mode) {
  ENTER(driver);
  return driver->exchange_capture_mode(mode);
}

// ---- host memory

Code hipHostRegister(void* host, size_t size, uint32_t flags) {
  ENTER(driver);
  return driver->host_register(host, size, flags);
}

Code hipHostUnregister(void* host) {
  ENTER(driver);
  return driver->host_unregister(host);
}

#pragma GCC visibility pop

}  // extern "C"
