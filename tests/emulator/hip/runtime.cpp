// Touches the process's address space where a quirk leaves something mapped. Its mutex is held over the calls into
// libcuda, so that the books and the driver agree.
#include "runtime.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>

#include "emuhip.h"

namespace emuhip {
namespace {

constexpr Code kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kUnknown = 999;
constexpr int32_t kDefaultVersion = 70226015;
constexpr const char* kMarker = "emuhip-held";  // the name of the file that stands for the device file

using Locked = std::lock_guard<std::mutex>;

void* pointer(uint64_t address) {
  return reinterpret_cast<void*>(address);
}

[[noreturn]] void crash(const char* call, uint64_t what) {
  std::fprintf(stderr, "emuhip: %s of 0x%" PRIx64 " would crash AMD's runtime\n", call, what);
  std::abort();
}

// Whether the file is still mapped over all of these addresses.
bool marker_covers(uint64_t address, uint64_t size) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    uint64_t begin = 0, end = 0;
    if (line.find(kMarker) == std::string::npos) continue;
    if (std::sscanf(line.c_str(), "%" SCNx64 "-%" SCNx64, &begin, &end) != 2) continue;
    if (begin <= address && address + size <= end) return true;
  }
  return false;
}

}  // namespace

Runtime& Runtime::instance() {
  static Runtime* const runtime = new Runtime;
  return *runtime;
}

Runtime::Runtime() {
  reset();
}

void Runtime::reset() {
  const char* version = std::getenv("EMUHIP_VERSION");
  const char* quirks = std::getenv("EMUHIP_QUIRKS");
  set_quirks(quirks == nullptr ? "" : quirks);
  return_stolen();
  const Locked lock(mutex_);
  version_ = version == nullptr ? kDefaultVersion : std::atoi(version);
  to_steal_ = 0;
  finished_ = true;
  Code code = kSuccess;
  const Cuda* driver = held_.empty() ? nullptr : cuda(&code);
  if (driver == nullptr) return;
  for (const Held& held : held_) driver->release(held.handle);
  held_.clear();
}

void Runtime::set_quirks(const std::string& names) {
  const Locked lock(mutex_);
  quirks_.clear();
  std::istringstream items(names);
  for (std::string name; std::getline(items, name, ',');) quirks_.insert(name);
}

void Runtime::steal(int32_t count) {
  const Locked lock(mutex_);
  to_steal_ = count;
}

void Runtime::return_stolen() {
  const Locked lock(mutex_);
  for (const Range& range : stolen_) munmap(pointer(range.address), range.size);
  stolen_.clear();
}

uint64_t Runtime::held_bytes() {
  const Locked lock(mutex_);
  uint64_t bytes = 0;
  for (const Held& held : held_) bytes += is_let_go(held) ? 0 : held.size;
  return bytes;
}

Code Runtime::memory_info(const Cuda& cuda, size_t* free_bytes, size_t* total) {
  const Locked lock(mutex_);
  settle(cuda);
  const Code code = cuda.memory_info(free_bytes, total);
  if (!has("free-frozen")) return code;
  if (frozen_free_ == 0) frozen_free_ = *free_bytes;
  *free_bytes = frozen_free_;
  return code;
}

Code Runtime::reserve(const Cuda& cuda, uint64_t* out, size_t size, size_t alignment, uint64_t hint) {
  const Locked lock(mutex_);
  if (alignment != 0 && has("refuse-align")) return kOutOfMemory;
  const bool elsewhere = hint != 0 && has("ignore-hint");
  const Code code =
      elsewhere ? reserve_elsewhere(cuda, out, size, alignment, hint) : cuda.reserve(out, size, alignment, hint, 0);
  if (code == kSuccess) reservations_[*out] = size;
  return code;
}

// Left alone, the kernel would often choose the addresses that have just become free.
Code Runtime::reserve_elsewhere(const Cuda& cuda, uint64_t* out, size_t size, size_t alignment, uint64_t not_there) {
  Code code = cuda.reserve(out, size, alignment, 0, 0);
  if (code != kSuccess || *out != not_there) return code;
  const uint64_t refused = *out;
  code = cuda.reserve(out, size, alignment, 0, 0);
  cuda.unreserve(refused, size);
  return code;
}

Code Runtime::unreserve(const Cuda& cuda, uint64_t address, size_t size) {
  const Locked lock(mutex_);
  const auto found = reservations_.find(address);
  if (found == reservations_.end()) crash("hipMemAddressFree", address);
  if (found->second != size || !mappings_in(address, size).empty() || stuck_.count(address) > 0) return kInvalidValue;
  const Code code = cuda.unreserve(address, size);
  if (code != kSuccess) return code;
  reservations_.erase(found);
  settle(cuda);
  if (to_steal_ > 0) take_over(address, size);
  return code;
}

void Runtime::take_over(uint64_t address, uint64_t size) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  if (mmap(pointer(address), size, PROT_NONE, kFlags, -1, 0) == MAP_FAILED) return;
  stolen_.push_back({address, size});
  --to_steal_;
}

