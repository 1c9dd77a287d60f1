// The CPU as a device: host memory behind the table of primitives.
//
// Physical memory is one memfd per opened device, a sparse file that only grows: `create` takes the next offset and
// `release` punches the hole, so sleeping memory really leaves the process and its cgroup. Addresses are reserved
// ranges, `map` puts pages of the file into them. Copies run on worker threads. Codes are errno.
#include "driver.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>

#include "addresses.h"
#include "codec.h"
#include "codes.h"
#include "copy_streams.h"
#include "host_memory.h"
#include "options.h"

namespace {

constexpr uint64_t kFileSize = uint64_t{1} << 62;  // sparse: what is not mapped and written takes no memory
constexpr uint64_t kHugePage = 2u << 20;
constexpr uint32_t kStreams = 2;

struct Cpu {
  explicit Cpu(const hal::CpuOptions& given) : options(given) {}
  ~Cpu() {
    if (memory >= 0) close(memory);
  }
  const hal::CpuOptions options;
  int memory = -1;  // the memfd
  std::mutex mutex;
  uint64_t next_offset = 0, created_bytes = 0;
  uint64_t unchecked_room = 0;  // bytes that may be created before the host is asked again what it has
  hal::CopyStreams streams{kStreams};
};

Cpu& cpu_of(void* context) {
  return *static_cast<Cpu*>(context);
}
void* pointer(hal_address address) {
  return reinterpret_cast<void*>(address);
}
int32_t code_of(bool ok) {
  return ok ? 0 : errno;
}

int32_t open_cpu(int32_t device, const char* text, void** context, char* why, size_t why_size) {
  hal::CpuOptions options;
  std::string bad;
  if (device != 0) {
    std::snprintf(why, why_size, "the CPU is one device; its number is 0");
    return ENODEV;
  }
  if (!hal::parse_cpu_options(text, &options, &bad)) {
    std::snprintf(why, why_size, "'%s' is no option; there are capacity, granularity (pages), chunk, dirty (a byte)",
                  bad.c_str());
    return EINVAL;
  }
  auto cpu = std::make_unique<Cpu>(options);
  cpu->memory = memfd_create("hal-cpu-device", MFD_CLOEXEC);
  if (cpu->memory < 0 || ftruncate(cpu->memory, static_cast<off_t>(kFileSize)) != 0) {
    const int32_t code = errno;
    std::snprintf(why, why_size, "memfd_create failed: %s; a Linux kernel from 3.17 on is needed", std::strerror(code));
    return code;
  }
  *context = cpu.release();
  return 0;
}

void close_cpu(void* context) {
  delete static_cast<Cpu*>(context);
}

void say_no(hal_facts* facts, hal_fact fact, const char* reason) {
  std::snprintf(facts->why_not[fact], sizeof facts->why_not[fact], "%s", reason);
}

int32_t facts_of_cpu(void* context, hal_facts* out) {
  const hal::CpuOptions& options = cpu_of(context).options;
  *out = hal_facts{};
  out->granularity = out->alignment = options.granularity;
  out->chunk = options.chunk;
  out->streams = kStreams;
  for (hal_fact fact : {HAL_FACT_VMM, HAL_FACT_FREE_TRUTHFUL, HAL_FACT_HOST_ACCESS, HAL_FACT_UNIFIED_MEMORY}) {
    out->yes |= 1u << fact;
  }
  if (options.dirty < 0) {
    out->yes |= 1u << HAL_FACT_SCRUBS;
  } else {
    say_no(out, HAL_FACT_SCRUBS, "fresh memory is filled with a byte, as the option 'dirty' asks");
  }
  say_no(out, HAL_FACT_PIN_HOST, "device memory is host memory here, so there is nothing to pin it for");
  say_no(out, HAL_FACT_RDMA, "host memory is registered with RDMA devices as it is");
  say_no(out, HAL_FACT_PARK, "the CPU has no driver state to give back");
  std::snprintf(out->device_name, sizeof out->device_name, "CPU");
  std::snprintf(out->version, sizeof out->version, "memfd");
  return 0;
}

int32_t granularity(void* context, uint64_t, uint64_t* bytes) {
  *bytes = cpu_of(context).options.granularity;
  return 0;
}

int32_t memory_info(void* context, uint64_t* free_bytes, uint64_t* total_bytes) {
  Cpu& cpu = cpu_of(context);
  if (cpu.options.capacity > 0) {
    std::lock_guard<std::mutex> lock(cpu.mutex);
    *total_bytes = cpu.options.capacity;
    *free_bytes = cpu.options.capacity - cpu.created_bytes;
    return 0;
  }
  hal_host_info info;
  if (!hal::read_host_memory(&info).ok()) return ENOENT;
  *free_bytes = info.available;
  *total_bytes = info.total;
  return 0;
}

int32_t reserve(void* context, uint64_t size, uint64_t alignment, hal_address hint, hal_address* out) {
  if (size == 0 || size % cpu_of(context).options.granularity != 0) return EINVAL;
  if (hint != 0) return hal::reserve_at(hint, size, out);
  // Huge pages need addresses that begin at one.
  return hal::reserve_anywhere(size, std::max(alignment, size >= kHugePage ? kHugePage : uint64_t{4096}), out);
}

int32_t unreserve(void*, hal_address address, uint64_t size) {
  return code_of(munmap(pointer(address), size) == 0);
}

// Fresh pages of the file read as zero; with `dirty` they are given the byte that was asked for.
int32_t soil(const Cpu& cpu, uint64_t offset, uint64_t size) {
  if (cpu.options.dirty < 0) return 0;
  void* view = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, cpu.memory, static_cast<off_t>(offset));
  if (view == MAP_FAILED) return errno;
  std::memset(view, cpu.options.dirty, size);
  munmap(view, size);
  return 0;
}

