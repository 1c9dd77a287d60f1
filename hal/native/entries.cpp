// A table of slots, trivially destructible because torch may still free while the process exits. The callbacks never
// touch Python and never throw; what they cannot return their pool keeps. The mutex is a leaf.
#include "entries.h"

#include <pthread.h>
#include <sys/types.h>

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "device.h"

namespace hal {
namespace {

struct Slot {
  std::atomic<hal_device*> device{nullptr};  // null: free
  std::atomic<uint64_t> pool{0};
};

std::array<Slot, HAL_POOL_SLOTS> slots;
std::mutex slots_mutex;
size_t next_slot = 0;  // goes round, so that a pair that was given back rests as long as possible
std::atomic<uint64_t> pools{0};

Status allocate(hal_device* device, uint64_t pool, ssize_t size, int ordinal, void* stream, hal_address* address) {
  if (ordinal != device->primitives.device()) {
    return Status::invalid("allocate", "this pool is on device " + std::to_string(device->primitives.device()) +
                                           ", and memory was asked for on device " + std::to_string(ordinal));
  }
  if (size < 0) return Status::invalid("allocate", "the size is negative");
  return device->ledger.allocate(pool, static_cast<uint64_t>(size), address, stream);
}

void* alloc_in(size_t slot, ssize_t size, int ordinal, void* stream) {
  hal_device* device = slots[slot].device;
  if (device == nullptr || !device->usable()) return nullptr;
  const uint64_t pool = slots[slot].pool;
  hal_address address = 0;
  Status status = guarded("allocate", [&] { return allocate(device, pool, size, ordinal, stream, &address); });
  if (status.ok()) return reinterpret_cast<void*>(address);
  device->ledger.keep_error(pool, std::move(status));
  return nullptr;
}

void free_in(size_t slot, void* address, void* stream) {
  hal_device* device = slots[slot].device;
  if (address == nullptr || device == nullptr || !device->usable()) return;
  const uint64_t pool = slots[slot].pool;
  Status status = guarded("free", [&] { return device->ledger.free(reinterpret_cast<hal_address>(address), stream); });
  if (!status.ok()) device->ledger.keep_error(pool, std::move(status));
}

template <size_t Index>
void* alloc_trampoline(ssize_t size, int ordinal, void* stream) {
  return alloc_in(Index, size, ordinal, stream);
}

template <size_t Index>
void free_trampoline(void* address, ssize_t, int, void* stream) {
  free_in(Index, address, stream);
}

using Alloc = void* (*)(ssize_t, int, void*);
using Free = void (*)(void*, ssize_t, int, void*);

template <size_t... Index>
constexpr std::array<std::pair<Alloc, Free>, sizeof...(Index)> make_entries(std::index_sequence<Index...>) {
  return {{{&alloc_trampoline<Index>, &free_trampoline<Index>}...}};
}

constexpr auto kEntries = make_entries(std::make_index_sequence<HAL_POOL_SLOTS>());

}  // namespace

uint64_t next_pool() {
  return ++pools;
}

int claim_slot(hal_device* device, uint64_t pool) {
  // A child must find the mutex open, whichever thread of the parent held it.
  static const int atfork =
      pthread_atfork([] { slots_mutex.lock(); }, [] { slots_mutex.unlock(); }, [] { slots_mutex.unlock(); });
  static_cast<void>(atfork);
  std::lock_guard<std::mutex> lock(slots_mutex);
  for (size_t tried = 0; tried < slots.size(); ++tried) {
    const size_t index = (next_slot + tried) % slots.size();
    if (slots[index].device != nullptr) continue;
    next_slot = index + 1;
    slots[index].pool = pool;
    slots[index].device = device;
    return static_cast<int>(index);
  }
  return -1;
}

void release_slot(int slot) {
  std::lock_guard<std::mutex> lock(slots_mutex);
  slots[static_cast<size_t>(slot)].device = nullptr;
}

void* alloc_entry(int slot) {
  return reinterpret_cast<void*>(kEntries[static_cast<size_t>(slot)].first);
}
void* free_entry(int slot) {
  return reinterpret_cast<void*>(kEntries[static_cast<size_t>(slot)].second);
}

}  // namespace hal