Code Runtime::create(const Cuda& cuda, uint64_t* out, size_t size, const void* properties) {
  const Locked lock(mutex_);
  settle(cuda);
  const Code code = cuda.create(out, size, properties, 0);
  if (code == kSuccess) pieces_[*out] = {size, 0};
  return code;
}

Code Runtime::release(const Cuda& cuda, uint64_t handle) {
  const Locked lock(mutex_);
  const auto found = pieces_.find(handle);
  if (found == pieces_.end()) crash("hipMemRelease", handle);
  const bool held = hold(found->second, handle);
  const Code code = held ? kSuccess : cuda.release(handle);
  if (code == kSuccess) pieces_.erase(found);
  return code;
}

// Keeps the memory of a piece that was mapped, as the faulty releases do; false: it is to be released.
bool Runtime::hold(const Piece& piece, uint64_t handle) {
  const bool until_freed = has("hold-hard") || has("leak");
  if (piece.address == 0 || (!until_freed && !has("hold"))) return false;
  if (!until_freed) {
    if (marker_file_ < 0) marker_file_ = memfd_create(kMarker, MFD_CLOEXEC);
    if (ftruncate(marker_file_, static_cast<off_t>(piece.size)) != 0) return false;
    mmap(pointer(piece.address), piece.size, PROT_NONE, MAP_SHARED | MAP_FIXED, marker_file_, 0);
  }
  held_.push_back({piece.address, piece.size, handle, until_freed});
  return true;
}

bool Runtime::is_let_go(const Held& held) const {
  if (has("leak")) return false;
  if (reservation_of(held.address).size == 0) return true;
  return !held.until_freed && !marker_covers(held.address, held.size);
}

void Runtime::settle(const Cuda& cuda) {
  const auto first_gone =
      std::stable_partition(held_.begin(), held_.end(), [&](const Held& held) { return !is_let_go(held); });
  std::for_each(first_gone, held_.end(), [&](const Held& held) { cuda.release(held.handle); });
  held_.erase(first_gone, held_.end());
}

Code Runtime::map(const Cuda& cuda, uint64_t address, size_t size, uint64_t handle) {
  const Locked lock(mutex_);
  const auto found = pieces_.find(handle);
  if (found == pieces_.end()) crash("hipMemMap", handle);
  const Code code = cuda.map(address, size, 0, handle, 0);
  if (code != kSuccess) return code;
  mappings_[address] = {size, handle};
  found->second.address = address;
  finished_ = false;
  settle(cuda);
  return code;
}

Code Runtime::unmap(const Cuda& cuda, uint64_t address, size_t size) {
  const Locked lock(mutex_);
  const std::vector<uint64_t> starts = mappings_in(address, size);
  if (starts.empty()) crash("hipMemUnmap", address);
  const Code code = cuda.unmap(address, size);
  if (code != kSuccess) return code;
  if (starts.size() > 1 && has("unmap-several")) stuck_.insert(reservation_of(address).address);
  for (const uint64_t start : starts) mappings_.erase(start);
  return code;
}

Code Runtime::access(const Cuda& cuda, uint64_t address, size_t size, const void* descriptions, size_t count) {
  const Locked lock(mutex_);
  const Range range = reservation_of(address);
  const bool is_part = mappings_in(address, size).size() != mappings_in(range.address, range.size).size();
  if (is_part && has("access-parts")) return kInvalidValue;
  if (!finished_ && has("access-early")) return kInvalidValue;
  return cuda.access(address, size, descriptions, count);
}

void Runtime::synchronized() {
  const Locked lock(mutex_);
  finished_ = true;
}

Runtime::Range Runtime::reservation_of(uint64_t address) const {
  auto next = reservations_.upper_bound(address);
  if (next == reservations_.begin()) return {};
  const auto& [start, size] = *--next;
  return address < start + size ? Range{start, size} : Range{};
}

std::vector<uint64_t> Runtime::mappings_in(uint64_t address, uint64_t size) const {
  std::vector<uint64_t> starts;
  for (auto next = mappings_.lower_bound(address); next != mappings_.end() && next->first < address + size; ++next) {
    starts.push_back(next->first);
  }
  return starts;
}

}  // namespace emuhip

extern "C" {

void emuhip_reset(void) {
  emuhip::Runtime::instance().reset();
}

void emuhip_set_quirks(const char* names) {
  emuhip::Runtime::instance().set_quirks(names);
}

void emuhip_set_version(int32_t version) {
  emuhip::Runtime::instance().set_version(version);
}

void emuhip_steal(int32_t count) {
  emuhip::Runtime::instance().steal(count);
}

void emuhip_return_stolen(void) {
  emuhip::Runtime::instance().return_stolen();
}

uint64_t emuhip_held_bytes(void) {
  return emuhip::Runtime::instance().held_bytes();
}

}  // extern "C"
