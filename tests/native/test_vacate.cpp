// A driver that holds memory until its range is given up: the range is given up and taken again in every sleep, and may
// be lost to somebody else.
#include <sys/mman.h>

#include "machine.h"

extern "C" const hal_driver* hal_cpu_driver();

namespace {

int vacated = 0;
bool thief = false;  // takes the range in the moment in which it is free
void* stolen = nullptr;
uint64_t stolen_size = 0;

int32_t vacate(void* context, hal_address address, uint64_t size, hal_address* got) {
  ++vacated;
  const hal_driver& cpu = *hal_cpu_driver();
  if (const int32_t code = cpu.unreserve(context, address, size)) return code;
  if (thief) {
    stolen_size = size;
    stolen = mmap(reinterpret_cast<void*>(address), size, PROT_NONE,
                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
  }
  const int32_t code = cpu.reserve(context, size, 0, address, got);
  if (code == EEXIST) *got = address + size;
  return code;
}

void give_back_stolen() {
  if (stolen != nullptr) munmap(stolen, stolen_size);
  stolen = nullptr;
}

void use_clinging() {
  static hal_driver driver = [] {
    hal_driver made = *hal_cpu_driver();
    made.name = "clinging";
    made.vacate = vacate;
    return made;
  }();
  OK(hal_register_driver(&driver, &status));
  vacated = 0;
  thief = false;
}

// Two segments to keep and one to discard, of which the second can lose its address.
struct Engine {
  Engine() : m("chunk=1048576;granularity=65536", "clinging"), arena(m.make_arena(HAL_ANONYMOUS)) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
      const uint64_t address = m.allocate(2 * MiB);
      write_pattern(address, 2 * MiB, seed);
      orders.push_back(order(address, seed == 2 ? HAL_DISCARD : HAL_OFFLOAD));
    }
  }
  int32_t sleep() { return hal_sleep(m.device, arena, orders.data(), orders.size(), nullptr, 0, &report, &status); }
  int32_t wake() { return hal_wake(m.device, arena, orders.data(), orders.size(), -1, &report, &status); }
  void check_woken() const {
    CHECK(has_pattern(orders[0].address, 2 * MiB, 0));
    CHECK(has_pattern(orders[1].address, 2 * MiB, 1));
    CHECK(all_bytes(orders[2].address, 2 * MiB, 0));
  }
  Machine m;
  hal_arena* arena;
  std::vector<hal_segment_order> orders;
  hal_transfer_report report{};
};

}  // namespace

TEST(every_segment_that_falls_asleep_is_vacated_once_and_none_that_is_freed) {
  use_clinging();
  Engine e;
  const hal_counters before = e.m.counters();
  OK(e.sleep());
  CHECK_EQ(vacated, 3);
  CHECK_EQ(e.m.counters().reservations, 3u);
  OK(e.wake());
  e.check_woken();
  CHECK(same_books(before, e.m.counters()));
  OK(hal_free(e.m.device, e.orders[0].address, &status));
  CHECK_EQ(vacated, 3);
}

TEST(a_wake_that_is_rolled_back_vacates_what_it_had_mapped) {
  use_clinging();
  Engine e;
  OK(e.sleep());
  OK(hal_fault_set(e.m.device, "map", 5, EIO, 1, &status));
  CHECK_EQ(e.wake(), HAL_DRIVER_ERROR);
  CHECK_EQ(vacated, 6);
  OK(e.wake());
  e.check_woken();
}

TEST(a_vacate_that_fails_without_losing_the_address_undoes_the_sleep) {
  use_clinging();
  Engine e;
  const hal_counters before = e.m.counters();
  OK(hal_fault_set(e.m.device, "vacate", 2, EIO, 1, &status));
  CHECK_EQ(e.sleep(), HAL_DRIVER_ERROR);
  CHECK_EQ(e.report.rolled_back, 1);
  CHECK(same_books(before, e.m.counters()));
  CHECK(has_pattern(e.orders[1].address, 2 * MiB, 1));
  CHECK(has_pattern(e.orders[2].address, 2 * MiB, 2));
}

TEST(r98_a_lost_address_is_told_and_the_other_segments_are_intact) {
  use_clinging();
  Engine e;
  const uint64_t lost = e.orders[2].address;
  std::vector<hal_segment_order> others(e.orders.begin(), e.orders.begin() + 2);
  OK(hal_sleep(e.m.device, e.arena, others.data(), others.size(), nullptr, 0, &e.report, &status));
  thief = true;
  CHECK_EQ(hal_sleep(e.m.device, e.arena, &e.orders[2], 1, nullptr, 0, &e.report, &status), HAL_ADDRESS_LOST);
  CHECK_EQ(status.address, lost);
  CHECK_EQ(status.needed, lost + 2 * MiB);
  CHECK_EQ(e.report.ended_asleep, 1);
  CHECK_EQ(e.orders[2].state, HAL_ASLEEP_DISCARDED);
  CHECK_EQ(e.m.counters().handles, 0u);
  CHECK_EQ(e.m.counters().reservations, 2u);

  const hal_counters asleep = e.m.counters();
  CHECK_EQ(e.wake(), HAL_ADDRESS_LOST);  // all or nothing, and nothing is mapped where somebody else is
  CHECK_EQ(e.report.rolled_back, 1);
  CHECK_EQ(e.m.counters().creates, asleep.creates);
  CHECK(same_books(asleep, e.m.counters()));
  thief = false;
  OK(hal_wake(e.m.device, e.arena, others.data(), others.size(), -1, &e.report, &status));
  CHECK(has_pattern(others[0].address, 2 * MiB, 0));
  CHECK(has_pattern(others[1].address, 2 * MiB, 1));

  OK(hal_free(e.m.device, lost, &status));
  CHECK_EQ(e.m.counters().reservations, 2u);
  CHECK_EQ(mprotect(stolen, stolen_size, PROT_READ), 0);  // what is the thief's is left alone
  give_back_stolen();
}

TEST(a_lost_address_that_is_free_again_wakes) {
  use_clinging();
  Engine e;
  const hal_counters before = e.m.counters();
  thief = true;
  std::vector<hal_segment_order> one{e.orders[1]};
  CHECK_EQ(hal_sleep(e.m.device, e.arena, one.data(), 1, nullptr, 0, &e.report, &status), HAL_ADDRESS_LOST);
  thief = false;
  CHECK_EQ(hal_wake(e.m.device, e.arena, one.data(), 1, -1, &e.report, &status), HAL_ADDRESS_LOST);
  give_back_stolen();
  OK(hal_wake(e.m.device, e.arena, one.data(), 1, -1, &e.report, &status));
  CHECK(has_pattern(e.orders[1].address, 2 * MiB, 1));
  CHECK(same_books(before, e.m.counters()));
}

TEST_MAIN()
