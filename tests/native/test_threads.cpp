// Frees and allocations from other threads while sleeps and wakes go on: nothing waits for ever, nothing is lost.
#include <atomic>
#include <thread>

#include "machine.h"

namespace {

struct Block {
  uint64_t address, seed;
};

constexpr uint64_t kBlock = 256 * KiB;

// Allocates, writes and frees blocks of its own until told to stop; checks what it can be sure of.
void churn(Machine& m, uint64_t pool, uint64_t seed, std::atomic<bool>& stop, std::atomic<int>& rounds) {
  std::vector<Block> blocks;
  while (!stop) {
    for (int i = 0; i < 8; ++i) {
      uint64_t address = 0;
      hal_status mine;
      if (hal_pool_allocate(m.device, pool, kBlock, &address, &mine) != HAL_OK) std::abort();
      blocks.push_back({address, ++seed});
    }
    for (const Block& block : blocks) {
      hal_status mine;
      if (hal_free(m.device, block.address, &mine) != HAL_OK) std::abort();
    }
    blocks.clear();
    ++rounds;
  }
}

}  // namespace

TEST(frees_and_allocations_go_on_during_transitions) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_ANONYMOUS, 0, true);
  const hal_counters empty = m.counters();
  const uint64_t busy_pool = m.make_pool("runtime");
  std::vector<Block> kept;
  for (uint64_t i = 0; i < 32; ++i) {
    kept.push_back({m.allocate(kBlock), i});
    write_pattern(kept.back().address, kBlock, i);
  }
  std::atomic<bool> stop{false};
  std::atomic<int> rounds{0};
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] { churn(m, busy_pool, t * 1000, stop, rounds); });
  }
  // Both device-wide transitions over everything that is there, the churned blocks included.
  for (int cycle = 0; cycle < 20 || rounds < 20; ++cycle) {
    std::vector<hal_segment_order> orders;
    for (const hal_segment& s : m.segments()) {
      orders.push_back(order(s.address, s.pool == busy_pool ? HAL_DISCARD : HAL_OFFLOAD));
      orders.back().serial = s.serial;
    }
    hal_transfer_report report;
    OK(hal_sleep(m.device, arena, orders.data(), orders.size(), nullptr, 0, &report, &status));
    OK(hal_wake(m.device, arena, orders.data(), orders.size(), -1, &report, &status));
    for (const Block& block : kept) CHECK(has_pattern(block.address, kBlock, block.seed));
  }
  stop = true;
  for (std::thread& thread : threads) thread.join();
  for (const Block& block : kept) OK(hal_free(m.device, block.address, &status));
  OK(hal_pool_destroy(m.device, busy_pool, &status));
  CHECK(same_books(empty, m.counters()));
}

TEST(a_free_during_a_transition_is_deferred_and_completed) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_FILE);
  const hal_counters empty = m.counters();
  for (int round = 0; round < 10; ++round) {
    const uint64_t address = m.allocate(4 * MiB);
    hal_segment_order o = order(address, HAL_OFFLOAD);
    std::thread other([&] {
      hal_status mine;
      std::this_thread::sleep_for(std::chrono::milliseconds(round));
      if (hal_free(m.device, address, &mine) != HAL_OK) std::abort();
    });
    hal_transfer_report report;
    OK(hal_sleep(m.device, arena, &o, 1, nullptr, 0, &report, &status));
    other.join();
    CHECK(same_books(empty, m.counters()));
    CHECK_EQ(stats_of(arena).used_bytes, 0u);
  }
}

TEST(r17_transitions_of_one_device_take_turns) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_ANONYMOUS);
  const uint64_t a = m.allocate(4 * MiB), b = m.allocate(4 * MiB);
  write_pattern(a, 4 * MiB, 1);
  write_pattern(b, 4 * MiB, 2);
  const auto cycle = [&](uint64_t address) {
    for (int i = 0; i < 10; ++i) {
      hal_segment_order o = order(address, HAL_OFFLOAD);
      hal_status mine;
      if (hal_sleep(m.device, arena, &o, 1, nullptr, 0, nullptr, &mine) != HAL_OK) std::abort();
      hal_arena_trim(arena);
      if (hal_wake(m.device, arena, &o, 1, -1, nullptr, &mine) != HAL_OK) std::abort();
    }
  };
  std::thread first([&] { cycle(a); }), second([&] { cycle(b); });
  first.join();
  second.join();
  CHECK(has_pattern(a, 4 * MiB, 1));
  CHECK(has_pattern(b, 4 * MiB, 2));
}

TEST(pools_come_and_go_on_many_threads) {
  Machine m;
  const hal_counters before = m.counters();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 50; ++i) {
        uint64_t pool = 0, address = 0;
        hal_status mine;
        if (hal_pool_create(m.device, "t", &pool, nullptr, nullptr, &mine) != HAL_OK) std::abort();
        if (hal_pool_allocate(m.device, pool, 1, &address, &mine) != HAL_OK) std::abort();
        if (hal_pool_destroy(m.device, pool, &mine) != HAL_OK) std::abort();
        if (hal_free(m.device, address, &mine) != HAL_OK) std::abort();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(same_books(before, m.counters()));
}

TEST_MAIN()
