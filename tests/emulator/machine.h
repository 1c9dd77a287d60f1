// The emulated machine: its devices, the calling thread's context, captures and registered host memory.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "emucuda.h"
#include "memory.h"
#include "processes.h"
#include "settings.h"
#include "streams.h"

namespace emu {

struct Device {
  int ordinal = 0;
  std::atomic<int32_t> sticky{0};
  uint64_t retained = 0;                         // references to the primary context
  std::shared_ptr<Stream> default_stream;        // the legacy one
  std::vector<std::shared_ptr<Stream>> streams;  // destroyed ones too, until their work is done
};

// What a call needs; `Machine::enter` checks it.
enum Need : unsigned {
  kNothing = 0,
  kInitialized = 1,
  kContext = 2,      // a current context (and so initialization) without a sticky error
  kCaptureSafe = 4,  // a capture forbids the call, unless the thread says otherwise
};

class Machine {
 public:
  static Machine& instance();

  // The start of every function: counts it and checks faults and needs; returns what it must fail with, or 0.
  int32_t enter(const char* call, unsigned needs);
  int32_t initialize();
  void reset();

  Settings settings() const;
  template <typename Change>
  void configure(Change&& change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change(settings_);
  }

  // Contexts: there is one a device, its primary one.
  int32_t retain_context(int ordinal, void** context);
  int32_t release_context(int ordinal);
  Device* device_of_context(const void* context);
  int32_t make_current(void* context);
  void* current_context() const;
  Device& current_device();  // only after `enter` with kContext

  int32_t create_stream(uint32_t flags, void** out);
  int32_t destroy_stream(void* handle);
  // Null, or CU_STREAM_LEGACY, is the default stream of the current device; a null result is an unknown handle.
  std::shared_ptr<Stream> find_stream(void* handle);
  int32_t synchronize_device();
  // Queues an operation behind what comes before it: work on the default stream waits for blocking streams.
  int32_t submit(const std::shared_ptr<Stream>& stream, Stream::Operation operation, bool wait);

  int32_t exchange_capture_mode(int32_t* mode);
  int32_t query_capture(void* handle, int32_t* status);
  int32_t begin_capture(void* handle, int32_t mode);
  int32_t end_capture(void* handle);

  int32_t register_host(uint64_t address, uint64_t size);
  int32_t unregister_host(uint64_t address);
  bool is_registered(uint64_t address, uint64_t size) const;

  // How this process looks to the checkpoint calls of others.
  Process* process() const { return process_.load(); }

  int32_t stats(int ordinal, emucuda_device_stats* out);

  Memory memory;
  Faults faults;

 private:
  Machine();
  // In a child of the process that initialized: nothing works there, and no lock may be touched.
  bool is_forked_child() const;
  // The streams whose capture forbids unsafe calls to the calling thread.
  std::vector<Stream*> forbidding_captures();
  int32_t refuse_while_capturing();

  mutable std::mutex mutex_;  // of what follows; never held while a queue is waited for
  Settings settings_;
  Device devices_[kMaxDevices];
  std::map<uint64_t, uint64_t> registrations_;
  uint64_t registered_bytes_ = 0;
  std::atomic<pid_t> initialized_by_{0};
  std::atomic<Process*> process_;
};

}  // namespace emu
