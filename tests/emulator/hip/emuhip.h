/* The controls of the emulated libamdhip64: a HIP runtime over whatever libcuda there is, the emulated one or a real
 * one, that behaves like AMD's releases, bugs included.
 *
 * Environment, read when the library is loaded and again by emuhip_reset:
 *   EMUHIP_LIBCUDA=libcuda.so.1  the libcuda beneath
 *   EMUHIP_VERSION=70226015      what hipRuntimeGetVersion answers
 *   EMUHIP_QUIRKS=               comma-separated:
 *     hold           released memory stays in use until its range is freed, or the process maps something else over it
 *                    (the runtime leaves a file mapped there; not over a real libcuda)
 *     hold-hard      the same, and only freeing the range helps
 *     leak           released memory stays in use for good
 *     ignore-hint    reservations never land at their hint
 *     refuse-align   a reservation with an alignment fails, as if memory were short
 *     unmap-several  one unmap of several mappings works, and leaves the range impossible to free
 *     access-parts   access to less than all that is mapped in a range is refused
 *     access-early   access is refused until the device has been waited for since the last mapping
 *     free-frozen    the free memory of hipMemGetInfo never moves
 *
 * What makes AMD's runtime dereference nonsense (a dead handle, memory that is not mapped, an unknown range) prints one
 * line and aborts here.
 */
#ifndef EMUHIP_H
#define EMUHIP_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define EMUHIP_API __attribute__((visibility("default")))

EMUHIP_API void emuhip_reset(void);
EMUHIP_API void emuhip_set_quirks(const char* names);
EMUHIP_API void emuhip_set_version(int32_t version);
/* The next `count` ranges that are freed are taken by somebody else in the same moment. */
EMUHIP_API void emuhip_steal(int32_t count);
/* Somebody else gives back what it has taken. */
EMUHIP_API void emuhip_return_stolen(void);
/* Bytes that are released and still in use. */
EMUHIP_API uint64_t emuhip_held_bytes(void);

#ifdef __cplusplus
}
#endif
#endif
