// The driver's process checkpoint as a state machine: which calls are legal when, and nothing of the device's contents.
// A call made while the process is locked fails instead of blocking, so that a test sees it.
#include <unistd.h>

#include "codes.h"
#include "machine.h"

using emu::Machine;

namespace {

emu::Process* process_of(int32_t id) {
  return id == getpid() ? Machine::instance().process() : emu::find_process(id);
}

int32_t change_state(int32_t id, int32_t from, int32_t to) {
  emu::Process* const process = process_of(id);
  if (process == nullptr) return emu::kNotInitialized;  // as for a process that does not use the driver
  return process->state.compare_exchange_strong(from, to) ? int32_t{emu::kSuccess} : int32_t{emu::kIllegalState};
}

}  // namespace

#define COUNTED                                                                                       \
  do {                                                                                                \
    if (const int32_t emu_code = Machine::instance().enter(__func__, emu::kNothing)) return emu_code; \
  } while (false)

extern "C" {

#pragma GCC visibility push(default)

int32_t cuCheckpointProcessLock(int32_t process, void*) {
  COUNTED;
  return change_state(process, emu::kRunning, emu::kLocked);
}

int32_t cuCheckpointProcessCheckpoint(int32_t process, void*) {
  COUNTED;
  return change_state(process, emu::kLocked, emu::kCheckpointed);
}

// A restore that fails is final, as on a GPU.
int32_t cuCheckpointProcessRestore(int32_t process, void*) {
  if (const int32_t code = Machine::instance().enter(__func__, emu::kNothing)) {
    change_state(process, emu::kCheckpointed, emu::kFailed);
    return code;
  }
  return change_state(process, emu::kCheckpointed, emu::kLocked);
}

int32_t cuCheckpointProcessUnlock(int32_t process, void*) {
  COUNTED;
  return change_state(process, emu::kLocked, emu::kRunning);
}

int32_t cuCheckpointProcessGetState(int32_t id, int32_t* state) {
  COUNTED;
  const emu::Process* const process = process_of(id);
  if (process == nullptr) return emu::kNotInitialized;
  *state = process->state;
  return emu::kSuccess;
}

#pragma GCC visibility pop

}  // extern "C"
