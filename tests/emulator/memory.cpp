// Touches the process's address space and one memory file.
#include "memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <mutex>

#include "codes.h"

namespace emu {
namespace {

using Exclusive = std::unique_lock<std::shared_mutex>;
using Shared = std::shared_lock<std::shared_mutex>;

constexpr int kInaccessible = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

void* pointer(uint64_t address) {
  return reinterpret_cast<void*>(address);
}

// Inaccessible addresses at `hint` exactly, or null.
void* place_at(uint64_t hint, uint64_t size) {
  void* at = mmap(pointer(hint), size, PROT_NONE, kInaccessible | MAP_FIXED_NOREPLACE, -1, 0);
  return at == MAP_FAILED ? nullptr : at;
}

// Inaccessible addresses anywhere, aligned, or null: maps more and cuts off what is too much.
void* place_anywhere(uint64_t size, uint64_t alignment) {
  void* at = mmap(nullptr, size + alignment, PROT_NONE, kInaccessible, -1, 0);
  if (at == MAP_FAILED) return nullptr;
  const uint64_t start = reinterpret_cast<uint64_t>(at);
  const uint64_t aligned = (start + alignment - 1) / alignment * alignment;
  if (aligned > start) munmap(at, aligned - start);
  if (aligned < start + alignment) munmap(pointer(aligned + size), start + alignment - aligned);
  return pointer(aligned);
}

int protection(const std::map<int, uint32_t>& access) {
  uint32_t flags = 0;
  for (const auto& [device, granted] : access) flags |= granted;
  return ((flags & 1) != 0 ? PROT_READ : 0) | ((flags & 2) != 0 ? PROT_WRITE : 0);
}

}  // namespace

int32_t Memory::reserve(uint64_t size, uint64_t alignment, uint64_t hint, uint64_t* out) {
  const Exclusive lock(mutex_);
  void* at = hint != 0 && hint % alignment == 0 ? place_at(hint, size) : nullptr;
  if (at == nullptr) at = place_anywhere(size, alignment);
  if (at == nullptr) return kOutOfMemory;
  *out = reinterpret_cast<uint64_t>(at);
  reservations_[*out] = size;
  return kSuccess;
}

int32_t Memory::unreserve(uint64_t address, uint64_t size) {
  const Exclusive lock(mutex_);
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != size || overlaps_mapping(address, size)) return kInvalidValue;
  munmap(pointer(address), size);
  reservations_.erase(found);
  return kSuccess;
}

int32_t Memory::take_physical(uint64_t size, int poison, uint64_t* offset) {
  if (file_ < 0) file_ = memfd_create("emucuda", MFD_CLOEXEC);
  if (file_ < 0 || ftruncate(file_, static_cast<off_t>(file_size_ + size)) != 0) return kOutOfMemory;
  if (poison >= 0) {
    void* view = mmap(nullptr, size, PROT_WRITE, MAP_SHARED, file_, static_cast<off_t>(file_size_));
    if (view == MAP_FAILED) return kOutOfMemory;
    std::memset(view, poison, size);
    munmap(view, size);
  }
  *offset = file_size_;
  file_size_ += size;  // ranges are not used twice: what is given back becomes a hole
  return kSuccess;
}

int32_t Memory::create(int device, uint64_t size, uint64_t limit, int poison, bool rdma, uint64_t* out) {
  const Exclusive lock(mutex_);
  uint64_t offset = 0;
  if (used_[device] + size > limit) return kOutOfMemory;
  const int32_t code = take_physical(size, poison, &offset);
  if (code != kSuccess) return code;
  *out = next_handle_++;
  physical_[*out] = Physical{device, offset, size, rdma, true, 0};
  used_[device] += size;
  return kSuccess;
}

int32_t Memory::release(uint64_t handle) {
  const Exclusive lock(mutex_);
  const auto found = physical_.find(handle);
  if (found == physical_.end() || !found->second.handle_live) {
    ++double_releases_;
    return kInvalidValue;
  }
  found->second.handle_live = false;
  drop_if_unused(handle);
  return kSuccess;
}

void Memory::drop_if_unused(uint64_t handle) {
  const auto found = physical_.find(handle);
  const Physical& piece = found->second;
  if (piece.handle_live || piece.mappings > 0) return;
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(piece.offset),
            static_cast<off_t>(piece.size));
  used_[piece.device] -= piece.size;
  physical_.erase(found);
}

bool Memory::reserved(uint64_t address, uint64_t size) const {
  auto next = reservations_.upper_bound(address);
  if (next == reservations_.begin()) return false;
  const auto& [start, length] = *--next;
  return address + size <= start + length;
}

bool Memory::overlaps_mapping(uint64_t address, uint64_t size) const {
  const auto next = mappings_.lower_bound(address);
  if (next != mappings_.end() && next->first < address + size) return true;
  if (next == mappings_.begin()) return false;
  const auto before = std::prev(next);
  return before->first + before->second.size > address;
}

