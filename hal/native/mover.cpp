// The two ways of moving: by the device's copy streams to and from host memory, and by reads and writes of a file.
// Touches the driver, the arena's memory or file, and helper threads; takes no lock of its own.
#include "mover.h"

#include <algorithm>
#include <mutex>

#include "crc32c.h"
#include "encoded_mover.h"
#include "staging.h"

namespace hal {
namespace {

// Calls body(segment, piece) for every moving piece of a batch on several threads and returns the first failure.
template <typename Body>
Status for_each_piece(const Batch& batch, Direction direction, Body body) {
  const auto flat = moving(batch, direction);
  std::mutex mutex;
  Status first;
  parallel_for(flat.size(), processors(8), [&](size_t i) {
    Status status = body(flat[i].segment, *flat[i].piece);
    if (status.ok()) return;
    std::lock_guard<std::mutex> lock(mutex);
    if (first.ok()) first = std::move(status);
  });
  return first;
}

class MemoryMover : public Mover {
 public:
  MemoryMover(Primitives& primitives, Arena& arena, Direction direction) : Mover(primitives, arena, direction) {}

  Status start(Batch batch, size_t lane) override {
    batches_[lane] = std::move(batch);
    if (direction_ == Direction::ToDevice && arena_.verifies()) {
      HAL_TRY(for_each_piece(batches_[lane], direction_, [](hal_address segment, const Piece& piece) {
        return check_piece(segment, piece, Arena::host(piece.position), "restore");
      }));
    }
    for (const auto& [segment, piece] : moving(batches_[lane], direction_)) {
      HAL_TRY(copy(segment, *piece, stream(lane)));
    }
    return {};
  }

  Status finish(size_t lane) override {
    HAL_TRY(primitives_.synchronize(stream(lane)));
    if (direction_ == Direction::ToDevice || !arena_.verifies()) return {};
    return for_each_piece(batches_[lane], direction_, [](hal_address, Piece& piece) {
      piece.checksum = crc32c(Arena::host(piece.position), piece.size);
      return Status();
    });
  }

 private:
  Status copy(hal_address segment, const Piece& piece, uint32_t stream) {
    void* host = Arena::host(piece.position);
    const hal_address device = segment + piece.offset;
    if (direction_ == Direction::ToDevice) return primitives_.copy_to_device(device, host, piece.size, stream);
    HAL_TRY(arena_.wait_ready(piece.position));
    return primitives_.copy_to_host(host, device, piece.size, stream);
  }

  std::array<Batch, kLanes> batches_;
};

class FileMover : public Mover {
 public:
  FileMover(Primitives& primitives, Arena& arena, Direction direction)
      : Mover(primitives, arena, direction), file_(*arena.file()) {}

  Status start(Batch batch, size_t lane) override {
    lanes_[lane].batch = std::move(batch);
    lanes_[lane].task = Task([this, lane] { lanes_[lane].status = guarded("backup", [&] { return move(lane); }); });
    return {};
  }

  Status finish(size_t lane) override {
    lanes_[lane].task.join();
    return std::move(lanes_[lane].status);
  }

 private:
  struct Lane {
    Batch batch;
    Status status;
    std::unique_ptr<StagingBuffer> staging;
    Task task;  // last: it is joined before the rest goes
  };

  Status move(size_t lane) {
    const bool direct = primitives_.has(HAL_FACT_HOST_ACCESS);
    if (!direct && lanes_[lane].staging == nullptr) {
      HAL_TRY(StagingBuffer::make(primitives_, arena_.piece_limit(), &lanes_[lane].staging));
    }
    for (const auto& [segment, piece] : moving(lanes_[lane].batch, direction_)) {
      const hal_address device = segment + piece->offset;
      void* buffer = direct ? reinterpret_cast<void*>(device) : lanes_[lane].staging->get();
      HAL_TRY(direction_ == Direction::ToBackup ? save(device, *piece, buffer, direct, stream(lane))
                                                : load(segment, *piece, buffer, direct, stream(lane)));
    }
    return direction_ == Direction::ToBackup ? file_.flush() : Status();
  }

  Status save(hal_address device, Piece& piece, void* buffer, bool direct, uint32_t stream) {
    if (!direct) {
      HAL_TRY(primitives_.copy_to_host(buffer, device, piece.size, stream));
      HAL_TRY(primitives_.synchronize(stream));
    }
    piece.checksum = crc32c(buffer, piece.size);
    return file_.write(buffer, piece.size, piece.position);
  }

  Status load(hal_address segment, const Piece& piece, void* buffer, bool direct, uint32_t stream) {
    HAL_TRY(file_.read(buffer, piece.size, piece.position));
    file_.forget(piece.size, piece.position);
    HAL_TRY(check_piece(segment, piece, buffer, "restore"));
    if (direct) return {};
    HAL_TRY(primitives_.copy_to_device(segment + piece.offset, buffer, piece.size, stream));
    return primitives_.synchronize(stream);
  }

  FileStorage& file_;
  std::array<Lane, kLanes> lanes_;
};

}  // namespace

std::vector<Moving> moving(const Batch& batch, Direction direction) {
  std::vector<Moving> pieces;
  for (const Job& job : batch) {
    for (Piece& piece : *job.pieces) {
      if (direction == Direction::ToDevice || !piece.clean) pieces.push_back({job.segment, &piece});
    }
  }
  return pieces;
}

std::unique_ptr<Mover> Mover::make(Primitives& primitives, Arena& arena, Direction direction,
                                   const MoverOptions& options) {
  if (arena.encodes()) return make_encoded_mover(primitives, arena, direction, options);
  if (arena.file() != nullptr) return std::make_unique<FileMover>(primitives, arena, direction);
  return std::make_unique<MemoryMover>(primitives, arena, direction);
}

}  // namespace hal
