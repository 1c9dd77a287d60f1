// The options of the cpu driver, as `hal_device_open` gets them: "key=value;key=value".
#pragma once

#include <cstdint>
#include <string>

namespace hal {

struct CpuOptions {
  uint64_t capacity = 0;             // bytes; creating more fails with ENOMEM; 0: what the host has
  uint64_t granularity = 64u << 10;  // bytes; a multiple of the page size
  uint64_t chunk = 0;                // bytes of the largest physical piece; 0: no limit
  int dirty = -1;                    // fresh memory is filled with this byte, as by drivers that do not scrub; -1: zero
};

// On failure `bad` is the item that is wrong.
bool parse_cpu_options(const char* text, CpuOptions* out, std::string* bad);

}  // namespace hal
