// Host memory for backups: exact sizes, budgets, files, corruption, pinning, staging.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>

#include "far_driver.h"

namespace {

int32_t sleep_one(Machine& m, hal_arena* arena, uint64_t address, hal_transfer_report* report) {
  hal_segment_order o = order(address, HAL_OFFLOAD);
  return hal_sleep(m.device, arena, &o, 1, nullptr, 0, report, &status);
}

int32_t wake_one(Machine& m, uint64_t address, hal_transfer_report* report) {
  hal_segment_order o = order(address, HAL_OFFLOAD);
  return hal_wake(m.device, nullptr, &o, 1, -1, report, &status);
}

uint64_t resident_bytes() {
  uint64_t pages = 0, resident = 0;
  std::ifstream("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

size_t descriptors() {
  size_t count = 0;
  for (int fd = 0; fd < 256; ++fd) count += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
  return count;
}

bool on_tmpfs_exists() {
  return access("/dev/shm", W_OK) == 0;
}

}  // namespace

TEST(r64_growth_is_exact_and_any_free_extent_is_used) {
  for (int32_t backing : {HAL_ANONYMOUS, HAL_FILE}) {
    Machine m;
    hal_arena* arena = m.make_arena(backing);
    const uint64_t a = m.allocate(5 * MiB), b = m.allocate(64 * KiB), c = m.allocate(5 * MiB);
    const uint64_t big = m.allocate(10 * MiB + 64 * KiB);
    write_pattern(b, 64 * KiB, 2);
    write_pattern(big, 10 * MiB + 64 * KiB, 4);
    hal_transfer_report report;
    for (uint64_t address : {a, b, c}) OK(sleep_one(m, arena, address, &report));
    CHECK_EQ(stats_of(arena).held_bytes, 10 * MiB + 64 * KiB);
    OK(wake_one(m, a, &report));
    OK(wake_one(m, c, &report));
    CHECK_EQ(stats_of(arena).used_bytes, 64 * KiB);
    OK(sleep_one(m, arena, big, &report));  // lies in both holes, and takes just what is missing beside
    CHECK_EQ(stats_of(arena).held_bytes, 10 * MiB + 128 * KiB);
    CHECK_EQ(stats_of(arena).used_bytes, 10 * MiB + 128 * KiB);
    OK(wake_one(m, big, &report));
    CHECK(has_pattern(big, 10 * MiB + 64 * KiB, 4));
    CHECK_EQ(hal_arena_trim(arena), 10 * MiB + 64 * KiB);  // around the backup that is left
    CHECK_EQ(stats_of(arena).held_bytes, 64 * KiB);
    OK(wake_one(m, b, &report));
    CHECK(has_pattern(b, 64 * KiB, 2));
  }
}

TEST(a_budget_too_small_refuses_before_anything_changes) {
  for (int32_t backing : {HAL_ANONYMOUS, HAL_FILE}) {
    Machine m;
    hal_arena* arena = m.make_arena(backing, 3 * MiB);
    const uint64_t address = m.allocate(4 * MiB);
    write_pattern(address, 4 * MiB, 1);
    const hal_counters before = m.counters();
    CHECK_EQ(hal_arena_check(arena, 4 * MiB, &status), HAL_HOST_MEMORY);
    OK(hal_arena_check(arena, 3 * MiB, &status));
    hal_transfer_report report;
    CHECK_EQ(sleep_one(m, arena, address, &report), HAL_HOST_MEMORY);
    CHECK_EQ(status.needed, 4 * MiB);
    CHECK_EQ(status.available, 3 * MiB);
    CHECK_EQ(status.limit, 3 * MiB);
    CHECK_EQ(m.counters().unmaps, before.unmaps);
    CHECK(has_pattern(address, 4 * MiB, 1));
    CHECK_EQ(stats_of(arena).held_bytes, 0u);
  }
}

TEST(more_than_the_host_has_is_refused) {
  Machine m;
  hal_host_info info;
  OK(hal_host_memory(&info, &status));
  CHECK(info.available > 0 && info.available <= info.total);
  hal_arena* arena = m.make_arena(HAL_ANONYMOUS);
  CHECK_EQ(hal_arena_check(arena, info.total + MiB, &status), HAL_HOST_MEMORY);
  CHECK(status.available < info.total + MiB);
  hal_arena* file = m.make_arena(HAL_FILE);
  CHECK_EQ(hal_arena_prepare(file, uint64_t{1} << 60, &status), HAL_HOST_MEMORY);
  CHECK_EQ(stats_of(file).held_bytes, 0u);
}

TEST(prepare_grows_now_and_sleep_only_uses_it) {
  for (int32_t backing : {HAL_ANONYMOUS, HAL_FILE}) {
    Machine m;
    hal_arena* arena = m.make_arena(backing);
    OK(hal_arena_prepare(arena, 8 * MiB, &status));
    OK(hal_arena_prepare(arena, 8 * MiB, &status));
    CHECK_EQ(stats_of(arena).held_bytes, 8 * MiB);
    const uint64_t address = m.allocate(8 * MiB);
    hal_transfer_report report;
    OK(sleep_one(m, arena, address, &report));
    CHECK_EQ(stats_of(arena).held_bytes, 8 * MiB);
    CHECK_EQ(hal_arena_destroy(arena, &status), HAL_BAD_STATE);
    OK(wake_one(m, address, &report));
  }
}

TEST(a_sleeping_process_gives_its_memory_back) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_FILE);
  const uint64_t address = m.allocate(128 * MiB);
  const uint64_t empty = resident_bytes();
  write_pattern(address, 128 * MiB, 1);
  CHECK(resident_bytes() > empty + 120 * MiB);
  hal_transfer_report report;
  OK(sleep_one(m, arena, address, &report));
  CHECK(resident_bytes() < empty + 16 * MiB);
  OK(wake_one(m, address, &report));
  CHECK(has_pattern(address, 128 * MiB, 1));
}

