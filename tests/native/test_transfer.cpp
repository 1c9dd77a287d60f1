// Sleep and wake without failures: contents, counts, states, live ranges, retained backups.
#include "machine.h"

namespace {

struct Case {
  int32_t backing;
  bool verify;
};
constexpr Case kCases[] = {{HAL_ANONYMOUS, false}, {HAL_ANONYMOUS, true}, {HAL_FILE, true}, {HAL_PINNED, false}};

void sleep_all(Machine& m, hal_arena* arena, std::vector<hal_segment_order>& orders, hal_transfer_report* report) {
  OK(hal_sleep(m.device, arena, orders.data(), orders.size(), nullptr, 0, report, &status));
}

void wake_all(Machine& m, hal_arena* arena, std::vector<hal_segment_order>& orders, int32_t fill = -1,
              int32_t retain = 0) {
  for (hal_segment_order& order : orders) order.retain = retain;
  hal_transfer_report report;
  OK(hal_wake(m.device, arena, orders.data(), orders.size(), fill, &report, &status));
}

}  // namespace

TEST(contents_and_counts_survive_cycles) {
  for (const Case& c : kCases) {
    Machine m("granularity=65536;chunk=1048576");
    hal_arena* arena = m.make_arena(c.backing, 0, c.verify);
    const uint64_t kept = m.allocate(14 * MiB), small = m.allocate(3 * MiB + 1), gone = m.allocate(8 * MiB);
    write_pattern(kept, 14 * MiB, 1);
    write_pattern(small, 3 * MiB, 2);
    write_pattern(gone, 8 * MiB, 3);
    const hal_counters before = m.counters();
    for (int cycle = 0; cycle < 3; ++cycle) {
      std::vector<hal_segment_order> orders = {order(kept, HAL_OFFLOAD), order(small, HAL_OFFLOAD),
                                               order(gone, HAL_DISCARD)};
      hal_transfer_report report;
      const hal_counters awake = m.counters();
      sleep_all(m, arena, orders, &report);
      const hal_counters asleep = m.counters();
      CHECK_EQ(asleep.mapped_bytes, 0u);
      CHECK_EQ(asleep.handles, 0u);
      CHECK_EQ(asleep.asleep_bytes, before.mapped_bytes);
      CHECK_EQ(asleep.unmaps - awake.unmaps, before.mappings);
      CHECK_EQ(asleep.releases - awake.releases, before.handles);
      CHECK_EQ(report.released_bytes, before.mapped_bytes);
      CHECK_EQ(report.copied_bytes, before.mapped_bytes - 8 * MiB);
      CHECK_EQ(stats_of(arena).used_bytes, report.host_bytes);
      CHECK_EQ(stats_of(arena).held_bytes, report.host_bytes);
      CHECK_EQ(orders[0].state, HAL_ASLEEP_BACKED);
      CHECK_EQ(orders[2].state, HAL_ASLEEP_DISCARDED);
      sleep_all(m, arena, orders, &report);  // a second sleep does nothing
      CHECK_EQ(report.released_bytes, 0u);
      CHECK(orders[0].skipped && orders[1].skipped && orders[2].skipped);
      wake_all(m, arena, orders);
      const hal_counters woken = m.counters();
      CHECK(same_books(before, woken));
      CHECK_EQ(woken.creates - asleep.creates, before.handles);
      CHECK_EQ(woken.maps - asleep.maps, before.mappings);
      CHECK_EQ(stats_of(arena).used_bytes, 0u);
      CHECK(has_pattern(kept, 14 * MiB, 1));
      CHECK(has_pattern(small, 3 * MiB, 2));
      CHECK(all_bytes(gone, 8 * MiB, 0));
      wake_all(m, arena, orders);  // so does a second wake
      CHECK(orders[0].skipped && orders[1].skipped && orders[2].skipped);
      write_pattern(gone, 8 * MiB, 3);
    }
    CHECK(hal_arena_trim(arena) > 0);
    CHECK_EQ(stats_of(arena).held_bytes, 0u);
    CHECK_EQ(stats_of(arena).chunks, 0u);
  }
}

