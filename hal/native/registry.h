// The drivers of this process: the built-in ones and those registered at run time.
#pragma once

#include <string>
#include <vector>

#include "status.h"

namespace hal {

std::vector<const hal_driver*> builtin_drivers();  // generated from the rooms hal/<vendor>/

Status register_driver(const hal_driver* driver);
Status load_driver(const char* path);
const hal_driver* find_driver(const std::string& name);  // null when there is none
std::string driver_names();                              // comma separated

// Counts the forks that lie between this process and the one that loaded the library: what was made before a fork
// belongs to the parent, its threads and locks are not here.
uint32_t fork_generation();

}  // namespace hal
