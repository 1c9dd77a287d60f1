#include "staging.h"

#include <sys/mman.h>

#include <cerrno>

namespace hal {

Status StagingBuffer::make(Primitives& primitives, uint64_t size, std::unique_ptr<StagingBuffer>* out) {
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    return Status::host_error(HAL_HOST_MEMORY, "staging", errno, "no host memory for a bounce buffer", size);
  }
  out->reset(new StagingBuffer(primitives, memory, size));
  return {};
}

StagingBuffer::StagingBuffer(Primitives& primitives, void* memory, uint64_t size)
    : primitives_(primitives), memory_(memory), size_(size) {
  if (primitives.has(HAL_FACT_PIN_HOST)) registered_ = primitives.host_register(memory_, size).ok();
}

StagingBuffer::~StagingBuffer() {
  // Memory that the driver still knows must not be unmapped: a page left behind is the lesser harm.
  if (registered_ && !primitives_.host_unregister(memory_, size_).ok()) return;
  munmap(memory_, size_);
}

}  // namespace hal
