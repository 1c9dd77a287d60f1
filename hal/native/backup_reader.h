// Reading a backup while it stays where it is.
#pragma once

#include "segment.h"

namespace hal {

// Copies a range of the segment out of its backup; HAL_BAD_STATE unless the backup has all of it.
Status read_backup(Segment& segment, Range wanted, void* out);

}  // namespace hal
