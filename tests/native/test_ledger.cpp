// Pools, entry points, drivers and devices: who owns what, and what bad calls get.
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include "far_driver.h"

namespace {

using Alloc = void* (*)(ssize_t, int, void*);
using Free = void (*)(void*, ssize_t, int, void*);

struct EntryPool {
  explicit EntryPool(Machine& m, const char* tag = "kv_cache") {
    void *a = nullptr, *f = nullptr;
    OK(hal_pool_create(m.device, tag, &id, &a, &f, &status));
    alloc = reinterpret_cast<Alloc>(a);
    free = reinterpret_cast<Free>(f);
  }
  uint64_t id = 0;
  Alloc alloc;
  Free free;
};

}  // namespace

TEST(sizes_are_rounded_up_to_the_granularity) {
  Machine m("granularity=131072");
  for (const auto& [asked, got] : {std::pair<uint64_t, uint64_t>{0, 128 * KiB},
                                   {1, 128 * KiB},
                                   {128 * KiB, 128 * KiB},
                                   {128 * KiB + 1, 256 * KiB}}) {
    const uint64_t address = m.allocate(asked);
    CHECK_EQ(m.segments()[0].size, got);
    CHECK_EQ(address % (128 * KiB), 0u);
    OK(hal_free(m.device, address, &status));
  }
  uint64_t address = 0;
  CHECK_EQ(hal_pool_allocate(m.device, m.pool, UINT64_MAX, &address, &status), HAL_INVALID);
  CHECK_EQ(hal_pool_allocate(m.device, 999999, 1, &address, &status), HAL_INVALID);
}

TEST(an_entry_point_knows_its_pool_and_its_device) {
  Machine m;
  EntryPool kv(m), runtime(m, "runtime");
  void* a = kv.alloc(MiB, 0, nullptr);
  void* b = runtime.alloc(100, 0, nullptr);
  CHECK(a != nullptr && b != nullptr);
  for (const hal_segment& s : m.segments()) {
    CHECK_EQ(s.pool, s.address == reinterpret_cast<uint64_t>(a) ? kv.id : runtime.id);
  }
  CHECK(kv.alloc(MiB, 1, nullptr) == nullptr);
  CHECK(kv.alloc(-5, 0, nullptr) == nullptr);
  CHECK_EQ(hal_pool_take_error(m.device, kv.id, &status), HAL_INVALID);  // the first of the two
  CHECK(std::strstr(status.text, "on device 1") != nullptr);
  OK(hal_pool_take_error(m.device, kv.id, &status));
  OK(hal_pool_take_error(m.device, runtime.id, &status));
  kv.free(a, MiB, 0, nullptr);
  kv.free(nullptr, 0, 0, nullptr);
  kv.free(a, MiB, 0, nullptr);  // twice
  CHECK_EQ(hal_pool_take_error(m.device, kv.id, &status), HAL_INVALID);
  runtime.free(b, 100, 0, nullptr);
  CHECK_EQ(m.segments().size(), 0u);
}

TEST(a_failed_entry_returns_null_and_the_pool_keeps_why) {
  Machine m("capacity=1048576");
  EntryPool kv(m);
  CHECK(kv.alloc(2 * MiB, 0, nullptr) == nullptr);
  CHECK_EQ(hal_pool_take_error(m.device, kv.id, &status), HAL_OUT_OF_DEVICE_MEMORY);
  CHECK_EQ(status.needed, 2 * MiB);
  CHECK_EQ(status.available, MiB);
  void* fits = kv.alloc(MiB, 0, nullptr);
  CHECK(fits != nullptr);
  kv.free(fits, MiB, 0, nullptr);
}

TEST(slots_run_out_as_a_typed_error_and_are_used_again_after_the_last_free) {
  Machine m;
  std::vector<EntryPool> pools;
  while (pools.size() < HAL_POOL_SLOTS - 1) pools.emplace_back(m);
  uint64_t id = 0;
  CHECK_EQ(hal_pool_create(m.device, "more", &id, nullptr, nullptr, &status), HAL_UNSUPPORTED);
  EntryPool& first = pools.front();
  void* kept = first.alloc(1, 0, nullptr);
  OK(hal_pool_destroy(m.device, first.id, &status));
  CHECK_EQ(hal_pool_destroy(m.device, first.id, &status), HAL_INVALID);
  CHECK(first.alloc(1, 0, nullptr) == nullptr);
  CHECK_EQ(hal_pool_create(m.device, "more", &id, nullptr, nullptr, &status), HAL_UNSUPPORTED);
  CHECK_EQ(m.counters().pools, static_cast<uint64_t>(HAL_POOL_SLOTS - 1));
  first.free(kept, 1, 0, nullptr);
  OK(hal_pool_create(m.device, "more", &id, nullptr, nullptr, &status));
  CHECK(id > pools.back().id);
  for (size_t i = 1; i < pools.size(); ++i) OK(hal_pool_destroy(m.device, pools[i].id, &status));
}

