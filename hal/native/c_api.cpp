// The C ABI: checks handles, turns exceptions into statuses, and delegates. No policy of its own.
#include "c_api.h"

#include <algorithm>
#include <cstring>

#include "backup_reader.h"
#include "crc32c.h"
#include "device.h"
#include "entries.h"
#include "fingerprint.h"
#include "host_memory.h"
#include "transfer.h"

using hal::Status;

namespace {

template <typename Body>
int32_t answer(const char* call, hal_status* status, Body&& body) {
  return hal::guarded(call, body).write_to(status);
}

Status check_device(const char* call, const hal_device* device) {
  if (device == nullptr) return Status::invalid(call, "the device is null");
  if (!device->usable()) {
    return Status::bad_state(call, "this process was forked from the one that opened the device; open its own");
  }
  return {};
}

// Answers with `body` once `device` is known to be one that this process may use.
template <typename Body>
int32_t on_device(const char* call, hal_device* device, hal_status* status, Body&& body) {
  return answer(call, status, [&]() -> Status {
    HAL_TRY(check_device(call, device));
    return body();
  });
}

template <typename Body>
int32_t on_arena(const char* call, hal_arena* arena, hal_status* status, Body&& body) {
  return answer(call, status, [&]() -> Status {
    if (arena == nullptr) return Status::invalid(call, "the arena is null");
    HAL_TRY(check_device(call, arena->device));
    return body();
  });
}

// Retained backups of awake segments are there for speed alone, so they go first.
uint64_t trim(hal_arena& arena) {
  arena.device->ledger.take_retained(arena.arena.get());  // dropped here
  return arena.arena->trim();
}

Status close_device(hal_device* device) {
  device->ledger.collect();
  if (!device->ledger.empty()) return Status::bad_state("close", "segments are still there; free them first");
  if (device->arenas > 0) return Status::bad_state("close", "arenas are still there; destroy them first");
  device->ledger.close_pools();
  delete device;
  return {};
}

Status flip_in_file(hal::FileStorage& file, uint64_t position, uint64_t byte, uint8_t mask) {
  const uint64_t block = hal::backup_alignment();
  const uint64_t start = (position + byte) / block * block;
  void* raw = nullptr;
  if (posix_memalign(&raw, block, block) != 0) throw std::bad_alloc();
  const std::unique_ptr<void, void (*)(void*)> buffer(raw, std::free);
  HAL_TRY(file.read(raw, block, start));
  static_cast<uint8_t*>(raw)[position + byte - start] ^= mask;
  HAL_TRY(file.write(raw, block, start));
  return file.flush();
}

Status flip_bit(hal::Segment& segment, uint64_t bit) {
  uint64_t byte = bit / 8;
  const auto mask = static_cast<uint8_t>(1u << (bit % 8));
  for (const hal::Piece& piece : segment.backup.pieces()) {
    if (byte >= piece.stored) {
      byte -= piece.stored;
      continue;
    }
    hal::Arena& arena = *segment.backup.arena();
    if (arena.file() != nullptr) return flip_in_file(*arena.file(), piece.position, byte, mask);
    static_cast<uint8_t*>(hal::Arena::host(piece.position))[byte] ^= mask;
    return {};
  }
  return Status::invalid("flip bit", "the backup has no such bit");
}

}  // namespace

/* ---- drivers ------------------------------------------------------------------------------------------------- */

uint32_t hal_api_version(void) {
  return HAL_API_VERSION;
}

int32_t hal_register_driver(const hal_driver* driver, hal_status* status) {
  return answer("register driver", status, [&] { return hal::register_driver(driver); });
}

int32_t hal_load_driver(const char* path, hal_status* status) {
  return answer("load driver", status, [&] { return hal::load_driver(path); });
}

size_t hal_driver_names(char* out, size_t size) {
  const std::string names = hal::driver_names();
  if (out != nullptr && size > 0) {
    const size_t length = std::min(size - 1, names.size());
    std::memcpy(out, names.data(), length);
    out[length] = '\0';
  }
  return names.size() + 1;
}

/* ---- devices ------------------------------------------------------------------------------------------------- */

