/* The table of primitives that a platform's driver gives to libhal: a public, versioned C ABI.
 *
 * A driver is one `hal_driver` filled with function pointers and registered at run time with
 * `hal_register_driver` (or found by `hal_load_driver` in a shared object that exports
 * `const hal_driver *hal_driver_entry(void)`), so a vendor outside this repository can add itself.
 *
 * Rules for every primitive:
 *   - it returns the vendor's own code; 0 is success. It logs nothing, aborts nothing, keeps no sticky error;
 *   - it is called from any thread, often concurrently, and never while Python's GIL is needed;
 *   - it changes nothing when it fails.
 * All policy (states, rollback, budgets, fault points) lives above this table, written once.
 */
#ifndef HAL_DRIVER_H
#define HAL_DRIVER_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HAL_DRIVER_ABI 1u
#define HAL_ALL_STREAMS UINT32_MAX

typedef uint64_t hal_address; /* a device virtual address */
typedef uint64_t hal_handle;  /* physical memory, named by the driver; 0 is never a valid handle */

/* What a failure means to the layers above, whatever the vendor calls it. */
typedef enum hal_kind {
  HAL_OK = 0,
  HAL_OUT_OF_DEVICE_MEMORY = 1, /* physical device memory does not suffice */
  HAL_HOST_MEMORY = 2,          /* host memory or backup storage does not suffice, or its budget is spent */
  HAL_BUSY = 3,                 /* the device or a transaction is busy */
  HAL_DRIVER_ERROR = 4,         /* a vendor call failed for another reason */
  HAL_ADDRESS_LOST = 5,         /* a reserved range could not be had again at its address */
  HAL_BAD_STATE = 6,            /* the call does not fit the state of the object */
  HAL_INVALID = 7,              /* a bad argument */
  HAL_UNSUPPORTED = 8,          /* the platform cannot do this */
  HAL_CORRUPT_BACKUP = 9,       /* a backup's checksum differs: nothing was restored from it */
} hal_kind;

/* Yes/no facts of an opened device; each "no" carries a one-line reason in `hal_facts.why_not`. */
typedef enum hal_fact {
  HAL_FACT_VMM = 0,            /* addresses and physical memory are separate, so memory can sleep */
  HAL_FACT_PIN_HOST = 1,       /* host_register works */
  HAL_FACT_SCRUBS = 2,         /* memory from `create` is zero when it is mapped */
  HAL_FACT_FREE_TRUTHFUL = 3,  /* memory_info's `free` moves with `create` and `release` */
  HAL_FACT_HOST_ACCESS = 4,    /* the host may read and write mapped device addresses directly */
  HAL_FACT_UNIFIED_MEMORY = 5, /* device memory and host memory are the same physical memory */
  HAL_FACT_RDMA = 6,           /* `create` makes memory that RDMA devices can register */
  HAL_FACT_PARK = 7,           /* the driver's own process checkpoint is there */
  HAL_FACT_COUNT = 8,
} hal_fact;

typedef struct hal_facts {
  uint64_t granularity; /* bytes; every size and address of `create` and `map` is a multiple */
  uint64_t alignment;   /* bytes; what `reserve` should be asked for */
  uint64_t chunk;       /* bytes of the largest physical piece to create at once; 0: no limit */
  uint32_t streams;     /* copy streams, numbered from 0; at least 1 */
  uint32_t yes;         /* bit i is hal_fact i */
  char why_not[HAL_FACT_COUNT][120];
  char device_name[64];
  char device_uuid[64]; /* UUID or PCI address by which management libraries know it; "" when unknown */
  char version[48];     /* of the driver, in the vendor's words */
} hal_facts;

/* One chunk for a codec: where its contents are, and where it is (or goes) encoded. Sizes in bytes. */
typedef struct hal_chunk {
  hal_address plain, encoded;
  uint64_t plain_size;
  uint64_t encoded_size; /* to encode: the room at `encoded`; to decode: what is there */
} hal_chunk;

/* A lossless codec that works where the driver's memory is. Its calls return 0 or a code of its own, and `describe`
 * puts that into words. `host` is memory of the host, `scratch` of the device, of the sizes that `limits` tells; both
 * belong to one call until the stream has passed it. When it has, `host` begins with `count` sizes of 8 bytes, of an
 * encode the encoded ones, of a decode the decoded ones, and then `count` results of 4 bytes, 0 for a chunk that went
 * well. */
