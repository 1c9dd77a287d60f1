// What the emulated machine is like, and which calls fail.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <string>

namespace emu {

constexpr int kMaxDevices = 16;

struct Settings {
  int devices = 1;
  uint64_t capacity[kMaxDevices] = {};
  uint64_t taken[kMaxDevices] = {};  // by other processes
  uint64_t granularity = 0;
  int poison = 0;  // byte of fresh physical memory; -1: zero pages
  int driver_version = 0;
  uint64_t pin_limit = 0;  // bytes; 0: none
  uint64_t delay_us = 0;   // of every queued copy and fill
  bool ignore_hints = false;
  bool mig = false;
  std::map<int, int> attributes;
};

Settings settings_from_environment();

// Counts the calls of every function and makes chosen ones fail. Thread-safe.
class Faults {
 public:
  void read_environment();
  void set(const std::string& call, uint64_t nth, int32_t code, int64_t times);
  void clear();
  uint64_t calls(const std::string& call) const;
  // Counts one call; returns the code that it must fail with, or 0.
  int32_t enter(const std::string& call);

 private:
  struct Point {
    uint64_t skip;
    int64_t times;  // -1: for ever
    int32_t code;
  };
  mutable std::mutex mutex_;
  std::map<std::string, Point> points_;
  std::map<std::string, uint64_t> calls_;
};

}  // namespace emu
