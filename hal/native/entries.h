// The numbered entry points that torch's pluggable allocators call: one pair a pool, so that a segment can never carry
// another pool's tag, whatever scope is open when torch asks for memory.
#pragma once

#include <cstdint>

struct hal_device;

namespace hal {

uint64_t next_pool();  // never the same twice in a process
// Binds a free pair to a pool; -1 when all are taken.
int claim_slot(hal_device* device, uint64_t pool);
void release_slot(int slot);
void* alloc_entry(int slot);
void* free_entry(int slot);

}  // namespace hal
