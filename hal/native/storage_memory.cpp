// Anonymous memory for backups. Touches mmap and the host's memory figures.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "host_memory.h"
#include "storage.h"

namespace hal {
namespace {

constexpr uint64_t kHugePage = 2u << 20;

void* map_anonymous(uint64_t size) {
  return mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
}

// Maps `size` bytes that begin at a huge page, so that the kernel can use huge pages throughout.
void* map_aligned(uint64_t size) {
  if (size < kHugePage) return map_anonymous(size);
  void* raw = map_anonymous(size + kHugePage);
  if (raw == MAP_FAILED) return raw;
  const auto begin = reinterpret_cast<uint64_t>(raw);
  const uint64_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > begin) munmap(raw, aligned - begin);
  const uint64_t tail = begin + kHugePage - aligned;
  if (tail > 0) munmap(reinterpret_cast<void*>(aligned + size), tail);
  return reinterpret_cast<void*>(aligned);
}

}  // namespace

uint64_t backup_alignment() {
  static const uint64_t alignment = std::max<uint64_t>(4096, static_cast<uint64_t>(sysconf(_SC_PAGESIZE)));
  return alignment;
}

Status MemoryStorage::available(uint64_t* bytes) {
  hal_host_info info;
  HAL_TRY(read_host_memory(&info));
  *bytes = info.available;
  return {};
}

Status MemoryStorage::add(uint64_t size, uint64_t* position) {
  int code = 0;
  if (faults_.fires("arena grow", &code)) {
    return Status::host_error(HAL_HOST_MEMORY, "arena grow", code, "host memory for backups was refused", size);
  }
  void* memory = map_aligned(size);
  if (memory == MAP_FAILED) {
    return Status::host_error(HAL_HOST_MEMORY, "arena grow", errno, "host memory for backups was refused", size);
  }
  madvise(memory, size, MADV_HUGEPAGE);  // a wish: without huge pages it is only slower
  madvise(memory, size, MADV_DONTDUMP);
  *position = reinterpret_cast<uint64_t>(memory);
  return {};
}

void MemoryStorage::remove(uint64_t position, uint64_t size) {
  munmap(reinterpret_cast<void*>(position), size);
}

}  // namespace hal
