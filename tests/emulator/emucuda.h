/* The controls of the emulated libcuda: what a test sets and reads besides the driver's own functions.
 *
 * All are thread-safe. Environment variables, read when the library is loaded and again by emucuda_reset:
 *   EMUCUDA_DEVICES=1            how many devices there are (at most 16)
 *   EMUCUDA_MEMORY_MB=512        capacity of each
 *   EMUCUDA_GRANULARITY_KB=2048  allocation granularity
 *   EMUCUDA_POISON=165           byte that fresh physical memory holds; -1: zero pages
 *   EMUCUDA_DRIVER_VERSION=13000 what cuDriverGetVersion answers
 *   EMUCUDA_PIN_LIMIT_MB=0       most host memory that can be registered; 0: no limit
 *   EMUCUDA_ATTRIBUTES=          device attributes that differ, as in "102=0,18=1"
 *   EMUCUDA_FAIL=                faults, as in "cuMemCreate:3:2,cuMemMap:1:999:-1" (call:nth:code[:times])
 *   EMUCUDA_IGNORE_HINTS=0       1: reservations never land at their hint
 *   EMUCUDA_PROCESSES=           folder in which processes see each other's checkpoint states, a file each
 *   EMUCUDA_MIG=0                1: cuDeviceGetUuid_v2 names a MIG instance
 */
#ifndef EMUCUDA_H
#define EMUCUDA_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EMUCUDA_API __attribute__((visibility("default")))

typedef struct emucuda_device_stats {
  uint64_t used_bytes; /* physical memory that this process holds */
  uint64_t rdma_bytes; /* of it, made for GPUDirect RDMA */
  uint64_t handles;    /* physical pieces with a live handle */
  uint64_t orphans;    /* pieces whose handle is released and that a mapping still holds */
  uint64_t mappings;
  uint64_t reservations;    /* of all devices: addresses belong to none */
  uint64_t double_releases; /* calls that released a dead handle, since the last reset */
  uint64_t streams;         /* live, the default stream not counted */
  uint64_t queued;          /* operations that have not finished */
  uint64_t retained;        /* references to the primary context */
  uint64_t registrations;   /* of host memory, of all devices */
  uint64_t registered_bytes;
  int64_t sticky_error; /* what every call on this device returns; 0: none */
} emucuda_device_stats;

EMUCUDA_API int32_t emucuda_stats(int32_t device, emucuda_device_stats* out);

/* Settings, sticky errors, faults, call counts and double releases as after loading; what is allocated stays. */
EMUCUDA_API void emucuda_reset(void);

/* The nth call from now of a function fails with `code` and does nothing, `times` times in a row (-1: for ever). */
EMUCUDA_API void emucuda_fail(const char* call, uint64_t nth, int32_t code, int64_t times);
/* How often a function was called since the last reset. */
EMUCUDA_API uint64_t emucuda_calls(const char* call);

EMUCUDA_API void emucuda_set_capacity(int32_t device, uint64_t bytes);
/* Other processes hold `bytes` of the device from now on. */
EMUCUDA_API void emucuda_set_taken(int32_t device, uint64_t bytes);
EMUCUDA_API void emucuda_set_attribute(int32_t attribute, int32_t value);
EMUCUDA_API void emucuda_set_driver_version(int32_t version);
EMUCUDA_API void emucuda_set_poison(int32_t byte);
EMUCUDA_API void emucuda_set_pin_limit(uint64_t bytes);
/* Every queued copy and fill waits this long before it runs, so that whoever does not wait for it is found out. */
EMUCUDA_API void emucuda_set_delay(uint64_t microseconds);

/* A kernel on `stream` of the current context: waits, then writes `size` bytes of `value`. Memory that is not mapped by
 * then is an illegal address (700), sticky, as on a GPU. */
EMUCUDA_API int32_t emucuda_launch_write(void* stream, uint64_t address, uint8_t value, uint64_t size,
                                         uint64_t microseconds);
/* A kernel that waits, then fails with `code`, sticky. */
EMUCUDA_API int32_t emucuda_launch_failure(void* stream, int32_t code, uint64_t microseconds);

/* Puts a stream into capture (mode: 0 global, 1 thread-local, 2 relaxed) and out of it again; `end` returns 901 when a
 * forbidden call has broken the capture. No graph is recorded. */
EMUCUDA_API int32_t emucuda_capture_begin(void* stream, int32_t mode);
EMUCUDA_API int32_t emucuda_capture_end(void* stream);

#ifdef __cplusplus
}
#endif
#endif