TEST(only_live_ranges_are_copied_and_gaps_are_filled) {
  for (const Case& c : kCases) {
    Machine m("dirty=0xA5");
    hal_arena* arena = m.make_arena(c.backing, 0, c.verify);
    const uint64_t address = m.allocate(MiB);
    write_pattern(address, MiB, 7);
    const hal_range ranges[] = {{600 * KiB, 1000}, {100, 200}, {4096, 4096}, {601 * KiB, 10 * KiB}};
    std::vector<hal_segment_order> orders = {order(address, HAL_OFFLOAD, 0, 4)};
    hal_transfer_report report;
    OK(hal_sleep(m.device, arena, orders.data(), 1, ranges, 4, &report, &status));
    CHECK_EQ(report.copied_bytes, 8192u + 12 * KiB);
    OK(hal_wake(m.device, arena, orders.data(), 1, -1, &report, &status));
    CHECK_EQ(report.filled_bytes, MiB - report.copied_bytes);
    CHECK(has_pattern(address, 8192, 7));
    CHECK(has_pattern(address, 11 * KiB, 7, 600 * KiB));
    CHECK(all_bytes(address + 8192, 600 * KiB - 8192, 0));
    CHECK(all_bytes(address + 612 * KiB, MiB - 612 * KiB, 0));
  }
}

TEST(a_discard_that_keeps_parts_is_undone_with_all_of_its_contents) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_ANONYMOUS);
  const uint64_t partly = m.allocate(MiB), gone = m.allocate(MiB);
  write_pattern(partly, MiB, 1);
  write_pattern(gone, MiB, 2);
  const hal_range kept[] = {{4096, 8192}};
  std::vector<hal_segment_order> orders = {order(partly, HAL_DISCARD, 0, 1), order(gone, HAL_DISCARD)};
  hal_transfer_report report;
  for (uint64_t nth = 1; nth <= 2; ++nth) {  // either of the two cannot be unmapped
    OK(hal_fault_set(m.device, "unmap", nth, 22, 1, &status));
    CHECK(hal_sleep(m.device, arena, orders.data(), 2, kept, 1, &report, &status) != HAL_OK);
    CHECK_EQ(report.rolled_back, 1);
    CHECK(has_pattern(partly, MiB, 1));
    CHECK(has_pattern(gone, MiB, 2));
    CHECK_EQ(stats_of(arena).used_bytes, 0u);
    hal_fault_clear(m.device);
  }
  OK(hal_sleep(m.device, arena, orders.data(), 2, kept, 1, &report, &status));
  CHECK_EQ(orders[0].state, HAL_ASLEEP_BACKED);
  CHECK_EQ(orders[1].state, HAL_ASLEEP_DISCARDED);
  CHECK_EQ(report.copied_bytes, 8192u);
  wake_all(m, arena, orders);
  CHECK(has_pattern(partly, 8192, 1, 4096));
  CHECK(all_bytes(partly + 12288, MiB - 12288, 0));
}

TEST(nothing_live_copies_nothing_and_fill_poisons) {
  Machine m;
  const uint64_t address = m.allocate(MiB);
  write_pattern(address, MiB, 7);
  std::vector<hal_segment_order> orders = {order(address, HAL_OFFLOAD)};
  orders[0].nothing_live = 1;
  hal_transfer_report report;
  sleep_all(m, nullptr, orders, &report);
  CHECK_EQ(orders[0].state, HAL_ASLEEP_BACKED);
  CHECK_EQ(report.copied_bytes, 0u);
  wake_all(m, nullptr, orders, 0xEE);
  CHECK_EQ(orders[0].filled_bytes, MiB);
  CHECK(all_bytes(address, MiB, 0xEE));
}

