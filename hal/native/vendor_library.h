// A vendor's driver library: found and opened at run time, its symbols bound by one table.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace hal {

struct LibrarySearch {
  const char* variable;            // environment variable that names a file and overrides the rest
  const char* prefix;              // of the file name of an instance that this process has loaded already
  std::vector<const char*> names;  // for the dynamic loader, tried in this order otherwise
};

// Opens a library for good (vendors' libraries do not survive being unloaded): the one the process has, if it has one,
// so that there is never a second instance beside torch's. Null on failure, and then `why` says what to do.
void* open_vendor_library(const LibrarySearch& search, std::string* why);

// One function of a library, where its address goes, and the first driver version that has it, in the vendor's
// numbering.
struct Symbol {
  const char* name;
  void** slot;
  int32_t since;
  bool required;
};

template <typename Function>
Symbol required_symbol(const char* name, Function*& slot, int32_t since) {
  return {name, reinterpret_cast<void**>(&slot), since, true};
}

template <typename Function>
Symbol optional_symbol(const char* name, Function*& slot, int32_t since) {
  return {name, reinterpret_cast<void**>(&slot), since, false};
}

// Fills every slot, with null where the library lacks the symbol.
void bind_symbols(void* library, const std::vector<Symbol>& symbols);

// Empties the slots of symbols that a driver of `version` is too old for, and returns the first required symbol whose
// slot is empty; null when there is none.
const Symbol* check_symbols(const std::vector<Symbol>& symbols, int32_t version);

}  // namespace hal
