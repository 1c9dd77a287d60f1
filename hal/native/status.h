// What happened, as a value: success costs a null pointer, a failure carries one hal_status.
#pragma once

#include <memory>
#include <string>

#include "c_api.h"

namespace hal {

constexpr uint64_t kUnknownBytes = UINT64_MAX;

class [[nodiscard]] Status {
 public:
  Status() = default;  // success

  static Status error(hal_kind kind, const char* call, int32_t code, const std::string& text, uint64_t size = 0,
                      uint64_t address = 0);
  // A failed host call: `number` is errno, and its description is appended to `text`.
  static Status host_error(hal_kind kind, const char* call, int number, const std::string& text, uint64_t size = 0);
  static Status invalid(const char* call, const std::string& text) { return error(HAL_INVALID, call, 0, text); }
  static Status bad_state(const char* call, const std::string& text) { return error(HAL_BAD_STATE, call, 0, text); }

  bool ok() const { return detail_ == nullptr; }
  hal_kind kind() const { return ok() ? HAL_OK : static_cast<hal_kind>(detail_->kind); }
  const hal_status* detail() const { return detail_.get(); }
  Status copy() const;
  void set_memory(uint64_t needed, uint64_t available, uint64_t limit);

  // Fills `out` (which may be null) and returns the kind.
  int32_t write_to(hal_status* out) const;

 private:
  std::unique_ptr<hal_status> detail_;
};

// Runs `body`; an exception (only the host allocator and the thread library throw here) becomes a Status.
template <typename Body>
Status guarded(const char* call, Body&& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Status::error(HAL_HOST_MEMORY, call, 0, "the process is out of host memory");
  } catch (const std::exception& failure) {
    return Status::error(HAL_HOST_MEMORY, call, 0, failure.what());
  }
}

}  // namespace hal

// Hands a failure on to the caller.
#define HAL_TRY(expression)                          \
  do {                                               \
    ::hal::Status hal_try_status = (expression);     \
    if (!hal_try_status.ok()) return hal_try_status; \
  } while (false)
