// Host memory for backups: exact sizes, grown in chunks, bounded by a budget, kept or given back by choice.
//
// A backup may lie in any free extents, so growth takes exactly the bytes that are missing, rounded to a page. With
// pinned backing a growth goes on in the background, chunk by chunk, while earlier chunks are being filled already.
#pragma once

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "backup.h"
#include "codec.h"
#include "parallel.h"
#include "primitives.h"
#include "segment.h"
#include "step_sizes.h"
#include "storage.h"

namespace hal {

class Growth;

class Arena {
 public:
  static Status create(Primitives& primitives, const hal_arena_options& options, std::unique_ptr<Arena>* out);
  ~Arena();

  // Whether room for `bytes` of backups is there or could be taken; changes nothing.
  Status check(uint64_t bytes);
  // Makes room for `bytes` of backups, all or nothing, before anything else is changed; where they are encoded, for
  // what they are expected to take. The growth ends with `*growth`:
  // what it took is given back then, unless it is kept.
  // With `touch` the system has to back all of it now, not at the first write.
  Status reserve(uint64_t bytes, bool touch, std::unique_ptr<Growth>* growth);
  // Takes `bytes` of the room that was reserved, in as many extents as it needs.
  std::vector<Range> take(uint64_t bytes);
  // Takes `bytes` in one extent; false when there is none that large.
  bool take_whole(uint64_t bytes, uint64_t* position);
  void give_back(uint64_t position, uint64_t size);
  // Waits until the memory at `position` may be used; fails when it could not be pinned and has to be.
  Status wait_ready(uint64_t position);
  // Keeps device memory of a transition that the driver would not take back, and tries again.
  void leave(Segment&& memory);
  void collect_left();
  // Gives free room back to the system; bytes.
  uint64_t trim();
  void stats(hal_arena_stats* out);

  Codec* codec() { return codec_.get(); }  // null: backups are kept as they are
  bool encodes() const { return codec_ != nullptr; }
  // Notes how much smaller backups became, for the next reservation.
  void learn(uint64_t plain, uint64_t stored);
  bool verifies() const { return verify_; }
  uint64_t piece_limit() const { return verify_ ? kVerifiedPiece : kPlainPiece; }
  FileStorage* file() { return storage_->file(); }  // null: memory
  static void* host(uint64_t position) { return reinterpret_cast<void*>(position); }

 private:
  friend class Growth;
  enum class Readiness { Pending, Ready, Failed };
  struct HeldChunk {  // taken from the system at once
    uint64_t size = 0;
    Readiness readiness = Readiness::Ready;
    bool registered = false;
  };
  using Chunks = std::map<uint64_t, HeldChunk>;  // by position

  Arena(Primitives& primitives, const hal_arena_options& options, std::unique_ptr<Storage> storage,
        std::unique_ptr<Codec> codec);
  uint64_t expected(uint64_t bytes) const;
  Status missing_for(uint64_t bytes, uint64_t* missing);
  Status check_limit(uint64_t more, uint64_t asked);
  bool ready(uint64_t position);
  Status add_chunk(uint64_t size, Readiness readiness, uint64_t* position);
  bool remove_chunk(uint64_t position);
  void carve(uint64_t position, uint64_t size);
  Chunks::iterator chunk_of(uint64_t position);

  Primitives& primitives_;
  const std::unique_ptr<Storage> storage_;
  const std::unique_ptr<Codec> codec_;
  std::atomic<double> shrinks_to_{1.0};  // stored bytes a plain byte, as far as is known
  const uint64_t budget_;
  const bool verify_, pinned_, require_pinned_;

  // growth_mutex_ is held while the arena grows or is trimmed; mutex_ guards the books and is held for moments only.
  // Order: transition -> ledger -> growth_mutex_ -> mutex_; the driver and the system are called without mutex_.
  std::mutex growth_mutex_;
  std::mutex mutex_;
  std::condition_variable changed_;
  Chunks chunks_;
  std::map<uint64_t, uint64_t> free_;  // extents, each within one chunk: position to size
  uint64_t held_ = 0, used_ = 0, pinned_bytes_ = 0;
  bool fell_back_ = false;
  Status pin_failure_;
  std::vector<Segment> left_;
};

// A growth under way; it holds the arena's growth mutex.
class Growth {
 public:
  explicit Growth(Arena& arena) : arena_(arena), lock_(arena.growth_mutex_) {}
  ~Growth();
  // Waits until every chunk is ready.
  Status wait();
  // Takes as much again as needed for `bytes` in one extent, ready at once, when what was reserved does not suffice.
  Status add(uint64_t bytes);
  // Gives up what is not ready yet and not used.
  void stop_early();
  void keep() { kept_ = true; }

 private:
  friend class Arena;
  void prepare_in_background();
  void prepare_chunks();
  void touch(uint64_t position);
  Status pin(uint64_t position);
  void finish_chunk(uint64_t position, Arena::Readiness readiness, bool registered);

  Arena& arena_;
  std::unique_lock<std::mutex> lock_;
  std::vector<uint64_t> chunks_;
  std::atomic<bool> cancelled_{false};
  bool kept_ = false;
  Task task_;  // last: it is joined before anything else goes
};

}  // namespace hal
