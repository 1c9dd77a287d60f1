// Touches the dynamic loader. Keeps the table, the primary contexts and each thread's device.
#include "cuda.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <mutex>

namespace emuhip {
namespace {

constexpr Code kNoDevice = 100, kInvalidDevice = 101;
constexpr int32_t kMaxDevices = 64;

Cuda table{};
Code loaded = kNoDevice;
std::once_flag once;
std::mutex contexts_mutex;
void* contexts[kMaxDevices];
thread_local int32_t device_of_thread = 0;

template <typename Function>
bool bind(void* library, const char* name, Function*& slot) {
  slot = reinterpret_cast<Function*>(dlsym(library, name));
  if (slot == nullptr) std::fprintf(stderr, "emuhip: the libcuda beneath lacks %s\n", name);
  return slot != nullptr;
}

bool bind_all(void* library) {
  Cuda& t = table;
  return bind(library, "cuInit", t.init) && bind(library, "cuDeviceGetCount", t.device_count) &&
         bind(library, "cuDeviceGetAttribute", t.device_attribute) && bind(library, "cuDeviceGetName", t.device_name) &&
         bind(library, "cuDeviceGetUuid_v2", t.device_uuid) && bind(library, "cuDeviceGetPCIBusId", t.pci_bus_id) &&
         bind(library, "cuDevicePrimaryCtxRetain", t.retain_context) &&
         bind(library, "cuCtxSetCurrent", t.set_context) && bind(library, "cuCtxSynchronize", t.synchronize) &&
         bind(library, "cuMemGetInfo_v2", t.memory_info) &&
         bind(library, "cuMemGetAllocationGranularity", t.granularity) &&
         bind(library, "cuMemAddressReserve", t.reserve) && bind(library, "cuMemAddressFree", t.unreserve) &&
         bind(library, "cuMemCreate", t.create) && bind(library, "cuMemRelease", t.release) &&
         bind(library, "cuMemMap", t.map) && bind(library, "cuMemUnmap", t.unmap) &&
         bind(library, "cuMemSetAccess", t.access) && bind(library, "cuMemcpyDtoHAsync_v2", t.to_host) &&
         bind(library, "cuMemcpyHtoDAsync_v2", t.to_device) && bind(library, "cuMemsetD8Async", t.fill_bytes) &&
         bind(library, "cuMemsetD32Async", t.fill_words) && bind(library, "cuStreamCreate", t.stream_create) &&
         bind(library, "cuStreamDestroy_v2", t.stream_destroy) &&
         bind(library, "cuStreamSynchronize", t.stream_synchronize) &&
         bind(library, "cuStreamIsCapturing", t.stream_is_capturing) &&
         bind(library, "cuThreadExchangeStreamCaptureMode", t.exchange_capture_mode) &&
         bind(library, "cuMemHostRegister_v2", t.host_register) &&
         bind(library, "cuMemHostUnregister", t.host_unregister);
}

void load() {
  const char* named = std::getenv("EMUHIP_LIBCUDA");
  void* library = dlopen(named != nullptr ? named : "libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr && bind_all(library)) loaded = 0;
}

}  // namespace

const Cuda* cuda(Code* code) {
  std::call_once(once, load);
  *code = loaded == 0 ? table.init(0) : loaded;
  return *code == 0 ? &table : nullptr;
}

Code enter(const Cuda** out) {
  Code code = 0;
  *out = cuda(&code);
  if (*out == nullptr) return code;
  void*& context = contexts[device_of_thread];
  {
    const std::lock_guard<std::mutex> lock(contexts_mutex);
    if (context == nullptr) code = table.retain_context(&context, device_of_thread);
  }
  return code != 0 ? code : table.set_context(context);
}

int32_t current_device() {
  return device_of_thread;
}

Code set_current_device(int32_t device) {
  Code code = 0;
  int32_t count = 0;
  const Cuda* driver = cuda(&code);
  if (driver == nullptr) return code;
  code = driver->device_count(&count);
  if (code != 0) return code;
  if (device < 0 || device >= count || device >= kMaxDevices) return kInvalidDevice;
  device_of_thread = device;
  return 0;
}

}  // namespace emuhip
