// CUDA's row of primitives: libcuda opened at run time, and the primary context of one device.
// The primitives themselves are in native/vmm_family.cpp, which HIP shares.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <memory>
#include <utility>

#include "libcuda.h"
#include "nvcomp.h"

namespace hal {
namespace {

// A piece costs tens of microseconds to create and map whatever its size: 16 GiB in pieces of 64 MiB map in about 10 ms
// on an H200, in pieces of 2 MiB in 310.
constexpr uint64_t kDefaultChunk = uint64_t{512} << 20;

// CUdevice_attribute
constexpr int32_t kIntegrated = 18, kVirtualMemory = 102, kRdmaWithVirtualMemory = 110;

// For `describe`, which gets no context: libcuda's functions that put codes into words need none either.
std::atomic<decltype(CudaApi::error_name)> error_name{nullptr};
std::atomic<decltype(CudaApi::error_text)> error_text{nullptr};

std::string words_of(int32_t code, const std::atomic<decltype(CudaApi::error_name)>& lookup) {
  const auto function = lookup.load(std::memory_order_acquire);
  const char* words = nullptr;
  return function != nullptr && function(code, &words) == kVmmSuccess && words != nullptr ? words : "";
}

void describe(int32_t code, char* text, size_t size) {
  const std::string name = words_of(code, error_name), meaning = words_of(code, error_text);
  std::snprintf(text, size, "%s: %s", name.empty() ? "CUDA error" : name.c_str(),
                meaning.empty() ? "libcuda knows no words for it" : meaning.c_str());
}

std::string version_text(int32_t version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// The table of a libcuda that can do what is needed; on failure `why` says what to do.
int32_t load_api(CudaApi* api, int32_t* version, std::string* why) {
  void* library = open_vendor_library({"HAL_LIBCUDA", "libcuda.so", {"libcuda.so.1"}}, why);
  if (library == nullptr) return kVmmNoDevice;
  const std::vector<Symbol> symbols = symbols_of(*api);
  bind_symbols(library, symbols);
  *version = 0;
  if (api->driver_version != nullptr) api->driver_version(version);
  if (const Symbol* missing = check_symbols(symbols, *version)) {
    *why = std::string(missing->name) + " needs a driver of CUDA " + version_text(missing->since) +
           " or later, this is " + version_text(*version) + "; update the NVIDIA driver";
    return kVmmNotSupported;
  }
  error_name.store(api->error_name, std::memory_order_release);
  error_text.store(api->error_text, std::memory_order_release);
  return kVmmSuccess;
}

class CudaDevice final : public VmmDevice {
 public:
  CudaDevice(const CudaApi& api, int32_t device) : VmmDevice(api.vmm, device), cuda_(api), device_(device) {}
  ~CudaDevice() override {
    if (context_ == nullptr) return;
    destroy_streams();
    cuda_.release_context(device_);
  }

  // Takes a reference to the context that torch uses too; makes it if nobody has yet.
  int32_t retain_context() { return cuda_.retain_context(&context_, device_); }

  int32_t make_current(uint64_t* previous) override {
    void* current = nullptr;
    const int32_t code = cuda_.get_context(&current);
    if (code != kVmmSuccess) return code;
    *previous = reinterpret_cast<uint64_t>(current);
    return current == context_ ? kVmmSuccess : cuda_.set_context(context_);
  }

  void restore(uint64_t previous) override {
    void* const context = reinterpret_cast<void*>(previous);
    if (context != context_) cuda_.set_context(context);
  }

  int32_t read_facts(int32_t version, const VmmOptions& options, std::string* why) {
    properties_.rdma_capable = attribute(kRdmaWithVirtualMemory) != 0;
    set_fact(HAL_FACT_RDMA, properties_.rdma_capable != 0,
             "GPUDirect RDMA does not take virtual memory on this device");
    set_fact(HAL_FACT_SCRUBS, false, "CUDA does not promise that fresh physical memory is zero");
    set_fact(HAL_FACT_UNIFIED_MEMORY, attribute(kIntegrated) != 0, "the device has memory of its own");
    const bool park = cuda_.checkpoint_lock && cuda_.checkpoint && cuda_.checkpoint_restore && cuda_.checkpoint_unlock;
    set_fact(HAL_FACT_PARK, park, "process checkpoints need a driver of CUDA 12.8, this is " + version_text(version));
    cuda_.device_name(facts_.device_name, sizeof facts_.device_name, device_);
    std::snprintf(facts_.device_uuid, sizeof facts_.device_uuid, "%s", management_id().c_str());
    std::snprintf(facts_.version, sizeof facts_.version, "driver %s", version_text(version).c_str());
    return read_common_facts(options, why);
  }

  int32_t attribute(int32_t number) const {
    int32_t value = 0;
    return cuda_.device_attribute(&value, number, device_) == kVmmSuccess ? value : 0;
  }

 private:
  // The name that NVML knows the device by: its UUID, else its PCI address, else "".
  std::string management_id() const {
    CudaUuid uuid{};
    char pci[sizeof facts_.device_uuid] = "";
    if (cuda_.device_uuid != nullptr && cuda_.device_uuid(&uuid, device_) == kVmmSuccess) return uuid_text(uuid);
    return cuda_.pci_bus_id != nullptr && cuda_.pci_bus_id(pci, sizeof pci, device_) == kVmmSuccess ? pci : "";
  }

  std::string uuid_text(const CudaUuid& uuid) const {
    std::string text = is_mig_instance(uuid) ? "MIG" : "GPU";
    for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
      char digits[3];
      std::snprintf(digits, sizeof digits, "%02x", uuid.bytes[i]);
      text += (i == 0 || i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "") + std::string(digits);
    }
    return text;
  }

  // The older call answers with the UUID of the whole GPU, the newer with that of the MIG instance.
  bool is_mig_instance(const CudaUuid& uuid) const {
    CudaUuid parent{};
    if (cuda_.parent_uuid == nullptr || cuda_.parent_uuid(&parent, device_) != kVmmSuccess) return false;
    return std::memcmp(&parent, &uuid, sizeof uuid) != 0;
  }

  const CudaApi cuda_;
  const int32_t device_;
  void* context_ = nullptr;
};

std::string why_init_failed(int32_t code) {
  if (code == kVmmNotInitialized) {
    return "CUDA was initialized before this process was forked and cannot be used in it; start workers with 'spawn' "
           "or 'forkserver', or open the device only after the fork";
  }
  char text[160];
  describe(code, text, sizeof text);
  return std::string("cuInit failed with ") + text;
}

std::string why_no_device(const CudaApi& api, int32_t ordinal) {
  int32_t count = 0;
  api.device_count(&count);
  return "there is no CUDA device " + std::to_string(ordinal) + ": this process sees " + std::to_string(count) +
         " (see CUDA_VISIBLE_DEVICES)";
}

int32_t find_device(const CudaApi& api, int32_t ordinal, int32_t* device, std::string* why) {
  int32_t code = api.init(0);
  if (code != kVmmSuccess) {
    *why = why_init_failed(code);
    return code;
  }
  code = api.device_get(device, ordinal);
  if (code != kVmmSuccess) *why = why_no_device(api, ordinal);
  return code;
}

int32_t open_device(int32_t ordinal, const char* options_text, std::unique_ptr<CudaDevice>* out, std::string* why) {
  VmmOptions options{kDefaultChunk};
  *why = parse_vmm_options(options_text, &options);
  if (!why->empty()) return kVmmInvalidValue;
  CudaApi api{};
  int32_t version = 0, device = 0;
  int32_t code = load_api(&api, &version, why);
  if (code != kVmmSuccess) return code;
  code = find_device(api, ordinal, &device, why);
  if (code != kVmmSuccess) return code;
  auto opened = std::make_unique<CudaDevice>(api, device);
  if (opened->attribute(kVirtualMemory) == 0) {
    *why = "this device or its virtualization does not support CUDA's virtual memory management";
    return kVmmNotSupported;
  }
  code = opened->retain_context();
  if (code != kVmmSuccess) return code;
  code = opened->read_facts(version, options, why);
  if (code == kVmmSuccess) *out = std::move(opened);
  return code;
}

int32_t open(int32_t ordinal, const char* options, void** context, char* why, size_t why_size) {
  std::unique_ptr<CudaDevice> device;
  std::string reason;
  const int32_t code = open_device(ordinal, options, &device, &reason);
  std::snprintf(why, why_size, "%s", reason.c_str());
  if (code == kVmmSuccess) *context = static_cast<VmmDevice*>(device.release());
  return code;
}

}  // namespace
}  // namespace hal

extern "C" const hal_driver* hal_cuda_driver(void) {
  static const hal_driver table = [] {
    hal_driver made = hal::vmm_driver_table("cuda", hal::open, hal::describe);
    made.codec = hal::nvcomp_codec();
    return made;
  }();
  return &table;
}