TEST(segments_may_outlive_their_pool_and_still_sleep) {
  Machine m;
  hal_arena* arena = m.make_arena(HAL_ANONYMOUS);
  EntryPool kv(m);
  void* kept = kv.alloc(MiB, 0, nullptr);
  const auto address = reinterpret_cast<uint64_t>(kept);
  write_pattern(address, MiB, 1);
  OK(hal_pool_destroy(m.device, kv.id, &status));
  hal_segment_order o = order(address, HAL_OFFLOAD);
  OK(hal_sleep(m.device, arena, &o, 1, nullptr, 0, nullptr, &status));
  OK(hal_wake(m.device, arena, &o, 1, -1, nullptr, &status));
  CHECK(has_pattern(address, MiB, 1));
  kv.free(kept, MiB, 0, nullptr);
  CHECK_EQ(m.segments().size(), 0u);
}

TEST(r53_a_free_waits_for_the_device_but_never_during_a_capture) {
  far::use();
  Machine m("", "far");
  EntryPool pool(m);
  void* a = pool.alloc(MiB, 0, nullptr);
  void* b = pool.alloc(MiB, 0, nullptr);
  int before = far::synchronizations;
  pool.free(a, MiB, 0, nullptr);
  CHECK(far::synchronizations > before);
  far::capturing = true;
  before = far::synchronizations;
  pool.free(b, MiB, 0, nullptr);
  void* c = pool.alloc(MiB, 0, nullptr);  // allocating goes on
  CHECK(c != nullptr);
  CHECK_EQ(far::synchronizations.load(), before);
  CHECK_EQ(m.counters().deferred_frees, 1u);
  CHECK_EQ(m.segments().size(), 2u);
  far::capturing = false;
  pool.free(c, MiB, 0, nullptr);  // completes the other one too
  CHECK_EQ(m.segments().size(), 0u);
  OK(hal_pool_take_error(m.device, pool.id, &status));
}

TEST(transitions_are_refused_during_a_capture) {
  far::use();
  Machine m("", "far");
  hal_arena* arena = m.make_arena(HAL_ANONYMOUS);
  hal_segment_order o = order(m.allocate(MiB), HAL_OFFLOAD);
  const int before = far::synchronizations;
  far::capturing = true;
  CHECK_EQ(hal_sleep(m.device, arena, &o, 1, nullptr, 0, nullptr, &status), HAL_BUSY);
  CHECK_EQ(hal_wake(m.device, arena, &o, 1, -1, nullptr, &status), HAL_BUSY);
  far::capturing = false;
  CHECK_EQ(far::synchronizations.load(), before);
  OK(hal_sleep(m.device, arena, &o, 1, nullptr, 0, nullptr, &status));
  CHECK_EQ(o.state, HAL_ASLEEP_BACKED);
}

TEST(a_driver_from_a_shared_object_joins) {
  OK(hal_load_driver(HAL_TEST_PLUGIN, &status));
  OK(hal_load_driver(HAL_TEST_PLUGIN, &status));  // twice is once
  hal_device* device = nullptr;
  CHECK_EQ(hal_device_open("plugin", 0, "", &device, &status), HAL_UNSUPPORTED);
  CHECK_EQ(std::string(status.text), std::string("no such card; put one in"));
}

TEST(a_device_closes_only_when_nothing_is_left) {
  hal_device* device = nullptr;
  OK(hal_device_open("cpu", 0, "", &device, &status));
  uint64_t pool = 0, address = 0;
  OK(hal_pool_create(device, "weights", &pool, nullptr, nullptr, &status));
  OK(hal_pool_allocate(device, pool, MiB, &address, &status));
  CHECK_EQ(hal_device_close(device, &status), HAL_BAD_STATE);
  OK(hal_free(device, address, &status));
  const hal_arena_options options{};
  hal_arena* arena = nullptr;
  OK(hal_arena_create(device, &options, &arena, &status));
  CHECK_EQ(hal_device_close(device, &status), HAL_BAD_STATE);
  OK(hal_arena_destroy(arena, &status));
  OK(hal_device_close(device, &status));
}

TEST(opening_says_what_is_wrong) {
  hal_device* device = nullptr;
  CHECK_EQ(hal_device_open("tpu", 0, "", &device, &status), HAL_UNSUPPORTED);
  CHECK(std::strstr(status.text, "cpu") != nullptr);
  CHECK_EQ(hal_device_open("cpu", 3, "", &device, &status), HAL_UNSUPPORTED);
  for (const char* bad : {"capcity=1", "granularity=100", "granularity=0", "dirty=256", "chunk", "capacity=x"}) {
    CHECK_EQ(hal_device_open("cpu", 0, bad, &device, &status), HAL_UNSUPPORTED);
    CHECK(std::strstr(status.text, "option") != nullptr);
  }
  CHECK_EQ(hal_device_open(nullptr, 0, "", &device, &status), HAL_INVALID);
  CHECK_EQ(hal_device_facts(nullptr, nullptr, &status), HAL_INVALID);
}

