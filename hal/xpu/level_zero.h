// The part of Level Zero that the driver uses: its values, layouts and functions, and where the functions come from.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "driver.h"
#include "vendor_library.h"

namespace hal {

using ZeHandle = void*;  // of a driver, device, context, command list or physical memory

// ze_result_t: the values that mean something to the driver.
enum ZeResult : int32_t {
  kZeSuccess = 0,
  kZeOutOfDeviceMemory = 0x70000003,
  kZeDependencyUnavailable = 0x70020000,
  kZeUninitialized = 0x78000001,
  kZeUnsupportedVersion = 0x78000002,
  kZeUnsupportedFeature = 0x78000003,
  kZeInvalidArgument = 0x78000004,
  kZeUnsupportedAlignment = 0x7800000a,
};

constexpr uint32_t kZeGpuOnly = 1;    // zeInit
constexpr uint32_t kZeDeviceGpu = 1;  // ZeDeviceProperties::type
constexpr uint32_t kZeIntegrated = 1, kZeSubdevice = 2;
constexpr uint32_t kZeReadWrite = 1;  // CUDA's value is 3
constexpr uint32_t kZeCanCopy = 3;    // a queue group with either flag: compute or copy
constexpr uint32_t kZeSynchronous = 1, kZeAsynchronous = 2;
constexpr int32_t kZelDriver = 0;  // what zelLoaderTranslateHandle is given

// Descriptions and properties begin with the number of their type and a pointer to extensions, which are not used.
struct ZeContextDescription {
  uint32_t stype = 0xd;
  const void* next = nullptr;
  uint32_t flags = 0;
};
static_assert(sizeof(ZeContextDescription) == 24, "ze_context_desc_t");

struct ZePhysicalDescription {
  uint32_t stype = 0x20;
  void* next = nullptr;
  uint32_t flags = 0;  // memory of the device
  size_t size = 0;
};
static_assert(sizeof(ZePhysicalDescription) == 32, "ze_physical_mem_desc_t");

struct ZeQueueDescription {
  uint32_t stype = 0xe;
  const void* next = nullptr;
  uint32_t ordinal = 0, index = 0, flags = 0, mode = kZeSynchronous, priority = 0;
};
static_assert(sizeof(ZeQueueDescription) == 40, "ze_command_queue_desc_t");

struct ZeQueueGroup {
  uint32_t stype = 0x6;
  void* next = nullptr;
  uint32_t flags = 0;
  size_t largest_fill_pattern = 0;
  uint32_t queues = 0;
};
static_assert(sizeof(ZeQueueGroup) == 40, "ze_command_queue_group_properties_t");

struct ZeDriverProperties {
  uint32_t stype = 0x1;
  void* next = nullptr;
  uint8_t uuid[16] = {};
  uint32_t version = 0;
};
static_assert(sizeof(ZeDriverProperties) == 40, "ze_driver_properties_t");

struct ZeDeviceProperties {
  uint32_t stype = 0x3;
  void* next = nullptr;
  uint32_t type = 0, vendor = 0, device = 0, flags = 0, subdevice = 0, clock = 0;
  uint64_t largest_allocation = 0;
  uint8_t processors[48] = {};
  uint8_t uuid[16] = {};
  char name[256] = {};
};
static_assert(sizeof(ZeDeviceProperties) == 368 && offsetof(ZeDeviceProperties, flags) == 28, "ze_device_properties_t");
static_assert(offsetof(ZeDeviceProperties, largest_allocation) == 40 && offsetof(ZeDeviceProperties, uuid) == 96, "");

struct ZeMemoryProperties {
  uint32_t stype = 0x7;
  void* next = nullptr;
  uint32_t flags = 0, clock = 0, bus_width = 0;
  uint64_t total = 0;
  char name[256] = {};
};
static_assert(sizeof(ZeMemoryProperties) == 296 && offsetof(ZeMemoryProperties, total) == 32,
              "ze_device_memory_properties_t");

struct ZePciProperties {
  uint32_t stype = 0x10008;
  void* next = nullptr;
  uint32_t domain = 0, bus = 0, device = 0, function = 0;
  int32_t generation = 0, width = 0;
  int64_t bandwidth = 0;
};
static_assert(sizeof(ZePciProperties) == 48 && offsetof(ZePciProperties, domain) == 16, "ze_pci_ext_properties_t");

struct ZeApi {
  int32_t (*init)(uint32_t flags);
  int32_t (*drivers)(uint32_t* count, ZeHandle* drivers);
  int32_t (*api_version)(ZeHandle driver, uint32_t* version);
  int32_t (*driver_properties)(ZeHandle driver, ZeDriverProperties* out);
  int32_t (*extension)(ZeHandle driver, const char* name, void** function);
  int32_t (*translate)(int32_t type, ZeHandle in, ZeHandle* out);
  int32_t (*devices)(ZeHandle driver, uint32_t* count, ZeHandle* devices);
  int32_t (*device_properties)(ZeHandle device, ZeDeviceProperties* out);
  int32_t (*memory_properties)(ZeHandle device, uint32_t* count, ZeMemoryProperties* out);
  int32_t (*pci_properties)(ZeHandle device, ZePciProperties* out);
  int32_t (*queue_groups)(ZeHandle device, uint32_t* count, ZeQueueGroup* out);
  int32_t (*context_create)(ZeHandle driver, const ZeContextDescription* description, ZeHandle* out);
  int32_t (*context_destroy)(ZeHandle context);
  int32_t (*page_size)(ZeHandle context, ZeHandle device, size_t size, size_t* out);
  int32_t (*reserve)(ZeHandle context, const void* hint, size_t size, void** out);
  int32_t (*unreserve)(ZeHandle context, const void* address, size_t size);
  int32_t (*create)(ZeHandle context, ZeHandle device, ZePhysicalDescription* description, ZeHandle* out);
  int32_t (*destroy)(ZeHandle context, ZeHandle physical);
  int32_t (*map)(ZeHandle context, const void* address, size_t size, ZeHandle physical, size_t offset, uint32_t access);
  int32_t (*unmap)(ZeHandle context, const void* address, size_t size);
  int32_t (*list_create)(ZeHandle context, ZeHandle device, const ZeQueueDescription* description, ZeHandle* out);
  int32_t (*list_destroy)(ZeHandle list);
  int32_t (*list_synchronize)(ZeHandle list, uint64_t nanoseconds);
  int32_t (*append_copy)(ZeHandle list, void* to, const void* from, size_t size, ZeHandle signal, uint32_t waits,
                         ZeHandle* events);
  int32_t (*append_fill)(ZeHandle list, void* at, const void* pattern, size_t pattern_size, size_t size,
                         ZeHandle signal, uint32_t waits, ZeHandle* events);
  int32_t (*append_barrier)(ZeHandle list, ZeHandle signal, uint32_t waits, ZeHandle* events);
};

// Binds the loader that this process has, or the system's; on failure `why` says what is missing and what to do.
int32_t load_level_zero(ZeApi* api, std::string* why);

// The virtual-memory functions that the loader lacks, in words; "" when all are there.
std::string missing_virtual_memory(const ZeApi& api);

std::string ze_name(int32_t code);  // "ZE_RESULT_ERROR_… (0x…)"
void describe_ze(int32_t code, char* text, size_t size);
hal_kind classify_ze(int32_t code);

}  // namespace hal
