// Keeps the state of all devices. Never destroyed: streams may still run while the process exits.
#include "machine.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "codes.h"

namespace emu {
namespace {

constexpr int32_t kGlobalCapture = 0, kRelaxedCapture = 2;
constexpr uint64_t kPage = 4096;

thread_local Device* current = nullptr;
thread_local int32_t capture_mode = kGlobalCapture;  // how far this thread lets captures restrict it

bool is_host_memory(uint64_t address, uint64_t size) {
  const uint64_t start = address / kPage * kPage;
  const uint64_t pages = (address + size - start + kPage - 1) / kPage;
  std::vector<unsigned char> present(pages);
  return mincore(reinterpret_cast<void*>(start), pages * kPage, present.data()) == 0;
}

}  // namespace

Machine& Machine::instance() {
  static Machine* const machine = new Machine;
  return *machine;
}

Machine::Machine() : settings_(settings_from_environment()), process_(own_process()) {
  faults.read_environment();
  for (int i = 0; i < kMaxDevices; ++i) {
    devices_[i].ordinal = i;
    devices_[i].default_stream = std::make_shared<Stream>(i, true, &devices_[i].sticky);
  }
}

bool Machine::is_forked_child() const {
  const pid_t owner = initialized_by_.load();
  return owner != 0 && owner != getpid();
}

int32_t Machine::enter(const char* call, unsigned needs) {
  if (needs != kNothing && is_forked_child()) return kNotInitialized;
  const int32_t fault = faults.enter(call);
  if (fault != kSuccess) return fault;
  if (needs == kNothing) return kSuccess;
  if (initialized_by_ == 0) return kNotInitialized;
  if (process()->state != kRunning) {
    ++process()->refused_calls;
    return kIllegalState;
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if ((needs & kContext) != 0) {
    if (current == nullptr) return kInvalidContext;
    if (current->retained == 0) return kContextIsDestroyed;
    if (current->sticky.load() != kSuccess) return current->sticky.load();
  }
  return (needs & kCaptureSafe) != 0 ? refuse_while_capturing() : int32_t{kSuccess};
}

int32_t Machine::initialize() {
  if (is_forked_child()) return kNotInitialized;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (settings_.devices == 0) return kNoDevice;
  initialized_by_ = getpid();
  return kSuccess;
}

void Machine::reset() {
  const std::lock_guard<std::mutex> lock(mutex_);
  settings_ = settings_from_environment();
  faults.clear();
  faults.read_environment();
  memory.forget_double_releases();
  for (Device& device : devices_) device.sticky = kSuccess;
  process_ = own_process();
}

Settings Machine::settings() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return settings_;
}

int32_t Machine::retain_context(int ordinal, void** context) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ordinal < 0 || ordinal >= settings_.devices) return kInvalidDevice;
  ++devices_[ordinal].retained;
  *context = &devices_[ordinal];
  return kSuccess;
}

int32_t Machine::release_context(int ordinal) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (ordinal < 0 || ordinal >= settings_.devices) return kInvalidDevice;
  if (devices_[ordinal].retained == 0) return kInvalidContext;
  --devices_[ordinal].retained;
  return kSuccess;
}

Device* Machine::device_of_context(const void* context) {
  for (Device& device : devices_) {
    if (&device == context) return &device;
  }
  return nullptr;
}

int32_t Machine::make_current(void* context) {
  Device* device = device_of_context(context);
  if (context != nullptr && device == nullptr) return kInvalidContext;
  current = device;
  return kSuccess;
}

void* Machine::current_context() const {
  return current;
}

Device& Machine::current_device() {
  return *current;
}

int32_t Machine::create_stream(uint32_t flags, void** out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto stream = std::make_shared<Stream>(current->ordinal, (flags & 1u) == 0, &current->sticky);
  current->streams.push_back(stream);
  *out = stream.get();
  return kSuccess;
}

int32_t Machine::destroy_stream(void* handle) {
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr || handle == nullptr) return kInvalidHandle;
  stream->wait();
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& streams = devices_[stream->device()].streams;
  streams.erase(std::remove(streams.begin(), streams.end(), stream), streams.end());
  return kSuccess;
}

std::shared_ptr<Stream> Machine::find_stream(void* handle) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (reinterpret_cast<uintptr_t>(handle) <= 1) return current == nullptr ? nullptr : current->default_stream;
  for (Device& device : devices_) {
    for (const auto& stream : device.streams) {
      if (stream.get() == handle) return stream;
    }
  }
  return nullptr;
}

int32_t Machine::synchronize_device() {
  Device& device = *current;
  std::vector<std::shared_ptr<Stream>> streams;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& stream : device.streams) {
      if (stream->capture.status == Capture::kNone) continue;
      stream->capture.status = Capture::kInvalidated;
      return kCaptureUnsupported;
    }
    streams = device.streams;
    streams.push_back(device.default_stream);
  }
  for (const auto& stream : streams) stream->wait();
  return device.sticky.load();
}

