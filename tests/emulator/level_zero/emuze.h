/* The controls of the emulated Intel driver: what a test sets and reads besides Level Zero's own functions.
 *
 * All are thread-safe. The driver reads ZE_AFFINITY_MASK, ZE_FLAT_DEVICE_HIERARCHY and ZES_ENABLE_SYSMAN whenever it is
 * asked for devices, as Intel's does when it starts.
 */
#ifndef EMUZE_H
#define EMUZE_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EMUZE_API __attribute__((visibility("default")))

typedef struct emuze_stats {
  uint64_t used_bytes; /* physical memory that this process holds on the card */
  uint64_t handles, orphans, mappings;
  uint64_t reservations, contexts, lists; /* of all cards */
  uint64_t queued;                        /* operations that have not finished */
  uint64_t double_releases;               /* calls that destroyed dead physical memory, since the last reset */
  uint64_t shared_mappings;               /* maps of physical memory that was mapped already, since the last reset */
  uint64_t concurrent_uses;               /* calls on a list while another thread used it, since the last reset */
  uint64_t registrations, registered_bytes;
} emuze_stats;

EMUZE_API int32_t emuze_stats_of(int32_t card, emuze_stats* out);

/* Settings, faults and counts as after loading; what is allocated stays. */
EMUZE_API void emuze_reset(void);

/* Sets one property, of one card where it is a card's; returns 0 for an unknown name.
 *   cards=1, first=0 (that many, from that one on, of the 4 that there are), poison=165 (byte of fresh memory; -1: zero
 * pages), delay_us=0 (of every copy and fill), pin_limit=0 (bytes; 0: none), import=1 (the driver has the extension to
 * import host memory), late_memory=0 (1: physical memory is taken when it is mapped, so that only then it can run out),
 *   share=0 (1: a second mapping of physical memory works),
 *   sysman_reversed=0 (1: Sysman lists the cards in the opposite order), sysman_modules=1, sysman_processes=1,
 *   sysman_free=0 (0: true, 1: frozen at its first value, 2: always 0, 3: always the total)
 *   of a card: total=536870912, taken=0 (by other processes), tiles=1 (at most 4), integrated=0, bus=0x3a + card */
EMUZE_API int32_t emuze_set(const char* name, int32_t card, int64_t value);

/* The nth call from now of a function fails with `code` and does nothing, `times` times in a row (-1: for ever). */
EMUZE_API void emuze_fail(const char* call, uint64_t nth, int32_t code, int64_t times);
/* How often a function was called since the last reset. */
EMUZE_API uint64_t emuze_calls(const char* call);

/* Torch's own context and the device in it, as SYCL would have made them. */
EMUZE_API void emuze_engine_context(int32_t device, void** context, void** handle);
/* A kernel in a context: writes `size` bytes of `value` at once; an address that the context does not map is
 * 0x70000001, as a device that is lost. */
EMUZE_API int32_t emuze_kernel_write(void* context, uint64_t address, uint8_t value, uint64_t size);

#ifdef __cplusplus
}
#endif
#endif