TEST(retained_backups_are_written_again_in_place) {
  for (const Case& c : kCases) {
    Machine m;
    hal_arena* arena = m.make_arena(c.backing, 0, c.verify);
    const uint64_t address = m.allocate(5 * MiB);
    std::vector<hal_segment_order> orders = {order(address, HAL_OFFLOAD)};
    hal_transfer_report report;
    for (uint64_t cycle = 0; cycle < 3; ++cycle) {
      write_pattern(address, 5 * MiB, cycle);
      sleep_all(m, arena, orders, &report);
      wake_all(m, arena, orders, -1, 1);
      CHECK(has_pattern(address, 5 * MiB, cycle));
      CHECK_EQ(stats_of(arena).used_bytes, 5 * MiB);
      CHECK_EQ(stats_of(arena).held_bytes, 5 * MiB);
    }
    const hal_range other{MiB, MiB};  // other live ranges: the retained room is used for them
    orders[0].range_count = 1;
    OK(hal_sleep(m.device, arena, orders.data(), 1, &other, 1, &report, &status));
    CHECK_EQ(stats_of(arena).used_bytes, MiB);
    CHECK_EQ(stats_of(arena).held_bytes, 5 * MiB);
    wake_all(m, arena, orders, -1, 1);
    CHECK_EQ(hal_arena_trim(arena), 5 * MiB);
    CHECK_EQ(stats_of(arena).held_bytes, 0u);
  }
}

TEST(what_a_retained_backup_has_is_not_copied_again) {
  for (const Case& c : kCases) {
    Machine m;
    hal_arena* arena = m.make_arena(c.backing, 0, c.verify);
    constexpr uint64_t kSize = 16 * MiB, kHalf = kSize / 2;
    const uint64_t address = m.allocate(kSize);
    std::vector<hal_segment_order> orders = {order(address, HAL_OFFLOAD)};
    hal_transfer_report report;
    const hal_range clean{0, kHalf};
    orders[0].clean_count = 1;
    write_pattern(address, kSize, 1);
    OK(hal_sleep(m.device, arena, orders.data(), 1, &clean, 1, &report, &status));
    CHECK_EQ(report.unchanged_bytes, 0u);  // there is no backup yet: the claim is not believed
    CHECK_EQ(report.copied_bytes, kSize);
    wake_all(m, arena, orders, -1, 1);
    CHECK(has_pattern(address, kSize, 1));
    write_pattern(address, kSize, 2);  // all of it changes, and half is said to be clean
    orders[0].clean_count = 1;
    OK(hal_sleep(m.device, arena, orders.data(), 1, &clean, 1, &report, &status));
    CHECK(report.unchanged_bytes > 0 && report.unchanged_bytes <= kHalf);
    CHECK_EQ(report.copied_bytes + report.unchanged_bytes, kSize);
    CHECK_EQ(report.host_bytes, kSize);
    const uint64_t unchanged = report.unchanged_bytes;
    wake_all(m, arena, orders);
    std::vector<uint8_t> first(kSize), second(kSize);
    write_pattern(reinterpret_cast<uint64_t>(first.data()), kSize, 1);
    write_pattern(reinterpret_cast<uint64_t>(second.data()), kSize, 2);
    const auto* now = reinterpret_cast<const uint8_t*>(address);
    CHECK(std::equal(now, now + unchanged, first.begin()));
    CHECK(std::equal(now + unchanged, now + kSize, second.begin() + static_cast<long>(unchanged)));
  }
}

TEST(encoded_backups_survive_cycles) {
  for (const Case& c : kCases) {
    Machine m;
    hal_arena* arena = m.make_arena(c.backing, 0, c.verify, false, "zstd");
    constexpr uint64_t kSize = 5 * MiB;
    const uint64_t plain = m.allocate(kSize), easy = m.allocate(kSize), mixed = m.allocate(kSize);
    std::vector<hal_segment_order> orders = {order(plain, HAL_OFFLOAD), order(easy, HAL_OFFLOAD),
                                             order(mixed, HAL_OFFLOAD)};
    hal_transfer_report report;
    for (uint64_t cycle = 0; cycle < 3; ++cycle) {
      write_pattern(plain, kSize, cycle);
      std::memset(reinterpret_cast<void*>(easy), static_cast<int>(cycle + 1), kSize);
      write_pattern(mixed, kSize / 2, cycle + 7);
      std::memset(reinterpret_cast<void*>(mixed + kSize / 2), 0x55, kSize / 2);
      sleep_all(m, arena, orders, &report);
      CHECK_EQ(report.copied_bytes, 3 * kSize);
      CHECK(report.host_bytes < 2 * kSize);
      wake_all(m, arena, orders, -1, cycle == 1 ? 1 : 0);
      CHECK(has_pattern(plain, kSize, cycle));
      CHECK(all_bytes(easy, kSize, static_cast<uint8_t>(cycle + 1)));
      CHECK(has_pattern(mixed, kSize / 2, cycle + 7));
      CHECK(all_bytes(mixed + kSize / 2, kSize / 2, 0x55));
      CHECK_EQ(stats_of(arena).used_bytes > 0, cycle == 1);
    }
  }
}

