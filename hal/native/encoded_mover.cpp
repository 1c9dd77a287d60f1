// A window of pieces is encoded, or decoded, at once. There are two windows, each with device memory and a copy stream
// of its own: while one is copied the other is encoded or decoded. With little free device memory windows are smaller.
// Touches the driver, the codec and the arena; takes no lock of its own.
#include "encoded_mover.h"

#include <algorithm>
#include <cstring>

#include "crc32c.h"
#include "device_memory.h"
#include "staging.h"

namespace hal {
namespace {

constexpr size_t kWindows = 2;
constexpr uint32_t kMostPieces = static_cast<uint32_t>(kBatchBytes / kEncodedPiece);

uint64_t round_up(uint64_t bytes, uint64_t step) {
  return (bytes + step - 1) / step * step;
}

// Encoded pieces that lie side by side in the arena, and so in a window.
struct Run {
  hal_address to;
  uint64_t position, size;
};

struct Window {
  Window(Primitives& primitives, Arena& arena) : memory(primitives, arena) {}

  DeviceMemory memory;                    // encoded pieces, then the codec's scratch
  std::unique_ptr<StagingBuffer> host;    // the codec's results
  std::unique_ptr<StagingBuffer> bounce;  // one piece of a file
  std::vector<Moving> pieces;             // in flight
  std::vector<hal_chunk> chunks;          // of them, those that are encoded
  std::vector<Moving> encoded;            // their pieces, in the same order
  uint64_t number = 0;                    // counted from 1; 0: nothing is in flight
};

// What the codec says of a chunk; UINT64_MAX of one that failed.
uint64_t size_of(const Window& window, size_t index) {
  const auto* sizes = static_cast<const uint64_t*>(window.host->get());
  const auto* results = reinterpret_cast<const int32_t*>(sizes + window.chunks.size());
  return results[index] == 0 ? sizes[index] : UINT64_MAX;
}

class EncodedMover : public Mover {
 public:
  EncodedMover(Primitives& primitives, Arena& arena, Direction direction, const MoverOptions& options)
      : Mover(primitives, arena, direction), codec_(*arena.codec()), options_(options) {
    arena_.collect_left();
  }

  ~EncodedMover() override {
    // What is in flight reads and writes the windows: they go when it has ended, however it ended.
    for (size_t i = 0; i < windows_.size(); ++i) static_cast<void>(primitives_.synchronize(stream(i)).ok());
  }

  Status start(Batch batch, size_t lane) override {
    const std::vector<Moving> pieces = moving(batch, direction_);
    if (!pieces.empty() && windows_.empty()) HAL_TRY(open_windows());
    for (size_t first = 0; first < pieces.size(); first += most_) {
      const auto begin = pieces.begin() + static_cast<long>(first);
      const size_t count = std::min<size_t>(most_, pieces.size() - first);
      HAL_TRY(move({begin, begin + static_cast<long>(count)}));
    }
    last_of_lane_[lane] = moved_;
    return {};
  }

  Status finish(size_t lane) override {
    for (size_t i = 0; i < windows_.size(); ++i) {
      if (windows_[i]->number <= last_of_lane_[lane]) HAL_TRY(drain(i));
    }
    return {};
  }

 private:
  Status open_windows();
  Status allocate_windows();
  uint64_t window_bytes() const { return most_ * step_ + limits_.scratch; }
  Status move(std::vector<Moving> pieces);
  Status encode(Window& window, uint32_t stream);
  Status store(Moving moving, hal_address from, Window& window, uint32_t stream);
  Status take_room(Piece& piece);
  Status load(Window& window, uint32_t stream);
  Status extend(Run* run, uint64_t position, uint64_t size, hal_address to, uint32_t stream);
  Status flush(const Run& run, uint32_t stream);
  Status check_stored(const Moving& moving) const;
  Status fetch(const Moving& moving, hal_address to, Window& window, uint32_t stream);
  Status drain(size_t index);
  Status check_decoded(const Window& window) const;
  hal_address scratch(const Window& window) const { return window.memory.address() + most_ * step_; }

