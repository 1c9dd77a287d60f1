// How a VmmDevice is presented as the C table of driver.h: thunks, options and what the error codes mean. Keeps
// nothing.
#include <cerrno>
#include <cstdlib>
#include <sstream>

#include "vmm_family.h"

namespace hal {
namespace {

VmmDevice& self(void* context) {
  return *static_cast<VmmDevice*>(context);
}

bool parse_bytes(const std::string& text, uint64_t* out) {
  if (text.empty() || text.find_first_not_of("0123456789") != std::string::npos) return false;
  errno = 0;
  *out = std::strtoull(text.c_str(), nullptr, 10);
  return errno == 0;
}

// Reads one "key=value"; returns what is wrong, or "".
std::string parse_vmm_option(const std::string& item, VmmOptions* out) {
  const std::string key = "chunk=";
  if (item.compare(0, key.size(), key) != 0) return "unknown option '" + item + "'; there is: chunk=BYTES";
  if (!parse_bytes(item.substr(key.size()), &out->chunk)) {
    return "option '" + item + "' needs a whole number of bytes (0: no limit)";
  }
  return "";
}

}  // namespace

std::string parse_vmm_options(const char* text, VmmOptions* out) {
  std::istringstream items(text == nullptr ? "" : text);
  for (std::string item; std::getline(items, item, ';');) {
    const std::string wrong = item.empty() ? "" : parse_vmm_option(item, out);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

hal_kind classify_vmm_error(int32_t code) {
  switch (code) {
    case kVmmSuccess:
      return HAL_OK;
    case kVmmOutOfMemory:
      return HAL_OUT_OF_DEVICE_MEMORY;
    case kVmmDeviceUnavailable:
      return HAL_BUSY;
    case kVmmInvalidDevice:
      return HAL_INVALID;
    case kVmmNoDevice:
    case kVmmNotSupported:
      return HAL_UNSUPPORTED;
    case kVmmHostAlreadyRegistered:
    case kVmmHostNotRegistered:
      return HAL_BAD_STATE;
    default:
      return HAL_DRIVER_ERROR;
  }
}

hal_driver vmm_driver_table(const char* name, OpenFunction open, DescribeFunction describe) {
  hal_driver table{};
  table.abi = HAL_DRIVER_ABI;
  table.struct_size = sizeof table;
  table.name = name;
  table.open = open;
  table.close = [](void* c) { delete &self(c); };
  table.facts = [](void* c, hal_facts* out) -> int32_t {
    *out = self(c).facts();
    return kVmmSuccess;
  };
  table.granularity = [](void* c, uint64_t, uint64_t* bytes) -> int32_t {
    *bytes = self(c).facts().granularity;
    return kVmmSuccess;
  };
  table.memory_info = [](void* c, uint64_t* free_bytes, uint64_t* total_bytes) {
    return self(c).memory_info(free_bytes, total_bytes);
  };
  table.reserve = [](void* c, uint64_t size, uint64_t alignment, hal_address hint, hal_address* out) {
    return self(c).reserve(size, alignment, hint, out);
  };
  table.unreserve = [](void* c, hal_address address, uint64_t size) { return self(c).unreserve(address, size); };
  table.create = [](void* c, uint64_t size, hal_handle* out) { return self(c).create(size, out); };
  table.release = [](void* c, hal_handle handle, uint64_t) { return self(c).release(handle); };
  table.map = [](void* c, hal_address address, uint64_t size, hal_handle handle) {
    return self(c).map(address, size, handle);
  };
  table.access = [](void* c, hal_address address, uint64_t size) { return self(c).access(address, size); };
  table.unmap = [](void* c, hal_address address, uint64_t size) { return self(c).unmap(address, size); };
  table.copy_to_host = [](void* c, void* host, hal_address device, uint64_t size, uint32_t stream) {
    return self(c).copy_to_host(host, device, size, stream);
  };
  table.copy_to_device = [](void* c, hal_address device, const void* host, uint64_t size, uint32_t stream) {
    return self(c).copy_to_device(device, host, size, stream);
  };
  table.fill = [](void* c, hal_address device, uint8_t value, uint64_t size, uint32_t stream) {
    return self(c).fill(device, value, size, stream);
  };
  table.synchronize = [](void* c, uint32_t stream) { return self(c).synchronize(stream); };
  table.host_register = [](void* c, void* host, uint64_t size) { return self(c).host_register(host, size); };
  table.host_unregister = [](void* c, void* host, uint64_t) { return self(c).host_unregister(host); };
  table.is_capturing = [](void* c, void* stream) { return int32_t{self(c).is_capturing(stream)}; };
  table.classify = classify_vmm_error;
  table.describe = describe;
  return table;
}

}  // namespace hal
