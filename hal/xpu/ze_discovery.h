// Which of Level Zero's devices is meant, and by what name management libraries know it.
#pragma once

#include <cstdint>
#include <string>

#include "level_zero.h"
#include "ze_device.h"

namespace hal {

// The driver and the names of a device that SYCL has given. `handles->driver` stays null where no driver lists it.
void describe_device(const ZeApi& api, ZeHandles* handles);

// The GPU with that UUID (32 hexadecimal digits), or without one the `ordinal`th, in a context of its own; on failure
// `why` says what there is.
int32_t find_device(const ZeApi& api, int32_t ordinal, const std::string& uuid, ZeHandles* out, std::string* why);

}  // namespace hal