int32_t hal_device_open(const char* driver, int32_t device, const char* options, hal_device** out, hal_status* status) {
  return answer("open", status, [&]() -> Status {
    if (driver == nullptr || out == nullptr) return Status::invalid("open", "a driver's name and a result are needed");
    const hal_driver* found = hal::find_driver(driver);
    if (found == nullptr) {
      return Status::error(HAL_UNSUPPORTED, "open", 0,
                           std::string("there is no driver '") + driver + "'; there are: " + hal::driver_names());
    }
    auto made = std::make_unique<hal_device>();
    HAL_TRY(hal::Primitives::open(found, device, options, &made->primitives));
    *out = made.release();
    return {};
  });
}

int32_t hal_device_close(hal_device* device, hal_status* status) {
  return on_device("close", device, status, [&] { return close_device(device); });
}

int32_t hal_device_facts(hal_device* device, hal_facts* out, hal_status* status) {
  return on_device("facts", device, status, [&] {
    *out = device->primitives.facts();
    return Status();
  });
}

int32_t hal_device_memory(hal_device* device, uint64_t* free_bytes, uint64_t* total_bytes, hal_status* status) {
  return on_device("memory_info", device, status,
                   [&] { return device->primitives.memory_info(free_bytes, total_bytes); });
}

int32_t hal_device_set_margin(hal_device* device, uint64_t bytes, hal_status* status) {
  return on_device("set margin", device, status, [&]() -> Status {
    device->ledger.set_margin(bytes);
    return {};
  });
}

void hal_device_counters(hal_device* device, hal_counters* out) {
  *out = hal_counters{};
  if (device != nullptr && device->usable()) device->ledger.count(out);
}

int32_t hal_granularity(hal_device* device, uint64_t size, uint64_t* bytes, hal_status* status) {
  return on_device("granularity", device, status, [&] { return device->primitives.granularity(size, bytes); });
}

int32_t hal_reserve(hal_device* device, uint64_t size, uint64_t alignment, uint64_t hint, uint64_t* address,
                    hal_status* status) {
  return on_device("reserve", device, status,
                   [&] { return device->primitives.reserve(size, alignment, hint, address); });
}

int32_t hal_unreserve(hal_device* device, uint64_t address, uint64_t size, hal_status* status) {
  return on_device("unreserve", device, status, [&] { return device->primitives.unreserve(address, size); });
}

int32_t hal_create(hal_device* device, uint64_t size, uint64_t* handle, hal_status* status) {
  return on_device("create", device, status, [&] {
    Status made = device->primitives.create(size, handle);
    device->primitives.describe_shortage(&made, size);
    return made;
  });
}

int32_t hal_release(hal_device* device, uint64_t handle, uint64_t size, hal_status* status) {
  return on_device("release", device, status, [&] { return device->primitives.release(handle, size); });
}

int32_t hal_map(hal_device* device, uint64_t address, uint64_t size, uint64_t handle, hal_status* status) {
  return on_device("map", device, status, [&] { return device->primitives.map(address, size, handle); });
}

int32_t hal_access(hal_device* device, uint64_t address, uint64_t size, hal_status* status) {
  return on_device("access", device, status, [&] { return device->primitives.access(address, size); });
}

int32_t hal_unmap(hal_device* device, uint64_t address, uint64_t size, hal_status* status) {
  return on_device("unmap", device, status, [&] { return device->primitives.unmap(address, size); });
}

int32_t hal_copy_to_host(hal_device* device, void* host, uint64_t address, uint64_t size, uint32_t stream,
                         hal_status* status) {
  return on_device("copy_to_host", device, status,
                   [&] { return device->primitives.copy_to_host(host, address, size, stream); });
}

int32_t hal_copy_to_device(hal_device* device, uint64_t address, const void* host, uint64_t size, uint32_t stream,
                           hal_status* status) {
  return on_device("copy_to_device", device, status,
                   [&] { return device->primitives.copy_to_device(address, host, size, stream); });
}

int32_t hal_fill(hal_device* device, uint64_t address, uint8_t value, uint64_t size, uint32_t stream,
                 hal_status* status) {
  return on_device("fill", device, status, [&] { return device->primitives.fill(address, value, size, stream); });
}

