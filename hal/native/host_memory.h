// How much host memory this process may still take: the kernel's figure and every cgroup above the process.
#pragma once

#include <string>

#include "status.h"

namespace hal {

// `root` is put before every path that is read, so that tests can give a tree of their own.
Status read_host_memory(const std::string& root, hal_host_info* out);
inline Status read_host_memory(hal_host_info* out) {
  return read_host_memory("", out);
}

}  // namespace hal
