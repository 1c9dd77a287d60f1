// The primitives of CUDA and HIP. Touches only the vendor's functions in VmmApi; holds a lock while it calls them only
// to make a copy stream.
#include "vmm_family.h"

#include <cstring>

namespace hal {
namespace {

constexpr uint32_t kNonBlockingStream = 1;
constexpr uint32_t kPortableRegistration = 1;  // pinned for every context of the process
constexpr int32_t kMinimumGranularity = 0, kRecommendedGranularity = 1;
constexpr int32_t kRelaxedCapture = 2;

// Lets this thread make calls that a capture on another stream (in "global" mode, on another thread) would forbid and
// be broken by. They are safe: nothing that this library queues is part of the engine's capture.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const VmmApi& api) : exchange_(api.exchange_capture_mode) {
    if (exchange_ != nullptr) exchanged_ = exchange_(&mode_) == kVmmSuccess;
  }
  ~RelaxedCapture() {
    if (exchanged_) exchange_(&mode_);
  }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int32_t (*const exchange_)(int32_t*);
  int32_t mode_ = kRelaxedCapture;
  bool exchanged_ = false;
};

class CurrentDevice {
 public:
  explicit CurrentDevice(VmmDevice& device) : device_(device), code_(device.make_current(&previous_)) {}
  ~CurrentDevice() {
    if (code_ == kVmmSuccess) device_.restore(previous_);
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  int32_t code() const { return code_; }

 private:
  VmmDevice& device_;
  uint64_t previous_ = 0;
  const int32_t code_;
};

}  // namespace

template <typename Call>
int32_t VmmDevice::on_device(Call&& call) {
  const CurrentDevice current(*this);
  if (current.code() != kVmmSuccess) return current.code();
  const RelaxedCapture relaxed(api_);
  return call();
}

int32_t VmmDevice::memory_info(uint64_t* free_bytes, uint64_t* total_bytes) {
  return on_device([&] { return api_.memory_info(free_bytes, total_bytes); });
}

int32_t VmmDevice::reserve(uint64_t size, uint64_t alignment, hal_address hint, hal_address* out) {
  return on_device([&] { return api_.reserve(out, size, alignment, hint, 0); });
}

int32_t VmmDevice::unreserve(hal_address address, uint64_t size) {
  return on_device([&] { return api_.unreserve(address, size); });
}

int32_t VmmDevice::create(uint64_t size, hal_handle* out) {
  return on_device([&] { return api_.create(out, size, &properties_, 0); });
}

int32_t VmmDevice::release(hal_handle handle) {
  return on_device([&] { return api_.release(handle); });
}

int32_t VmmDevice::map(hal_address address, uint64_t size, hal_handle handle) {
  return on_device([&] { return api_.map(address, size, 0, handle, 0); });
}

int32_t VmmDevice::access(hal_address address, uint64_t size) {
  return on_device([&] { return api_.access(address, size, &access_, 1); });
}

int32_t VmmDevice::unmap(hal_address address, uint64_t size) {
  return on_device([&] { return api_.unmap(address, size); });
}

int32_t VmmDevice::copy_to_host(void* host, hal_address device, uint64_t size, uint32_t stream) {
  return on_device([&] {
    void* queue = nullptr;
    const int32_t code = copy_stream(stream, &queue);
    return code != kVmmSuccess ? code : api_.copy_to_host(host, device, size, queue);
  });
}

int32_t VmmDevice::copy_to_device(hal_address device, const void* host, uint64_t size, uint32_t stream) {
  return on_device([&] {
    void* queue = nullptr;
    const int32_t code = copy_stream(stream, &queue);
    return code != kVmmSuccess ? code : api_.copy_to_device(device, host, size, queue);
  });
}

int32_t VmmDevice::fill(hal_address device, uint8_t value, uint64_t size, uint32_t stream) {
  return on_device([&] {
    void* queue = nullptr;
    const int32_t code = copy_stream(stream, &queue);
    if (code != kVmmSuccess) return code;
    if ((device | size) % sizeof(uint32_t) != 0) return api_.fill_bytes(device, value, size, queue);
    return api_.fill_words(device, value * 0x01010101u, size / sizeof(uint32_t), queue);
  });
}