TEST(a_directory_that_cannot_hold_backups_is_refused) {
  Machine m;
  hal_arena* arena = nullptr;
  hal_arena_options options{HAL_FILE, 0, 0, 0, 0, "/nonexistent/directory", nullptr, nullptr, nullptr};
  CHECK_EQ(hal_arena_create(m.device, &options, &arena, &status), HAL_HOST_MEMORY);
  CHECK_EQ(status.code, ENOENT);
  CHECK(std::strstr(status.text, "/nonexistent/directory") != nullptr);
  options.directory = "/proc/self";
  CHECK_EQ(hal_arena_create(m.device, &options, &arena, &status), HAL_HOST_MEMORY);
  options.directory = nullptr;
  CHECK_EQ(hal_arena_create(m.device, &options, &arena, &status), HAL_INVALID);
  options.backing = 7;
  CHECK_EQ(hal_arena_create(m.device, &options, &arena, &status), HAL_INVALID);
  if (!on_tmpfs_exists()) return;
  options = {HAL_FILE, 0, 0, 0, 0, "/dev/shm", nullptr, nullptr, nullptr};
  CHECK_EQ(hal_arena_create(m.device, &options, &arena, &status), HAL_HOST_MEMORY);
  CHECK(std::strstr(status.text, "tmpfs") != nullptr);
}

TEST(one_flipped_bit_is_detected_and_nothing_is_restored) {
  struct {
    int32_t backing;
    const char* driver;
  } cases[] = {{HAL_ANONYMOUS, "cpu"}, {HAL_FILE, "cpu"}, {HAL_FILE, "far"}, {HAL_PINNED, "far"}};
  far::use();
  for (const auto& c : cases) {
    Machine m("", c.driver);
    hal_arena* arena = m.make_arena(c.backing, 0, true);
    const uint64_t a = m.allocate(9 * MiB), b = m.allocate(MiB);
    write_pattern(a, 9 * MiB, 1);
    write_pattern(b, MiB, 2);
    hal_segment_order orders[] = {order(b, HAL_OFFLOAD), order(a, HAL_OFFLOAD)};
    hal_transfer_report report;
    OK(hal_sleep(m.device, arena, orders, 2, nullptr, 0, &report, &status));
    const hal_counters asleep = m.counters();
    const uint64_t bit = (6 * MiB + 77) * 8 + 3;
    OK(hal_backup_flip_bit(m.device, a, bit, &status));
    CHECK_EQ(hal_wake(m.device, arena, orders, 2, -1, &report, &status), HAL_CORRUPT_BACKUP);
    CHECK_EQ(status.address, a);
    CHECK_EQ(report.rolled_back, 1);
    CHECK(same_books(asleep, m.counters()));
    CHECK_EQ(stats_of(arena).used_bytes, 10 * MiB);
    OK(hal_backup_flip_bit(m.device, a, bit, &status));
    OK(hal_wake(m.device, arena, orders, 2, -1, &report, &status));
    CHECK(has_pattern(a, 9 * MiB, 1));
    CHECK(has_pattern(b, MiB, 2));
    CHECK_EQ(hal_backup_flip_bit(m.device, a, bit, &status), HAL_INVALID);
  }
}

TEST(files_leave_nothing_behind_even_after_kill) {
  const std::string directory = scratch_directory() + "/hal-test-kill";
  CHECK(std::system(("rm -rf " + directory + " && mkdir " + directory).c_str()) == 0);
  const pid_t child = fork();
  if (child == 0) {
    setenv("HAL_TEST_DIRECTORY", directory.c_str(), 1);
    Machine m;
    hal_arena* arena = m.make_arena(HAL_FILE);
    hal_transfer_report report;
    const uint64_t address = m.allocate(MiB);
    if (sleep_one(m, arena, address, &report) != HAL_OK) _exit(1);
    kill(getpid(), SIGKILL);
  }
  int result = 0;
  CHECK_EQ(waitpid(child, &result, 0), child);
  CHECK(WIFSIGNALED(result) && WTERMSIG(result) == SIGKILL);
  CHECK(std::system(("rmdir " + directory).c_str()) == 0);  // which needs it empty
}

