// Finds out, when a device is opened, how physical memory gets back to it while its addresses stay reserved. Releases
// of ROCm differ in that, and their version numbers do not tell: so it is tried.
#pragma once

#include <vector>

#include "hip_device.h"

namespace hal {

struct GiveBackProof {
  bool mapped = false;  // memory could be mapped at all, and used
  bool leaked = false;  // not even freeing the range brought it back
  bool proved = false;
  GiveBack way = GiveBack::kPlain;
  bool free_moves = true;                // with what is allocated; where it does not, nothing can be proved
  uint64_t released = 0, came_back = 0;  // bytes, of the last try
  int32_t code = kVmmSuccess;            // of the runtime's call that failed
};

// Leaves the device with the first of `ways` that is proved: twice at one address, memory is mapped, written, read and
// released, and the free memory of the device follows.
GiveBackProof find_give_back(HipDevice& device, const std::vector<GiveBack>& ways);

}  // namespace hal
