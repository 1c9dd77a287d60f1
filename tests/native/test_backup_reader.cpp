// Reading a backup where it lies, and the margin that allocations leave free.
#include "machine.h"

namespace {

int32_t offload(Machine& m, hal_arena* arena, uint64_t address, const std::vector<hal_range>& live) {
  hal_segment_order o = order(address, HAL_OFFLOAD, 0, static_cast<uint32_t>(live.size()));
  return hal_sleep(m.device, arena, &o, 1, live.data(), live.size(), nullptr, &status);
}

int32_t wake_one(Machine& m, uint64_t address, int32_t retain) {
  hal_segment_order o = order(address, HAL_OFFLOAD);
  o.retain = retain;
  return hal_wake(m.device, nullptr, &o, 1, -1, nullptr, &status);
}

// Reads a range of a patterned segment's backup, and whether it is that part of the pattern.
bool reads_pattern(Machine& m, uint64_t address, uint64_t offset, uint64_t size, uint64_t seed) {
  std::vector<char> expected(offset + size + 8), read(size);
  write_pattern(reinterpret_cast<uint64_t>(expected.data()), (offset + size + 7) / 8 * 8, seed);
  OK(hal_backup_read(m.device, address, offset, size, read.data(), &status));
  return std::memcmp(read.data(), expected.data() + offset, size) == 0;
}

int32_t read_kind(Machine& m, uint64_t address, uint64_t offset, uint64_t size) {
  std::vector<char> read(size);
  return hal_backup_read(m.device, address, offset, size, read.data(), &status);
}

}  // namespace

TEST(any_part_of_a_backup_is_read_and_stays) {
  for (int32_t backing : {HAL_ANONYMOUS, HAL_FILE}) {
    Machine m;
    hal_arena* arena = m.make_arena(backing);
    const uint64_t size = 9 * MiB, address = m.allocate(size);
    write_pattern(address, size, 1);
    OK(offload(m, arena, address, {}));
    CHECK(reads_pattern(m, address, 0, size, 1));
    CHECK(reads_pattern(m, address, 4 * MiB - 1, 3, 1));  // over the border of two pieces
    CHECK(reads_pattern(m, address, size - 5, 5, 1));
    CHECK(reads_pattern(m, address, 12345, 5 * MiB, 1));
    OK(hal_backup_read(m.device, address, 0, 0, nullptr, &status));
    OK(wake_one(m, address, 0));
    CHECK(has_pattern(address, size, 1));
  }
}

TEST(what_no_backup_has_is_a_bad_state) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_ANONYMOUS);
  const uint64_t size = 4 * MiB, address = m.allocate(size);
  write_pattern(address, size, 2);
  CHECK_EQ(read_kind(m, address, 0, 16), HAL_BAD_STATE);  // awake
  OK(offload(m, arena, address, {{0, MiB}, {2 * MiB, MiB}}));
  CHECK(reads_pattern(m, address, 2 * MiB, MiB, 2));
  CHECK_EQ(read_kind(m, address, MiB - 8, 16), HAL_BAD_STATE);  // ends in a gap
  CHECK_EQ(read_kind(m, address, MiB, 16), HAL_BAD_STATE);      // begins in a gap
  CHECK_EQ(read_kind(m, address, 0, 3 * MiB), HAL_BAD_STATE);   // goes over a gap
  CHECK_EQ(read_kind(m, address, size - 8, 16), HAL_BAD_STATE);
  CHECK_EQ(read_kind(m, address, UINT64_MAX - 7, 16), HAL_BAD_STATE);
  CHECK_EQ(read_kind(m, address + 4096, 0, 16), HAL_INVALID);
  CHECK_EQ(hal_backup_read(m.device, address, 0, 16, nullptr, &status), HAL_INVALID);
  hal_segment_order drop = order(address, HAL_DROP_BACKUP);
  OK(hal_sleep(m.device, arena, &drop, 1, nullptr, 0, nullptr, &status));
  CHECK_EQ(read_kind(m, address, 0, 16), HAL_BAD_STATE);  // discarded
}

