// The host copy of an offloaded segment: pieces of the segment and where each lies in the arena.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "status.h"

namespace hal {

class Arena;

struct Range {
  uint64_t offset = 0, size = 0;  // bytes within the segment
  bool operator==(const Range& other) const { return offset == other.offset && size == other.size; }
};

struct Piece {
  uint64_t offset = 0;    // bytes within the segment
  uint64_t size = 0;      // bytes
  uint64_t position = 0;  // in the arena: a host address, or an offset in its file
  uint64_t stored = 0;    // bytes there; 0: nothing yet, less than `size`: encoded
  uint32_t checksum = 0;  // CRC-32C of the contents, where the arena verifies
  bool clean = false;     // in a sleep: what is in the arena is right already
};

// Whether `contents` are what was written for a piece of the segment at `segment`; `call` is who asks.
Status check_piece(uint64_t segment, const Piece& piece, const void* contents, const char* call);

// Gives its room back to the arena when it goes.
class Backup {
 public:
  Backup() = default;
  // Takes room for `ranges` that the arena has reserved before; of an arena that encodes, the pieces get theirs when
  // their sizes are known.
  Backup(Arena* arena, std::vector<Range> ranges);
  ~Backup() { drop(); }
  Backup(Backup&& other) noexcept { swap(other); }
  Backup& operator=(Backup&& other) noexcept {
    Backup moved(std::move(other));
    swap(moved);
    return *this;
  }

  Arena* arena() const { return arena_; }  // null: there is no backup
  const std::vector<Range>& ranges() const { return ranges_; }
  std::vector<Piece>& pieces() { return pieces_; }
  uint64_t bytes() const;         // of the segment
  uint64_t stored_bytes() const;  // of the arena
  void drop();
  // Marks the pieces that lie in `ranges` (sorted, apart) as clean, and no others.
  void mark_clean(const std::vector<Range>& ranges);
  uint64_t clean_bytes() const;

 private:
  void take_room(const Range& range);

  void swap(Backup& other) noexcept {
    std::swap(arena_, other.arena_);
    ranges_.swap(other.ranges_);
    pieces_.swap(other.pieces_);
  }

  Arena* arena_ = nullptr;
  std::vector<Range> ranges_;
  std::vector<Piece> pieces_;
};

}  // namespace hal
