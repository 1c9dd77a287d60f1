// How functions are put into the tables that the loader hands to a driver.
#pragma once

#include <level_zero/ze_api.h>

#include "machine.h"

namespace emuze {

// Puts functions into the slots from `first` on.
template <typename... Functions>
ze_result_t put(void** slots, int first, Functions*... functions) {
  int index = first;
  ((slots[index++] = reinterpret_cast<void*>(functions)), ...);
  return ZE_RESULT_SUCCESS;
}

// What the core and Sysman both say of a device.
void describe(const Gpu& gpu, ze_device_properties_t* out);

}  // namespace emuze
