// Calls libsycl's exported C++ functions by their mangled names, as the Itanium ABI has them.
#include "sycl_queue.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>

namespace hal {
namespace {

// The majors that this was tested with. An ABI that is not among them could differ in anything, so nothing is called in
// it. A `sycl::context` or `sycl::device` has 16 bytes in 8, and 8 in 9.
constexpr int32_t kTestedMajors[] = {8, 9};
constexpr size_t kLargestObject = 16;
constexpr signed char kLevelZeroBackend = 2;

struct SyclApi {
  void (*context_of)(void* result, const void* queue);  // the result's address is the first argument, the object's next
  void (*device_of)(void* result, const void* queue);
  uint64_t (*native_context)(const void* context);
  uint64_t (*native_device)(const void* device);
  signed char (*backend_of)(const void* queue);
};

std::vector<Symbol> symbols_of(SyclApi& api) {
  return {
      required_symbol("_ZNK4sycl3_V15queue11get_contextEv", api.context_of, 0),
      required_symbol("_ZNK4sycl3_V15queue10get_deviceEv", api.device_of, 0),
      required_symbol("_ZNK4sycl3_V17context9getNativeEv", api.native_context, 0),
      required_symbol("_ZNK4sycl3_V16device9getNativeEv", api.native_device, 0),
      required_symbol("_ZNK4sycl3_V15queue11get_backendEv", api.backend_of, 0),
  };
}

// The number after ".so." in the name of the file that a library was loaded from; 0 when there is none.
int32_t major_of(void* library) {
  const link_map* map = nullptr;
  if (dlinfo(library, RTLD_DI_LINKMAP, &map) != 0) return 0;
  const std::string path = map->l_name;
  const size_t start = path.find(".so.", path.rfind('/') + 1);
  return start == std::string::npos ? 0 : static_cast<int32_t>(std::strtol(path.c_str() + start + 4, nullptr, 10));
}

bool is_tested(int32_t number) {
  return std::find(std::begin(kTestedMajors), std::end(kTestedMajors), number) != std::end(kTestedMajors);
}

std::string why_untested(int32_t number) {
  std::string known;
  for (const int32_t major : kTestedMajors) known += (known.empty() ? "" : ", ") + std::to_string(major);
  return "libsycl.so." + std::to_string(number) + " is not one of the tested majors (" + known + ")";
}

// A `sycl::context` or `sycl::device` on the heap. It is never destroyed, since its destructor is not exported and a
// reference for each device that is opened costs nothing; the handle lives as long as the process.
void* object_of(void (*getter)(void*, const void*), const void* queue) {
  void* object = std::calloc(1, kLargestObject);
  if (object != nullptr) getter(object, queue);
  return object;
}

}  // namespace

int32_t handles_of_queue(const void* queue, QueueHandles* out, std::string* why) {
  void* library = open_vendor_library({"HAL_LIBSYCL", "libsycl.so", {}}, why);
  if (library == nullptr) {
    *why = "this process has loaded no libsycl: torch's queue is not SYCL's";
    return kZeDependencyUnavailable;
  }
  out->major = major_of(library);
  if (!is_tested(out->major)) {
    *why = why_untested(out->major);
    return kZeUnsupportedVersion;
  }
  SyclApi api{};
  const std::vector<Symbol> symbols = symbols_of(api);
  bind_symbols(library, symbols);
  if (const Symbol* missing = check_symbols(symbols, 0)) {
    *why = "libsycl.so." + std::to_string(out->major) + " does not export " + missing->name;
    return kZeUnsupportedVersion;
  }
  if (api.backend_of(queue) != kLevelZeroBackend) {
    *why = "torch's queue is not on Level Zero; set ONEAPI_DEVICE_SELECTOR=level_zero:gpu or unset it";
    return kZeUnsupportedFeature;
  }
  const void* context = object_of(api.context_of, queue);
  const void* device = object_of(api.device_of, queue);
  if (context == nullptr || device == nullptr) {
    *why = "no host memory";
    return kZeUninitialized;
  }
  out->context = reinterpret_cast<ZeHandle>(api.native_context(context));
  out->device = reinterpret_cast<ZeHandle>(api.native_device(device));
  return kZeSuccess;
}

}  // namespace hal
