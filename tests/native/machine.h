// What the tests share: an opened device with pools, patterned segments, and the orders to move them.
#pragma once

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "c_api.h"
#include "check.h"

constexpr uint64_t KiB = 1u << 10, MiB = 1u << 20;

inline std::ostream& operator<<(std::ostream& out, const hal_status& s) {
  return out << s.call << ": kind " << s.kind << " code " << s.code << " " << s.text << " size " << s.size;
}

// What the last call of this thread reported.
inline thread_local hal_status status{};

#define OK(expression)                                 \
  do {                                                 \
    if ((expression) != HAL_OK) {                      \
      std::ostringstream ok_text;                      \
      ok_text << #expression << " failed: " << status; \
      check::fail(__FILE__, __LINE__, ok_text.str());  \
    }                                                  \
  } while (false)

// Where file arenas of the tests go: a disk, not a tmpfs.
inline std::string scratch_directory() {
  const char* given = std::getenv("HAL_TEST_DIRECTORY");
  return given != nullptr ? given : ".";
}

class Machine {
 public:
  explicit Machine(const std::string& options = "", const char* driver = "cpu") {
    OK(hal_device_open(driver, 0, options.c_str(), &device, &status));
    pool = make_pool("weights");
  }
  ~Machine() {
    hal_fault_clear(device);
    for (const hal_segment& segment : segments()) hal_free(device, segment.address, nullptr);
    for (hal_arena* arena : arenas) hal_arena_destroy(arena, nullptr);
    hal_device_close(device, nullptr);
  }
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  uint64_t make_pool(const char* tag) {
    uint64_t made = 0;
    OK(hal_pool_create(device, tag, &made, nullptr, nullptr, &status));
    return made;
  }

  hal_arena* make_arena(int32_t backing, uint64_t budget = 0, bool verify = false, bool require_pinned = false,
                        const char* codec = nullptr) {
    const std::string directory = scratch_directory();
    const hal_arena_options options{backing,           verify, require_pinned, 0,      budget,
                                    directory.c_str(), codec,  nullptr,        nullptr};
    hal_arena* made = nullptr;
    OK(hal_arena_create(device, &options, &made, &status));
    arenas.push_back(made);
    return made;
  }

  uint64_t allocate(uint64_t size, uint64_t from = 0) {
    uint64_t address = 0;
    OK(hal_pool_allocate(device, from == 0 ? pool : from, size, &address, &status));
    return address;
  }

  hal_counters counters() const {
    hal_counters c;
    hal_device_counters(device, &c);
    return c;
  }

  std::vector<hal_segment> segments() const {
    std::vector<hal_segment> all(hal_segments(device, 0, nullptr, 0));
    all.resize(std::min(all.size(), hal_segments(device, 0, all.data(), all.size())));
    return all;
  }

  hal_device* device = nullptr;
  uint64_t pool = 0;
  std::vector<hal_arena*> arenas;
};

inline hal_arena_stats stats_of(hal_arena* arena) {
  hal_arena_stats stats;
  hal_arena_stats_of(arena, &stats);
  return stats;
}

inline hal_segment_order order(uint64_t address, int32_t action, uint32_t first_range = 0, uint32_t range_count = 0) {
  hal_segment_order made{};
  made.address = address;
  made.action = action;
  made.first_range = first_range;
  made.range_count = range_count;
  return made;
}

// A sanitizer would only slow these loops down.
#define HAL_PLAIN_LOOP __attribute__((no_sanitize("address", "thread", "undefined")))

// Bytes that depend on the place and on `seed`, so that any swap, shift or loss shows.
HAL_PLAIN_LOOP inline uint64_t pattern_word(uint64_t index, uint64_t seed) {
  uint64_t x = (index + 1) * 0x9E3779B97F4A7C15u ^ (seed * 0xD1B54A32D192ED03u);
  x ^= x >> 29;
  return x * 0xBF58476D1CE4E5B9u;
}

HAL_PLAIN_LOOP inline void write_pattern(uint64_t address, uint64_t size, uint64_t seed) {
  auto* words = reinterpret_cast<uint64_t*>(address);
  for (uint64_t i = 0; i < size / 8; ++i) words[i] = pattern_word(i, seed);
}

HAL_PLAIN_LOOP inline bool has_pattern(uint64_t address, uint64_t size, uint64_t seed, uint64_t first = 0) {
  const auto* words = reinterpret_cast<const uint64_t*>(address);
  for (uint64_t i = first / 8; i < (first + size) / 8; ++i) {
    if (words[i] != pattern_word(i, seed)) return false;
  }
  return true;
}

HAL_PLAIN_LOOP inline bool all_bytes(uint64_t address, uint64_t size, int value) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(address);
  for (uint64_t i = 0; i < size; ++i) {
    if (bytes[i] != value) return false;
  }
  return true;
}

// What has to be the same after a failure as before it.
inline bool same_books(const hal_counters& a, const hal_counters& b) {
  return a.segments == b.segments && a.mapped_bytes == b.mapped_bytes && a.asleep_bytes == b.asleep_bytes &&
         a.handles == b.handles && a.mappings == b.mappings && a.reservations == b.reservations &&
         a.reserved_bytes == b.reserved_bytes && a.pools == b.pools;
}
