// What AMD's runtime keeps in its own books of virtual memory, and where its releases go wrong.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda.h"

namespace emuhip {

class Runtime {
 public:
  static Runtime& instance();

  void reset();
  void set_quirks(const std::string& names);
  void set_version(int32_t version) { version_ = version; }
  int32_t version() const { return version_; }
  void steal(int32_t count);
  void return_stolen();
  uint64_t held_bytes();

  Code memory_info(const Cuda& cuda, size_t* free_bytes, size_t* total);
  Code reserve(const Cuda& cuda, uint64_t* out, size_t size, size_t alignment, uint64_t hint);
  Code unreserve(const Cuda& cuda, uint64_t address, size_t size);
  Code create(const Cuda& cuda, uint64_t* out, size_t size, const void* properties);
  Code release(const Cuda& cuda, uint64_t handle);
  Code map(const Cuda& cuda, uint64_t address, size_t size, uint64_t handle);
  Code unmap(const Cuda& cuda, uint64_t address, size_t size);
  Code access(const Cuda& cuda, uint64_t address, size_t size, const void* descriptions, size_t count);
  void synchronized();

 private:
  struct Mapping {
    uint64_t size, handle;
  };
  struct Piece {  // of physical memory, with the place where it was mapped last
    uint64_t size, address;
  };
  struct Held {
    uint64_t address, size, handle;
    bool until_freed;
  };
  struct Range {
    uint64_t address, size;
  };

  Runtime();
  bool has(const char* quirk) const { return quirks_.count(quirk) > 0; }
  Range reservation_of(uint64_t address) const;
  std::vector<uint64_t> mappings_in(uint64_t address, uint64_t size) const;
  bool hold(const Piece& piece, uint64_t handle);
  bool is_let_go(const Held& held) const;
  void settle(const Cuda& cuda);
  Code reserve_elsewhere(const Cuda& cuda, uint64_t* out, size_t size, size_t alignment, uint64_t not_there);
  void take_over(uint64_t address, uint64_t size);

  std::mutex mutex_;
  std::set<std::string> quirks_;
  int32_t version_ = 0;
  int32_t to_steal_ = 0;
  bool finished_ = true;  // whether the device was waited for since the last mapping
  size_t frozen_free_ = 0;
  int marker_file_ = -1;
  std::map<uint64_t, uint64_t> reservations_;
  std::set<uint64_t> stuck_;  // ranges that can never be freed
  std::map<uint64_t, Mapping> mappings_;
  std::map<uint64_t, Piece> pieces_;
  std::vector<Held> held_;
  std::vector<Range> stolen_;
};

}  // namespace emuhip
