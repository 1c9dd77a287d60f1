#include "fingerprint.h"

#include <array>

namespace hal {
namespace {

constexpr uint64_t kPrime = (uint64_t{1} << 61) - 1;

__extension__ using Wide = unsigned __int128;

// A product modulo the prime, up to a few multiples of it.
uint64_t multiply(uint64_t a, uint64_t b) {
  const Wide product = static_cast<Wide>(a) * b;
  return (static_cast<uint64_t>(product) & kPrime) + static_cast<uint64_t>(product >> 61);
}

uint64_t canonical(uint64_t value) {
  value = (value & kPrime) + (value >> 61);
  return value >= kPrime ? value - kPrime : value;
}

}  // namespace

uint64_t fingerprint(const uint32_t* block, size_t words, const FingerprintKey& key) {
  std::array<uint64_t, kFingerprintColumns> totals{};
  totals[0] = words;
  for (size_t row = 0; row < words; row += kFingerprintColumns) {
    // Keys below 2^58 keep every total below 2^62 with one fold.
    for (size_t column = 0; column < kFingerprintColumns; ++column) {
      const uint64_t word = row + column < words ? block[row + column] : 0;
      totals[column] = multiply(totals[column], key.row) + word;
    }
  }
  uint64_t sum = 0;
  for (size_t column = kFingerprintColumns; column-- > 0;) {
    sum = canonical(multiply(sum, key.column) + canonical(totals[column]));
  }
  return sum;
}

}  // namespace hal
