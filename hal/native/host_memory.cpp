// Reads /proc/meminfo, /proc/self/cgroup, /proc/self/mountinfo and the memory controller's files; writes nothing.
//
// The page cache that a cgroup can drop (inactive_file) counts as room, as it does in MemAvailable.
// Sources: the kernel's admin-guide/cgroup-v2.rst ("memory.max", "memory.current", "memory.stat") and
// admin-guide/cgroup-v1/memory.rst ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file").
#include "host_memory.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <vector>

namespace hal {
namespace {

// One memory controller: where it is mounted, what of the hierarchy the mount shows, and which cgroup is ours.
struct Controller {
  bool version_2 = false;
  std::string mount, mount_root, path;
};

constexpr uint64_t kUnlimited = uint64_t{1} << 62;  // v1 says "no limit" by a huge number

bool read_number(const std::string& file, uint64_t* out) {
  std::ifstream stream(file);
  return static_cast<bool>(stream >> *out);  // v2's "max" is no number: no limit
}

uint64_t read_field(const std::string& file, const std::string& field) {
  std::ifstream stream(file);
  std::string name;
  uint64_t value = 0;
  while (stream >> name >> value) {
    if (name == field) return value;
  }
  return 0;
}

bool read_meminfo(const std::string& root, hal_host_info* out) {
  std::ifstream stream(root + "/proc/meminfo");
  std::string line;
  int found = 0;
  while (found < 2 && std::getline(stream, line)) {
    std::istringstream words(line);
    std::string name;
    uint64_t kib = 0;
    if (!(words >> name >> kib)) continue;
    if (name == "MemTotal:") out->total = kib << 10, ++found;
    if (name == "MemAvailable:") out->available = kib << 10, ++found;
  }
  return found == 2;
}

bool lists(const std::string& names, const std::string& name) {
  std::istringstream stream(names);
  std::string candidate;
  while (std::getline(stream, candidate, ',')) {
    if (candidate == name) return true;
  }
  return false;
}

// A line is "36 35 98:0 /root /mount/point options - type source superoptions" (proc_pid_mountinfo(5)).
void find_mounts(const std::string& root, std::vector<Controller>* out) {
  std::ifstream stream(root + "/proc/self/mountinfo");
  std::string line;
  while (std::getline(stream, line)) {
    const size_t dash = line.find(" - ");
    if (dash == std::string::npos) continue;
    std::istringstream left(line), right(line.substr(dash + 3));
    std::string skipped, type, source, options;
    Controller controller;
    left >> skipped >> skipped >> skipped >> controller.mount_root >> controller.mount;
    right >> type >> source >> options;
    controller.version_2 = type == "cgroup2";
    if (controller.version_2 || (type == "cgroup" && lists(options, "memory"))) out->push_back(controller);
  }
}

// A line is "4:memory:/path", or "0::/path" for version 2 (cgroups(7)).
bool find_path(const std::string& root, bool version_2, std::string* path) {
  std::ifstream stream(root + "/proc/self/cgroup");
  std::string line;
  while (std::getline(stream, line)) {
    const size_t first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    if (version_2 ? !controllers.empty() : !lists(controllers, "memory")) continue;
    *path = line.substr(second + 1);
    return true;
  }
  return false;
}

// The part of our cgroup's path below what the mount shows; "" (the mount point itself) when it lies outside of it.
std::string below_mount(const Controller& controller) {
  const std::string& shown = controller.mount_root;
  std::string path = controller.path;
  if (path.find("/..") == 0) return "";
  if (shown != "/") {
    if (path.compare(0, shown.size(), shown) != 0) return "";
    path = path.substr(shown.size());
  }
  while (!path.empty() && path.back() == '/') path.pop_back();
  return path;
}

void apply_limit(const std::string& directory, bool version_2, hal_host_info* out) {
  uint64_t limit = 0, usage = 0;
  if (!read_number(directory + (version_2 ? "/memory.max" : "/memory.limit_in_bytes"), &limit)) return;
  if (limit >= kUnlimited) return;
  if (!read_number(directory + (version_2 ? "/memory.current" : "/memory.usage_in_bytes"), &usage)) return;
  const uint64_t droppable =
      read_field(directory + "/memory.stat", version_2 ? "inactive_file" : "total_inactive_file");
  const uint64_t used = usage - std::min(usage, droppable);
  const uint64_t room = limit - std::min(limit, used);
  out->total = std::min(out->total, limit);
  if (room >= out->available) return;
  out->available = room;
  std::strcpy(out->source, version_2 ? "cgroup v2" : "cgroup v1");
}

}  // namespace

Status read_host_memory(const std::string& root, hal_host_info* out) {
  *out = hal_host_info{};
  std::strcpy(out->source, "meminfo");
  if (!read_meminfo(root, out)) {
    return Status::error(HAL_UNSUPPORTED, "host memory", ENOENT, "/proc/meminfo cannot be read; mount /proc");
  }
  std::vector<Controller> controllers;
  find_mounts(root, &controllers);
  for (Controller& controller : controllers) {
    if (!find_path(root, controller.version_2, &controller.path)) continue;
    std::string below = below_mount(controller);
    for (;;) {  // our own cgroup and every ancestor that the mount shows
      apply_limit(root + controller.mount + below, controller.version_2, out);
      if (below.empty()) break;
      below.erase(below.rfind('/'));
    }
  }
  return {};
}

}  // namespace hal
