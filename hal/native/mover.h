// Moves backup pieces between a device and an arena, up to kLanes batches at a time, each in a lane of its own.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "arena.h"
#include "primitives.h"
#include "step_sizes.h"

namespace hal {

constexpr size_t kLanes = 2;

enum class Direction { ToBackup, ToDevice };

struct Job {
  hal_address segment;
  std::vector<Piece>* pieces;
};
using Batch = std::vector<Job>;

struct MoverOptions {
  Growth* growth = nullptr;           // to a backup: where room comes from whose size is not known before
  uint64_t device_room = UINT64_MAX;  // bytes of device memory that a mover may take for itself, if it can do with them
};

class Mover {
 public:
  static std::unique_ptr<Mover> make(Primitives& primitives, Arena& arena, Direction direction,
                                     const MoverOptions& options = {});
  virtual ~Mover() = default;  // waits for what is in flight on the host's side
  // Begins a batch in a lane that is empty. What goes to the device from a verifying arena is checked before it counts.
  virtual Status start(Batch batch, size_t lane) = 0;
  // Waits for the lane's batch.
  virtual Status finish(size_t lane) = 0;

 protected:
  Mover(Primitives& primitives, Arena& arena, Direction direction)
      : primitives_(primitives), arena_(arena), direction_(direction) {}
  uint32_t stream(size_t lane) const { return static_cast<uint32_t>(lane % primitives_.facts().streams); }

  Primitives& primitives_;
  Arena& arena_;
  const Direction direction_;
};

struct Moving {
  hal_address segment;
  Piece* piece;
};
// The pieces of a batch that have to move: on the way to the device all of them.
std::vector<Moving> moving(const Batch& batch, Direction direction);

}  // namespace hal
