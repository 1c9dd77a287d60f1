// Cutting a backup into pieces that each lie in one live range and one extent of the arena.
#include "backup.h"

#include <algorithm>

#include "arena.h"

namespace hal {

Backup::Backup(Arena* arena, std::vector<Range> ranges) : arena_(arena), ranges_(std::move(ranges)) {
  for (const Range& range : ranges_) {
    uint64_t offset = range.offset;
    for (const Range& extent : arena_->take(range.size)) {
      for (uint64_t done = 0; done < extent.size;) {
        Piece piece;
        piece.offset = offset;
        piece.size = std::min({extent.size - done, arena_->piece_limit(), range.offset + range.size - offset});
        piece.position = extent.offset + done;
        pieces_.push_back(piece);
        offset += piece.size;
        done += piece.size;
        if (offset == range.offset + range.size) break;
      }
    }
  }
}

uint64_t Backup::bytes() const {
  uint64_t sum = 0;
  for (const Piece& piece : pieces_) sum += piece.size;
  return sum;
}

void Backup::drop() {
  if (arena_ == nullptr) return;
  for (const Piece& piece : pieces_) arena_->give_back(piece.position, piece.size);
  arena_ = nullptr;
  ranges_.clear();
  pieces_.clear();
}

}  // namespace hal
