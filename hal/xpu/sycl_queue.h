// Level Zero's handles out of a `sycl::queue *`, without SYCL's headers or compiler.
#pragma once

#include <cstdint>
#include <string>

#include "level_zero.h"

namespace hal {

struct QueueHandles {
  ZeHandle context = nullptr, device = nullptr;
  int32_t major = 0;  // of the libsycl that was asked
};

// Asks the libsycl that torch has loaded for the handles behind torch's queue. Memory that is mapped in their context
// is memory to torch's kernels. On failure `why` says what is not as it was tested.
int32_t handles_of_queue(const void* queue, QueueHandles* out, std::string* why);

}  // namespace hal
