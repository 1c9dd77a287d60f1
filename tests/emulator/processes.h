// The checkpoint states of emulated processes, where other processes can see and change them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>

namespace emu {

enum ProcessState : int32_t { kRunning = 0, kLocked = 1, kCheckpointed = 2, kFailed = 3 };  // CUprocessState

// One process. Its layout is read by `EmulatedProcess` in emucuda.py.
struct Process {
  std::atomic<int32_t> state{kRunning};
  std::atomic<int32_t> refused_calls{0};  // driver calls made while it was not running
};

// This process: in the file named by its id under EMUCUDA_PROCESSES, or its own alone without that variable.
Process* own_process();
// Another process that has initialized; null when there is none.
Process* find_process(pid_t id);

}  // namespace emu