int32_t VmmDevice::synchronize(uint32_t stream) {
  if (stream == HAL_ALL_STREAMS) return on_device([&] { return api_.device_synchronize(); });
  if (stream >= kStreams) return kVmmInvalidValue;
  void* queue = streams_[stream].load(std::memory_order_acquire);
  if (queue == nullptr) return kVmmSuccess;  // never used
  return on_device([&] { return api_.stream_synchronize(queue); });
}

int32_t VmmDevice::host_register(void* host, uint64_t size) {
  if (api_.host_register == nullptr) return kVmmNotSupported;
  return on_device([&] { return api_.host_register(host, size, kPortableRegistration); });
}

int32_t VmmDevice::host_unregister(void* host) {
  if (api_.host_unregister == nullptr) return kVmmNotSupported;
  return on_device([&] { return api_.host_unregister(host); });
}

// The null stream stands for all: a query of it fails with a capture code while a stream that synchronizes with it is
// captured. A capture on a non-blocking stream, as torch's are, is seen only by asking for that very stream: the
// vendors offer nothing else, and to remember streams would mean to ask for one that is destroyed, which crashes
// libcuda.
bool VmmDevice::is_capturing(void* stream) {
  if (api_.is_capturing == nullptr) return false;
  int32_t status = 0;
  const int32_t code = on_device([&] { return api_.is_capturing(stream, &status); });
  return code == kVmmSuccess ? status != 0 : kVmmCaptureUnsupported <= code && code <= kVmmCaptureWrongThread;
}

int32_t VmmDevice::copy_stream(uint32_t number, void** out) {
  if (number >= kStreams) return kVmmInvalidValue;
  std::atomic<void*>& slot = streams_[number];
  *out = slot.load(std::memory_order_acquire);
  if (*out != nullptr) return kVmmSuccess;
  const std::lock_guard<std::mutex> lock(streams_mutex_);
  *out = slot.load(std::memory_order_relaxed);
  if (*out != nullptr) return kVmmSuccess;
  const int32_t code = api_.stream_create(out, kNonBlockingStream);
  if (code == kVmmSuccess) slot.store(*out, std::memory_order_release);
  return code;
}

void VmmDevice::destroy_streams() {
  for (std::atomic<void*>& slot : streams_) {
    void* stream = slot.exchange(nullptr);
    if (stream != nullptr) on_device([&] { return api_.stream_destroy(stream); });
  }
}

void VmmDevice::set_fact(hal_fact fact, bool yes, const std::string& why_not) {
  const uint32_t bit = 1u << fact;
  facts_.yes = yes ? facts_.yes | bit : facts_.yes & ~bit;
  std::strncpy(facts_.why_not[fact], yes ? "" : why_not.c_str(), sizeof facts_.why_not[fact] - 1);
}

int32_t VmmDevice::read_common_facts(const VmmOptions& options, std::string* why) {
  const int32_t code = on_device([&] {
    const int32_t minimum = api_.granularity(&facts_.granularity, &properties_, kMinimumGranularity);
    return minimum != kVmmSuccess ? minimum
                                  : api_.granularity(&facts_.alignment, &properties_, kRecommendedGranularity);
  });
  if (code != kVmmSuccess) {
    *why = "the driver does not tell its allocation granularity";
    return code;
  }
  if (options.chunk % facts_.granularity != 0) {
    *why = "option chunk must be a multiple of the granularity, " + std::to_string(facts_.granularity) + " bytes";
    return kVmmInvalidValue;
  }
  facts_.chunk = options.chunk;
  facts_.streams = kStreams;
  set_fact(HAL_FACT_VMM, true, "");
  set_fact(HAL_FACT_FREE_TRUTHFUL, true, "");
  set_fact(HAL_FACT_PIN_HOST, api_.host_register != nullptr && api_.host_unregister != nullptr,
           "the driver has no call to register host memory");
  set_fact(HAL_FACT_HOST_ACCESS, false, "the host cannot read device addresses");
  return kVmmSuccess;
}

}  // namespace hal
