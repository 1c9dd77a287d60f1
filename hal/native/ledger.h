// The books of one device: its pools and segments, who owns which, and what could not be freed yet.
//
// The mutex guards the map, the pools and each segment's state and flags. A segment whose `busy` flag somebody has set
// belongs to that one thread: its chunks and its backup are touched by nobody else, so the driver is called without the
// mutex. A free of a busy segment is noted and completed by its owner, so a free never waits for a transition.
// Lock order: torch's allocator -> transition -> this mutex -> arena -> leaves (entries, faults, status).
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "segment.h"

struct hal_device;

namespace hal {

class Ledger {
 public:
  Ledger(Primitives& primitives, hal_device* device) : primitives_(primitives), device_(device) {}

  Status create_pool(const char* tag, uint64_t* pool, int* slot);
  Status destroy_pool(uint64_t pool);
  // `stream`: the one that the memory is for; while it is captured nothing is synchronized.
  Status allocate(uint64_t pool, uint64_t size, hal_address* address, void* stream = nullptr);
  Status free(hal_address address, void* stream);

  // An allocation that would leave less than this free fails; 0: none does.
  void set_margin(uint64_t bytes) { margin_ = bytes; }

  // A pool keeps the first failure that an entry point could not return.
  void keep_error(uint64_t pool, Status status);
  Status take_error(uint64_t pool);

  // Takes a segment for a transition; null when it is not there any more, being freed, or taken already.
  Segment* acquire(hal_address address, uint64_t serial);  // serial 0: whichever has the address
  struct Outcome {
    Segment* segment;
    hal_segment_state state;
  };
  // Ends a transition: the segments get their states, and frees that came meanwhile are completed.
  void release(const std::vector<Outcome>& outcomes);

  // Completes the frees that had to wait.
  void collect();
  // Takes the backups that mapped segments keep in `arena` for its space.
  std::vector<Backup> take_retained(const Arena* arena);

  size_t list(uint64_t pool, hal_segment* out, size_t capacity);
  void count(hal_counters* out);
  bool empty();
  // Destroys every pool; only when `empty`.
  void close_pools();

 private:
  struct Pool {
    std::string tag;
    int slot = -1;
    bool destroyed = false;
    uint64_t segments = 0;  // and allocations under way
    Status first_error;
  };

  Status keep_margin(uint64_t size);
  Status build(uint64_t size, Segment* segment);
  Status take_down(Segment& segment);
  Status finish_free(Segment& segment);
  void insert(Segment&& segment);
  void leave_pool(uint64_t pool);
  uint64_t chunk_limit() const;

  Primitives& primitives_;
  hal_device* const device_;
  std::mutex mutex_;
  std::map<hal_address, Segment> segments_;
  std::map<uint64_t, Pool> pools_;
  std::set<hal_address> pending_;  // segments whose free has to be completed
  uint64_t next_serial_ = 1;
  uint64_t deferred_frees_ = 0;
  std::atomic<uint64_t> margin_{0};
};

}  // namespace hal
