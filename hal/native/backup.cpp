// Cutting a backup into pieces that each lie in one live range and one extent of the arena.
#include "backup.h"

#include <algorithm>

#include "arena.h"
#include "crc32c.h"

namespace hal {

Status check_piece(uint64_t segment, const Piece& piece, const void* contents, const char* call) {
  if (crc32c(contents, piece.stored) == piece.checksum) return {};
  return Status::error(HAL_CORRUPT_BACKUP, call, 0,
                       "the checksum of the piece at offset " + std::to_string(piece.offset) + " differs", piece.size,
                       segment);
}

Backup::Backup(Arena* arena, std::vector<Range> ranges) : arena_(arena), ranges_(std::move(ranges)) {
  for (const Range& range : ranges_) {
    if (!arena_->encodes()) {
      take_room(range);
      continue;
    }
    for (uint64_t done = 0; done < range.size; done += kEncodedPiece) {
      Piece piece;
      piece.offset = range.offset + done;
      piece.size = std::min(kEncodedPiece, range.size - done);
      pieces_.push_back(piece);
    }
  }
}

void Backup::take_room(const Range& range) {
  uint64_t offset = range.offset;
  for (const Range& extent : arena_->take(range.size)) {
    for (uint64_t done = 0; done < extent.size;) {
      Piece piece;
      piece.offset = offset;
      piece.size = std::min({extent.size - done, arena_->piece_limit(), range.offset + range.size - offset});
      piece.position = extent.offset + done;
      piece.stored = piece.size;
      pieces_.push_back(piece);
      offset += piece.size;
      done += piece.size;
      if (offset == range.offset + range.size) break;
    }
  }
}

uint64_t Backup::bytes() const {
  uint64_t sum = 0;
  for (const Piece& piece : pieces_) sum += piece.size;
  return sum;
}

uint64_t Backup::stored_bytes() const {
  uint64_t sum = 0;
  for (const Piece& piece : pieces_) sum += piece.stored;
  return sum;
}

void Backup::mark_clean(const std::vector<Range>& ranges) {
  for (Piece& piece : pieces_) {
    // The last range that begins at or before the piece is the only one that can hold it.
    auto range = std::upper_bound(ranges.begin(), ranges.end(), piece.offset,
                                  [](uint64_t offset, const Range& other) { return offset < other.offset; });
    if (range != ranges.begin()) --range;
    piece.clean = range != ranges.end() && range->offset <= piece.offset &&
                  piece.offset + piece.size <= range->offset + range->size;
  }
}

uint64_t Backup::clean_bytes() const {
  uint64_t sum = 0;
  for (const Piece& piece : pieces_) sum += piece.clean ? piece.size : 0;
  return sum;
}

void Backup::drop() {
  if (arena_ == nullptr) return;
  for (const Piece& piece : pieces_) {
    if (piece.stored > 0) arena_->give_back(piece.position, piece.stored);
  }
  arena_ = nullptr;
  ranges_.clear();
  pieces_.clear();
}

}  // namespace hal
