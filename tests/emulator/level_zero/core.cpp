// Level Zero's core functions as a driver offers them to the loader.
#include <cstdlib>
#include <cstring>
#include <vector>

#include "machine.h"
#include "tables.h"

using emuze::Context;
using emuze::Driver;
using emuze::Gpu;
using emuze::List;
using emuze::Machine;

namespace {

Machine& machine() {
  return Machine::instance();
}
uint64_t number(const void* pointer) {
  return reinterpret_cast<uint64_t>(pointer);
}
Gpu& gpu_of(ze_device_handle_t handle) {
  return *reinterpret_cast<Gpu*>(handle);
}
Context* context_of(ze_context_handle_t handle) {
  return reinterpret_cast<Context*>(handle);
}
List* list_of(ze_command_list_handle_t handle) {
  return reinterpret_cast<List*>(handle);
}

// The start of a function that tests can make fail.
#define ENTER(call) \
  if (const ze_result_t fault = machine().enter(call)) return fault

template <typename Out, typename Value>
void answer_one(uint32_t* count, Out* out, Value value) {
  if (out != nullptr && *count > 0) *out = value;
  *count = 1;
}

ze_result_t init(ze_init_flags_t) {
  ENTER("zeInit");
  return ZE_RESULT_SUCCESS;
}

// ---- drivers and devices -----------------------------------------------------------------------------------------

ze_result_t driver_get(uint32_t* count, ze_driver_handle_t* out) {
  ENTER("zeDriverGet");
  answer_one(count, out, reinterpret_cast<ze_driver_handle_t>(machine().driver()));
  return ZE_RESULT_SUCCESS;
}

ze_result_t driver_api_version(ze_driver_handle_t, ze_api_version_t* out) {
  *out = static_cast<ze_api_version_t>(ZE_MAKE_VERSION(1, 4));
  return ZE_RESULT_SUCCESS;
}

ze_result_t driver_properties(ze_driver_handle_t, ze_driver_properties_t* out) {
  if (out->stype != ZE_STRUCTURE_TYPE_DRIVER_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  std::memset(&out->uuid, 0x11, sizeof out->uuid);
  out->driverVersion = 1u << 24 | 3u << 16 | 30000u;
  return ZE_RESULT_SUCCESS;
}

ze_result_t driver_extensions(ze_driver_handle_t, uint32_t* count, ze_driver_extension_properties_t*) {
  *count = 0;
  return ZE_RESULT_SUCCESS;
}

ze_result_t driver_ipc(ze_driver_handle_t, ze_driver_ipc_properties_t* out) {
  out->flags = 0;
  return ZE_RESULT_SUCCESS;
}

ze_result_t import_pointer(ze_driver_handle_t driver, void* host, size_t size) {
  ENTER("zexDriverImportExternalPointer");
  if (reinterpret_cast<Driver*>(driver) != machine().driver()) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
  return machine().import_host(number(host), size);
}

ze_result_t release_pointer(ze_driver_handle_t driver, void* host) {
  ENTER("zexDriverReleaseImportedPointer");
  if (reinterpret_cast<Driver*>(driver) != machine().driver()) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
  return machine().release_host(number(host));
}

ze_result_t driver_function(ze_driver_handle_t, const char* name, void** out) {
  *out = nullptr;
  if (machine().settings().import && std::strcmp(name, "zexDriverImportExternalPointer") == 0) {
    *out = reinterpret_cast<void*>(import_pointer);
  }
  if (machine().settings().import && std::strcmp(name, "zexDriverReleaseImportedPointer") == 0) {
    *out = reinterpret_cast<void*>(release_pointer);
  }
  return *out != nullptr ? ZE_RESULT_SUCCESS : ZE_RESULT_ERROR_INVALID_ARGUMENT;
}

ze_result_t device_get(ze_driver_handle_t, uint32_t* count, ze_device_handle_t* out) {
  ENTER("zeDeviceGet");
  const std::vector<Gpu*> gpus = machine().visible_gpus();
  for (uint32_t i = 0; out != nullptr && i < *count && i < gpus.size(); ++i) {
    out[i] = reinterpret_cast<ze_device_handle_t>(gpus[i]);
  }
  *count = static_cast<uint32_t>(gpus.size());
  return ZE_RESULT_SUCCESS;
}

// A tile says that it is one where the mask has picked it; where every tile is a device of its own it does not.
bool calls_itself_subdevice(const Gpu& gpu) {
  const char* mask = std::getenv("ZE_AFFINITY_MASK");
  return gpu.tile != emuze::kWholeCard && mask != nullptr && std::strchr(mask, '.') != nullptr;
}

ze_result_t device_properties(ze_device_handle_t handle, ze_device_properties_t* out) {
  ENTER("zeDeviceGetProperties");
  if (out->stype != ZE_STRUCTURE_TYPE_DEVICE_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  emuze::describe(gpu_of(handle), out);
  if (calls_itself_subdevice(gpu_of(handle))) {
    out->flags |= ZE_DEVICE_PROPERTY_FLAG_SUBDEVICE;
    out->subdeviceId = static_cast<uint32_t>(gpu_of(handle).tile);
  }
  return ZE_RESULT_SUCCESS;
}

ze_result_t device_memory(ze_device_handle_t handle, uint32_t* count, ze_device_memory_properties_t* out) {
  ENTER("zeDeviceGetMemoryProperties");
  if (out != nullptr && *count > 0) {
    if (out->stype != ZE_STRUCTURE_TYPE_DEVICE_MEMORY_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    out->totalSize = machine().total_of(gpu_of(handle));
    std::strcpy(out->name, "HBM");
  }
  *count = 1;
  return ZE_RESULT_SUCCESS;
}

ze_result_t device_pci(ze_device_handle_t handle, ze_pci_ext_properties_t* out) {
  ENTER("zeDevicePciGetPropertiesExt");
  if (out->stype != ZE_STRUCTURE_TYPE_PCI_EXT_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  out->address = {0, machine().settings().card[gpu_of(handle).card].bus, 0, 0};
  return ZE_RESULT_SUCCESS;
}

ze_result_t device_queue_groups(ze_device_handle_t, uint32_t* count, ze_command_queue_group_properties_t* out) {
  if (out != nullptr && *count > 0) {
    out->flags = ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COMPUTE | ZE_COMMAND_QUEUE_GROUP_PROPERTY_FLAG_COPY;
    out->maxMemoryFillPatternSize = 128;
    out->numQueues = 1;
  }
  *count = 1;
  return ZE_RESULT_SUCCESS;
}

ze_result_t device_subdevices(ze_device_handle_t, uint32_t* count, ze_device_handle_t*) {
  *count = 0;
  return ZE_RESULT_SUCCESS;
}

// ---- contexts and memory -----------------------------------------------------------------------------------------

ze_result_t context_create(ze_driver_handle_t, const ze_context_desc_t* description, ze_context_handle_t* out) {
  ENTER("zeContextCreate");
  if (description->stype != ZE_STRUCTURE_TYPE_CONTEXT_DESC) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  *out = reinterpret_cast<ze_context_handle_t>(machine().create_context());
  return ZE_RESULT_SUCCESS;
}

ze_result_t context_destroy(ze_context_handle_t context) {
  ENTER("zeContextDestroy");
  return machine().destroy_context(context_of(context));
}

ze_result_t memory_page_size(ze_context_handle_t, ze_device_handle_t, size_t size, size_t* out) {
  ENTER("zeVirtualMemQueryPageSize");
  *out = size < (2u << 20) ? 64u << 10 : 2u << 20;
  return ZE_RESULT_SUCCESS;
}

ze_result_t memory_reserve(ze_context_handle_t context, const void* hint, size_t size, void** out) {
  ENTER("zeVirtualMemReserve");
  return machine().reserve(context_of(context), number(hint), size, reinterpret_cast<uint64_t*>(out));
}

ze_result_t memory_free(ze_context_handle_t context, const void* address, size_t size) {
  ENTER("zeVirtualMemFree");
  return machine().unreserve(context_of(context), number(address), size);
}

ze_result_t physical_create(ze_context_handle_t, ze_device_handle_t device, ze_physical_mem_desc_t* description,
                            ze_physical_mem_handle_t* out) {
  ENTER("zePhysicalMemCreate");
  if (description->stype != ZE_STRUCTURE_TYPE_PHYSICAL_MEM_DESC) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  return machine().create(gpu_of(device), description->size, reinterpret_cast<uint64_t*>(out));
}

ze_result_t physical_destroy(ze_context_handle_t, ze_physical_mem_handle_t physical) {
  ENTER("zePhysicalMemDestroy");
  return machine().destroy(number(physical));
}

ze_result_t memory_map(ze_context_handle_t context, const void* address, size_t size, ze_physical_mem_handle_t physical,
                       size_t offset, ze_memory_access_attribute_t access) {
  ENTER("zeVirtualMemMap");
  if (access > ZE_MEMORY_ACCESS_ATTRIBUTE_READONLY) return ZE_RESULT_ERROR_INVALID_ENUMERATION;
  if (offset != 0) return ZE_RESULT_ERROR_UNSUPPORTED_FEATURE;
  return machine().map(context_of(context), number(address), size, number(physical), access);
}

ze_result_t memory_unmap(ze_context_handle_t context, const void* address, size_t size) {
  ENTER("zeVirtualMemUnmap");
  return machine().unmap(context_of(context), number(address), size);
}

// ---- lists -------------------------------------------------------------------------------------------------------

ze_result_t list_create(ze_context_handle_t context, ze_device_handle_t device,
                        const ze_command_queue_desc_t* description, ze_command_list_handle_t* out) {
  ENTER("zeCommandListCreateImmediate");
  if (description->stype != ZE_STRUCTURE_TYPE_COMMAND_QUEUE_DESC) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  const bool synchronous = description->mode == ZE_COMMAND_QUEUE_MODE_SYNCHRONOUS;
  List* list = machine().create_list(context_of(context), gpu_of(device), synchronous);
  *out = reinterpret_cast<ze_command_list_handle_t>(list);
  return ZE_RESULT_SUCCESS;
}

ze_result_t list_destroy(ze_command_list_handle_t list) {
  ENTER("zeCommandListDestroy");
  return machine().destroy_list(list_of(list));
}

ze_result_t list_barrier(ze_command_list_handle_t list, ze_event_handle_t, uint32_t, ze_event_handle_t*) {
  ENTER("zeCommandListAppendBarrier");
  return machine().barrier(list_of(list));
}

ze_result_t list_copy(ze_command_list_handle_t handle, void* to, const void* from, size_t size, ze_event_handle_t,
                      uint32_t, ze_event_handle_t*) {
  ENTER("zeCommandListAppendMemoryCopy");
  List* list = list_of(handle);
  const int reach_to = machine().reaches(list->context, number(to), size);
  const int reach_from = machine().reaches(list->context, number(from), size);
  if (reach_to == 0 || reach_from == 0 || reach_to == reach_from) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  const int owner = list->owner;
  if (reach_from == 1) {
    return machine().append(list, [=] { return machine().memory.copy_out(owner, to, number(from), size); });
  }
  return machine().append(list, [=] { return machine().memory.copy_in(owner, number(to), from, size); });
}

ze_result_t list_fill(ze_command_list_handle_t handle, void* at, const void* pattern, size_t pattern_size, size_t size,
                      ze_event_handle_t, uint32_t, ze_event_handle_t*) {
  ENTER("zeCommandListAppendMemoryFill");
  List* list = list_of(handle);
  if (machine().reaches(list->context, number(at), size) != 1 || size % pattern_size != 0) {
    return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  }
  const auto* bytes = static_cast<const uint8_t*>(pattern);
  const std::vector<uint8_t> unit(bytes, bytes + pattern_size);
  return machine().append(list, [=, owner = list->owner] {
    return machine().memory.fill(owner, number(at), unit.data(), unit.size(), size / unit.size());
  });
}

ze_result_t list_synchronize(ze_command_list_handle_t list, uint64_t) {
  ENTER("zeCommandListHostSynchronize");
  return machine().synchronize(list_of(list));
}

constexpr uint32_t kVersionWithSynchronize = ZE_MAKE_VERSION(1, 6);

}  // namespace

// ---- tables: the slots are in the order of the specification, which later versions append to ----------------------

using emuze::put;

extern "C" {

EMUZE_API ze_result_t zeGetGlobalProcAddrTable(uint32_t, void** slots) {
  return put(slots, 0, init);
}

EMUZE_API ze_result_t zeGetDriverProcAddrTable(uint32_t, void** slots) {
  return put(slots, 0, driver_get, driver_api_version, driver_properties, driver_ipc, driver_extensions,
             driver_function);
}

EMUZE_API ze_result_t zeGetDeviceProcAddrTable(uint32_t, void** slots) {
  put(slots, 0, device_get, device_subdevices, device_properties);
  put(slots, 5, device_queue_groups, device_memory);
  return put(slots, 17, device_pci);
}

EMUZE_API ze_result_t zeGetContextProcAddrTable(uint32_t, void** slots) {
  return put(slots, 0, context_create, context_destroy);
}

EMUZE_API ze_result_t zeGetVirtualMemProcAddrTable(uint32_t, void** slots) {
  return put(slots, 0, memory_reserve, memory_free, memory_page_size, memory_map, memory_unmap);
}

EMUZE_API ze_result_t zeGetPhysicalMemProcAddrTable(uint32_t, void** slots) {
  return put(slots, 0, physical_create, physical_destroy);
}

EMUZE_API ze_result_t zeGetCommandListProcAddrTable(uint32_t version, void** slots) {
  put(slots, 1, list_create, list_destroy);
  put(slots, 6, list_barrier);
  put(slots, 8, list_copy, list_fill);
  // An older loader's table ends before this slot.
  return version < kVersionWithSynchronize ? ZE_RESULT_SUCCESS : put(slots, 28, list_synchronize);
}

}  // extern "C"