int32_t Memory::map(uint64_t address, uint64_t size, uint64_t handle) {
  const Exclusive lock(mutex_);
  const auto found = physical_.find(handle);
  if (found == physical_.end() || !found->second.handle_live || size == 0 || size > found->second.size ||
      !reserved(address, size) || overlaps_mapping(address, size)) {
    return kInvalidValue;
  }
  void* at =
      mmap(pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, file_, static_cast<off_t>(found->second.offset));
  if (at == MAP_FAILED) return kOutOfMemory;
  mappings_[address] = Mapping{size, handle, {}};
  ++found->second.mappings;
  return kSuccess;
}

std::vector<uint64_t> Memory::whole_mappings(uint64_t address, uint64_t size) const {
  std::vector<uint64_t> starts;
  uint64_t next = address;
  while (next < address + size) {
    const auto found = mappings_.find(next);
    if (found == mappings_.end()) return {};
    starts.push_back(next);
    next += found->second.size;
  }
  return next == address + size ? starts : std::vector<uint64_t>{};
}

int32_t Memory::set_access(uint64_t address, uint64_t size, int device, uint32_t flags) {
  const Exclusive lock(mutex_);
  const std::vector<uint64_t> starts = whole_mappings(address, size);
  if (starts.empty()) return kInvalidValue;
  for (const uint64_t start : starts) {
    Mapping& mapping = mappings_[start];
    mapping.access[device] = flags;
    mprotect(pointer(start), mapping.size, protection(mapping.access));
  }
  return kSuccess;
}

int32_t Memory::unmap(uint64_t address, uint64_t size) {
  const Exclusive lock(mutex_);
  const std::vector<uint64_t> starts = whole_mappings(address, size);
  if (starts.empty()) return kInvalidValue;
  if (mmap(pointer(address), size, PROT_NONE, kInaccessible | MAP_FIXED, -1, 0) == MAP_FAILED) return kOutOfMemory;
  for (const uint64_t start : starts) {
    const uint64_t handle = mappings_[start].handle;
    mappings_.erase(start);
    --physical_[handle].mappings;
    drop_if_unused(handle);
  }
  return kSuccess;
}

bool Memory::accessible(int device, uint64_t address, uint64_t size, uint32_t need) const {
  const Shared lock(mutex_);
  return accessible_locked(device, address, size, need);
}

bool Memory::accessible_locked(int device, uint64_t address, uint64_t size, uint32_t need) const {
  const uint64_t end = address + size;
  while (address < end) {
    auto next = mappings_.upper_bound(address);
    if (next == mappings_.begin()) return false;
    const auto& [start, mapping] = *--next;
    const auto granted = mapping.access.find(device);
    if (address >= start + mapping.size || granted == mapping.access.end()) return false;
    if ((granted->second & need) != need) return false;
    address = start + mapping.size;
  }
  return true;
}

int32_t Memory::copy_out(int device, void* host, uint64_t address, uint64_t size) const {
  const Shared lock(mutex_);
  if (!accessible_locked(device, address, size, 1)) return kIllegalAddress;
  std::memcpy(host, pointer(address), size);
  return kSuccess;
}

int32_t Memory::copy_in(int device, uint64_t address, const void* host, uint64_t size) const {
  const Shared lock(mutex_);
  if (!accessible_locked(device, address, size, 2)) return kIllegalAddress;
  std::memcpy(pointer(address), host, size);
  return kSuccess;
}

int32_t Memory::fill(int device, uint64_t address, const void* pattern, uint64_t pattern_size, uint64_t count) const {
  const Shared lock(mutex_);
  if (!accessible_locked(device, address, pattern_size * count, 2)) return kIllegalAddress;
  auto* const out = static_cast<char*>(pointer(address));
  const uint64_t size = pattern_size * count;
  std::memcpy(out, pattern, std::min(pattern_size, size));
  for (uint64_t done = pattern_size; done < size; done *= 2) std::memcpy(out + done, out, std::min(done, size - done));
  return kSuccess;
}

MemoryUse Memory::use(int device) const {
  const Shared lock(mutex_);
  MemoryUse use{};
  for (const auto& [handle, piece] : physical_) {
    if (piece.device != device) continue;
    use.used_bytes += piece.size;
    use.rdma_bytes += piece.rdma ? piece.size : 0;
    use.handles += piece.handle_live ? 1 : 0;
    use.orphans += piece.handle_live ? 0 : 1;
    use.mappings += piece.mappings;
  }
  use.reservations = reservations_.size();
  use.double_releases = double_releases_;
  return use;
}

void Memory::forget_double_releases() {
  const Exclusive lock(mutex_);
  double_releases_ = 0;
}

}  // namespace emu
