// The 128-bit fingerprint of a block of host memory; core/kernels/fingerprint.py says what it is and why.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hal {

constexpr size_t kFingerprintColumns = 1024;

// The keys of one half: for the rows, below 2^58, and for the columns, below 2^61 - 1.
struct FingerprintKey {
  uint64_t row, column;
};

// Of `words` words of 4 bytes at `block`; in [0, 2^61 - 1).
uint64_t fingerprint(const uint32_t* block, size_t words, const FingerprintKey& key);

}  // namespace hal
