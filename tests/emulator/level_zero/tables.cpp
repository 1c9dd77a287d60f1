// The tables that are there and empty: loaders refuse a driver that lacks one, and answer "unsupported" for an empty
// slot.
#include "tables.h"

#include <cstdio>
#include <cstring>

namespace emuze {

void describe(const Gpu& gpu, ze_device_properties_t* out) {
  const CardSettings card = Machine::instance().settings().card[gpu.card];
  out->type = ZE_DEVICE_TYPE_GPU;
  out->vendorId = 0x8086;
  out->deviceId = 0x0bd5;
  out->flags = card.integrated ? ZE_DEVICE_PROPERTY_FLAG_INTEGRATED : 0;
  out->maxMemAllocSize = Machine::instance().total_of(gpu);
  std::memset(&out->uuid, 0x22, sizeof out->uuid);
  out->uuid.id[0] = static_cast<uint8_t>(gpu.card);
  out->uuid.id[15] = static_cast<uint8_t>(gpu.tile + 1);
  std::snprintf(out->name, sizeof out->name, "Emulated Intel GPU %d", gpu.card);
}

}  // namespace emuze

#define EMPTY(name)                                         \
  extern "C" EMUZE_API ze_result_t name(uint32_t, void**) { \
    return ZE_RESULT_SUCCESS;                               \
  }

EMPTY(zeGetCommandListExpProcAddrTable)
EMPTY(zeGetCommandQueueProcAddrTable)
EMPTY(zeGetDeviceExpProcAddrTable)
EMPTY(zeGetDriverExpProcAddrTable)
EMPTY(zeGetEventExpProcAddrTable)
EMPTY(zeGetEventPoolProcAddrTable)
EMPTY(zeGetEventProcAddrTable)
EMPTY(zeGetFabricEdgeExpProcAddrTable)
EMPTY(zeGetFabricVertexExpProcAddrTable)
EMPTY(zeGetFenceProcAddrTable)
EMPTY(zeGetImageExpProcAddrTable)
EMPTY(zeGetImageProcAddrTable)
EMPTY(zeGetKernelExpProcAddrTable)
EMPTY(zeGetKernelProcAddrTable)
EMPTY(zeGetMemExpProcAddrTable)
EMPTY(zeGetMemProcAddrTable)
EMPTY(zeGetModuleBuildLogProcAddrTable)
EMPTY(zeGetModuleProcAddrTable)
EMPTY(zeGetRTASBuilderExpProcAddrTable)
EMPTY(zeGetRTASBuilderProcAddrTable)
EMPTY(zeGetRTASParallelOperationExpProcAddrTable)
EMPTY(zeGetRTASParallelOperationProcAddrTable)
EMPTY(zeGetSamplerProcAddrTable)
EMPTY(zerGetGlobalProcAddrTable)
EMPTY(zesGetDeviceExpProcAddrTable)
EMPTY(zesGetDiagnosticsProcAddrTable)
EMPTY(zesGetDriverExpProcAddrTable)
EMPTY(zesGetEngineProcAddrTable)
EMPTY(zesGetFabricPortProcAddrTable)
EMPTY(zesGetFanProcAddrTable)
EMPTY(zesGetFirmwareExpProcAddrTable)
EMPTY(zesGetFirmwareProcAddrTable)
EMPTY(zesGetFrequencyProcAddrTable)
EMPTY(zesGetLedProcAddrTable)
EMPTY(zesGetOverclockProcAddrTable)
EMPTY(zesGetPerformanceFactorProcAddrTable)
EMPTY(zesGetPowerProcAddrTable)
EMPTY(zesGetPsuProcAddrTable)
EMPTY(zesGetRasExpProcAddrTable)
EMPTY(zesGetRasProcAddrTable)
EMPTY(zesGetSchedulerProcAddrTable)
EMPTY(zesGetStandbyProcAddrTable)
EMPTY(zesGetTemperatureProcAddrTable)
EMPTY(zesGetVFManagementExpProcAddrTable)
EMPTY(zetGetCommandListExpProcAddrTable)
EMPTY(zetGetCommandListProcAddrTable)
EMPTY(zetGetContextProcAddrTable)
EMPTY(zetGetDebugProcAddrTable)
EMPTY(zetGetDeviceExpProcAddrTable)
EMPTY(zetGetDeviceProcAddrTable)
EMPTY(zetGetKernelProcAddrTable)
EMPTY(zetGetMetricDecoderExpProcAddrTable)
EMPTY(zetGetMetricExpProcAddrTable)
EMPTY(zetGetMetricGroupExpProcAddrTable)
EMPTY(zetGetMetricGroupProcAddrTable)
EMPTY(zetGetMetricProcAddrTable)
EMPTY(zetGetMetricProgrammableExpProcAddrTable)
EMPTY(zetGetMetricQueryPoolProcAddrTable)
EMPTY(zetGetMetricQueryProcAddrTable)
EMPTY(zetGetMetricStreamerProcAddrTable)
EMPTY(zetGetMetricTracerExpProcAddrTable)
EMPTY(zetGetModuleProcAddrTable)
EMPTY(zetGetTracerExpProcAddrTable)
