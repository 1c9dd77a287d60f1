// What CUDA and HIP share. Their virtual-memory calls have one ABI (HIP's since 5.3): the same structures, values and
// error numbers, so both drivers are a VmmDevice, each with its own table of symbols and its own notion of a current
// device.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>

#include "driver.h"

namespace hal {

// CUresult and hipError_t: the values that mean something to a driver.
enum VmmError : int32_t {
  kVmmSuccess = 0,
  kVmmInvalidValue = 1,
  kVmmOutOfMemory = 2,
  kVmmNotInitialized = 3,
  kVmmDeviceUnavailable = 46,  // another process holds the device in exclusive mode
  kVmmNoDevice = 100,
  kVmmInvalidDevice = 101,
  kVmmHostAlreadyRegistered = 712,
  kVmmHostNotRegistered = 713,
  kVmmNotSupported = 801,
  kVmmCaptureUnsupported = 900,  // this and the codes up to kVmmCaptureWrongThread: a capture forbids the call
  kVmmCaptureWrongThread = 908,
};

struct VmmLocation {
  uint32_t type = 1;  // a device
  int32_t id = 0;
};
static_assert(sizeof(VmmLocation) == 8, "CUmemLocation, hipMemLocation");

struct VmmProperties {
  uint32_t type = 1;  // pinned
  uint32_t handle_types = 0;
  VmmLocation location;
  void* win32_metadata = nullptr;
  uint8_t compression = 0;
  uint8_t rdma_capable = 0;
  uint16_t usage = 0;
  uint8_t reserved[4] = {};
};
static_assert(sizeof(VmmProperties) == 32, "CUmemAllocationProp, hipMemAllocationProp");
static_assert(offsetof(VmmProperties, location) == 8 && offsetof(VmmProperties, rdma_capable) == 25, "their layout");

struct VmmAccess {
  VmmLocation location;
  uint32_t flags = 3;  // read and write
};
static_assert(sizeof(VmmAccess) == 12, "CUmemAccessDesc, hipMemAccessDesc");

// The calls of the family; a vendor's table of symbols fills them. Streams and contexts are opaque pointers.
struct VmmApi {
  int32_t (*granularity)(size_t* bytes, const VmmProperties* properties, int32_t recommended);
  int32_t (*memory_info)(size_t* free_bytes, size_t* total_bytes);
  int32_t (*reserve)(uint64_t* address, size_t size, size_t alignment, uint64_t hint, unsigned long long flags);
  int32_t (*unreserve)(uint64_t address, size_t size);
  int32_t (*create)(uint64_t* handle, size_t size, const VmmProperties* properties, unsigned long long flags);
  int32_t (*release)(uint64_t handle);
  int32_t (*map)(uint64_t address, size_t size, size_t offset, uint64_t handle, unsigned long long flags);
  int32_t (*access)(uint64_t address, size_t size, const VmmAccess* access, size_t count);
  int32_t (*unmap)(uint64_t address, size_t size);
  int32_t (*copy_to_host)(void* host, uint64_t device, size_t size, void* stream);
  int32_t (*copy_to_device)(uint64_t device, const void* host, size_t size, void* stream);
  int32_t (*fill_bytes)(uint64_t device, uint8_t value, size_t count, void* stream);
  int32_t (*fill_words)(uint64_t device, uint32_t value, size_t count, void* stream);
  int32_t (*stream_create)(void** stream, uint32_t flags);
  int32_t (*stream_destroy)(void* stream);
  int32_t (*stream_synchronize)(void* stream);
  int32_t (*device_synchronize)();
  int32_t (*host_register)(void* host, size_t size, uint32_t flags);
  int32_t (*host_unregister)(void* host);
  int32_t (*is_capturing)(void* stream, int32_t* status);  // optional: without it there are no captures
  int32_t (*exchange_capture_mode)(int32_t* mode);         // optional: without it captures forbid nothing
};
static_assert(sizeof(size_t) == 8 && sizeof(void*) == 8, "device addresses are passed as 64-bit integers");

struct VmmOptions {
  uint64_t chunk;  // bytes of the largest physical piece; 0: no limit
};

// One opened device. The methods are the primitives of driver.h; those of virtual memory can be overridden, because
// HIP's releases differ in what these need around them.
class VmmDevice {
 public:
  VmmDevice(const VmmApi& api, int32_t device) : api_(api) { properties_.location.id = access_.location.id = device; }
  virtual ~VmmDevice() = default;
  VmmDevice(const VmmDevice&) = delete;
  VmmDevice& operator=(const VmmDevice&) = delete;

  // Makes this device the calling thread's; `previous` tells `restore` what was there before.
  virtual int32_t make_current(uint64_t* previous) = 0;
  virtual void restore(uint64_t previous) = 0;

  const hal_facts& facts() const { return facts_; }
  int32_t memory_info(uint64_t* free_bytes, uint64_t* total_bytes);
  virtual int32_t reserve(uint64_t size, uint64_t alignment, hal_address hint, hal_address* out);
  virtual int32_t unreserve(hal_address address, uint64_t size);
  virtual int32_t create(uint64_t size, hal_handle* out);
  virtual int32_t release(hal_handle handle);
  virtual int32_t map(hal_address address, uint64_t size, hal_handle handle);
  virtual int32_t access(hal_address address, uint64_t size);
  virtual int32_t unmap(hal_address address, uint64_t size);
  int32_t copy_to_host(void* host, hal_address device, uint64_t size, uint32_t stream);
  int32_t copy_to_device(hal_address device, const void* host, uint64_t size, uint32_t stream);
  virtual int32_t fill(hal_address device, uint8_t value, uint64_t size, uint32_t stream);
  int32_t synchronize(uint32_t stream);
  int32_t host_register(void* host, uint64_t size);
  int32_t host_unregister(void* host);
  bool is_capturing(void* stream);
  // The copy stream of that number, made at its first use: a device that is only measured gets none.
  int32_t copy_stream(uint32_t number, void** out);

 protected:
  static constexpr uint32_t kStreams = 2;  // one for each direction, so that copies both ways can overlap

  // Fills what follows from the calls that are there and from `options`; on failure `why` says what is wrong.
  int32_t read_common_facts(const VmmOptions& options, std::string* why);
  void set_fact(hal_fact fact, bool yes, const std::string& why_not);
  void destroy_streams();

  const VmmApi api_;
  VmmProperties properties_;
  VmmAccess access_;
  hal_facts facts_{};

 private:
  // Runs `call` with this device current and with capture restrictions off for this thread, and puts both back.
  template <typename Call>
  int32_t on_device(Call&& call);

  std::mutex streams_mutex_;
  std::array<std::atomic<void*>, kStreams> streams_{};
};

// Reads "chunk=BYTES" (items are separated by ';'); returns what is wrong, or "".
std::string parse_vmm_options(const char* text, VmmOptions* out);

hal_kind classify_vmm_error(int32_t code);

using OpenFunction = int32_t (*)(int32_t device, const char* options, void** context, char* why, size_t why_size);
using DescribeFunction = void (*)(int32_t code, char* text, size_t size);

// The driver table of a vendor whose `open` hands out a VmmDevice* as context.
hal_driver vmm_driver_table(const char* name, OpenFunction open, DescribeFunction describe);

}  // namespace hal
