// Host memory that the device copies to and from; pinned where that works.
#pragma once

#include <memory>

#include "primitives.h"

namespace hal {

class StagingBuffer {
 public:
  static Status make(Primitives& primitives, uint64_t size, std::unique_ptr<StagingBuffer>* out);
  ~StagingBuffer();
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;
  void* get() const { return memory_; }

 private:
  StagingBuffer(Primitives& primitives, void* memory, uint64_t size);

  Primitives& primitives_;
  void* const memory_;
  const uint64_t size_;
  bool registered_ = false;
};

}  // namespace hal
