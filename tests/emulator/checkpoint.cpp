// The driver's process checkpoint as a state machine of this process alone: which calls are legal when, and nothing of
// the device's contents. A call made while the process is locked fails instead of blocking, so that a test sees it.
#include <unistd.h>

#include "codes.h"
#include "machine.h"

using emu::Machine;

namespace {

int32_t change_state(int32_t process, emu::ProcessState from, emu::ProcessState to) {
  return process == getpid() ? Machine::instance().change_process_state(from, to) : int32_t{emu::kInvalidValue};
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

int32_t cuCheckpointProcessRestore(int32_t process, void*) {
  COUNTED;
  return change_state(process, emu::kCheckpointed, emu::kLocked);
}

int32_t cuCheckpointProcessUnlock(int32_t process, void*) {
  COUNTED;
  return change_state(process, emu::kLocked, emu::kRunning);
}

int32_t cuCheckpointProcessGetState(int32_t process, int32_t* state) {
  COUNTED;
  if (process != getpid()) return emu::kInvalidValue;
  *state = Machine::instance().process_state();
  return emu::kSuccess;
}

#pragma GCC visibility pop

}  // extern "C"
