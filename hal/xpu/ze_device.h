// One opened device of Level Zero: the primitives of driver.h as methods.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

#include "level_zero.h"

namespace hal {

struct ZeHandles {
  ZeHandle driver = nullptr;  // null: not found, which costs the calls that need it
  ZeHandle device = nullptr, context = nullptr;
  bool owns_context = false;  // false: it is torch's
  std::string management_id;  // PCI address or UUID, and "#tile" where the device is a tile of a card
};

class ZeDevice {
 public:
  ZeDevice(const ZeApi& api, const ZeHandles& handles) : api_(api), handles_(handles) {}
  ~ZeDevice();
  ZeDevice(const ZeDevice&) = delete;
  ZeDevice& operator=(const ZeDevice&) = delete;

  // Asks and probes what the device can do. `chunk`: bytes of the largest physical piece; 0: what the device allows.
  int32_t read_facts(uint64_t chunk, std::string* why);
  const hal_facts& facts() const { return facts_; }

  // The page size for memory of `size` bytes: small memory can have small pages.
  uint64_t page_size(uint64_t size) const;
  // Level Zero does not tell what is free: this is the device's memory less what this process holds here.
  void memory_info(uint64_t* free_bytes, uint64_t* total_bytes) const;
  int32_t reserve(uint64_t size, uint64_t alignment, hal_address hint, hal_address* out) const;
  int32_t unreserve(hal_address address, uint64_t size) const;
  int32_t create(uint64_t size, hal_handle* out);
  int32_t release(hal_handle handle, uint64_t size);
  int32_t map(hal_address address, uint64_t size, hal_handle handle) const;
  int32_t unmap(hal_address address, uint64_t size) const;
  int32_t copy(void* to, const void* from, uint64_t size, uint32_t stream);
  int32_t fill(hal_address address, uint8_t value, uint64_t size, uint32_t stream);
  int32_t synchronize(uint32_t stream);
  int32_t host_register(void* host, uint64_t size) const;
  int32_t host_unregister(void* host) const;

 private:
  static constexpr uint32_t kStreams = 2;  // one for each direction, so that copies both ways can overlap

  // A command list that runs what is appended at once. No two threads may use one at the same time.
  struct Queue {
    std::mutex mutex;
    ZeHandle list = nullptr;
  };

  // Appends behind everything that was appended before.
  template <typename Append>
  int32_t append(uint32_t stream, Append&& append);
  int32_t make_list(ZeHandle* out) const;
  int32_t wait_for(Queue& queue) const;
  uint32_t copy_group() const;
  bool take_room(uint64_t size);

  void read_names(const ZeDeviceProperties& properties);
  void read_memory();
  void find_import_calls();
  // Takes one page through its whole life; returns the call that fails, in words, or "".
  std::string probe_page();
  int32_t choose_chunk(uint64_t asked, uint64_t allowed, std::string* why);
  void set_fact(hal_fact fact, bool yes, const std::string& why_not);

  const ZeApi api_;
  const ZeHandles handles_;
  hal_facts facts_{};
  uint64_t total_ = 0;  // bytes; 0: unknown
  std::atomic<uint64_t> held_{0};
  std::array<Queue, kStreams> queues_;
  int32_t (*import_host_)(ZeHandle driver, void* host, size_t size) = nullptr;
  int32_t (*release_host_)(ZeHandle driver, void* host) = nullptr;
  ZeHandle real_driver_ = nullptr;  // as the driver itself knows it, for its extensions
};

}  // namespace hal
