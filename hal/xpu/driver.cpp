// XPU's row of primitives: Level Zero through its loader, in the context of torch's SYCL queue.
//
// Options: queue=ADDRESS (of torch's `sycl::queue`: the device and the context are those of that queue; without it the
// context is one of the driver's own, in which torch's kernels may not see the memory), uuid=HEX (which device, without
// a queue), chunk=BYTES (the largest physical piece; 0: what the device allows).
#include "driver.h"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <sstream>
#include <string>

#include "level_zero.h"
#include "sycl_queue.h"
#include "ze_device.h"
#include "ze_discovery.h"

namespace hal {
namespace {

struct Options {
  uint64_t queue = 0, chunk = 0;
  std::string uuid;
};

bool parse_number(const std::string& text, uint64_t* out) {
  char* end = nullptr;
  errno = 0;
  *out = std::strtoull(text.c_str(), &end, 0);
  return !text.empty() && text[0] != '-' && *end == '\0' && errno == 0;
}

// Reads one "key=value"; returns what is wrong, or "".
std::string parse_option(const std::string& item, Options* out) {
  const size_t equals = item.find('=');
  const std::string key = item.substr(0, equals), value = equals == std::string::npos ? "" : item.substr(equals + 1);
  if (key == "uuid" && value.size() == 32) return out->uuid = value, "";
  if (key == "queue" && parse_number(value, &out->queue)) return "";
  if (key == "chunk" && parse_number(value, &out->chunk)) return "";
  return "'" + item + "' is no option; there are queue=ADDRESS, uuid=32 DIGITS and chunk=BYTES";
}

std::string parse_options(const char* text, Options* out) {
  std::istringstream items(text == nullptr ? "" : text);
  for (std::string item; std::getline(items, item, ';');) {
    const std::string wrong = item.empty() ? "" : parse_option(item, out);
    if (!wrong.empty()) return wrong;
  }
  return "";
}

std::string why_init_failed(int32_t code) {
  return "zeInit failed with " + ze_name(code) +
         ": no GPU driver was found; install libze_intel_gpu.so.1 (package intel-level-zero-gpu or libze-intel-gpu1)";
}

int32_t find_handles(const ZeApi& api, int32_t ordinal, const Options& options, ZeHandles* out, std::string* why) {
  if (options.queue == 0) return find_device(api, ordinal, options.uuid, out, why);
  QueueHandles handles;
  const int32_t code = handles_of_queue(reinterpret_cast<const void*>(options.queue), &handles, why);
  if (code != kZeSuccess) return code;
  out->context = handles.context;
  out->device = handles.device;
  describe_device(api, out);
  return kZeSuccess;
}

int32_t open_device(int32_t ordinal, const char* text, std::unique_ptr<ZeDevice>* out, std::string* why) {
  Options options;
  *why = parse_options(text, &options);
  if (!why->empty()) return kZeInvalidArgument;
  ZeApi api{};
  int32_t code = load_level_zero(&api, why);
  if (code != kZeSuccess) return code;
  code = api.init(kZeGpuOnly);
  if (code != kZeSuccess) {
    *why = why_init_failed(code);
    return code;
  }
  ZeHandles handles;
  code = find_handles(api, ordinal, options, &handles, why);
  if (code != kZeSuccess) return code;
  auto opened = std::make_unique<ZeDevice>(api, handles);
  code = opened->read_facts(options.chunk, why);
  if (code == kZeSuccess) *out = std::move(opened);
  return code;
}

int32_t open(int32_t ordinal, const char* options, void** context, char* why, size_t why_size) {
  std::unique_ptr<ZeDevice> device;
  std::string reason;
  const int32_t code = open_device(ordinal, options, &device, &reason);
  std::snprintf(why, why_size, "%s", reason.c_str());
  if (code == kZeSuccess) *context = device.release();
  return code;
}

ZeDevice& self(void* context) {
  return *static_cast<ZeDevice*>(context);
}

// Calls `primitive` where the device has virtual memory: without it the loader may not even have the functions.
template <typename Primitive>
int32_t with_vmm(void* context, Primitive&& primitive) {
  const bool has_vmm = (self(context).facts().yes >> HAL_FACT_VMM & 1u) != 0;
  return has_vmm ? primitive(self(context)) : int32_t{kZeUnsupportedFeature};
}

hal_driver make_table() {
  hal_driver table{};
  table.abi = HAL_DRIVER_ABI;
  table.struct_size = sizeof table;
  table.name = "xpu";
  table.open = open;
  table.close = [](void* c) { delete &self(c); };
  table.facts = [](void* c, hal_facts* out) -> int32_t { return *out = self(c).facts(), kZeSuccess; };
  table.granularity = [](void* c, uint64_t size, uint64_t* bytes) {
    return with_vmm(c, [&](ZeDevice& d) -> int32_t { return *bytes = d.page_size(size), kZeSuccess; });
  };
  table.memory_info = [](void* c, uint64_t* free_bytes, uint64_t* total_bytes) -> int32_t {
    return self(c).memory_info(free_bytes, total_bytes), kZeSuccess;
  };
  table.reserve = [](void* c, uint64_t size, uint64_t alignment, hal_address hint, hal_address* out) {
    return with_vmm(c, [&](ZeDevice& d) { return d.reserve(size, alignment, hint, out); });
  };
  table.unreserve = [](void* c, hal_address address, uint64_t size) {
    return with_vmm(c, [&](ZeDevice& d) { return d.unreserve(address, size); });
  };
  table.create = [](void* c, uint64_t size, hal_handle* out) {
    return with_vmm(c, [&](ZeDevice& d) { return d.create(size, out); });
  };
  table.release = [](void* c, hal_handle handle, uint64_t size) {
    return with_vmm(c, [&](ZeDevice& d) { return d.release(handle, size); });
  };
  table.map = [](void* c, hal_address address, uint64_t size, hal_handle handle) {
    return with_vmm(c, [&](ZeDevice& d) { return d.map(address, size, handle); });
  };
  table.access = [](void*, hal_address, uint64_t) -> int32_t { return kZeSuccess; };  // `map` has given it
  table.unmap = [](void* c, hal_address address, uint64_t size) {
    return with_vmm(c, [&](ZeDevice& d) { return d.unmap(address, size); });
  };
  table.copy_to_host = [](void* c, void* host, hal_address device, uint64_t size, uint32_t stream) {
    return self(c).copy(host, reinterpret_cast<const void*>(device), size, stream);
  };
  table.copy_to_device = [](void* c, hal_address device, const void* host, uint64_t size, uint32_t stream) {
    return self(c).copy(reinterpret_cast<void*>(device), host, size, stream);
  };
  table.fill = [](void* c, hal_address device, uint8_t value, uint64_t size, uint32_t stream) {
    return self(c).fill(device, value, size, stream);
  };
  table.synchronize = [](void* c, uint32_t stream) { return self(c).synchronize(stream); };
  table.host_register = [](void* c, void* host, uint64_t size) { return self(c).host_register(host, size); };
  table.host_unregister = [](void* c, void* host, uint64_t) { return self(c).host_unregister(host); };
  // What torch captures are commands of SYCL queues: waiting for lists of our own disturbs no capture.
  table.is_capturing = [](void*, void*) -> int32_t { return 0; };
  table.classify = classify_ze;
  table.describe = describe_ze;
  return table;
}

}  // namespace
}  // namespace hal

extern "C" const hal_driver* hal_xpu_driver(void);
const hal_driver* hal_xpu_driver(void) {
  static const hal_driver table = hal::make_table();
  return &table;
}
