// What the C ABI's opaque handles are.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "arena.h"
#include "ledger.h"
#include "registry.h"

struct hal_device {
  // False in a child of the process that opened it: its threads, locks and mappings are the parent's.
  bool usable() const { return generation == hal::fork_generation(); }

  const uint32_t generation = hal::fork_generation();
  hal::Primitives primitives;
  hal::Ledger ledger{primitives, this};
  std::mutex transition;  // held by the one sleep or wake that goes on
  std::atomic<int> arenas{0};
};

struct hal_arena {
  hal_device* const device;
  const std::unique_ptr<hal::Arena> arena;
};
