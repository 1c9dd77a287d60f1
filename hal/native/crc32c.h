// CRC-32C (Castagnoli, Braeuer and Herrmann 1993; RFC 3720, appendix B.4): the checksum of every backup piece.
#pragma once

#include <cstddef>
#include <cstdint>

namespace hal {

// With the processor's own instruction where it has one.
uint32_t crc32c(const void* data, size_t size);
// The same by table, on any processor.
uint32_t crc32c_portable(const void* data, size_t size);

}  // namespace hal
