// The books of the fault points. Touches nothing else; costs one atomic load where none is set.
#include "faults.h"

#include <algorithm>
#include <iterator>

namespace hal {
namespace {

constexpr const char* kNames[] = {
    "granularity", "memory_info",    "reserve", "unreserve",   "create",        "release",         "map",
    "access",      "unmap",          "fill",    "synchronize", "host_register", "host_unregister", "copy_to_host",
    "arena grow",  "copy_to_device", "restore", "file write",  "file read",     "vacate",          "encode",
    "decode",
};

bool known(const std::string& name) {
  return std::any_of(std::begin(kNames), std::end(kNames), [&](const char* candidate) { return name == candidate; });
}

}  // namespace

Status Faults::set(const char* call, uint64_t nth, int32_t code, int64_t times) {
  if (call == nullptr || !known(call)) {
    std::string names;
    for (const char* name : kNames) names += std::string(names.empty() ? "" : ", ") + name;
    return Status::invalid("fault_set", "there is no such fault point; there are: " + names);
  }
  if (nth == 0) return Status::invalid("fault_set", "calls are counted from 1, the next one");
  if (code == 0 && std::string(call) != "restore") {
    return Status::invalid("fault_set", "code 0 is success; only 'restore' takes it, to leave a copy out silently");
  }
  std::lock_guard<std::mutex> lock(mutex_);
  points_[call] = Point{nth - 1, times, code};
  armed_ = true;
  return {};
}

void Faults::clear() {
  std::lock_guard<std::mutex> lock(mutex_);
  points_.clear();
  hits_.clear();
  armed_ = false;
}

uint64_t Faults::hits(const char* call) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = call == nullptr ? hits_.end() : hits_.find(call);
  return found == hits_.end() ? 0 : found->second;
}

bool Faults::fires(const char* call, int32_t* code) {
  if (!armed_.load(std::memory_order_acquire)) return false;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = points_.find(call);
  if (found == points_.end()) return false;
  Point& point = found->second;
  if (point.skip > 0) {
    --point.skip;
    return false;
  }
  if (point.times == 0) return false;
  if (point.times > 0) --point.times;
  *code = point.code;
  ++hits_[call];
  return true;
}

}  // namespace hal
