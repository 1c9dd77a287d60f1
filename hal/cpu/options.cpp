// Parsing the cpu driver's options. Touches nothing else.
#include "options.h"

#include <unistd.h>

#include <cstdlib>
#include <sstream>

namespace hal {
namespace {

bool parse_number(const std::string& text, uint64_t* out) {
  char* end = nullptr;
  *out = std::strtoull(text.c_str(), &end, 0);
  return !text.empty() && *end == '\0';
}

bool parse_item(const std::string& item, CpuOptions* out) {
  const size_t equals = item.find('=');
  uint64_t value = 0;
  if (equals == std::string::npos || !parse_number(item.substr(equals + 1), &value)) return false;
  const std::string key = item.substr(0, equals);
  if (key == "capacity") {
    out->capacity = value;
  } else if (key == "chunk") {
    out->chunk = value;
  } else if (key == "granularity" && value > 0 && value % static_cast<uint64_t>(sysconf(_SC_PAGESIZE)) == 0) {
    out->granularity = value;
  } else if (key == "dirty" && value <= 0xFF) {
    out->dirty = static_cast<int>(value);
  } else {
    return false;
  }
  return true;
}

}  // namespace

bool parse_cpu_options(const char* text, CpuOptions* out, std::string* bad) {
  std::istringstream stream(text);
  while (std::getline(stream, *bad, ';')) {
    if (!bad->empty() && !parse_item(*bad, out)) return false;
  }
  return true;
}

}  // namespace hal
