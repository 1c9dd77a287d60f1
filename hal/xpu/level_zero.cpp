// Finds the Level Zero loader, binds its functions and puts its codes into words. Keeps nothing.
#include "level_zero.h"

#include <cstdio>

namespace hal {
namespace {

struct CodeName {
  int32_t code;
  const char* name;
};

constexpr CodeName kNames[] = {
    {0x1, "NOT_READY"},
    {0x70000001, "ERROR_DEVICE_LOST"},
    {0x70000002, "ERROR_OUT_OF_HOST_MEMORY"},
    {kZeOutOfDeviceMemory, "ERROR_OUT_OF_DEVICE_MEMORY"},
    {0x70010000, "ERROR_INSUFFICIENT_PERMISSIONS"},
    {0x70010001, "ERROR_NOT_AVAILABLE"},
    {kZeDependencyUnavailable, "ERROR_DEPENDENCY_UNAVAILABLE"},
    {kZeUninitialized, "ERROR_UNINITIALIZED"},
    {kZeUnsupportedVersion, "ERROR_UNSUPPORTED_VERSION"},
    {kZeUnsupportedFeature, "ERROR_UNSUPPORTED_FEATURE"},
    {kZeInvalidArgument, "ERROR_INVALID_ARGUMENT"},
    {0x78000005, "ERROR_INVALID_NULL_HANDLE"},
    {0x78000006, "ERROR_HANDLE_OBJECT_IN_USE"},
    {0x78000007, "ERROR_INVALID_NULL_POINTER"},
    {0x78000008, "ERROR_INVALID_SIZE"},
    {0x78000009, "ERROR_UNSUPPORTED_SIZE"},
    {kZeUnsupportedAlignment, "ERROR_UNSUPPORTED_ALIGNMENT"},
    {0x7800000c, "ERROR_INVALID_ENUMERATION"},
    {0x7ffffffe, "ERROR_UNKNOWN"},
};

// Level Zero numbers its specification and not its functions: none is too new for a loader that exports it.
constexpr int32_t kAnyVersion = 0;

std::vector<Symbol> core_symbols(ZeApi& api) {
  return {
      required_symbol("zeInit", api.init, kAnyVersion),
      required_symbol("zeDriverGet", api.drivers, kAnyVersion),
      required_symbol("zeDriverGetApiVersion", api.api_version, kAnyVersion),
      required_symbol("zeDriverGetProperties", api.driver_properties, kAnyVersion),
      optional_symbol("zeDriverGetExtensionFunctionAddress", api.extension, kAnyVersion),
      optional_symbol("zelLoaderTranslateHandle", api.translate, kAnyVersion),
      required_symbol("zeDeviceGet", api.devices, kAnyVersion),
      required_symbol("zeDeviceGetProperties", api.device_properties, kAnyVersion),
      required_symbol("zeDeviceGetMemoryProperties", api.memory_properties, kAnyVersion),
      optional_symbol("zeDevicePciGetPropertiesExt", api.pci_properties, kAnyVersion),
      required_symbol("zeDeviceGetCommandQueueGroupProperties", api.queue_groups, kAnyVersion),
      required_symbol("zeContextCreate", api.context_create, kAnyVersion),
      required_symbol("zeContextDestroy", api.context_destroy, kAnyVersion),
      required_symbol("zeCommandListCreateImmediate", api.list_create, kAnyVersion),
      required_symbol("zeCommandListDestroy", api.list_destroy, kAnyVersion),
      // Without it the lists are synchronous.
      optional_symbol("zeCommandListHostSynchronize", api.list_synchronize, kAnyVersion),
      required_symbol("zeCommandListAppendMemoryCopy", api.append_copy, kAnyVersion),
      required_symbol("zeCommandListAppendMemoryFill", api.append_fill, kAnyVersion),
      required_symbol("zeCommandListAppendBarrier", api.append_barrier, kAnyVersion),
  };
}

// Without these a device can be described, and no memory of it can sleep.
std::vector<Symbol> virtual_memory_symbols(ZeApi& api) {
  return {
      required_symbol("zeVirtualMemQueryPageSize", api.page_size, kAnyVersion),
      required_symbol("zeVirtualMemReserve", api.reserve, kAnyVersion),
      required_symbol("zeVirtualMemFree", api.unreserve, kAnyVersion),
      required_symbol("zePhysicalMemCreate", api.create, kAnyVersion),
      required_symbol("zePhysicalMemDestroy", api.destroy, kAnyVersion),
      required_symbol("zeVirtualMemMap", api.map, kAnyVersion),
      required_symbol("zeVirtualMemUnmap", api.unmap, kAnyVersion),
  };
}

}  // namespace

int32_t load_level_zero(ZeApi* api, std::string* why) {
  void* library = open_vendor_library({"HAL_LIBZE", "libze_loader.so", {"libze_loader.so.1"}}, why);
  if (library == nullptr) {
    *why += " (the Level Zero loader: package libze1 or level-zero)";
    return kZeDependencyUnavailable;
  }
  const std::vector<Symbol> core = core_symbols(*api);
  bind_symbols(library, core);
  bind_symbols(library, virtual_memory_symbols(*api));
  if (const Symbol* missing = check_symbols(core, kAnyVersion)) {
    *why = std::string("the Level Zero loader has no ") + missing->name + "; update package libze1 or level-zero";
    return kZeUnsupportedVersion;
  }
  return kZeSuccess;
}

std::string missing_virtual_memory(const ZeApi& api) {
  ZeApi copy = api;
  const std::vector<Symbol> symbols = virtual_memory_symbols(copy);
  const Symbol* missing = check_symbols(symbols, kAnyVersion);
  return missing == nullptr ? "" : std::string("the Level Zero loader has no ") + missing->name;
}

std::string ze_name(int32_t code) {
  const char* name = "unknown code";
  for (const CodeName& known : kNames) {
    if (known.code == code) name = known.name;
  }
  char text[80];
  std::snprintf(text, sizeof text, "ZE_RESULT_%s (0x%x)", name, static_cast<unsigned>(code));
  return text;
}

void describe_ze(int32_t code, char* text, size_t size) {
  std::snprintf(text, size, "%s", ze_name(code).c_str());
}

hal_kind classify_ze(int32_t code) {
  switch (code) {
    case kZeSuccess:
      return HAL_OK;
    case kZeOutOfDeviceMemory:  // from `create`, or from `map` where the driver takes the memory only then
      return HAL_OUT_OF_DEVICE_MEMORY;
    case kZeDependencyUnavailable:
    case kZeUninitialized:
    case kZeUnsupportedVersion:
    case kZeUnsupportedFeature:
      return HAL_UNSUPPORTED;
    default:
      return HAL_DRIVER_ERROR;
  }
}

}  // namespace hal
