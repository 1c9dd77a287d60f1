// Device memory that a transition takes for itself. What the driver will not take back is left with an arena, which
// tries again.
#pragma once

#include "arena.h"
#include "segment.h"

namespace hal {

class DeviceMemory {
 public:
  explicit DeviceMemory(Primitives& primitives, Arena& arena) : primitives_(primitives), arena_(arena) {}
  ~DeviceMemory() { free(); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  Status allocate(uint64_t bytes);
  hal_address address() const { return segment_.address; }

 private:
  void free();

  Primitives& primitives_;
  Arena& arena_;
  Segment segment_;
};

// Gives a segment's memory and range back; false while the driver refuses, and then it can be called again.
bool give_back(Primitives& primitives, Segment& segment);

}  // namespace hal
