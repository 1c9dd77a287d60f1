// A table of the few codes that mean more than "failed".
#include "codes.h"

#include <cerrno>
#include <cstdio>
#include <cstring>

namespace hal {

hal_kind classify_errno(int32_t code) {
  switch (code) {
    case 0:
      return HAL_OK;
    case ENOMEM:
      return HAL_OUT_OF_DEVICE_MEMORY;
    case EBUSY:
      return HAL_BUSY;
    case EEXIST:
      return HAL_ADDRESS_LOST;
    case ENOTSUP:
      return HAL_UNSUPPORTED;
    default:
      return HAL_DRIVER_ERROR;
  }
}

void describe_errno(int32_t code, char* text, size_t size) {
  std::snprintf(text, size, "%s", std::strerror(code));
}

}  // namespace hal
