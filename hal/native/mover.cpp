// The two ways of moving: by the device's copy streams to and from host memory, and by reads and writes of a file.
// Touches the driver, the arena's memory or file, and helper threads; takes no lock of its own.
#include "mover.h"

#include <sys/mman.h>

#include <algorithm>
#include <mutex>

#include "crc32c.h"

namespace hal {
namespace {

Status corrupt(hal_address segment, const Piece& piece) {
  return Status::error(HAL_CORRUPT_BACKUP, "restore", 0,
                       "the checksum of the piece at offset " + std::to_string(piece.offset) + " differs", piece.size,
                       segment);
}

Status check(hal_address segment, const Piece& piece, const void* contents) {
  return crc32c(contents, piece.size) == piece.checksum ? Status() : corrupt(segment, piece);
}

// Calls body(segment, piece) for every piece of a batch on several threads and returns the first failure.
template <typename Body>
Status for_each_piece(const Batch& batch, Body body) {
  std::vector<std::pair<hal_address, Piece*>> flat;
  for (const Job& job : batch) {
    for (Piece& piece : *job.pieces) flat.emplace_back(job.segment, &piece);
  }
  std::mutex mutex;
  Status first;
  parallel_for(flat.size(), processors(8), [&](size_t i) {
    Status status = body(flat[i].first, *flat[i].second);
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
      HAL_TRY(for_each_piece(batches_[lane], [](hal_address segment, const Piece& piece) {
        return check(segment, piece, Arena::host(piece.position));
      }));
    }
    for (const Job& job : batches_[lane]) {
      for (const Piece& piece : *job.pieces) HAL_TRY(copy(job.segment, piece, stream(lane)));
    }
    return {};
  }

  Status finish(size_t lane) override {
    HAL_TRY(primitives_.synchronize(stream(lane)));
    if (direction_ == Direction::ToDevice || !arena_.verifies()) return {};
    return for_each_piece(batches_[lane], [](hal_address, Piece& piece) {
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

// A bounce buffer between a device that the host cannot reach and a file; pinned where that works.
class StagingBuffer {
 public:
  StagingBuffer(Primitives& primitives, uint64_t size) : primitives_(primitives), size_(size) {
    memory_ = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) memory_ = nullptr;
    if (memory_ != nullptr && primitives.has(HAL_FACT_PIN_HOST))
      registered_ = primitives.host_register(memory_, size).ok();
  }
  ~StagingBuffer() {
    // Memory that the driver still knows must not be unmapped: a page left behind is the lesser harm.
    if (registered_ && !primitives_.host_unregister(memory_, size_).ok()) return;
    if (memory_ != nullptr) munmap(memory_, size_);
  }
  StagingBuffer(const StagingBuffer&) = delete;
  StagingBuffer& operator=(const StagingBuffer&) = delete;
  void* get() const { return memory_; }

 private:
  Primitives& primitives_;
  const uint64_t size_;
  void* memory_ = nullptr;
  bool registered_ = false;
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
      lanes_[lane].staging = std::make_unique<StagingBuffer>(primitives_, arena_.piece_limit());
      if (lanes_[lane].staging->get() == nullptr) {
        return Status::error(HAL_HOST_MEMORY, "staging", 0, "no host memory for a bounce buffer", arena_.piece_limit());
      }
    }
    for (const Job& job : lanes_[lane].batch) {
      for (Piece& piece : *job.pieces) {
        const hal_address device = job.segment + piece.offset;
        void* buffer = direct ? reinterpret_cast<void*>(device) : lanes_[lane].staging->get();
        HAL_TRY(direction_ == Direction::ToBackup ? save(device, piece, buffer, direct, stream(lane))
                                                  : load(job.segment, piece, buffer, direct, stream(lane)));
      }
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
    HAL_TRY(check(segment, piece, buffer));
    if (direct) return {};
    HAL_TRY(primitives_.copy_to_device(segment + piece.offset, buffer, piece.size, stream));
    return primitives_.synchronize(stream);
  }

  FileStorage& file_;
  std::array<Lane, kLanes> lanes_;
};

}  // namespace

std::unique_ptr<Mover> Mover::make(Primitives& primitives, Arena& arena, Direction direction) {
  if (arena.file() != nullptr) return std::make_unique<FileMover>(primitives, arena, direction);
  return std::make_unique<MemoryMover>(primitives, arena, direction);
}

}  // namespace hal
