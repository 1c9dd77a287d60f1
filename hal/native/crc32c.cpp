// The only file that looks at the processor; everything else goes through crc32c().
#include "crc32c.h"

#include <array>
#include <cstring>

#if defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace hal {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;  // 0x1EDC6F41, bits reversed

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) value = (value >> 1) ^ ((value & 1u) != 0 ? kPolynomial : 0u);
    table[byte] = value;
  }
  return table;
}

constexpr std::array<uint32_t, 256> kTable = make_table();

uint64_t load_word(const uint8_t* bytes) {
  uint64_t word;
  std::memcpy(&word, bytes, sizeof word);
  return word;
}

#if defined(__x86_64__)
#if defined(__clang__) && __clang_major__ >= 14  // it has split the instruction off from SSE 4.2
#define HAL_CRC_TARGET __attribute__((target("sse4.2,crc32")))
#else
#define HAL_CRC_TARGET __attribute__((target("sse4.2")))
#endif
HAL_CRC_TARGET inline uint32_t step_word(uint32_t crc, uint64_t word) {
  return static_cast<uint32_t>(__builtin_ia32_crc32di(crc, word));
}
HAL_CRC_TARGET inline uint32_t step_byte(uint32_t crc, uint8_t byte) {
  return __builtin_ia32_crc32qi(crc, byte);
}
bool processor_has_crc() {
  return __builtin_cpu_supports("sse4.2") != 0;
}
#elif defined(__aarch64__)
#define HAL_CRC_TARGET __attribute__((target("+crc")))
HAL_CRC_TARGET inline uint32_t step_word(uint32_t crc, uint64_t word) {
  return __crc32cd(crc, word);
}
HAL_CRC_TARGET inline uint32_t step_byte(uint32_t crc, uint8_t byte) {
  return __crc32cb(crc, byte);
}
bool processor_has_crc() {
  constexpr unsigned long kHwcapCrc32 = 1ul << 7;
  return (getauxval(AT_HWCAP) & kHwcapCrc32) != 0;
}
#endif

#if defined(HAL_CRC_TARGET)
HAL_CRC_TARGET uint32_t crc32c_hardware(const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t crc = ~0u;
  for (; size >= 8; size -= 8, bytes += 8) crc = step_word(crc, load_word(bytes));
  for (; size > 0; --size, ++bytes) crc = step_byte(crc, *bytes);
  return ~crc;
}
#endif

}  // namespace

uint32_t crc32c_portable(const void* data, size_t size) {
  const auto* bytes = static_cast<const uint8_t*>(data);
  uint32_t crc = ~0u;
  for (; size > 0; --size, ++bytes) crc = (crc >> 8) ^ kTable[(crc ^ *bytes) & 0xFFu];
  return ~crc;
}

uint32_t crc32c(const void* data, size_t size) {
#if defined(HAL_CRC_TARGET)
  static const bool hardware = processor_has_crc();
  if (hardware) return crc32c_hardware(data, size);
#endif
  return crc32c_portable(data, size);
}

}  // namespace hal
