/* A libnvidia-ml.so.1 for tests without a GPU. The file that FAKE_NVML names describes the machine, one line a thing,
 * and is read again at every call, so that a test can change the machine between two calls:
 *
 *   card uuid=GPU-… bus=00000000:01:00.0 name=H200 total=N reserved=N used=N [mig=1]
 *   slice card=GPU-… uuid=MIG-… total=N reserved=N used=N      a MIG device
 *   process device=UUID pid=N used=N [list=mps]                pid 0: the caller; used -1: not available
 *   fail call=nvmlDeviceGetMemoryInfo_v2 code=4 [device=UUID]  the call fails with that code
 *
 * Like a strict NVML it answers only in a process that initialised it itself, not in one that was forked afterwards. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
  SUCCESS = 0,
  UNINITIALIZED = 1,
  INVALID_ARGUMENT = 2,
  NOT_SUPPORTED = 3,
  NOT_FOUND = 6,
  INSUFFICIENT_SIZE = 7,
  DRIVER_NOT_LOADED = 9,
  FUNCTION_NOT_FOUND = 13,
  VERSION_MISMATCH = 25,
};
enum { MAX = 64, MAX_SLICES = 7, TEXT = 96 };

typedef struct {
  char uuid[TEXT], card[TEXT], bus[32], name[TEXT];
  unsigned long long total, reserved, used;
  int mig, is_slice;
} Device;
typedef struct {
  char device[TEXT], list[16];
  unsigned pid;
  long long used;
} Process;
typedef struct {
  char call[TEXT], device[TEXT];
  int code;
} Failure;

typedef struct {
  unsigned long long total, free, used;
} MemoryV1;
typedef struct {
  unsigned version;
  unsigned long long total, reserved, free, used;
} MemoryV2;
typedef struct {
  unsigned pid;
  unsigned long long used;
  unsigned gpu_instance, compute_instance;
} ProcessInfo;
typedef struct {
  char bus_legacy[16];
  unsigned domain, bus, device, device_id, subsystem_id;
  char bus_id[32];
} PciInfo;
_Static_assert(sizeof(MemoryV2) == 40 && sizeof(ProcessInfo) == 24 && sizeof(PciInfo) == 68, "NVML's ABI");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Device devices[MAX];
static Process processes[MAX];
static Failure failures[MAX];
static int device_count, process_count, failure_count;
static pid_t initialised_by;
static int initialised;

static void text_of(const char* line, const char* key, char* out, size_t size) {
  char wanted[32];
  snprintf(wanted, sizeof wanted, " %s=", key);
  const char* found = strstr(line, wanted);
  out[0] = 0;
  if (found == NULL) return;
  found += strlen(wanted);
  size_t length = strcspn(found, " \n");
  snprintf(out, size, "%.*s", (int)length, found);
}

static long long number_of(const char* line, const char* key) {
  char text[TEXT];
  text_of(line, key, text, sizeof text);
  return strtoll(text, NULL, 0);
}

static void read_device(const char* line, int is_slice) {
  Device* device = &devices[device_count++];
  memset(device, 0, sizeof *device);
  text_of(line, "uuid", device->uuid, sizeof device->uuid);
  text_of(line, "card", device->card, sizeof device->card);
  text_of(line, "bus", device->bus, sizeof device->bus);
  text_of(line, "name", device->name, sizeof device->name);
  device->total = (unsigned long long)number_of(line, "total");
  device->reserved = (unsigned long long)number_of(line, "reserved");
  device->used = (unsigned long long)number_of(line, "used");
  device->mig = (int)number_of(line, "mig");
  device->is_slice = is_slice;
}

static void read_process(const char* line) {
  Process* process = &processes[process_count++];
  text_of(line, "device", process->device, sizeof process->device);
  text_of(line, "list", process->list, sizeof process->list);
  process->pid = (unsigned)number_of(line, "pid");
  process->used = number_of(line, "used");
}

static void read_failure(const char* line) {
  Failure* failure = &failures[failure_count++];
  text_of(line, "call", failure->call, sizeof failure->call);
  text_of(line, "device", failure->device, sizeof failure->device);
  failure->code = (int)number_of(line, "code");
}

static void read_machine(void) {
  device_count = process_count = failure_count = 0;
  const char* path = getenv("FAKE_NVML");
  FILE* file = path ? fopen(path, "r") : NULL;
  if (file == NULL) return;
  char line[512];
  while (fgets(line, sizeof line, file)) {
    if (device_count == MAX || process_count == MAX || failure_count == MAX) break;
    if (strncmp(line, "card ", 5) == 0) read_device(line, 0);
    if (strncmp(line, "slice ", 6) == 0) read_device(line, 1);
    if (strncmp(line, "process ", 8) == 0) read_process(line);
    if (strncmp(line, "fail ", 5) == 0) read_failure(line);
  }
  fclose(file);
}

static int failure_of(const char* call, const Device* device) {
  for (int i = 0; i < failure_count; i++) {
    int meets = failures[i].device[0] == 0 || (device && strcmp(failures[i].device, device->uuid) == 0);
    if (meets && strcmp(failures[i].call, call) == 0) return failures[i].code;
  }
  return SUCCESS;
}

/* Reads the machine and returns how the call fails, if it does; the lock is held when it returns. */
static int enter(const char* call, const Device* device) {
  pthread_mutex_lock(&lock);
  read_machine();
  if (!initialised || initialised_by != getpid()) return UNINITIALIZED;
  return failure_of(call, device);
}

