// The functions of libamdhip64 that the driver uses, and the one table that says where each comes from.
#pragma once

#include <cstdint>
#include <vector>

#include "vendor_library.h"
#include "vmm_family.h"

namespace hal {

struct HipUuid {
  char digits[16];  // hexadecimal, without the "GPU-" that the runtime's own variables put before them
};
static_assert(sizeof(HipUuid) == 16, "hipUUID");

struct HipApi {
  VmmApi vmm;
  int32_t (*init)(uint32_t flags);
  int32_t (*runtime_version)(int32_t* version);
  int32_t (*device_count)(int32_t* count);
  int32_t (*get_device)(int32_t* device);
  int32_t (*set_device)(int32_t device);
  int32_t (*device_attribute)(int32_t* value, int32_t attribute, int32_t device);
  int32_t (*device_name)(char* name, int32_t size, int32_t device);
  int32_t (*device_uuid)(HipUuid* uuid, int32_t device);
  int32_t (*pci_bus_id)(char* id, int32_t size, int32_t device);
  const char* (*error_name)(int32_t code);
  const char* (*error_text)(int32_t code);
};

// hipMemAllocationProp got the layout of VmmProperties in 5.3; in 5.2 the same calls take another one.
constexpr int32_t kFirstVirtualMemory = 50300000;

// Versions are as hipRuntimeGetVersion has them: 10,000,000 * major + 100,000 * minor + patch.
inline std::vector<Symbol> symbols_of(HipApi& api) {
  VmmApi& vmm = api.vmm;
  constexpr int32_t kEver = 0;
  return {
      required_symbol("hipRuntimeGetVersion", api.runtime_version, kEver),
      required_symbol("hipMemAddressReserve", vmm.reserve, kFirstVirtualMemory),
      required_symbol("hipMemAddressFree", vmm.unreserve, kFirstVirtualMemory),
      required_symbol("hipMemCreate", vmm.create, kFirstVirtualMemory),
      required_symbol("hipMemRelease", vmm.release, kFirstVirtualMemory),
      required_symbol("hipMemMap", vmm.map, kFirstVirtualMemory),
      required_symbol("hipMemSetAccess", vmm.access, kFirstVirtualMemory),
      required_symbol("hipMemUnmap", vmm.unmap, kFirstVirtualMemory),
      required_symbol("hipMemGetAllocationGranularity", vmm.granularity, kFirstVirtualMemory),
      required_symbol("hipInit", api.init, kEver),
      required_symbol("hipGetDeviceCount", api.device_count, kEver),
      required_symbol("hipGetDevice", api.get_device, kEver),
      required_symbol("hipSetDevice", api.set_device, kEver),
      required_symbol("hipDeviceGetAttribute", api.device_attribute, kEver),
      required_symbol("hipDeviceGetName", api.device_name, kEver),
      optional_symbol("hipDeviceGetUuid", api.device_uuid, kEver),
      optional_symbol("hipDeviceGetPCIBusId", api.pci_bus_id, kEver),
      required_symbol("hipGetErrorName", api.error_name, kEver),
      required_symbol("hipGetErrorString", api.error_text, kEver),
      required_symbol("hipDeviceSynchronize", vmm.device_synchronize, kEver),
      required_symbol("hipMemGetInfo", vmm.memory_info, kEver),
      required_symbol("hipMemcpyDtoHAsync", vmm.copy_to_host, kEver),
      required_symbol("hipMemcpyHtoDAsync", vmm.copy_to_device, kEver),
      required_symbol("hipMemsetD8Async", vmm.fill_bytes, kEver),
      required_symbol("hipMemsetD32Async", vmm.fill_words, kEver),
      required_symbol("hipStreamCreateWithFlags", vmm.stream_create, kEver),
      required_symbol("hipStreamDestroy", vmm.stream_destroy, kEver),
      required_symbol("hipStreamSynchronize", vmm.stream_synchronize, kEver),
      optional_symbol("hipHostRegister", vmm.host_register, kEver),
      optional_symbol("hipHostUnregister", vmm.host_unregister, kEver),
      optional_symbol("hipStreamIsCapturing", vmm.is_capturing, kEver),
      optional_symbol("hipThreadExchangeStreamCaptureMode", vmm.exchange_capture_mode, kEver),
  };
}

}  // namespace hal