TEST(devices_and_arenas_give_their_descriptors_back) {
  const size_t before = descriptors();
  for (int i = 0; i < 3; ++i) {
    Machine m;
    m.make_arena(HAL_FILE);
    m.make_arena(HAL_ANONYMOUS);
  }
  CHECK_EQ(descriptors(), before);
}

TEST(pinned_memory_is_registered_in_chunks_reused_and_given_back) {
  far::use();
  Machine m("", "far");
  hal_arena* arena = m.make_arena(HAL_PINNED, 0, false, true);
  const uint64_t address = m.allocate(6 * MiB);
  write_pattern(address, 6 * MiB, 1);
  hal_transfer_report report;
  for (int cycle = 0; cycle < 2; ++cycle) {
    OK(sleep_one(m, arena, address, &report));
    CHECK_EQ(stats_of(arena).pinned_bytes, 6 * MiB);
    CHECK_EQ(stats_of(arena).fell_back, 0);
    CHECK_EQ(far::registrations(), 3u);
    OK(wake_one(m, address, &report));
    CHECK(has_pattern(address, 6 * MiB, 1));
  }
  CHECK(far::largest_registration_mib <= 1024);
  CHECK_EQ(hal_arena_trim(arena), 6 * MiB);
  CHECK_EQ(far::registrations(), 0u);
  CHECK_EQ(stats_of(arena).pinned_bytes, 0u);
}

TEST(r66_a_failed_registration_falls_back_or_fails_as_asked) {
  far::use();
  for (bool require : {false, true}) {
    for (uint64_t nth : {1, 2, 3}) {
      Machine m("", "far");
      hal_arena* arena = m.make_arena(HAL_PINNED, 0, false, require);
      const uint64_t address = m.allocate(5 * MiB);
      write_pattern(address, 5 * MiB, nth);
      const hal_counters before = m.counters();
      hal_transfer_report report;
      OK(hal_fault_set(m.device, "host_register", nth, ENOMEM, 1, &status));
      const int32_t kind = sleep_one(m, arena, address, &report);
      hal_fault_clear(m.device);
      if (require) {
        CHECK_EQ(kind, HAL_HOST_MEMORY);
        CHECK_EQ(std::string(status.call), std::string("host_register"));
        CHECK_EQ(report.rolled_back, 1);
        CHECK(same_books(before, m.counters()));
        CHECK(has_pattern(address, 5 * MiB, nth));
        CHECK_EQ(stats_of(arena).held_bytes, 0u);
        CHECK_EQ(far::registrations(), 0u);
        OK(sleep_one(m, arena, address, &report));
        CHECK_EQ(stats_of(arena).pinned_bytes, 5 * MiB);
      } else {
        CHECK_EQ(kind, HAL_OK);
        CHECK_EQ(stats_of(arena).fell_back, 1);
        CHECK_EQ(far::registrations(), nth - 1);
      }
      OK(wake_one(m, address, &report));
      CHECK(has_pattern(address, 5 * MiB, nth));
    }
  }
  CHECK_EQ(far::registrations(), 0u);
}

TEST(r71_pinning_that_the_platform_lacks_is_a_fallback_or_an_error) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_PINNED);
  CHECK_EQ(stats_of(arena).fell_back, 1);
  const hal_arena_options options{HAL_PINNED, 0, 1, 0, 0, nullptr, nullptr, nullptr, nullptr};
  CHECK_EQ(hal_arena_create(m.device, &options, &arena, &status), HAL_UNSUPPORTED);
  CHECK(std::strstr(status.text, "pin") != nullptr);
}

TEST(files_of_devices_that_the_host_cannot_reach_go_through_bounce_buffers) {
  far::use();
  Machine m("", "far");
  hal_arena* arena = m.make_arena(HAL_FILE);
  const uint64_t a = m.allocate(10 * MiB), b = m.allocate(64 * KiB);
  write_pattern(a, 10 * MiB, 1);
  write_pattern(b, 64 * KiB, 2);
  hal_segment_order orders[] = {order(a, HAL_OFFLOAD), order(b, HAL_OFFLOAD)};
  hal_transfer_report report;
  OK(hal_sleep(m.device, arena, orders, 2, nullptr, 0, &report, &status));
  CHECK_EQ(m.counters().handles, 0u);
  OK(hal_wake(m.device, arena, orders, 2, -1, &report, &status));
  CHECK(has_pattern(a, 10 * MiB, 1));
  CHECK(has_pattern(b, 64 * KiB, 2));
  CHECK_EQ(far::registrations(), 0u);
}

TEST_MAIN()