TEST(a_retained_backup_is_what_the_last_sleep_wrote) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_ANONYMOUS);
  const uint64_t size = 2 * MiB, address = m.allocate(size);
  write_pattern(address, size, 3);
  OK(offload(m, arena, address, {}));
  OK(wake_one(m, address, 1));
  write_pattern(address, size, 4);
  CHECK(reads_pattern(m, address, 0, size, 3));
  CHECK_EQ(hal_arena_trim(arena), size);
  CHECK_EQ(read_kind(m, address, 0, 16), HAL_BAD_STATE);
}

TEST(r27_a_corrupted_backup_is_not_read) {
  for (int32_t backing : {HAL_ANONYMOUS, HAL_FILE}) {
    Machine m;
    hal_arena* arena = m.make_arena(backing, 0, true);
    const uint64_t size = 6 * MiB, address = m.allocate(size);
    write_pattern(address, size, 5);
    OK(offload(m, arena, address, {}));
    OK(hal_backup_flip_bit(m.device, address, 8 * (5 * MiB), &status));
    CHECK_EQ(read_kind(m, address, 4 * MiB, 16), HAL_CORRUPT_BACKUP);
    CHECK(reads_pattern(m, address, 0, 4 * MiB, 5));  // another piece
    OK(hal_backup_flip_bit(m.device, address, 8 * (5 * MiB), &status));
    CHECK(reads_pattern(m, address, 0, size, 5));
    OK(wake_one(m, address, 0));
  }
}

TEST(a_disk_that_fails_is_an_error_and_the_backup_stays) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_FILE);
  const uint64_t size = MiB, address = m.allocate(size);
  write_pattern(address, size, 6);
  OK(offload(m, arena, address, {}));
  OK(hal_fault_set(m.device, "file read", 1, EIO, 1, &status));
  CHECK_EQ(read_kind(m, address, 0, 16), HAL_DRIVER_ERROR);
  CHECK(reads_pattern(m, address, 0, size, 6));
  OK(wake_one(m, address, 0));
  CHECK(has_pattern(address, size, 6));
}

TEST(allocations_leave_the_margin_free_and_wakes_need_not) {
  Machine m("capacity=" + std::to_string(16 * MiB));
  const uint64_t first = m.allocate(4 * MiB);
  OK(hal_device_set_margin(m.device, 8 * MiB, &status));
  const hal_counters before = m.counters();
  uint64_t address = 0;
  CHECK_EQ(hal_pool_allocate(m.device, m.pool, 4 * MiB + 1, &address, &status), HAL_OUT_OF_DEVICE_MEMORY);
  CHECK_EQ(status.available, 12 * MiB);
  CHECK(same_books(before, m.counters()));
  m.allocate(4 * MiB);  // leaves just the margin
  OK(offload(m, m.make_arena(HAL_ANONYMOUS), first, {}));
  OK(hal_device_set_margin(m.device, 12 * MiB, &status));
  OK(wake_one(m, first, 0));
  OK(hal_device_set_margin(m.device, UINT64_MAX, &status));
  CHECK_EQ(hal_pool_allocate(m.device, m.pool, 1, &address, &status), HAL_OUT_OF_DEVICE_MEMORY);
  OK(hal_device_set_margin(m.device, 0, &status));
  m.allocate(8 * MiB);
}

TEST(a_margin_needs_a_figure_of_free_memory) {
  Machine m;
  OK(hal_device_set_margin(m.device, 1, &status));
  OK(hal_fault_set(m.device, "memory_info", 1, EIO, 1, &status));
  uint64_t address = 0;
  CHECK_EQ(hal_pool_allocate(m.device, m.pool, MiB, &address, &status), HAL_DRIVER_ERROR);
  m.allocate(MiB);
}

TEST_MAIN()
