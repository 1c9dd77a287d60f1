// Touches only the environment.
#include "settings.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace emu {
namespace {

long number(const char* name, long otherwise) {
  const char* text = std::getenv(name);
  return text != nullptr && *text != '\0' ? std::strtol(text, nullptr, 10) : otherwise;
}

// Calls `use` with each item of a comma-separated variable.
template <typename Use>
void each_item(const char* name, Use&& use) {
  const char* text = std::getenv(name);
  std::istringstream items(text == nullptr ? "" : text);
  for (std::string item; std::getline(items, item, ',');) use(item);
}

}  // namespace

Settings settings_from_environment() {
  Settings settings;
  settings.devices = static_cast<int>(std::clamp(number("EMUCUDA_DEVICES", 1), 0L, long{kMaxDevices}));
  std::fill_n(settings.capacity, kMaxDevices, static_cast<uint64_t>(number("EMUCUDA_MEMORY_MB", 512)) << 20);
  settings.granularity = static_cast<uint64_t>(number("EMUCUDA_GRANULARITY_KB", 2048)) << 10;
  settings.poison = static_cast<int>(number("EMUCUDA_POISON", 0xA5));
  settings.driver_version = static_cast<int>(number("EMUCUDA_DRIVER_VERSION", 13000));
  settings.pin_limit = static_cast<uint64_t>(number("EMUCUDA_PIN_LIMIT_MB", 0)) << 20;
  settings.ignore_hints = number("EMUCUDA_IGNORE_HINTS", 0) != 0;
  settings.mig = number("EMUCUDA_MIG", 0) != 0;
  settings.attributes = {{18, 0}, {102, 1}, {110, 1}};
  each_item("EMUCUDA_ATTRIBUTES", [&](const std::string& item) {
    int attribute = 0, value = 0;
    if (std::sscanf(item.c_str(), "%d=%d", &attribute, &value) == 2) settings.attributes[attribute] = value;
  });
  return settings;
}

void Faults::read_environment() {
  each_item("EMUCUDA_FAIL", [&](const std::string& item) {
    char call[64] = "";
    unsigned long long nth = 0;
    int code = 0;
    long long times = 1;
    if (std::sscanf(item.c_str(), "%63[^:]:%llu:%d:%lld", call, &nth, &code, &times) >= 3) set(call, nth, code, times);
  });
}

void Faults::set(const std::string& call, uint64_t nth, int32_t code, int64_t times) {
  const std::lock_guard<std::mutex> lock(mutex_);
  points_[call] = Point{nth == 0 ? 0 : nth - 1, times, code};
}

void Faults::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  points_.clear();
  calls_.clear();
}

uint64_t Faults::calls(const std::string& call) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = calls_.find(call);
  return found == calls_.end() ? 0 : found->second;
}

int32_t Faults::enter(const std::string& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ++calls_[call];
  const auto found = points_.find(call);
  if (found == points_.end()) return 0;
  Point& point = found->second;
  if (point.skip > 0) {
    --point.skip;
    return 0;
  }
  if (point.times == 0) return 0;
  if (point.times > 0) --point.times;
  return point.code;
}

}  // namespace emu
