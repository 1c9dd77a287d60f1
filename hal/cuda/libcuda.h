// The functions of libcuda that the driver uses, and the one table that says where each comes from.
#pragma once

#include <cstdint>
#include <vector>

#include "vendor_library.h"
#include "vmm_family.h"

namespace hal {

struct CudaUuid {
  uint8_t bytes[16];
};
static_assert(sizeof(CudaUuid) == 16, "CUuuid");

struct CudaApi {
  VmmApi vmm;
  int32_t (*init)(uint32_t flags);
  int32_t (*driver_version)(int32_t* version);
  int32_t (*device_count)(int32_t* count);
  int32_t (*device_get)(int32_t* device, int32_t ordinal);
  int32_t (*device_attribute)(int32_t* value, int32_t attribute, int32_t device);
  int32_t (*device_name)(char* name, int32_t size, int32_t device);
  int32_t (*device_uuid)(CudaUuid* uuid, int32_t device);
  int32_t (*parent_uuid)(CudaUuid* uuid, int32_t device);
  int32_t (*pci_bus_id)(char* id, int32_t size, int32_t device);
  int32_t (*retain_context)(void** context, int32_t device);
  int32_t (*release_context)(int32_t device);
  int32_t (*get_context)(void** context);
  int32_t (*set_context)(void* context);
  int32_t (*error_name)(int32_t code, const char** name);
  int32_t (*error_text)(int32_t code, const char** text);
  int32_t (*checkpoint_lock)(int32_t process,
                             void* arguments);  // these are only looked for, to know that they are there
  int32_t (*checkpoint)(int32_t process, void* arguments);
  int32_t (*checkpoint_restore)(int32_t process, void* arguments);
  int32_t (*checkpoint_unlock)(int32_t process, void* arguments);
};

// Versions are as cuDriverGetVersion has them: 1000 * major + 10 * minor.
inline std::vector<Symbol> symbols_of(CudaApi& api) {
  VmmApi& vmm = api.vmm;
  return {
      required_symbol("cuDriverGetVersion", api.driver_version, 2020),
      required_symbol("cuInit", api.init, 2000),
      required_symbol("cuDeviceGetCount", api.device_count, 2000),
      required_symbol("cuDeviceGet", api.device_get, 2000),
      required_symbol("cuDeviceGetAttribute", api.device_attribute, 2000),
      required_symbol("cuDeviceGetName", api.device_name, 2000),
      optional_symbol("cuDeviceGetUuid_v2", api.device_uuid, 11040),
      optional_symbol("cuDeviceGetUuid", api.parent_uuid, 9020),
      optional_symbol("cuDeviceGetPCIBusId", api.pci_bus_id, 4010),
      required_symbol("cuDevicePrimaryCtxRetain", api.retain_context, 7000),
      required_symbol("cuDevicePrimaryCtxRelease_v2", api.release_context, 11000),
      required_symbol("cuCtxGetCurrent", api.get_context, 4000),
      required_symbol("cuCtxSetCurrent", api.set_context, 4000),
      required_symbol("cuCtxSynchronize", vmm.device_synchronize, 2000),
      required_symbol("cuGetErrorName", api.error_name, 6000),
      required_symbol("cuGetErrorString", api.error_text, 6000),
      required_symbol("cuMemGetInfo_v2", vmm.memory_info, 3020),
      required_symbol("cuMemGetAllocationGranularity", vmm.granularity, 10020),
      required_symbol("cuMemAddressReserve", vmm.reserve, 10020),
      required_symbol("cuMemAddressFree", vmm.unreserve, 10020),
      required_symbol("cuMemCreate", vmm.create, 10020),
      required_symbol("cuMemRelease", vmm.release, 10020),
      required_symbol("cuMemMap", vmm.map, 10020),
      required_symbol("cuMemSetAccess", vmm.access, 10020),
      required_symbol("cuMemUnmap", vmm.unmap, 10020),
      required_symbol("cuMemcpyDtoHAsync_v2", vmm.copy_to_host, 3020),
      required_symbol("cuMemcpyHtoDAsync_v2", vmm.copy_to_device, 3020),
      required_symbol("cuMemsetD8Async", vmm.fill_bytes, 3020),
      required_symbol("cuMemsetD32Async", vmm.fill_words, 3020),
      required_symbol("cuStreamCreate", vmm.stream_create, 2000),
      required_symbol("cuStreamDestroy_v2", vmm.stream_destroy, 4000),
      required_symbol("cuStreamSynchronize", vmm.stream_synchronize, 2000),
      optional_symbol("cuMemHostRegister_v2", vmm.host_register, 6050),
      optional_symbol("cuMemHostUnregister", vmm.host_unregister, 4000),
      optional_symbol("cuStreamIsCapturing", vmm.is_capturing, 10000),
      optional_symbol("cuThreadExchangeStreamCaptureMode", vmm.exchange_capture_mode, 10010),
      optional_symbol("cuCheckpointProcessLock", api.checkpoint_lock, 12080),
      optional_symbol("cuCheckpointProcessCheckpoint", api.checkpoint, 12080),
      optional_symbol("cuCheckpointProcessRestore", api.checkpoint_restore, 12080),
      optional_symbol("cuCheckpointProcessUnlock", api.checkpoint_unlock, 12080),
  };
}

}  // namespace hal