static int leave(int code) {
  pthread_mutex_unlock(&lock);
  return code;
}

/* The body runs under the lock with `code` set to what it returns. */
#define CALL(device, body)                \
  do {                                    \
    int code = enter(__func__, (device)); \
    if (code == SUCCESS) body;            \
    return leave(code);                   \
  } while (0)

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  pthread_mutex_lock(&lock);
  read_machine();
  int code = failure_of(__func__, NULL);
  if (code == SUCCESS) {
    initialised = initialised_by == getpid() ? initialised + 1 : 1;
    initialised_by = getpid();
  }
  return leave(code);
}

int nvmlShutdown(void) {
  CALL(NULL, initialised--);
}

const char* nvmlErrorString(int code) {
  switch (code) {
    case SUCCESS:
      return "Success";
    case UNINITIALIZED:
      return "Uninitialized";
    case INVALID_ARGUMENT:
      return "Invalid Argument";
    case NOT_SUPPORTED:
      return "Not Supported";
    case 4:
      return "Insufficient Permissions";
    case NOT_FOUND:
      return "Not Found";
    case DRIVER_NOT_LOADED:
      return "Driver Not Loaded";
    case FUNCTION_NOT_FOUND:
      return "Function Not Found";
    default:
      return "Unknown Error";
  }
}

static Device* nth(int position, const Device* card) {
  for (int i = 0; i < device_count; i++) {
    Device* device = &devices[i];
    int belongs = card ? device->is_slice && strcmp(device->card, card->uuid) == 0 : !device->is_slice;
    if (belongs && position-- == 0) return device;
  }
  return NULL;
}

static int give(Device* device, Device** out, int otherwise) {
  *out = device;
  return device ? SUCCESS : otherwise;
}

int nvmlDeviceGetCount_v2(unsigned* count) {
  CALL(NULL, for (*count = 0; nth((int)*count, NULL); (*count)++));
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device** out) {
  int code = enter(__func__, NULL);
  if (code == SUCCESS) code = give(nth((int)index, NULL), out, INVALID_ARGUMENT);
  if (code == SUCCESS) code = failure_of(__func__, *out);
  return leave(code);
}

int nvmlDeviceGetHandleByUUID(const char* uuid, Device** out) {
  CALL(NULL, {
    Device* found = NULL;
    for (int i = 0; i < device_count; i++) {
      if (strcmp(devices[i].uuid, uuid) == 0) found = &devices[i];
    }
    code = give(found, out, NOT_FOUND);
  });
}

int nvmlDeviceGetUUID(Device* device, char* out, unsigned size) {
  CALL(device, snprintf(out, size, "%s", device->uuid));
}

int nvmlDeviceGetName(Device* device, char* out, unsigned size) {
  CALL(device, snprintf(out, size, "%s", device->name));
}

int nvmlDeviceGetPciInfo_v3(Device* device, PciInfo* out) {
  CALL(device, {
    memset(out, 0, sizeof *out);
    snprintf(out->bus_id, sizeof out->bus_id, "%s", device->bus);
  });
}

int nvmlDeviceGetMigMode(Device* device, unsigned* current, unsigned* pending) {
  CALL(device, *current = *pending = (unsigned)device->mig);
}

int nvmlDeviceGetMaxMigDeviceCount(Device* device, unsigned* count) {
  CALL(device, *count = device->mig ? MAX_SLICES : 0);
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device* device, unsigned index, Device** out) {
  CALL(device, code = give(nth((int)index, device), out, NOT_FOUND));
}

int nvmlDeviceGetMemoryInfo(Device* device, MemoryV1* out) {
  CALL(device, {
    out->total = device->total;
    out->used = device->reserved + device->used;
    out->free = out->total - out->used;
  });
}

int nvmlDeviceGetMemoryInfo_v2(Device* device, MemoryV2* out) {
  CALL(device, {
    if (out->version != (2u << 24 | sizeof *out)) {
      code = VERSION_MISMATCH;
    } else {
      out->total = device->total;
      out->reserved = device->reserved;
      out->used = device->used;
      out->free = device->total - device->reserved - device->used;
    }
  });
}

static int list_processes(const Device* device, const char* list, unsigned* count, ProcessInfo* out) {
  unsigned found = 0;
  unsigned room = *count;
  for (int i = 0; i < process_count; i++) {
    const Process* process = &processes[i];
    if (strcmp(process->device, device->uuid) != 0 || strcmp(process->list, list) != 0) continue;
    if (found < room) {
      unsigned pid = process->pid ? process->pid : (unsigned)getpid();
      out[found] = (ProcessInfo){pid, (unsigned long long)process->used, ~0u, ~0u};
    }
    found++;
  }
  *count = found;
  return found > room ? INSUFFICIENT_SIZE : SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(Device* device, unsigned* count, ProcessInfo* out) {
  CALL(device, code = list_processes(device, "", count, out));
}

int nvmlDeviceGetMPSComputeRunningProcesses_v3(Device* device, unsigned* count, ProcessInfo* out) {
  CALL(device, code = list_processes(device, "mps", count, out));
}
