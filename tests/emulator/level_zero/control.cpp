// The controls of emuze.h.
#include <map>
#include <string>

#include "machine.h"

using emuze::CardSettings;
using emuze::Machine;
using emuze::Settings;

namespace {

using Setter = void (*)(Settings& settings, CardSettings& card, int64_t value);

const std::map<std::string, Setter>& setters() {
  static const std::map<std::string, Setter> all = {
      {"cards", [](Settings& s, CardSettings&, int64_t v) { s.cards = static_cast<int>(v); }},
      {"first", [](Settings& s, CardSettings&, int64_t v) { s.first = static_cast<int>(v); }},
      {"poison", [](Settings& s, CardSettings&, int64_t v) { s.poison = static_cast<int>(v); }},
      {"delay_us", [](Settings& s, CardSettings&, int64_t v) { s.delay_us = static_cast<uint64_t>(v); }},
      {"pin_limit", [](Settings& s, CardSettings&, int64_t v) { s.pin_limit = static_cast<uint64_t>(v); }},
      {"import", [](Settings& s, CardSettings&, int64_t v) { s.import = v != 0; }},
      {"late_memory", [](Settings& s, CardSettings&, int64_t v) { s.late_memory = v != 0; }},
      {"share", [](Settings& s, CardSettings&, int64_t v) { s.share = v != 0; }},
      {"sysman_reversed", [](Settings& s, CardSettings&, int64_t v) { s.sysman_reversed = v != 0; }},
      {"sysman_modules", [](Settings& s, CardSettings&, int64_t v) { s.sysman_modules = v != 0; }},
      {"sysman_processes", [](Settings& s, CardSettings&, int64_t v) { s.sysman_processes = v != 0; }},
      {"sysman_free", [](Settings& s, CardSettings&, int64_t v) { s.sysman_free = static_cast<int>(v); }},
      {"total", [](Settings&, CardSettings& c, int64_t v) { c.total = static_cast<uint64_t>(v); }},
      {"taken", [](Settings&, CardSettings& c, int64_t v) { c.taken = static_cast<uint64_t>(v); }},
      {"tiles", [](Settings&, CardSettings& c, int64_t v) { c.tiles = static_cast<int>(v); }},
      {"integrated", [](Settings&, CardSettings& c, int64_t v) { c.integrated = v != 0; }},
      {"bus", [](Settings&, CardSettings& c, int64_t v) { c.bus = static_cast<uint32_t>(v); }},
  };
  return all;
}

}  // namespace

extern "C" {

int32_t emuze_stats_of(int32_t card, emuze_stats* out) {
  Machine::instance().stats(card, out);
  return 0;
}

void emuze_reset(void) {
  Machine::instance().reset();
}

int32_t emuze_set(const char* name, int32_t card, int64_t value) {
  const auto found = setters().find(name);
  if (found == setters().end() || card < 0 || card >= emuze::kMaxCards) return 0;
  Machine::instance().configure([&](Settings& settings) { found->second(settings, settings.card[card], value); });
  return 1;
}

void emuze_fail(const char* call, uint64_t nth, int32_t code, int64_t times) {
  Machine::instance().faults.set(call, nth, code, times);
}

uint64_t emuze_calls(const char* call) {
  return Machine::instance().faults.calls(call);
}

void emuze_engine_context(int32_t device, void** context, void** handle) {
  *context = Machine::instance().engine_context();
  const auto gpus = Machine::instance().visible_gpus();
  *handle = static_cast<size_t>(device) < gpus.size() ? gpus[static_cast<size_t>(device)] : nullptr;
}

int32_t emuze_kernel_write(void* context, uint64_t address, uint8_t value, uint64_t size) {
  Machine& machine = Machine::instance();
  if (machine.reaches(static_cast<emuze::Context*>(context), address, size) != 1) return ZE_RESULT_ERROR_DEVICE_LOST;
  auto* bytes = reinterpret_cast<volatile uint8_t*>(address);
  for (uint64_t i = 0; i < size; ++i) bytes[i] = value;
  return ZE_RESULT_SUCCESS;
}

}  // extern "C"
