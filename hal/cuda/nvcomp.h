// nvCOMP's ANS codec on device memory; the library is opened at run time.
#pragma once

#include "driver.h"

namespace hal {

const hal_codec* nvcomp_codec();

}  // namespace hal