int32_t Machine::submit(const std::shared_ptr<Stream>& stream, Stream::Operation operation, bool wait) {
  std::vector<std::shared_ptr<Stream>> before;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (stream->capture.status != Capture::kNone) return kNotSupported;  // no graph is recorded
    Device& device = devices_[stream->device()];
    if (stream == device.default_stream) before = device.streams;
    if (stream != device.default_stream && stream->blocking()) before.push_back(device.default_stream);
  }
  for (const auto& other : before) {
    if (other->blocking()) other->wait();
  }
  stream->enqueue(std::move(operation));
  if (wait) stream->wait();
  return wait ? devices_[stream->device()].sticky.load() : int32_t{kSuccess};
}

std::vector<Stream*> Machine::forbidding_captures() {
  std::vector<Stream*> found;
  for (Device& device : devices_) {
    for (const auto& stream : device.streams) {
      const Capture& capture = stream->capture;
      if (capture.status != Capture::kActive || capture.mode == kRelaxedCapture) continue;
      const bool mine = capture.owner == std::this_thread::get_id();
      const bool reaches_all = capture.mode == kGlobalCapture && capture_mode == kGlobalCapture;
      if (mine || reaches_all) found.push_back(stream.get());
    }
  }
  return found;
}

int32_t Machine::refuse_while_capturing() {
  if (capture_mode == kRelaxedCapture) return kSuccess;
  const std::vector<Stream*> captures = forbidding_captures();
  for (Stream* stream : captures) stream->capture.status = Capture::kInvalidated;
  return captures.empty() ? kSuccess : kCaptureUnsupported;
}

int32_t Machine::exchange_capture_mode(int32_t* mode) {
  if (*mode < kGlobalCapture || *mode > kRelaxedCapture) return kInvalidValue;
  std::swap(*mode, capture_mode);
  return kSuccess;
}

int32_t Machine::query_capture(void* handle, int32_t* status) {
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  const std::lock_guard<std::mutex> lock(mutex_);
  const Device& device = devices_[stream->device()];
  const bool implicit = std::any_of(device.streams.begin(), device.streams.end(), [](const auto& other) {
    return other->blocking() && other->capture.status != Capture::kNone;
  });
  if (stream == device.default_stream && implicit) return kCaptureImplicit;
  *status = stream->capture.status;
  return kSuccess;
}

int32_t Machine::begin_capture(void* handle, int32_t mode) {
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (stream == devices_[stream->device()].default_stream) return kCaptureUnsupported;
  if (stream->capture.status != Capture::kNone) return kIllegalState;
  stream->capture = Capture{Capture::kActive, mode, std::this_thread::get_id()};
  return kSuccess;
}

int32_t Machine::end_capture(void* handle) {
  const std::shared_ptr<Stream> stream = find_stream(handle);
  if (stream == nullptr) return kInvalidHandle;
  const std::lock_guard<std::mutex> lock(mutex_);
  switch (std::exchange(stream->capture, Capture{}).status) {
    case Capture::kActive:
      return kSuccess;
    case Capture::kInvalidated:
      return kCaptureInvalidated;
    default:
      return kIllegalState;
  }
}

int32_t Machine::register_host(uint64_t address, uint64_t size) {
  if (address == 0 || size == 0 || !is_host_memory(address, size)) return kInvalidValue;
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [start, length] : registrations_) {
    if (address < start + length && start < address + size) return kHostAlreadyRegistered;
  }
  if (settings_.pin_limit != 0 && registered_bytes_ + size > settings_.pin_limit) return kOutOfMemory;
  registrations_[address] = size;
  registered_bytes_ += size;
  return kSuccess;
}

int32_t Machine::unregister_host(uint64_t address) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = registrations_.find(address);
  if (found == registrations_.end()) return kHostNotRegistered;
  registered_bytes_ -= found->second;
  registrations_.erase(found);
  return kSuccess;
}

bool Machine::is_registered(uint64_t address, uint64_t size) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto next = registrations_.upper_bound(address);
  if (next == registrations_.begin()) return false;
  const auto& [start, length] = *--next;
  return address + size <= start + length;
}

int32_t Machine::stats(int ordinal, emucuda_device_stats* out) {
  if (ordinal < 0 || ordinal >= kMaxDevices) return kInvalidDevice;
  const MemoryUse use = memory.use(ordinal);
  const std::lock_guard<std::mutex> lock(mutex_);
  const Device& device = devices_[ordinal];
  *out = {};
  out->used_bytes = use.used_bytes;
  out->rdma_bytes = use.rdma_bytes;
  out->handles = use.handles;
  out->orphans = use.orphans;
  out->mappings = use.mappings;
  out->reservations = use.reservations;
  out->double_releases = use.double_releases;
  out->streams = device.streams.size();
  out->queued = device.default_stream->queued();
  for (const auto& stream : device.streams) out->queued += stream->queued();
  out->retained = device.retained;
  out->registrations = registrations_.size();
  out->registered_bytes = registered_bytes_;
  out->sticky_error = device.sticky.load();
  return kSuccess;
}

}  // namespace emu