  Codec& codec_;
  const MoverOptions options_;
  std::vector<std::unique_ptr<Window>> windows_;
  uint32_t most_ = 0;  // pieces a window
  uint64_t step_ = 0;  // bytes between two encoded pieces
  Codec::Limits limits_;
  uint64_t moved_ = 0;  // windows
  std::array<uint64_t, kLanes> last_of_lane_{};
};

Status EncodedMover::open_windows() {
  for (uint32_t pieces = kMostPieces;; pieces /= 2) {
    HAL_TRY(codec_.limits(kEncodedPiece, pieces, &limits_));
    most_ = pieces;
    step_ = round_up(limits_.encoded, backup_alignment());
    if (kWindows * window_bytes() > options_.device_room && pieces > 1) continue;
    Status status = allocate_windows();
    if (status.ok() || status.kind() != HAL_OUT_OF_DEVICE_MEMORY || pieces == 1) return status;
    windows_.clear();
  }
}

Status EncodedMover::allocate_windows() {
  for (size_t i = 0; i < kWindows; ++i) {
    auto window = std::make_unique<Window>(primitives_, arena_);
    HAL_TRY(window->memory.allocate(window_bytes()));
    HAL_TRY(StagingBuffer::make(primitives_, limits_.host, &window->host));
    if (arena_.file() != nullptr) HAL_TRY(StagingBuffer::make(primitives_, step_, &window->bounce));
    windows_.push_back(std::move(window));
  }
  return {};
}

Status EncodedMover::move(std::vector<Moving> pieces) {
  const size_t index = moved_ % kWindows;
  HAL_TRY(drain(index));
  Window& window = *windows_[index];
  window.pieces = std::move(pieces);
  window.number = ++moved_;
  return direction_ == Direction::ToBackup ? encode(window, stream(index)) : load(window, stream(index));
}

Status EncodedMover::encode(Window& window, uint32_t stream) {
  window.chunks.clear();
  hal_address to = window.memory.address();
  for (const Moving& moving : window.pieces) {
    window.chunks.push_back({moving.segment + moving.piece->offset, to, moving.piece->size, step_});
    to += step_;
  }
  const auto count = static_cast<uint32_t>(window.chunks.size());
  HAL_TRY(codec_.encode(window.chunks.data(), count, scratch(window), window.host->get(), stream));
  HAL_TRY(primitives_.synchronize(stream));
  for (uint32_t i = 0; i < count; ++i) {
    Piece& piece = *window.pieces[i].piece;
    const uint64_t size = size_of(window, i);
    const bool smaller = size < piece.size;  // else it is kept as it is
    piece.stored = smaller ? size : piece.size;
    HAL_TRY(take_room(piece));
    HAL_TRY(store(window.pieces[i], smaller ? window.chunks[i].encoded : window.chunks[i].plain, window, stream));
  }
  return {};
}

Status EncodedMover::take_room(Piece& piece) {
  const uint64_t stored = piece.stored;
  piece.stored = 0;  // nothing is taken until it is
  if (!arena_.take_whole(stored, &piece.position)) {
    HAL_TRY(options_.growth->add(round_up(stored, backup_alignment())));
    if (!arena_.take_whole(stored, &piece.position)) {
      return Status::error(HAL_HOST_MEMORY, "arena grow", 0, "the room that was added is too small", stored);
    }
  }
  piece.stored = stored;
  return {};
}

Status EncodedMover::store(Moving moving, hal_address from, Window& window, uint32_t stream) {
  Piece& piece = *moving.piece;
  if (arena_.file() == nullptr) {
    HAL_TRY(arena_.wait_ready(piece.position));
    return primitives_.copy_to_host(Arena::host(piece.position), from, piece.stored, stream);
  }
  void* buffer = window.bounce->get();
  HAL_TRY(primitives_.copy_to_host(buffer, from, piece.stored, stream));
  HAL_TRY(primitives_.synchronize(stream));
  piece.checksum = crc32c(buffer, piece.stored);
  return arena_.file()->write(buffer, round_up(piece.stored, backup_alignment()), piece.position);
}

Status EncodedMover::load(Window& window, uint32_t stream) {
  window.chunks.clear();
  window.encoded.clear();
  const bool in_file = arena_.file() != nullptr;
  hal_address at = window.memory.address();
  Run run{at, 0, 0};
  for (const Moving& moving : window.pieces) {
    const Piece& piece = *moving.piece;
    const hal_address plain = moving.segment + piece.offset;
    HAL_TRY(check_stored(moving));
    if (piece.stored == piece.size) {  // it was kept as it is
      HAL_TRY(fetch(moving, plain, window, stream));
      continue;
    }
    const uint64_t room = round_up(piece.stored, backup_alignment());
    window.chunks.push_back({plain, at, piece.size, piece.stored});
    window.encoded.push_back(moving);
    HAL_TRY(in_file ? fetch(moving, at, window, stream) : extend(&run, piece.position, room, at, stream));
    at += room;
  }
  HAL_TRY(flush(run, stream));
  if (window.chunks.empty()) return {};
  return codec_.decode(window.chunks.data(), static_cast<uint32_t>(window.chunks.size()), scratch(window),
                       window.host->get(), stream);
}

// Pieces that lie side by side in memory cross the link in one copy: many small ones take longer.
Status EncodedMover::extend(Run* run, uint64_t position, uint64_t size, hal_address to, uint32_t stream) {
  if (position != run->position + run->size) {
    HAL_TRY(flush(*run, stream));
    *run = {to, position, 0};
  }
  run->size += size;
  return {};
}

Status EncodedMover::flush(const Run& run, uint32_t stream) {
  if (run.size == 0) return {};
  return primitives_.copy_to_device(run.to, Arena::host(run.position), run.size, stream);
}

// Of a file's pieces the checksum is looked at when they have been read.
Status EncodedMover::check_stored(const Moving& moving) const {
  if (arena_.file() != nullptr || !arena_.verifies()) return {};
  return check_piece(moving.segment, *moving.piece, Arena::host(moving.piece->position), "restore");
}

Status EncodedMover::fetch(const Moving& moving, hal_address to, Window& window, uint32_t stream) {
  const Piece& piece = *moving.piece;
  if (arena_.file() == nullptr) {
    return primitives_.copy_to_device(to, Arena::host(piece.position), piece.stored, stream);
  }
  void* host = window.bounce->get();
  const uint64_t size = round_up(piece.stored, backup_alignment());
  HAL_TRY(arena_.file()->read(host, size, piece.position));
  arena_.file()->forget(size, piece.position);
  HAL_TRY(check_piece(moving.segment, piece, host, "restore"));
  HAL_TRY(primitives_.copy_to_device(to, host, piece.stored, stream));
  return primitives_.synchronize(stream);
}

// Waits for what is in flight in a window, and looks at how it went.
Status EncodedMover::drain(size_t index) {
  Window& window = *windows_[index];
  if (window.number == 0) return {};
  HAL_TRY(primitives_.synchronize(stream(index)));
  window.number = 0;
  if (direction_ == Direction::ToDevice) return check_decoded(window);
  if (arena_.file() != nullptr) return arena_.file()->flush();
  if (!arena_.verifies()) return {};
  parallel_for(window.pieces.size(), processors(8), [&](size_t i) {
    Piece& piece = *window.pieces[i].piece;
    piece.checksum = crc32c(Arena::host(piece.position), piece.stored);
  });
  return {};
}

Status EncodedMover::check_decoded(const Window& window) const {
  for (size_t i = 0; i < window.encoded.size(); ++i) {
    const Moving& moving = window.encoded[i];
    if (size_of(window, i) == moving.piece->size) continue;
    return Status::error(HAL_CORRUPT_BACKUP, "decode", 0,
                         "the piece at offset " + std::to_string(moving.piece->offset) + " cannot be decoded",
                         moving.piece->size, moving.segment);
  }
  return {};
}

}  // namespace

std::unique_ptr<Mover> make_encoded_mover(Primitives& primitives, Arena& arena, Direction direction,
                                          const MoverOptions& options) {
  return std::make_unique<EncodedMover>(primitives, arena, direction, options);
}

}  // namespace hal
