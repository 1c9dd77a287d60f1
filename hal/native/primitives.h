// One opened device as the library sees it: the driver's primitives, counted, with fault points and typed failures.
#pragma once

#include <atomic>
#include <string>

#include "faults.h"
#include "status.h"

namespace hal {

class Primitives {
 public:
  static Status open(const hal_driver* driver, int32_t device, const char* options, Primitives* out);
  Primitives() = default;
  ~Primitives();
  Primitives(const Primitives&) = delete;
  Primitives& operator=(const Primitives&) = delete;

  const hal_facts& facts() const { return facts_; }
  bool has(hal_fact fact) const { return (facts_.yes >> fact) & 1u; }
  const char* why_not(hal_fact fact) const { return facts_.why_not[fact]; }
  int32_t device() const { return device_; }
  Faults& faults() { return faults_; }

  Status granularity(uint64_t size, uint64_t* bytes);
  Status memory_info(uint64_t* free_bytes, uint64_t* total_bytes);
  Status reserve(uint64_t size, uint64_t alignment, hal_address hint, hal_address* out);
  Status unreserve(hal_address address, uint64_t size);
  Status create(uint64_t size, hal_handle* out);
  Status release(hal_handle handle, uint64_t size);
  Status map(hal_address address, uint64_t size, hal_handle handle);
  Status access(hal_address address, uint64_t size);
  Status unmap(hal_address address, uint64_t size);
  // Success where the driver has no need of it. HAL_ADDRESS_LOST: the range is not reserved any more.
  Status vacate(hal_address address, uint64_t size);
  // Reserves exactly this range again; HAL_ADDRESS_LOST while somebody else has it.
  Status reserve_again(hal_address address, uint64_t size);
  Status copy_to_host(void* host, hal_address device, uint64_t size, uint32_t stream);
  Status copy_to_device(hal_address device, const void* host, uint64_t size, uint32_t stream);
  Status fill(hal_address device, uint8_t value, uint64_t size, uint32_t stream);
  Status synchronize(uint32_t stream);
  Status host_register(void* host, uint64_t size);
  Status host_unregister(void* host, uint64_t size);
  bool is_capturing(void* stream);
  const hal_codec* codec() const { return driver_->codec; }  // null: there is none
  void* context() const { return context_; }

  // Adds what a failure for want of device memory needs: the bytes of the whole request and those that are free.
  void describe_shortage(Status* status, uint64_t needed);
  void count(hal_counters* out) const;

 private:
  template <typename Call>
  Status checked(const char* name, uint64_t size, uint64_t address, Call&& call);
  Status failure(const char* name, int32_t code, uint64_t size, uint64_t address) const;

  const hal_driver* driver_ = nullptr;
  void* context_ = nullptr;
  int32_t device_ = 0;
  hal_facts facts_{};
  Faults faults_;
  // Successful calls since open, and what they left behind.
  std::atomic<uint64_t> creates_{0}, releases_{0}, maps_{0}, unmaps_{0}, reserves_{0}, unreserves_{0};
  std::atomic<uint64_t> mapped_bytes_{0}, reserved_bytes_{0};
};

}  // namespace hal
