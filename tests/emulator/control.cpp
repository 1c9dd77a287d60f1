// The controls of emucuda.h.
#include <chrono>
#include <functional>
#include <thread>
#include <utility>

#include "codes.h"
#include "machine.h"

using emu::Machine;
using emu::Settings;

namespace {

bool exists(int32_t device) {
  return device >= 0 && device < emu::kMaxDevices;
}

// Queues what a kernel does after it has run for a while.
int32_t launch(void* handle, uint64_t microseconds, std::function<int32_t(int device)> effect) {
  Machine& machine = Machine::instance();
  if (const int32_t code = machine.enter("emucuda_launch", emu::kContext)) return code;
  const auto stream = machine.find_stream(handle);
  if (stream == nullptr) return emu::kInvalidHandle;
  const auto kernel = [device = stream->device(), microseconds, effect = std::move(effect)] {
    std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
    return effect(device);
  };
  return machine.submit(stream, kernel, false);
}

}  // namespace

extern "C" {

int32_t emucuda_stats(int32_t device, emucuda_device_stats* out) {
  return Machine::instance().stats(device, out);
}

void emucuda_reset(void) {
  Machine::instance().reset();
}

void emucuda_fail(const char* call, uint64_t nth, int32_t code, int64_t times) {
  Machine::instance().faults.set(call, nth, code, times);
}

uint64_t emucuda_calls(const char* call) {
  return Machine::instance().faults.calls(call);
}

void emucuda_set_capacity(int32_t device, uint64_t bytes) {
  if (exists(device)) Machine::instance().configure([=](Settings& settings) { settings.capacity[device] = bytes; });
}

void emucuda_set_taken(int32_t device, uint64_t bytes) {
  if (exists(device)) Machine::instance().configure([=](Settings& settings) { settings.taken[device] = bytes; });
}

void emucuda_set_attribute(int32_t attribute, int32_t value) {
  Machine::instance().configure([=](Settings& settings) { settings.attributes[attribute] = value; });
}

void emucuda_set_driver_version(int32_t version) {
  Machine::instance().configure([=](Settings& settings) { settings.driver_version = version; });
}

void emucuda_set_poison(int32_t byte) {
  Machine::instance().configure([=](Settings& settings) { settings.poison = byte; });
}

void emucuda_set_pin_limit(uint64_t bytes) {
  Machine::instance().configure([=](Settings& settings) { settings.pin_limit = bytes; });
}

void emucuda_set_delay(uint64_t microseconds) {
  Machine::instance().configure([=](Settings& settings) { settings.delay_us = microseconds; });
}

int32_t emucuda_launch_write(void* stream, uint64_t address, uint8_t value, uint64_t size, uint64_t microseconds) {
  return launch(stream, microseconds, [=](int device) {
    return Machine::instance().memory.fill(device, address, &value, sizeof value, size);
  });
}

int32_t emucuda_launch_failure(void* stream, int32_t code, uint64_t microseconds) {
  return launch(stream, microseconds, [code](int) { return code; });
}

int32_t emucuda_capture_begin(void* stream, int32_t mode) {
  return Machine::instance().begin_capture(stream, mode);
}

int32_t emucuda_capture_end(void* stream) {
  return Machine::instance().end_capture(stream);
}

}  // extern "C"
