// One AMD GPU behind the primitives of the family, with what HIP's releases need around them.
#pragma once

#include <map>
#include <mutex>
#include <string>

#include "libamdhip64.h"

namespace hal {

// Codes of this driver's own, beside hipError_t.
enum HipDriverCode : int32_t {
  kHipAddressLost = 100001,  // a range could not be reserved again at its address
  kHipRemapFailed = 100002,  // the kernel refused to map over a range
  kHipNotUsable = 100003,    // memory did not keep what was written into it
};

// How physical memory gets back to the device while its addresses stay reserved.
enum class GiveBack {
  kPlain,        // releasing it is enough, as it should be
  kPlaceholder,  // the range is given up and reserved again at once: somebody may be faster
  kAnonRemap,    // inaccessible anonymous memory is mapped over the range, which drops the runtime's own mapping
};

const char* name_of(GiveBack way);

class HipDevice final : public VmmDevice {
 public:
  HipDevice(const HipApi& api, int32_t device) : VmmDevice(api.vmm, device), hip_(api), device_(device) {}
  ~HipDevice() override { destroy_streams(); }

  int32_t make_current(uint64_t* previous) override;
  void restore(uint64_t previous) override;

  int32_t reserve(uint64_t size, uint64_t alignment, hal_address hint, hal_address* out) override;
  int32_t unreserve(hal_address address, uint64_t size) override;
  int32_t create(uint64_t size, hal_handle* out) override;
  int32_t release(hal_handle handle) override;
  int32_t map(hal_address address, uint64_t size, hal_handle handle) override;
  int32_t access(hal_address address, uint64_t size) override;
  int32_t unmap(hal_address address, uint64_t size) override;
  int32_t fill(hal_address device, uint8_t value, uint64_t size, uint32_t stream) override;
  int32_t vacate(hal_address address, uint64_t size, hal_address* got);

  int32_t read_facts(int32_t version, const VmmOptions& options, std::string* why);
  // From then on `vacate` gives memory back in this way.
  void set_give_back(GiveBack way) { give_back_ = way; }
  // What the probe found: whether memory comes back, and whether the runtime's figure of free memory shows it.
  void set_found(bool gives_back, bool free_is_truthful, const std::string& why_not);
  void set_version(const std::string& text);
  int32_t attribute(int32_t number) const;

 private:
  struct Mapping {
    uint64_t size;
    hal_handle handle;
  };

  int32_t reserve_somehow(uint64_t size, uint64_t alignment, hal_address hint, hal_address* out);
  int32_t reserve_again(hal_address address, uint64_t size, hal_address* got);
  bool is_reserved(hal_address address, uint64_t size) const;
  bool overlaps_mapping(hal_address address, uint64_t size) const;
  std::string management_id() const;

  const HipApi hip_;
  const int32_t device_;
  GiveBack give_back_ = GiveBack::kPlain;
  // What the runtime holds for this device: it follows whatever address and handle it is given, so a wrong one would
  // end the process. Guarded by the mutex of all virtual memory calls.
  std::map<hal_address, uint64_t> reservations_;
  std::map<hal_address, Mapping> mappings_;
  std::map<hal_handle, uint64_t> handles_;  // -> how often it is mapped
};

}  // namespace hal
