// Fault points: make the n-th call of a named step fail, so that every recovery path can be tested on every vendor.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <string>

#include "status.h"

namespace hal {

class Faults {
 public:
  Status set(const char* call, uint64_t nth, int32_t code, int64_t times);
  void clear();
  uint64_t hits(const char* call) const;

  // Whether this call of `call` has to fail, and then with which code.
  bool fires(const char* call, int32_t* code);

 private:
  struct Point {
    uint64_t skip;  // calls that still pass
    int64_t times;  // failures left; -1: for ever
    int32_t code;
  };
  std::atomic<bool> armed_{false};
  mutable std::mutex mutex_;  // a leaf
  std::map<std::string, Point> points_;
  std::map<std::string, uint64_t> hits_;
};

}  // namespace hal
