// Sysman: cards, their memory modules and the processes on them, as management libraries ask for them.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <vector>

#include "machine.h"
#include "tables.h"

using emuze::Gpu;
using emuze::Machine;
using emuze::Module;
using emuze::put;

namespace {

constexpr uint32_t kNeighbour = 40001;  // the process that has what `taken` says
std::atomic<bool> initialized{false};

Machine& machine() {
  return Machine::instance();
}

// Sysman works after zesInit, or where the environment had asked for it when zeInit was called.
ze_result_t enter(const char* call) {
  const char* wanted = std::getenv("ZES_ENABLE_SYSMAN");
  if (!initialized && (wanted == nullptr || std::strcmp(wanted, "1") != 0)) return ZE_RESULT_ERROR_UNINITIALIZED;
  return machine().enter(call);
}

#define ENTER(call) \
  if (const ze_result_t fault = enter(call)) return fault

// A device of the core stands for its card.
int card_of(zes_device_handle_t handle) {
  return reinterpret_cast<Gpu*>(handle)->card;
}

ze_result_t init(uint32_t) {
  if (const ze_result_t fault = machine().enter("zesInit")) return fault;
  const char* legacy = std::getenv("ZES_ENABLE_SYSMAN");
  if (legacy != nullptr && std::strcmp(legacy, "1") == 0) return ZE_RESULT_ERROR_UNINITIALIZED;  // two ways conflict
  initialized = true;
  return ZE_RESULT_SUCCESS;
}

ze_result_t driver_get(uint32_t* count, zes_driver_handle_t* out) {
  ENTER("zesDriverGet");
  if (out != nullptr && *count > 0) *out = reinterpret_cast<zes_driver_handle_t>(machine().driver());
  *count = 1;
  return ZE_RESULT_SUCCESS;
}

ze_result_t device_get(zes_driver_handle_t, uint32_t* count, zes_device_handle_t* out) {
  ENTER("zesDeviceGet");
  const emuze::Settings now = machine().settings();
  const auto cards = static_cast<uint32_t>(now.cards);
  for (uint32_t i = 0; out != nullptr && i < *count && i < cards; ++i) {
    const uint32_t card = now.sysman_reversed ? cards - 1 - i : i;
    out[i] = reinterpret_cast<zes_device_handle_t>(machine().card(now.first + static_cast<int>(card)));
  }
  *count = cards;
  return ZE_RESULT_SUCCESS;
}

ze_result_t device_properties(zes_device_handle_t handle, zes_device_properties_t* out) {
  ENTER("zesDeviceGetProperties");
  if (out->stype != ZES_STRUCTURE_TYPE_DEVICE_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  emuze::describe(*machine().card(card_of(handle)), &out->core);
  const emuze::CardSettings card = machine().settings().card[card_of(handle)];
  out->numSubdevices = card.tiles > 1 ? static_cast<uint32_t>(card.tiles) : 0;
  return ZE_RESULT_SUCCESS;
}

ze_result_t device_pci(zes_device_handle_t handle, zes_pci_properties_t* out) {
  ENTER("zesDevicePciGetProperties");
  if (out->stype != ZES_STRUCTURE_TYPE_PCI_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  out->address = {0, machine().settings().card[card_of(handle)].bus, 0, 0};
  return ZE_RESULT_SUCCESS;
}

ze_result_t device_processes(zes_device_handle_t handle, uint32_t* count, zes_process_state_t* out) {
  ENTER("zesDeviceProcessesGetState");
  const emuze::Settings now = machine().settings();
  const int card = card_of(handle);
  std::vector<std::pair<uint32_t, uint64_t>> processes;
  if (now.sysman_processes) processes.emplace_back(static_cast<uint32_t>(getpid()), machine().used_on(card));
  if (now.card[card].taken > 0) processes.emplace_back(kNeighbour, now.card[card].taken);
  for (uint32_t i = 0; out != nullptr && i < *count && i < processes.size(); ++i) {
    if (out[i].stype != ZES_STRUCTURE_TYPE_PROCESS_STATE) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
    out[i].processId = processes[i].first;
    out[i].memSize = processes[i].second;
    out[i].sharedSize = 0;
    out[i].engines = 0;
  }
  *count = static_cast<uint32_t>(processes.size());
  return ZE_RESULT_SUCCESS;
}

ze_result_t device_memories(zes_device_handle_t handle, uint32_t* count, zes_mem_handle_t* out) {
  ENTER("zesDeviceEnumMemoryModules");
  const int card = card_of(handle);
  const emuze::Settings now = machine().settings();
  const uint32_t modules = now.sysman_modules ? static_cast<uint32_t>(now.card[card].tiles) : 0;
  for (uint32_t i = 0; out != nullptr && i < *count && i < modules; ++i) {
    out[i] = reinterpret_cast<zes_mem_handle_t>(machine().module(card, static_cast<int>(i)));
  }
  *count = modules;
  return ZE_RESULT_SUCCESS;
}

ze_result_t memory_properties(zes_mem_handle_t handle, zes_mem_properties_t* out) {
  ENTER("zesMemoryGetProperties");
  if (out->stype != ZES_STRUCTURE_TYPE_MEM_PROPERTIES) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  const Module& module = *reinterpret_cast<Module*>(handle);
  out->type = ZES_MEM_TYPE_HBM;
  out->location = ZES_MEM_LOC_DEVICE;
  out->onSubdevice = machine().settings().card[module.card].tiles > 1;
  out->subdeviceId = static_cast<uint32_t>(module.tile);
  out->physicalSize = 0;
  return ZE_RESULT_SUCCESS;
}

ze_result_t memory_state(zes_mem_handle_t handle, zes_mem_state_t* out) {
  ENTER("zesMemoryGetState");
  if (out->stype != ZES_STRUCTURE_TYPE_MEM_STATE) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  const Module& module = *reinterpret_cast<Module*>(handle);
  const emuze::CardSettings card = machine().settings().card[module.card];
  out->health = ZES_MEM_HEALTH_OK;
  out->size = card.total / static_cast<uint64_t>(card.tiles);
  out->free = machine().reported_free(module.card, module.tile);
  return ZE_RESULT_SUCCESS;
}

constexpr uint32_t kVersionWithInit = ZE_MAKE_VERSION(1, 5);

}  // namespace

extern "C" {

EMUZE_API ze_result_t zesGetGlobalProcAddrTable(uint32_t, void** slots) {
  return put(slots, 0, init);
}

EMUZE_API ze_result_t zesGetDriverProcAddrTable(uint32_t version, void** slots) {
  return version < kVersionWithInit ? ZE_RESULT_SUCCESS : put(slots, 2, driver_get);
}

EMUZE_API ze_result_t zesGetDeviceProcAddrTable(uint32_t version, void** slots) {
  put(slots, 0, device_properties);
  put(slots, 3, device_processes, device_pci);
  put(slots, 16, device_memories);
  return version < kVersionWithInit ? ZE_RESULT_SUCCESS : put(slots, 29, device_get);
}

EMUZE_API ze_result_t zesGetMemoryProcAddrTable(uint32_t, void** slots) {
  return put(slots, 0, memory_properties, memory_state);
}

}  // extern "C"