TEST(drivers_are_registered_once_and_checked) {
  far::use();
  char names[64];
  CHECK(hal_driver_names(names, sizeof names) <= sizeof names);
  CHECK(std::strstr(names, "cpu") != nullptr && std::strstr(names, "far") != nullptr);
  hal_driver other = *hal_cpu_driver();
  CHECK_EQ(hal_register_driver(&other, &status), HAL_BAD_STATE);
  other.name = "other";
  other.abi = HAL_DRIVER_ABI + 1;
  CHECK_EQ(hal_register_driver(&other, &status), HAL_INVALID);
  other.abi = HAL_DRIVER_ABI;
  other.create = nullptr;
  CHECK_EQ(hal_register_driver(&other, &status), HAL_INVALID);
  CHECK_EQ(hal_register_driver(nullptr, &status), HAL_INVALID);
  CHECK_EQ(hal_load_driver("/nonexistent.so", &status), HAL_UNSUPPORTED);
  CHECK_EQ(hal_load_driver("libc.so.6", &status), HAL_UNSUPPORTED);
}

TEST(primitives_compose) {
  Machine m;
  const hal_counters before = m.counters();
  uint64_t granularity = 0, address = 0, again = 0, handle = 0, free_bytes = 0, total_bytes = 0;
  hal_facts facts;
  OK(hal_device_facts(m.device, &facts, &status));
  for (int fact = 0; fact < HAL_FACT_COUNT; ++fact) {
    CHECK(((facts.yes >> fact) & 1u) != 0 || facts.why_not[fact][0] != '\0');
  }
  OK(hal_granularity(m.device, MiB, &granularity, &status));
  OK(hal_reserve(m.device, MiB, granularity, 0, &address, &status));
  CHECK_EQ(hal_reserve(m.device, MiB, granularity, address, &again, &status), HAL_ADDRESS_LOST);
  OK(hal_create(m.device, MiB, &handle, &status));
  CHECK(handle != 0);
  OK(hal_map(m.device, address, MiB, handle, &status));
  OK(hal_access(m.device, address, MiB, &status));
  std::vector<char> there(MiB, 'x'), back(MiB);
  OK(hal_copy_to_device(m.device, address, there.data(), MiB, 0, &status));
  OK(hal_fill(m.device, address, 'y', 10, 0, &status));
  OK(hal_copy_to_host(m.device, back.data(), address, MiB, 0, &status));
  OK(hal_synchronize(m.device, 0, &status));
  CHECK(back[9] == 'y' && back[10] == 'x' && back[MiB - 1] == 'x');
  OK(hal_synchronize(m.device, HAL_ALL_STREAMS, &status));
  CHECK_EQ(hal_synchronize(m.device, 77, &status), HAL_DRIVER_ERROR);
  CHECK_EQ(status.code, EINVAL);
  OK(hal_unmap(m.device, address, MiB, &status));
  OK(hal_release(m.device, handle, MiB, &status));
  OK(hal_unreserve(m.device, address, MiB, &status));
  CHECK(same_books(before, m.counters()));
  OK(hal_reserve(m.device, MiB, granularity, address, &again, &status));
  CHECK_EQ(again, address);
  OK(hal_unreserve(m.device, again, MiB, &status));
  OK(hal_device_memory(m.device, &free_bytes, &total_bytes, &status));
  CHECK(free_bytes <= total_bytes && total_bytes > 0);
  CHECK_EQ(hal_host_register(m.device, there.data(), MiB, &status), HAL_UNSUPPORTED);
}

TEST(a_forked_child_is_refused_and_never_hangs) {
  Machine m;
  EntryPool pool(m);
  void* mine = pool.alloc(MiB, 0, nullptr);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    hal_device* own = nullptr;
    bool good = pool.alloc(MiB, 0, nullptr) == nullptr;
    pool.free(mine, MiB, 0, nullptr);
    good = good && hal_synchronize(m.device, HAL_ALL_STREAMS, &status) == HAL_BAD_STATE;
    good = good && hal_segments(m.device, 0, nullptr, 0) == 0;
    good = good && hal_device_open("cpu", 0, "", &own, &status) == HAL_OK;
    uint64_t own_pool = 0;
    good = good && hal_pool_create(own, "weights", &own_pool, nullptr, nullptr, &status) == HAL_OK;
    good = good && hal_device_close(own, &status) == HAL_OK;
    _exit(good ? 0 : 1);
  }
  int result = 0;
  CHECK_EQ(waitpid(child, &result, 0), child);
  CHECK_EQ(result, 0);
  CHECK_EQ(m.segments().size(), 1u);
  pool.free(mine, MiB, 0, nullptr);
}

TEST_MAIN()
