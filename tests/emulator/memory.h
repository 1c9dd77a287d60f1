// Device memory of all devices: addresses, physical pieces and the mappings between them, over host memory.
//
// Reservations are inaccessible host mappings; physical memory is ranges of one memory file; a mapping puts a range of
// the file at its addresses, and granting access unprotects it. So a mapped device address can be dereferenced by the
// host, which stands in for the tensors of a framework, and an unmapped one faults.
#pragma once

#include <cstdint>
#include <map>
#include <shared_mutex>
#include <vector>

namespace emu {

struct MemoryUse {
  uint64_t used_bytes, rdma_bytes, handles, orphans, mappings, reservations, double_releases;
};

class Memory {
 public:
  int32_t reserve(uint64_t size, uint64_t alignment, uint64_t hint, uint64_t* out);
  int32_t unreserve(uint64_t address, uint64_t size);
  // At most `limit` bytes of `device` may be in use. `poison`: byte the memory holds, -1: zero pages.
  int32_t create(int device, uint64_t size, uint64_t limit, int poison, bool rdma, uint64_t* out);
  int32_t release(uint64_t handle);
  int32_t map(uint64_t address, uint64_t size, uint64_t handle);
  int32_t set_access(uint64_t address, uint64_t size, int device, uint32_t flags);
  int32_t unmap(uint64_t address, uint64_t size);

  // Whether `device` may read (1) or write (2) all of these addresses, as bits in `need`.
  bool accessible(int device, uint64_t address, uint64_t size, uint32_t need) const;
  // What a queued operation does when its turn comes: by then wrong addresses are an illegal access.
  int32_t copy_out(int device, void* host, uint64_t address, uint64_t size) const;
  int32_t copy_in(int device, uint64_t address, const void* host, uint64_t size) const;
  int32_t fill(int device, uint64_t address, const void* pattern, uint64_t pattern_size, uint64_t count) const;

  MemoryUse use(int device) const;
  void forget_double_releases();

 private:
  struct Physical {
    int device;
    uint64_t offset, size;  // in the memory file
    bool rdma, handle_live;
    uint64_t mappings;
  };
  struct Mapping {
    uint64_t size, handle;
    std::map<int, uint32_t> access;  // device -> flags
  };

  bool reserved(uint64_t address, uint64_t size) const;
  bool overlaps_mapping(uint64_t address, uint64_t size) const;
  // The mappings that make up a range exactly; empty when they do not.
  std::vector<uint64_t> whole_mappings(uint64_t address, uint64_t size) const;
  bool accessible_locked(int device, uint64_t address, uint64_t size, uint32_t need) const;
  int32_t take_physical(uint64_t size, int poison, uint64_t* offset);
  void drop_if_unused(uint64_t handle);

  // Shared while device operations touch the memory, exclusive while the books change.
  mutable std::shared_mutex mutex_;
  std::map<uint64_t, uint64_t> reservations_;
  std::map<uint64_t, Physical> physical_;
  std::map<uint64_t, Mapping> mappings_;
  std::map<int, uint64_t> used_;
  int file_ = -1;
  uint64_t file_size_ = 0, next_handle_ = 0x1000, double_releases_ = 0;
};

}  // namespace emu
