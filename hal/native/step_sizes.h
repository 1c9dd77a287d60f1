// How much is done at once. The native tests set the first two lower, so that small segments make many batches.
#pragma once

#include <cstdint>

#ifndef HAL_BATCH_MIB
#define HAL_BATCH_MIB 64
#endif
#ifndef HAL_CHUNK_MIB
#define HAL_CHUNK_MIB 128
#endif

namespace hal {

constexpr uint64_t kBatchBytes = uint64_t{HAL_BATCH_MIB} << 20;    // copied before it is released: hides the release
constexpr uint64_t kLargestChunk = uint64_t{HAL_CHUNK_MIB} << 20;  // taken by an arena and registered at once
constexpr uint64_t kEncodedPiece = kBatchBytes / 64;  // encoded as one: larger ones encode slower, and copy faster
constexpr uint64_t kVerifiedPiece = 4u << 20;         // bytes under one checksum
constexpr uint64_t kPlainPiece = 64u << 20;           // bytes of one copy where nothing is checked
constexpr uint64_t kLargestFill = 1u << 30;  // some devices fault on one fill over many freshly mapped gigabytes
constexpr uint64_t kTouchSlice = 16u << 20;  // touched by one thread at a time

}  // namespace hal