// Whether the device, or else the host, has `size` bytes. Asking the host takes longer than a small allocation may, so
// an eighth of its answer is handed out before it is asked again. Called with the mutex held.
bool fits(Cpu& cpu, uint64_t size) {
  if (cpu.options.capacity > 0) return size <= cpu.options.capacity - cpu.created_bytes;
  if (size > cpu.unchecked_room) {
    hal_host_info info;
    if (!hal::read_host_memory(&info).ok()) return true;  // unknown: the kernel decides
    if (size > info.available) return false;
    cpu.unchecked_room = std::max(info.available / 8, size);
  }
  cpu.unchecked_room -= size;
  return true;
}

int32_t release(void* context, hal_handle handle, uint64_t size) {
  Cpu& cpu = cpu_of(context);
  const bool punched = fallocate(cpu.memory, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(handle - 1),
                                 static_cast<off_t>(size)) == 0;
  if (!punched) return errno;
  std::lock_guard<std::mutex> lock(cpu.mutex);
  cpu.created_bytes -= size;
  return 0;
}

int32_t create(void* context, uint64_t size, hal_handle* out) {
  Cpu& cpu = cpu_of(context);
  if (size == 0 || size % cpu.options.granularity != 0) return EINVAL;
  uint64_t offset;
  {
    std::lock_guard<std::mutex> lock(cpu.mutex);
    // As in addresses, so in the file: huge pages need offsets that begin at one.
    const uint64_t step = size >= kHugePage ? kHugePage : cpu.options.granularity;
    offset = (cpu.next_offset + step - 1) / step * step;
    if (size > kFileSize - offset || !fits(cpu, size)) return ENOMEM;
    cpu.next_offset = offset + size;
    cpu.created_bytes += size;
  }
  *out = offset + 1;
  const int32_t code = soil(cpu, offset, size);
  if (code != 0) release(context, *out, size);
  return code;
}

int32_t map(void* context, hal_address address, uint64_t size, hal_handle handle) {
  return code_of(mmap(pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, cpu_of(context).memory,
                      static_cast<off_t>(handle - 1)) != MAP_FAILED);
}

int32_t access_memory(void*, hal_address address, uint64_t size) {
  if (mprotect(pointer(address), size, PROT_READ | PROT_WRITE) != 0) return errno;
  if (size >= kHugePage) madvise(pointer(address), size, MADV_HUGEPAGE);  // a wish
  return 0;
}

int32_t unmap(void*, hal_address address, uint64_t size) {
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED;
  return code_of(mmap(pointer(address), size, PROT_NONE, kFlags, -1, 0) != MAP_FAILED);
}

int32_t copy_to_host(void* context, void* host, hal_address device, uint64_t size, uint32_t stream) {
  return cpu_of(context).streams.copy(stream, host, pointer(device), size);
}

int32_t copy_to_device(void* context, hal_address device, const void* host, uint64_t size, uint32_t stream) {
  return cpu_of(context).streams.copy(stream, pointer(device), host, size);
}

int32_t fill(void* context, hal_address device, uint8_t value, uint64_t size, uint32_t stream) {
  return cpu_of(context).streams.fill(stream, pointer(device), value, size);
}

int32_t synchronize(void* context, uint32_t stream) {
  return cpu_of(context).streams.synchronize(stream == HAL_ALL_STREAMS ? hal::CopyStreams::kAll : stream);
}

int32_t host_register(void*, void*, uint64_t) {
  return ENOTSUP;
}
int32_t host_unregister(void*, void*, uint64_t) {
  return ENOTSUP;
}
int32_t is_capturing(void*, void*) {
  return 0;
}

// No `vacate`: release alone gives memory back.
const hal_driver kDriver = {HAL_DRIVER_ABI,
                            sizeof(hal_driver),
                            "cpu",
                            open_cpu,
                            close_cpu,
                            facts_of_cpu,
                            granularity,
                            memory_info,
                            reserve,
                            unreserve,
                            create,
                            release,
                            map,
                            access_memory,
                            unmap,
                            copy_to_host,
                            copy_to_device,
                            fill,
                            synchronize,
                            host_register,
                            host_unregister,
                            is_capturing,
                            hal::classify_errno,
                            hal::describe_errno,
                            nullptr,
                            hal::zstd_codec()};

}  // namespace

extern "C" const hal_driver* hal_cpu_driver();
const hal_driver* hal_cpu_driver() {
  return &kDriver;
}
