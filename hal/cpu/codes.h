// What the cpu driver's codes, which are errno, mean to the layers above. Touches nothing.
#pragma once

#include "driver.h"

namespace hal {

hal_kind classify_errno(int32_t code);
void describe_errno(int32_t code, char* text, size_t size);

}  // namespace hal