typedef struct hal_codec {
  const char* name;
  int32_t immediate; /* 1: the host does it during the call, so the stream has to be waited for before */
  /* `context` is the driver's, `library` the file that has the codec, `kind` what the contents are: "" is bytes. On
   * failure `why` says what to do. */
  int32_t (*open)(void* context, const char* library, const char* kind, void** codec, char* why, size_t why_size);
  void (*close)(void* codec);
  /* For at most `count` chunks of at most `chunk` bytes: the most that one may take encoded, and what a call needs. */
  int32_t (*limits)(void* codec, uint64_t chunk, uint32_t count, uint64_t* encoded, uint64_t* scratch, uint64_t* host);
  /* On a copy stream, asynchronous unless `immediate`. */
  int32_t (*encode)(void* codec, const hal_chunk* chunks, uint32_t count, hal_address scratch, void* host,
                    uint32_t stream);
  int32_t (*decode)(void* codec, const hal_chunk* chunks, uint32_t count, hal_address scratch, void* host,
                    uint32_t stream);
  void (*describe)(int32_t code, char* text, size_t size);
} hal_codec;

typedef struct hal_driver {
  uint32_t abi;         /* HAL_DRIVER_ABI */
  uint32_t struct_size; /* sizeof(hal_driver), so that later versions can grow at the end */
  const char* name;

  /* `options` is "key=value;key=value"; unknown keys are an error. On failure `why` gets one line that says what is
   * missing and what to do. */
  int32_t (*open)(int32_t device, const char* options, void** context, char* why, size_t why_size);
  void (*close)(void* context);
  int32_t (*facts)(void* context, hal_facts* out);

  int32_t (*granularity)(void* context, uint64_t size, uint64_t* bytes);
  int32_t (*memory_info)(void* context, uint64_t* free_bytes, uint64_t* total_bytes);
  int32_t (*reserve)(void* context, uint64_t size, uint64_t alignment, hal_address hint, hal_address* out);
  int32_t (*unreserve)(void* context, hal_address address, uint64_t size);
  int32_t (*create)(void* context, uint64_t size, hal_handle* out);
  int32_t (*release)(void* context, hal_handle handle, uint64_t size);
  int32_t (*map)(void* context, hal_address address, uint64_t size, hal_handle handle);
  /* Read and write, for a whole segment in one call once all of its pieces are mapped. */
  int32_t (*access)(void* context, hal_address address, uint64_t size);
  int32_t (*unmap)(void* context, hal_address address, uint64_t size); /* one mapping, as it was mapped */

  /* Asynchronous on a copy stream; an error may also surface at `synchronize`. */
  int32_t (*copy_to_host)(void* context, void* host, hal_address device, uint64_t size, uint32_t stream);
  int32_t (*copy_to_device)(void* context, hal_address device, const void* host, uint64_t size, uint32_t stream);
  int32_t (*fill)(void* context, hal_address device, uint8_t value, uint64_t size, uint32_t stream);
  /* One copy stream, or with HAL_ALL_STREAMS everything the process has queued on the device, on any stream. */
  int32_t (*synchronize)(void* context, uint32_t stream);

  int32_t (*host_register)(void* context, void* host, uint64_t size);
  int32_t (*host_unregister)(void* context, void* host, uint64_t size);

  /* 1 while a graph is captured on the engine's stream (or anywhere, when `stream` is null): then nothing may
   * synchronize or fill. */
  int32_t (*is_capturing)(void* context, void* stream);

  hal_kind (*classify)(int32_t code);
  void (*describe)(int32_t code, char* text, size_t size);

  /* Optional; null where `release` alone gives memory back to the device. Called when everything that was mapped in a
   * reserved range has been unmapped and released while the range is to stay: lets go of what the vendor still holds
   * for it. A failure that is HAL_ADDRESS_LOST means that the range is not reserved any more, and `got` is where the
   * vendor would have put it instead, or 0. */
  int32_t (*vacate)(void* context, hal_address address, uint64_t size, hal_address* got);

  /* Optional: null where no codec works on this driver's memory. */
  const hal_codec* codec;
} hal_driver;

#ifdef __cplusplus
}
#endif
#endif
