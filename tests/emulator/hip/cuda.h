// The libcuda beneath: the functions that the emulated runtime stands on.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emuhip {

using Code = int32_t;

struct Cuda {
  Code (*init)(uint32_t);
  Code (*device_count)(int32_t*);
  Code (*device_attribute)(int32_t*, int32_t, int32_t);
  Code (*device_name)(char*, int32_t, int32_t);
  Code (*device_uuid)(uint8_t*, int32_t);
  Code (*pci_bus_id)(char*, int32_t, int32_t);
  Code (*retain_context)(void**, int32_t);
  Code (*set_context)(void*);
  Code (*synchronize)();
  Code (*memory_info)(size_t*, size_t*);
  Code (*granularity)(size_t*, const void*, int32_t);
  Code (*reserve)(uint64_t*, size_t, size_t, uint64_t, unsigned long long);
  Code (*unreserve)(uint64_t, size_t);
  Code (*create)(uint64_t*, size_t, const void*, unsigned long long);
  Code (*release)(uint64_t);
  Code (*map)(uint64_t, size_t, size_t, uint64_t, unsigned long long);
  Code (*unmap)(uint64_t, size_t);
  Code (*access)(uint64_t, size_t, const void*, size_t);
  Code (*to_host)(void*, uint64_t, size_t, void*);
  Code (*to_device)(uint64_t, const void*, size_t, void*);
  Code (*fill_bytes)(uint64_t, uint8_t, size_t, void*);
  Code (*fill_words)(uint64_t, uint32_t, size_t, void*);
  Code (*stream_create)(void**, uint32_t);
  Code (*stream_destroy)(void*);
  Code (*stream_synchronize)(void*);
  Code (*stream_is_capturing)(void*, int32_t*);
  Code (*exchange_capture_mode)(int32_t*);
  Code (*host_register)(void*, size_t, uint32_t);
  Code (*host_unregister)(void*);
};

// Loaded and initialized at the first call. Null with a code in `code`: hipErrorNoDevice where there is none.
const Cuda* cuda(Code* code);

// Makes the calling thread's current HIP device current in libcuda too, which has contexts where HIP has none.
Code enter(const Cuda** out);

int32_t current_device();
Code set_current_device(int32_t device);

}  // namespace emuhip
