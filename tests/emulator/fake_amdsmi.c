/* AMD's management library, for memory queries: the functions that answer; the rest of what the Python package binds is
 * generated beside them. The structures are those of amdsmi 7.0.
 *
 * Environment, read at every call:
 *   FAKE_AMDSMI=            GPUs, in the library's own order: "address serial total-MiB used-MiB;…"
 *   FAKE_AMDSMI_PROCESSES=  "gpu pid vram-bytes;…"
 *   FAKE_AMDSMI_INIT=0      what amdsmi_init answers (34: no driver)
 *   FAKE_AMDSMI_REFUSED=    names of functions that answer "not supported", separated by commas
 */
#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 1, NOT_SUPPORTED = 2 };

typedef struct {
  char address[32], serial[32];
  uint64_t total_mib, used_mib;
} gpu;

typedef struct {
  char market_name[256];
  uint32_t vendor_id;
  char vendor_name[256];
  uint32_t subvendor_id;
  uint64_t device_id;
  uint32_t rev_id;
  char asic_serial[256];
  uint32_t oam_id, num_of_compute_units;
  uint64_t target_graphics_version;
  uint32_t subsystem_id, reserved[21];
} asic_info;

typedef struct {
  char name[256];
  uint32_t pid;
  uint64_t mem;
  uint64_t gfx, enc;
  uint32_t engine_reserved[12];
  uint64_t gtt_mem, cpu_mem, vram_mem;
  uint32_t memory_reserved[10];
  char container_name[256];
  uint32_t cu_occupancy, reserved[11];
} process_info;

static const char* text(const char* name) {
  const char* found = getenv(name);
  return found == NULL ? "" : found;
}

/* The nth item of a list that ';' separates, or NULL. */
static const char* item(const char* list, uint32_t n) {
  for (; n > 0 && list != NULL; --n) {
    list = strchr(list, ';');
    list = list == NULL ? NULL : list + 1;
  }
  return list == NULL || *list == '\0' ? NULL : list;
}

static int read_gpu(uint32_t index, gpu* out) {
  const char* from = item(text("FAKE_AMDSMI"), index);
  return from != NULL && sscanf(from, "%31s %31s %" SCNu64 " %" SCNu64, out->address, out->serial, &out->total_mib,
                                &out->used_mib) == 4;
}

static int gpu_of(const void* handle, gpu* out) {
  return read_gpu((uint32_t)(uintptr_t)handle - 1, out);
}

static int refused(const char* name) {
  const char* found = strstr(text("FAKE_AMDSMI_REFUSED"), name);
  return found != NULL && (found[strlen(name)] == '\0' || found[strlen(name)] == ',');
}

/* The first lines of every query of one GPU. */
#define ASK(handle, answer)                        \
  gpu answer;                                      \
  if (refused(__func__)) return NOT_SUPPORTED;     \
  if (!gpu_of(handle, &answer)) return INVALID

int amdsmi_init(uint64_t flags) {
  (void)flags;
  return atoi(text("FAKE_AMDSMI_INIT"));
}

int amdsmi_shut_down(void) {
  return SUCCESS;
}

int amdsmi_status_code_to_string(int code, const char** words) {
  *words = code == 34 ? "AMDSMI_STATUS_DRIVER_NOT_LOADED: driver not loaded" : "AMDSMI_STATUS: see the number";
  return SUCCESS;
}

int amdsmi_get_socket_handles(uint32_t* count, void** handles) {
  if (handles != NULL && *count >= 1) handles[0] = (void*)1;
  *count = 1;
  return SUCCESS;
}

int amdsmi_get_processor_handles(void* socket, uint32_t* count, void** handles) {
  (void)socket;
  gpu ignored;
  uint32_t found = 0;
  for (; read_gpu(found, &ignored); ++found) {
    if (handles != NULL && found < *count) handles[found] = (void*)(uintptr_t)(found + 1);
  }
  *count = found;
  return SUCCESS;
}

int amdsmi_get_gpu_device_bdf(void* handle, uint64_t* bdf) {
  ASK(handle, asked);
  unsigned domain, bus, device, function;
  if (sscanf(asked.address, "%x:%x:%x.%x", &domain, &bus, &device, &function) != 4) return INVALID;
  *bdf = (uint64_t)domain << 16 | bus << 8 | device << 3 | function;
  return SUCCESS;
}

int amdsmi_get_gpu_asic_info(void* handle, asic_info* out) {
  ASK(handle, asked);
  memset(out, 0, sizeof *out);
  snprintf(out->asic_serial, sizeof out->asic_serial, "%s", asked.serial);
  return SUCCESS;
}

int amdsmi_get_gpu_memory_total(void* handle, uint32_t kind, uint64_t* bytes) {
  ASK(handle, asked);
  *bytes = kind == 0 ? asked.total_mib << 20 : 0;
  return SUCCESS;
}

int amdsmi_get_gpu_memory_usage(void* handle, uint32_t kind, uint64_t* bytes) {
  ASK(handle, asked);
  *bytes = kind == 0 ? asked.used_mib << 20 : 0;
  return SUCCESS;
}

int amdsmi_get_gpu_vram_usage(void* handle, uint32_t* mib) {
  ASK(handle, asked);
  mib[0] = (uint32_t)asked.total_mib;
  mib[1] = (uint32_t)asked.used_mib;
  return SUCCESS;
}

int amdsmi_get_gpu_process_list(void* handle, uint32_t* count, process_info* out) {
  ASK(handle, asked);
  const uint32_t wanted = (uint32_t)(uintptr_t)handle - 1;
  uint32_t found = 0, index, pid;
  uint64_t bytes;
  const char* list = text("FAKE_AMDSMI_PROCESSES");
  for (uint32_t n = 0; item(list, n) != NULL && found < *count; ++n) {
    if (sscanf(item(list, n), "%u %u %" SCNu64, &index, &pid, &bytes) != 3 || index != wanted) continue;
    memset(&out[found], 0, sizeof out[found]);
    snprintf(out[found].name, sizeof out[found].name, "process");
    out[found].pid = pid;
    out[found].vram_mem = bytes;
    ++found;
  }
  *count = found;
  return SUCCESS;
}
