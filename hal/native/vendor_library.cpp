// Touches the dynamic loader and /proc/self/maps; keeps nothing.
#include "vendor_library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <fstream>

namespace hal {
namespace {

// The path that a line of /proc/self/maps ends with; empty for memory that no file backs.
std::string path_of(const std::string& line) {
  const size_t start = line.find('/');
  return start == std::string::npos ? "" : line.substr(start);
}

bool file_name_starts_with(const std::string& path, const std::string& prefix) {
  return path.compare(path.rfind('/') + 1, prefix.size(), prefix) == 0;
}

void* find_loaded(const char* prefix) {
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const std::string path = path_of(line);
    if (path.empty() || !file_name_starts_with(path, prefix)) continue;
    // A mapping that is no loaded library (a file someone reads) is refused by RTLD_NOLOAD.
    if (void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD)) return library;
  }
  return nullptr;
}

void* open_or_explain(const char* name, std::string* why) {
  void* library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) *why = dlerror();
  return library;
}

}  // namespace

void* open_vendor_library(const LibrarySearch& search, std::string* why) {
  const char* named = std::getenv(search.variable);
  if (named != nullptr && *named != '\0') {
    void* library = open_or_explain(named, why);
    if (library == nullptr) *why = std::string(search.variable) + " names a library that does not load: " + *why;
    return library;
  }
  if (void* library = find_loaded(search.prefix)) return library;
  std::string first;
  for (const char* name : search.names) {
    if (void* library = open_or_explain(name, why)) return library;
    if (first.empty()) first = *why;
  }
  *why = first + "; install the vendor's driver, or name its library in " + search.variable;
  return nullptr;
}

void bind_symbols(void* library, const std::vector<Symbol>& symbols) {
  for (const Symbol& symbol : symbols) *symbol.slot = dlsym(library, symbol.name);
}

const Symbol* check_symbols(const std::vector<Symbol>& symbols, int32_t version) {
  const Symbol* missing = nullptr;
  for (const Symbol& symbol : symbols) {
    if (symbol.since > version) *symbol.slot = nullptr;
    if (missing == nullptr && symbol.required && *symbol.slot == nullptr) missing = &symbol;
  }
  return missing;
}

}  // namespace hal
