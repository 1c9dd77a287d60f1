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

class Mover {
 public:
  static std::unique_ptr<Mover> make(Primitives& primitives, Arena& arena, Direction direction);
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

}  // namespace hal