TEST(a_sleeping_segment_can_give_up_its_backup) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_ANONYMOUS);
  const uint64_t address = m.allocate(MiB);
  write_pattern(address, MiB, 1);
  std::vector<hal_segment_order> orders = {order(address, HAL_OFFLOAD)};
  hal_transfer_report report;
  sleep_all(m, arena, orders, &report);
  orders[0].action = HAL_DISCARD;  // asleep already: ignored
  sleep_all(m, arena, orders, &report);
  CHECK_EQ(orders[0].state, HAL_ASLEEP_BACKED);
  orders[0].action = HAL_DROP_BACKUP;
  sleep_all(m, arena, orders, &report);
  CHECK_EQ(orders[0].state, HAL_ASLEEP_DISCARDED);
  CHECK_EQ(stats_of(arena).used_bytes, 0u);
  wake_all(m, arena, orders);
  CHECK(all_bytes(address, MiB, 0));
}

TEST(r09_free_while_asleep_gives_range_and_backup_back_once) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_ANONYMOUS);
  const hal_counters empty = m.counters();
  const uint64_t a = m.allocate(MiB), b = m.allocate(MiB);
  write_pattern(b, MiB, 2);
  std::vector<hal_segment_order> orders = {order(a, HAL_OFFLOAD), order(b, HAL_OFFLOAD)};
  hal_transfer_report report;
  sleep_all(m, arena, orders, &report);
  const hal_counters asleep = m.counters();
  OK(hal_free(m.device, a, &status));
  CHECK_EQ(m.counters().releases, asleep.releases);
  CHECK_EQ(m.counters().reservations, asleep.reservations - 1);
  CHECK_EQ(stats_of(arena).used_bytes, MiB);
  wake_all(m, arena, orders);
  CHECK_EQ(orders[0].state, -1);
  CHECK_EQ(orders[0].skipped, 1);
  CHECK(has_pattern(b, MiB, 2));
  OK(hal_free(m.device, b, &status));
  CHECK(same_books(empty, m.counters()));
}

TEST(a_serial_tells_a_reused_address_from_the_old_segment) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_ANONYMOUS);
  const uint64_t address = m.allocate(MiB);
  std::vector<hal_segment_order> orders = {order(address, HAL_OFFLOAD)};
  orders[0].serial = m.segments()[0].serial + 1;
  hal_transfer_report report;
  sleep_all(m, arena, orders, &report);
  CHECK_EQ(orders[0].skipped, 1);
  CHECK_EQ(m.segments()[0].state, HAL_MAPPED);
}

TEST(malformed_requests_change_nothing) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_ANONYMOUS);
  const uint64_t address = m.allocate(MiB);
  write_pattern(address, MiB, 1);
  const hal_counters before = m.counters();
  const hal_range beyond{MiB - 10, 20}, wrapping{UINT64_MAX - 5, 10};
  hal_transfer_report report;
  for (const hal_range& range : {beyond, wrapping}) {
    hal_segment_order bad = order(address, HAL_OFFLOAD, 0, 1);
    CHECK_EQ(hal_sleep(m.device, arena, &bad, 1, &range, 1, &report, &status), HAL_INVALID);
  }
  hal_segment_order missing = order(address, HAL_OFFLOAD, 1, 1), action = order(address, 9);
  CHECK_EQ(hal_sleep(m.device, arena, &missing, 1, &beyond, 1, &report, &status), HAL_INVALID);
  CHECK_EQ(hal_sleep(m.device, arena, &action, 1, nullptr, 0, &report, &status), HAL_INVALID);
  hal_segment_order plain = order(address, HAL_OFFLOAD);
  CHECK_EQ(hal_sleep(m.device, nullptr, &plain, 1, nullptr, 0, &report, &status), HAL_INVALID);
  CHECK_EQ(hal_wake(m.device, arena, &plain, 1, 256, &report, &status), HAL_INVALID);
  CHECK(same_books(before, m.counters()));
  CHECK(has_pattern(address, MiB, 1));
}

TEST_MAIN()
