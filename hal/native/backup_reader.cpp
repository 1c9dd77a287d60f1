// Copies parts of a backup out, checked as in a wake. Touches the arena's memory or file, never the device.
#include "backup_reader.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <string>

#include "arena.h"

namespace hal {
namespace {

using Bytes = std::unique_ptr<void, void (*)(void*)>;

Bytes aligned_bytes(uint64_t size) {
  void* raw = nullptr;
  const uint64_t step = backup_alignment();
  if (posix_memalign(&raw, step, (size + step - 1) / step * step) != 0) throw std::bad_alloc();
  return {raw, std::free};
}

Status not_backed(const Segment& segment) {
  return Status::error(HAL_BAD_STATE, "backup read", 0, "there is no backup of all these bytes", 0, segment.address);
}

// The whole piece, as it was written: a checksum is of all of it, and so are direct reads.
Status contents_of(const Segment& segment, const Piece& piece, Bytes* buffer, const void** contents) {
  Arena& arena = *segment.backup.arena();
  *contents = Arena::host(piece.position);
  if (FileStorage* file = arena.file()) {
    if (*buffer == nullptr) *buffer = aligned_bytes(arena.piece_limit());
    HAL_TRY(file->read(buffer->get(), piece.size, piece.position));
    file->forget(piece.size, piece.position);
    *contents = buffer->get();
  }
  return arena.verifies() ? check_piece(segment.address, piece, *contents, "backup read") : Status();
}

}  // namespace

Status read_backup(Segment& segment, Range wanted, void* out) {
  if (segment.backup.arena() == nullptr || wanted.offset > segment.size || wanted.size > segment.size - wanted.offset) {
    return not_backed(segment);
  }
  if (segment.backup.arena()->encodes()) {
    return Status::error(HAL_UNSUPPORTED, "backup read", 0, "what a codec has made smaller only a wake can read");
  }
  Bytes buffer(nullptr, std::free);
  uint64_t next = wanted.offset;
  const uint64_t end = wanted.offset + wanted.size;
  for (const Piece& piece : segment.backup.pieces()) {  // in the order of their offsets
    if (next == end || piece.offset > next) break;
    if (piece.offset + piece.size <= next) continue;
    const void* contents = nullptr;
    HAL_TRY(contents_of(segment, piece, &buffer, &contents));
    const uint64_t size = std::min(piece.offset + piece.size, end) - next;
    std::memcpy(static_cast<char*>(out) + (next - wanted.offset),
                static_cast<const char*>(contents) + (next - piece.offset), size);
    next += size;
  }
  return next == end ? Status() : not_backed(segment);
}

}  // namespace hal
