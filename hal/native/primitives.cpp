// Calls into the driver: nothing else in the library does. Holds no lock while it calls.
#include "primitives.h"

#include <cstdio>

namespace hal {

template <typename Call>
Status Primitives::checked(const char* name, uint64_t size, uint64_t address, Call&& call) {
  int32_t code = 0;
  if (!faults_.fires(name, &code)) code = call();
  return code == 0 ? Status() : failure(name, code, size, address);
}

Status Primitives::failure(const char* name, int32_t code, uint64_t size, uint64_t address) const {
  char text[200] = "";
  driver_->describe(code, text, sizeof text);
  return Status::error(driver_->classify(code), name, code, text, size, address);
}

Status Primitives::open(const hal_driver* driver, int32_t device, const char* options, Primitives* out) {
  char why[200] = "";
  void* context = nullptr;
  const int32_t code = driver->open(device, options == nullptr ? "" : options, &context, why, sizeof why);
  if (code != 0) {
    char text[200] = "";
    driver->describe(code, text, sizeof text);
    return Status::error(HAL_UNSUPPORTED, "open", code, why[0] != '\0' ? why : text);
  }
  out->driver_ = driver;
  out->context_ = context;
  out->device_ = device;
  HAL_TRY(out->checked("facts", 0, 0, [&] { return driver->facts(context, &out->facts_); }));
  if (out->facts_.streams == 0 || out->facts_.granularity == 0) {
    return Status::error(HAL_DRIVER_ERROR, "facts", 0, "the driver reports no copy stream or no granularity");
  }
  if (out->facts_.granularity % 4096 != 0) {
    return Status::error(HAL_DRIVER_ERROR, "facts", 0, "the driver's granularity is no multiple of 4096 bytes");
  }
  return {};
}

Primitives::~Primitives() {
  if (context_ != nullptr) driver_->close(context_);
}

Status Primitives::granularity(uint64_t size, uint64_t* bytes) {
  return checked("granularity", size, 0, [&] { return driver_->granularity(context_, size, bytes); });
}

Status Primitives::memory_info(uint64_t* free_bytes, uint64_t* total_bytes) {
  return checked("memory_info", 0, 0, [&] { return driver_->memory_info(context_, free_bytes, total_bytes); });
}

Status Primitives::reserve(uint64_t size, uint64_t alignment, hal_address hint, hal_address* out) {
  HAL_TRY(checked("reserve", size, hint, [&] { return driver_->reserve(context_, size, alignment, hint, out); }));
  ++reserves_;
  reserved_bytes_ += size;
  return {};
}

Status Primitives::unreserve(hal_address address, uint64_t size) {
  HAL_TRY(checked("unreserve", size, address, [&] { return driver_->unreserve(context_, address, size); }));
  ++unreserves_;
  reserved_bytes_ -= size;
  return {};
}

Status Primitives::create(uint64_t size, hal_handle* out) {
  HAL_TRY(checked("create", size, 0, [&] { return driver_->create(context_, size, out); }));
  ++creates_;
  return {};
}

Status Primitives::release(hal_handle handle, uint64_t size) {
  HAL_TRY(checked("release", size, 0, [&] { return driver_->release(context_, handle, size); }));
  ++releases_;
  return {};
}

Status Primitives::map(hal_address address, uint64_t size, hal_handle handle) {
  HAL_TRY(checked("map", size, address, [&] { return driver_->map(context_, address, size, handle); }));
  ++maps_;
  mapped_bytes_ += size;
  return {};
}

Status Primitives::access(hal_address address, uint64_t size) {
  return checked("access", size, address, [&] { return driver_->access(context_, address, size); });
}

Status Primitives::unmap(hal_address address, uint64_t size) {
  HAL_TRY(checked("unmap", size, address, [&] { return driver_->unmap(context_, address, size); }));
  ++unmaps_;
  mapped_bytes_ -= size;
  return {};
}

Status Primitives::vacate(hal_address address, uint64_t size) {
  if (driver_->vacate == nullptr) return {};
  hal_address got = 0;
  Status status = checked("vacate", size, address, [&] { return driver_->vacate(context_, address, size, &got); });
  if (status.kind() == HAL_ADDRESS_LOST) {
    ++unreserves_;
    reserved_bytes_ -= size;
    status.set_memory(got, 0, 0);
  }
  return status;
}

Status Primitives::reserve_again(hal_address address, uint64_t size) {
  hal_address got = 0;
  Status status = reserve(size, 0, address, &got);
  if (status.ok() && got == address) return {};
  if (!status.ok() && status.kind() != HAL_ADDRESS_LOST) return status;
  if (status.ok()) HAL_TRY(unreserve(got, size));
  Status lost = Status::error(HAL_ADDRESS_LOST, "reserve", 0, "another allocation has this address now", size, address);
  lost.set_memory(got, 0, 0);
  return lost;
}

Status Primitives::copy_to_host(void* host, hal_address device, uint64_t size, uint32_t stream) {
  return checked("copy_to_host", size, device,
                 [&] { return driver_->copy_to_host(context_, host, device, size, stream); });
}

Status Primitives::copy_to_device(hal_address device, const void* host, uint64_t size, uint32_t stream) {
  return checked("copy_to_device", size, device,
                 [&] { return driver_->copy_to_device(context_, device, host, size, stream); });
}

Status Primitives::fill(hal_address device, uint8_t value, uint64_t size, uint32_t stream) {
  return checked("fill", size, device, [&] { return driver_->fill(context_, device, value, size, stream); });
}

Status Primitives::synchronize(uint32_t stream) {
  // A fault here stands for an asynchronous error that surfaces at the end: the waiting itself is real, because what
  // was in flight would otherwise still write into memory that the recovery takes down.
  const int32_t code = driver_->synchronize(context_, stream);
  return checked("synchronize", 0, 0, [&] { return code; });
}

Status Primitives::host_register(void* host, uint64_t size) {
  return checked("host_register", size, reinterpret_cast<uint64_t>(host),
                 [&] { return driver_->host_register(context_, host, size); });
}

Status Primitives::host_unregister(void* host, uint64_t size) {
  return checked("host_unregister", size, reinterpret_cast<uint64_t>(host),
                 [&] { return driver_->host_unregister(context_, host, size); });
}

bool Primitives::is_capturing(void* stream) {
  return driver_->is_capturing(context_, stream) != 0;
}

void Primitives::describe_shortage(Status* status, uint64_t needed) {
  if (status->kind() != HAL_OUT_OF_DEVICE_MEMORY) return;
  uint64_t free_bytes = kUnknownBytes, total_bytes = 0;
  // A query that fails must not hide the shortage it was to explain: then what is free stays unknown.
  if (!memory_info(&free_bytes, &total_bytes).ok()) free_bytes = kUnknownBytes;
  status->set_memory(needed, free_bytes, 0);
}

void Primitives::count(hal_counters* out) const {
  out->creates = creates_;
  out->releases = releases_;
  out->maps = maps_;
  out->unmaps = unmaps_;
  out->handles = creates_ - releases_;
  out->mappings = maps_ - unmaps_;
  out->reservations = reserves_ - unreserves_;
  out->mapped_bytes = mapped_bytes_;
  out->reserved_bytes = reserved_bytes_;
}

}  // namespace hal
