// Ranges of host addresses that hold nothing yet. Touches mmap alone; codes are errno.
#pragma once

#include "driver.h"

namespace hal {

// Exactly at `hint`, or EEXIST when something is there.
int32_t reserve_at(hal_address hint, uint64_t size, hal_address* out);
// Wherever the kernel likes, beginning at a multiple of `step` bytes.
int32_t reserve_anywhere(uint64_t size, uint64_t step, hal_address* out);

}  // namespace hal