int32_t hal_synchronize(hal_device* device, uint32_t stream, hal_status* status) {
  return on_device("synchronize", device, status, [&] { return device->primitives.synchronize(stream); });
}

int32_t hal_host_register(hal_device* device, void* host, uint64_t size, hal_status* status) {
  return on_device("host_register", device, status, [&] { return device->primitives.host_register(host, size); });
}

int32_t hal_host_unregister(hal_device* device, void* host, uint64_t size, hal_status* status) {
  return on_device("host_unregister", device, status, [&] { return device->primitives.host_unregister(host, size); });
}

/* ---- pools and segments -------------------------------------------------------------------------------------- */

int32_t hal_pool_create(hal_device* device, const char* tag, uint64_t* pool, void** alloc_entry, void** free_entry,
                        hal_status* status) {
  return on_device("pool create", device, status, [&]() -> Status {
    if (tag == nullptr || *tag == '\0') return Status::invalid("pool create", "a pool needs a tag");
    int slot = -1;
    HAL_TRY(device->ledger.create_pool(tag, pool, &slot));
    if (alloc_entry != nullptr) *alloc_entry = hal::alloc_entry(slot);
    if (free_entry != nullptr) *free_entry = hal::free_entry(slot);
    return {};
  });
}

int32_t hal_pool_destroy(hal_device* device, uint64_t pool, hal_status* status) {
  return on_device("pool destroy", device, status, [&] { return device->ledger.destroy_pool(pool); });
}

int32_t hal_pool_allocate(hal_device* device, uint64_t pool, uint64_t size, uint64_t* address, hal_status* status) {
  return on_device("allocate", device, status, [&] { return device->ledger.allocate(pool, size, address); });
}

int32_t hal_free(hal_device* device, uint64_t address, hal_status* status) {
  return on_device("free", device, status, [&] { return device->ledger.free(address, nullptr); });
}

int32_t hal_pool_take_error(hal_device* device, uint64_t pool, hal_status* status) {
  return on_device("pool error", device, status, [&] { return device->ledger.take_error(pool); });
}

size_t hal_segments(hal_device* device, uint64_t pool, hal_segment* out, size_t capacity) {
  return device == nullptr || !device->usable() ? 0 : device->ledger.list(pool, out, capacity);
}

/* ---- host memory --------------------------------------------------------------------------------------------- */

int32_t hal_host_memory(hal_host_info* out, hal_status* status) {
  return answer("host memory", status, [&] { return hal::read_host_memory(out); });
}

int32_t hal_arena_create(hal_device* device, const hal_arena_options* options, hal_arena** out, hal_status* status) {
  return on_device("arena create", device, status, [&]() -> Status {
    if (options == nullptr || out == nullptr) return Status::invalid("arena create", "options and a result are needed");
    std::unique_ptr<hal::Arena> arena;
    HAL_TRY(hal::Arena::create(device->primitives, *options, &arena));
    *out = new hal_arena{device, std::move(arena)};
    ++device->arenas;
    return {};
  });
}

int32_t hal_arena_destroy(hal_arena* arena, hal_status* status) {
  return on_arena("arena destroy", arena, status, [&]() -> Status {
    std::lock_guard<std::mutex> lock(arena->device->transition);
    trim(*arena);
    hal_arena_stats stats;
    arena->arena->stats(&stats);
    if (stats.used_bytes > 0) {
      return Status::bad_state("arena destroy", "it holds backups of sleeping segments; wake or free them first");
    }
    --arena->device->arenas;
    delete arena;
    return {};
  });
}

void hal_arena_stats_of(hal_arena* arena, hal_arena_stats* out) {
  *out = hal_arena_stats{};
  if (arena != nullptr && arena->device->usable()) arena->arena->stats(out);
}

int32_t hal_arena_prepare(hal_arena* arena, uint64_t bytes, hal_status* status) {
  return on_arena("arena prepare", arena, status, [&]() -> Status {
    std::unique_ptr<hal::Growth> growth;
    HAL_TRY(arena->arena->reserve(bytes, true, &growth));
    HAL_TRY(growth->wait());
    growth->keep();
    return {};
  });
}

