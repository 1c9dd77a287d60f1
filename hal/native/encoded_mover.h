// Moves backups that are encoded on the device: what crosses the link, and what lies in the arena, is smaller.
#pragma once

#include "mover.h"

namespace hal {

std::unique_ptr<Mover> make_encoded_mover(Primitives& primitives, Arena& arena, Direction direction,
                                          const MoverOptions& options);

}  // namespace hal
