// Building and copying out of statuses. Touches nothing else.
#include "status.h"

#include <algorithm>
#include <cstring>

namespace hal {
namespace {

template <size_t N>
void copy_text(char (&target)[N], const char* text) {
  const size_t length = std::min(std::strlen(text), N - 1);
  std::memcpy(target, text, length);
  target[length] = '\0';
}

}  // namespace

Status Status::error(hal_kind kind, const char* call, int32_t code, const std::string& text, uint64_t size,
                     uint64_t address) {
  Status status;
  status.detail_ = std::make_unique<hal_status>();
  hal_status& detail = *status.detail_;
  detail.kind = kind;
  detail.code = code;
  detail.size = size;
  detail.address = address;
  copy_text(detail.call, call);
  copy_text(detail.text, text.c_str());
  return status;
}

Status Status::host_error(hal_kind kind, const char* call, int number, const std::string& text, uint64_t size) {
  return error(kind, call, number, text + ": " + std::strerror(number), size);
}

Status Status::copy() const {
  Status status;
  if (!ok()) status.detail_ = std::make_unique<hal_status>(*detail_);
  return status;
}

void Status::set_memory(uint64_t needed, uint64_t available, uint64_t limit) {
  if (ok()) return;
  detail_->needed = needed;
  detail_->available = available;
  detail_->limit = limit;
}

int32_t Status::write_to(hal_status* out) const {
  if (out != nullptr) *out = ok() ? hal_status{} : *detail_;
  return kind();
}

}  // namespace hal