uint64_t hal_arena_trim(hal_arena* arena) {
  return arena == nullptr || !arena->device->usable() ? 0 : trim(*arena);
}

int32_t hal_arena_check(hal_arena* arena, uint64_t bytes, hal_status* status) {
  return on_arena("arena check", arena, status, [&] { return arena->arena->check(bytes); });
}

int32_t hal_backup_read(hal_device* device, uint64_t address, uint64_t offset, uint64_t size, void* out,
                        hal_status* status) {
  return on_device("backup read", device, status, [&]() -> Status {
    if (out == nullptr && size > 0) return Status::invalid("backup read", "a buffer for the bytes is needed");
    std::lock_guard<std::mutex> lock(device->transition);
    hal::Segment* segment = device->ledger.acquire(address, 0);
    if (segment == nullptr) return Status::invalid("backup read", "no segment begins at this address");
    Status read = hal::guarded("backup read", [&] { return hal::read_backup(*segment, {offset, size}, out); });
    device->ledger.release({{segment, segment->state}});
    return read;
  });
}

/* ---- transitions --------------------------------------------------------------------------------------------- */

int32_t hal_sleep(hal_device* device, hal_arena* arena, hal_segment_order* orders, size_t order_count,
                  const hal_range* ranges, size_t range_count, hal_transfer_report* report, hal_status* status) {
  return on_device("sleep", device, status, [&]() -> Status {
    if (arena != nullptr && arena->device != device) {
      return Status::invalid("sleep", "the arena belongs to another device");
    }
    hal_transfer_report unused;
    const hal::SleepRequest request{arena == nullptr ? nullptr : arena->arena.get(), orders, order_count, ranges,
                                    range_count};
    return hal::sleep(*device, request, report == nullptr ? &unused : report);
  });
}

int32_t hal_wake(hal_device* device, hal_arena* arena, hal_segment_order* orders, size_t order_count, int32_t fill,
                 hal_transfer_report* report, hal_status* status) {
  return on_device("wake", device, status, [&]() -> Status {
    if (arena != nullptr && arena->device != device) {
      return Status::invalid("wake", "the arena belongs to another device");
    }
    if (fill < -1 || fill > 255) return Status::invalid("wake", "fill is a byte or -1");
    hal_transfer_report unused;
    const hal::WakeRequest request{orders, order_count, fill};
    return hal::wake(*device, request, report == nullptr ? &unused : report);
  });
}

void hal_fingerprint(const hal_range* blocks, size_t count, const uint64_t* keys, uint64_t* digests) {
  hal::parallel_for(2 * count, hal::processors(16), [&](size_t i) {
    const hal_range& block = blocks[i / 2];
    const hal::FingerprintKey key{keys[i % 2], keys[2 + i % 2]};
    digests[i] = hal::fingerprint(reinterpret_cast<const uint32_t*>(block.offset), block.size / 4, key);
  });
}

/* ---- fault points, for tests --------------------------------------------------------------------------------- */

int32_t hal_fault_set(hal_device* device, const char* call, uint64_t nth, int32_t code, int64_t times,
                      hal_status* status) {
  return on_device("fault_set", device, status,
                   [&] { return device->primitives.faults().set(call, nth, code, times); });
}

void hal_fault_clear(hal_device* device) {
  if (device != nullptr && device->usable()) device->primitives.faults().clear();
}

uint64_t hal_fault_hits(hal_device* device, const char* call) {
  return device == nullptr || !device->usable() ? 0 : device->primitives.faults().hits(call);
}

int32_t hal_backup_flip_bit(hal_device* device, uint64_t address, uint64_t bit, hal_status* status) {
  return on_device("flip bit", device, status, [&]() -> Status {
    hal::Segment* segment = device->ledger.acquire(address, 0);
    if (segment == nullptr) return Status::invalid("flip bit", "no segment at this address, or it is in a transition");
    Status flipped = hal::guarded("flip bit", [&] { return flip_bit(*segment, bit); });
    device->ledger.release({{segment, segment->state}});
    return flipped;
  });
}
