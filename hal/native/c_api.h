/* The C ABI of libhal, which hal/native.py binds with ctypes.
 *
 * Every call that can fail returns a hal_kind and fills the caller's `hal_status`; nothing is kept between calls, but
 * for the one status a torch allocation callback cannot return: its pool keeps it until `hal_pool_take_error`.
 * Calls are thread-safe. Lock order: Python's GIL -> torch's allocator -> the ledger's mutex; no callback takes the
 * GIL.
 */
#ifndef HAL_C_API_H
#define HAL_C_API_H

#include "driver.h"

#ifdef __cplusplus
extern "C" {
#endif

#define HAL_API __attribute__((visibility("default")))
#define HAL_API_VERSION 2u
#define HAL_POOL_SLOTS 512

typedef struct hal_status {
  int32_t kind;       /* hal_kind */
  int32_t code;       /* the vendor's own code, or errno for host calls */
  uint64_t size;      /* bytes the call was about, else 0 */
  uint64_t address;   /* address the call was about, else 0 */
  uint64_t needed;    /* bytes, for the two memory kinds; for HAL_ADDRESS_LOST the address that was offered, else 0 */
  uint64_t available; /* bytes, for the two memory kinds; it and `needed` are UINT64_MAX when unknown */
  uint64_t limit;     /* bytes, for HAL_HOST_MEMORY: the budget that applied */
  char call[32];      /* "create", "map", "file write", … */
  char text[232];     /* what happened, in words */
} hal_status;

typedef struct hal_device hal_device; /* an opened device with its ledger */
typedef struct hal_arena hal_arena;   /* host memory or a file for backups */

/* ---- drivers ------------------------------------------------------------------------------------------------- */
HAL_API uint32_t hal_api_version(void);
HAL_API int32_t hal_register_driver(const hal_driver* driver, hal_status* status);
HAL_API int32_t hal_load_driver(const char* path, hal_status* status);
HAL_API size_t hal_driver_names(char* out, size_t size); /* comma separated; returns the length needed */

/* ---- devices ------------------------------------------------------------------------------------------------- */
typedef struct hal_counters {
  uint64_t segments, mapped_bytes, asleep_bytes, handles, mappings, reservations, reserved_bytes, pools;
  uint64_t creates, releases, maps, unmaps, deferred_frees; /* successful calls since open */
} hal_counters;

HAL_API int32_t hal_device_open(const char* driver, int32_t device, const char* options, hal_device** out,
                                hal_status* status);
HAL_API int32_t hal_device_close(hal_device* device, hal_status* status); /* BAD_STATE while segments live */
HAL_API int32_t hal_device_facts(hal_device* device, hal_facts* out, hal_status* status);
HAL_API int32_t hal_device_memory(hal_device* device, uint64_t* free_bytes, uint64_t* total_bytes, hal_status* status);
/* From now on a pool allocation that would leave less than `bytes` of the device's memory free fails with
 * HAL_OUT_OF_DEVICE_MEMORY; 0: none does. Wakes are not bound by it. */
HAL_API int32_t hal_device_set_margin(hal_device* device, uint64_t bytes, hal_status* status);
HAL_API void hal_device_counters(hal_device* device, hal_counters* out);

/* The primitives, for users who compose their own. */
HAL_API int32_t hal_granularity(hal_device* device, uint64_t size, uint64_t* bytes, hal_status* status);
HAL_API int32_t hal_reserve(hal_device* device, uint64_t size, uint64_t alignment, uint64_t hint, uint64_t* address,
                            hal_status* status);
HAL_API int32_t hal_unreserve(hal_device* device, uint64_t address, uint64_t size, hal_status* status);
HAL_API int32_t hal_create(hal_device* device, uint64_t size, uint64_t* handle, hal_status* status);
HAL_API int32_t hal_release(hal_device* device, uint64_t handle, uint64_t size, hal_status* status);
HAL_API int32_t hal_map(hal_device* device, uint64_t address, uint64_t size, uint64_t handle, hal_status* status);
HAL_API int32_t hal_access(hal_device* device, uint64_t address, uint64_t size, hal_status* status);
HAL_API int32_t hal_unmap(hal_device* device, uint64_t address, uint64_t size, hal_status* status);
HAL_API int32_t hal_copy_to_host(hal_device* device, void* host, uint64_t address, uint64_t size, uint32_t stream,
                                 hal_status* status);
HAL_API int32_t hal_copy_to_device(hal_device* device, uint64_t address, const void* host, uint64_t size,
                                   uint32_t stream, hal_status* status);
HAL_API int32_t hal_fill(hal_device* device, uint64_t address, uint8_t value, uint64_t size, uint32_t stream,
                         hal_status* status);
HAL_API int32_t hal_synchronize(hal_device* device, uint32_t stream, hal_status* status);
HAL_API int32_t hal_host_register(hal_device* device, void* host, uint64_t size, hal_status* status);
HAL_API int32_t hal_host_unregister(hal_device* device, void* host, uint64_t size, hal_status* status);

/* ---- pools and segments -------------------------------------------------------------------------------------- */
typedef enum hal_segment_state {
  HAL_MAPPED = 0,
  HAL_ASLEEP_BACKED = 1,
  HAL_ASLEEP_DISCARDED = 2,
} hal_segment_state;

typedef struct hal_segment {
  uint64_t address, size, pool, serial; /* serial: unique for ever, so a reused address is another segment */
  uint64_t backup_bytes;
  int32_t state;        /* hal_segment_state */
  int32_t free_pending; /* 1: its owner freed it during a transition; it goes when the transition ends */
} hal_segment;

/* Makes a pool and the pair of entry points that torch's pluggable allocators take:
 *   void *alloc(ssize_t size, int device, void *stream);  void free(void *address, ssize_t size, int device, void
 * *stream); `pool` is never used twice in a process. A slot is used again only after its last segment was freed. With
 * all HAL_POOL_SLOTS taken: HAL_UNSUPPORTED. */
HAL_API int32_t hal_pool_create(hal_device* device, const char* tag, uint64_t* pool, void** alloc_entry,
                                void** free_entry, hal_status* status);
HAL_API int32_t hal_pool_destroy(hal_device* device, uint64_t pool, hal_status* status); /* segments may outlive it */
HAL_API int32_t hal_pool_allocate(hal_device* device, uint64_t pool, uint64_t size, uint64_t* address,
                                  hal_status* status);
HAL_API int32_t hal_free(hal_device* device, uint64_t address, hal_status* status);
/* The first failure of this pool's alloc entry since the last take; HAL_OK when there was none. */
HAL_API int32_t hal_pool_take_error(hal_device* device, uint64_t pool, hal_status* status);
/* Fills at most `capacity` infos, ordered by address, and returns how many there are. pool 0: all pools. */
HAL_API size_t hal_segments(hal_device* device, uint64_t pool, hal_segment* out, size_t capacity);

/* ---- host memory --------------------------------------------------------------------------------------------- */
typedef struct hal_host_info {
  uint64_t available; /* bytes this process may still take: the least of MemAvailable and every cgroup's room */
  uint64_t total;     /* bytes: the least of MemTotal and every cgroup's limit */
  char source[32];    /* "meminfo", "cgroup v1", "cgroup v2" */
} hal_host_info;
HAL_API int32_t hal_host_memory(hal_host_info* out, hal_status* status);

typedef enum hal_backing { HAL_ANONYMOUS = 0, HAL_FILE = 1, HAL_PINNED = 2 } hal_backing;

typedef struct hal_arena_options {
  int32_t backing;        /* hal_backing */
  int32_t verify;         /* 1: keep and check a checksum for every piece (always on for files) */
  int32_t require_pinned; /* 1: a failed registration is an error, not a fallback to pageable */
  int32_t reserved;
  uint64_t budget;           /* bytes; 0: what is available */
  const char* directory;     /* for HAL_FILE */
  const char* codec;         /* the name of the driver's codec that backups are encoded with; null: they are not */
  const char* codec_library; /* the file that has it; null: the codec knows */
  const char* codec_kind;    /* what the contents are; null: bytes */
} hal_arena_options;

typedef struct hal_arena_stats {
  uint64_t held_bytes;   /* taken from the system (or the disk) */
  uint64_t used_bytes;   /* of them, holding backups */
  uint64_t pinned_bytes; /* of them, registered with the device */
  uint64_t chunks;
  int32_t fell_back; /* 1: pinned was asked for and pageable was used */
  int32_t direct_io; /* 1: a file is written around the page cache */
} hal_arena_stats;

HAL_API int32_t hal_arena_create(hal_device* device, const hal_arena_options* options, hal_arena** out,
                                 hal_status* status);
HAL_API int32_t hal_arena_destroy(hal_arena* arena, hal_status* status); /* BAD_STATE while it holds backups */
HAL_API void hal_arena_stats_of(hal_arena* arena, hal_arena_stats* out);
/* Takes now what backups of `bytes` more will need, so that the next sleep need not. */
HAL_API int32_t hal_arena_prepare(hal_arena* arena, uint64_t bytes, hal_status* status);
HAL_API uint64_t hal_arena_trim(hal_arena* arena); /* give free chunks back; returns bytes */
/* Whether backups of `bytes` more would fit: HAL_OK or HAL_HOST_MEMORY; changes nothing. */
HAL_API int32_t hal_arena_check(hal_arena* arena, uint64_t bytes, hal_status* status);

/* Copies [offset, offset + size) of the segment that begins at `address` out of its backup: the one it sleeps with, or
 * the one that its last wake retained. Changes nothing. HAL_BAD_STATE: there is no backup of all these bytes. */
HAL_API int32_t hal_backup_read(hal_device* device, uint64_t address, uint64_t offset, uint64_t size, void* out,
                                hal_status* status);

/* ---- transitions --------------------------------------------------------------------------------------------- */
typedef enum hal_action {
  HAL_OFFLOAD = 1,
  HAL_DISCARD = 2,
  HAL_DROP_BACKUP = 3, /* a segment that is asleep with a backup gives it up: it is then ASLEEP_DISCARDED; a mapped one
                        * gives up the backup that was retained */
} hal_action;

typedef struct hal_segment_order {
  uint64_t address, serial;          /* the segment; one freed since it was listed is skipped */
  int32_t action;                    /* hal_action, for sleep */
  uint32_t first_range, range_count; /* its live ranges in the request; 0 ranges of an OFFLOAD: the whole segment is
                                      * live, unless `nothing_live`; ranges of a DISCARD outlive it in a backup */
  int32_t nothing_live;
  uint32_t first_clean, clean_count; /* for sleep: its ranges in the request that a retained backup holds as they are
                                      * now; they need no copy. Ignored where no such backup is there */
  int32_t retain;                    /* for wake: the backup outlives it, for the next sleep */
  int32_t reserved;
  /* results */
  uint64_t copied_bytes, released_bytes, mapped_bytes, filled_bytes;
  uint64_t unchanged_bytes; /* of a backup: there already, not copied */
  int32_t skipped;          /* 1: already in that state, or freed */
  int32_t state;            /* hal_segment_state after the call; -1: freed */
} hal_segment_order;

typedef struct hal_range {
  uint64_t offset, size; /* bytes within the segment */
} hal_range;

typedef struct hal_transfer_report {
  uint64_t copied_bytes, released_bytes, mapped_bytes, filled_bytes, unchanged_bytes;
  uint64_t host_bytes; /* that the backups of this transition take, or took */
  double synchronize_seconds, host_seconds, copy_seconds, total_seconds;
  int32_t ended_asleep; /* sleep only: it failed, could not map everything again, and ended asleep, backups whole */
  int32_t rolled_back;  /* 1: it failed and everything is as before */
} hal_transfer_report;

/* Sleep: reserve all host memory, synchronize the device, copy, release; a failure maps again and restores. */
HAL_API int32_t hal_sleep(hal_device* device, hal_arena* arena, hal_segment_order* orders, size_t order_count,
                          const hal_range* ranges, size_t range_count, hal_transfer_report* report, hal_status* status);
/* Wake: create, map, copy or fill; a failure rolls back to asleep with the backups whole. `fill` is the byte that
 * memory without contents gets (discarded segments and dead ranges), or -1: zero, and only where the platform does not
 * scrub. Backups are given back to the arena but for those of orders that `retain` them. */
HAL_API int32_t hal_wake(hal_device* device, hal_arena* arena, hal_segment_order* orders, size_t order_count,
                         int32_t fill, hal_transfer_report* report, hal_status* status);
/* The 128-bit fingerprints of blocks of memory that the host can read: two words a block, as
 * hal.core.kernels.fingerprint defines them. Of a block, `offset` is its address and `size` its bytes, a multiple of 4;
 * `keys` are the two keys of the rows and the two of the columns. */
HAL_API void hal_fingerprint(const hal_range* blocks, size_t count, const uint64_t* keys, uint64_t* digests);

/* ---- fault points, for tests --------------------------------------------------------------------------------- */
/* The nth call from now (1 = next) of `call` fails with the vendor code `code`, `times` times in a row (-1: for ever).
 * Calls: the names of the primitives in driver.h, "encode", "decode", "arena grow", "file write", "file read", and
 * "restore", whose
 * failure with code 0 leaves out the copy of one segment silently (a defect that verification has to find). */
HAL_API int32_t hal_fault_set(hal_device* device, const char* call, uint64_t nth, int32_t code, int64_t times,
                              hal_status* status);
HAL_API void hal_fault_clear(hal_device* device);
HAL_API uint64_t hal_fault_hits(hal_device* device, const char* call); /* how often a fault of this call fired */
/* Flips one bit of a sleeping segment's backup. */
HAL_API int32_t hal_backup_flip_bit(hal_device* device, uint64_t address, uint64_t bit, hal_status* status);

#ifdef __cplusplus
}
#endif
#endif
