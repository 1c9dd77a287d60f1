// Reserving host addresses without memory behind them.
#include "addresses.h"

#include <sys/mman.h>

#include <cerrno>

namespace hal {
namespace {

constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

void* pointer(hal_address address) {
  return reinterpret_cast<void*>(address);
}

}  // namespace

int32_t reserve_at(hal_address hint, uint64_t size, hal_address* out) {
  void* at = mmap(pointer(hint), size, PROT_NONE, kFlags | MAP_FIXED_NOREPLACE, -1, 0);
  if (at == MAP_FAILED) return errno;
  *out = reinterpret_cast<hal_address>(at);
  if (*out == hint) return 0;
  munmap(at, size);  // a kernel before 4.17 takes the flag for a mere hint
  return EEXIST;
}

int32_t reserve_anywhere(uint64_t size, uint64_t step, hal_address* out) {
  void* raw = mmap(nullptr, size + step, PROT_NONE, kFlags, -1, 0);
  if (raw == MAP_FAILED) return errno;
  const auto begin = reinterpret_cast<uint64_t>(raw);
  *out = (begin + step - 1) / step * step;
  if (*out > begin) munmap(raw, *out - begin);
  const uint64_t tail = begin + step - *out;
  if (tail > 0) munmap(pointer(*out + size), tail);
  return 0;
}

}  // namespace hal
