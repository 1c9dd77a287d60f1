// ROCm's row of primitives: libamdhip64 opened at run time, one device of it, and how that device gives memory back.
// The primitives themselves are in native/vmm_family.cpp, which CUDA shares, and in hip_device.cpp.
//
// Options: chunk=BYTES (the largest physical piece; 0: no limit) and release=auto|plain|placeholder|anon-remap (how
// memory gets back to the device; each way is used only once it is proved).
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <sstream>
#include <utility>

#include "give_back.h"

namespace hal {
namespace {

// One physical piece of many gigabytes fails on some releases, and each unmapping costs a file descriptor on others.
constexpr uint64_t kDefaultChunk = uint64_t{256} << 20;

constexpr int32_t kVirtualMemory = 89;  // hipDeviceAttribute_t

// For `describe`, which gets no context: the runtime's functions that put codes into words need none either.
std::atomic<decltype(HipApi::error_name)> error_name{nullptr};
std::atomic<decltype(HipApi::error_text)> error_text{nullptr};

std::string words_of(int32_t code, const std::atomic<decltype(HipApi::error_name)>& lookup, const char* otherwise) {
  const auto function = lookup.load(std::memory_order_acquire);
  const char* words = function == nullptr ? nullptr : function(code);
  return words == nullptr ? otherwise : words;
}

void describe(int32_t code, char* text, size_t size) {
  switch (code) {
    case kHipAddressLost:
      std::snprintf(text, size, "another allocation took the range while it was given up to free its memory");
      return;
    case kHipRemapFailed:
      std::snprintf(text, size, "the kernel refused to map inaccessible memory over the range");
      return;
    case kHipNotUsable:
      std::snprintf(text, size, "mapped memory did not keep what was written into it");
      return;
    default:
      std::snprintf(text, size, "%s: %s", words_of(code, error_name, "HIP error").c_str(),
                    words_of(code, error_text, "the runtime knows no words for it").c_str());
  }
}

hal_kind classify(int32_t code) {
  return code == kHipAddressLost ? HAL_ADDRESS_LOST : classify_vmm_error(code);
}

std::string version_text(int32_t version) {
  return std::to_string(version / 10000000) + "." + std::to_string(version / 100000 % 100) + "." +
         std::to_string(version % 100000);
}

struct Options {
  VmmOptions common{kDefaultChunk};
  std::vector<GiveBack> ways{GiveBack::kPlain, GiveBack::kPlaceholder, GiveBack::kAnonRemap};
};

bool parse_release(const std::string& name, Options* out) {
  if (name == "auto") return true;
  for (const GiveBack way : Options().ways) {
    if (name == name_of(way)) return out->ways = {way}, true;
  }
  return false;
}

// Reads "key=value;key=value"; returns what is wrong, or "".
std::string parse_options(const char* text, Options* out) {
  const std::string key = "release=";
  std::istringstream items(text == nullptr ? "" : text);
  std::string common;
  for (std::string item; std::getline(items, item, ';');) {
    if (item.compare(0, key.size(), key) != 0) {
      common += item + ";";
    } else if (!parse_release(item.substr(key.size()), out)) {
      return "'" + item + "' is no way to release; there are auto, plain, placeholder and anon-remap";
    }
  }
  const std::string wrong = parse_vmm_options(common.c_str(), &out->common);
  return wrong.compare(0, 7, "unknown") == 0 ? wrong + " and release=WAY" : wrong;
}

// The table of a runtime that can do what is needed; on failure `why` says what to do.
int32_t load_api(HipApi* api, int32_t* version, std::string* why) {
  void* library = open_vendor_library(
      {"HAL_LIBAMDHIP64", "libamdhip64", {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so"}}, why);
  if (library == nullptr) return kVmmNoDevice;
  const std::vector<Symbol> symbols = symbols_of(*api);
  bind_symbols(library, symbols);
  *version = 0;
  if (api->runtime_version != nullptr) api->runtime_version(version);
  if (const Symbol* missing = check_symbols(symbols, *version)) {
    *why = std::string(missing->name) + " needs HIP " + version_text(std::max(missing->since, kFirstVirtualMemory)) +
           " or later, this is " + version_text(*version) + "; update ROCm, best to 6.3.4 or later";
    return kVmmNotSupported;
  }
  error_name.store(api->error_name, std::memory_order_release);
  error_text.store(api->error_text, std::memory_order_release);
  return kVmmSuccess;
}

std::string why_no_device(const HipApi& api, int32_t ordinal) {
  int32_t count = 0;
  api.device_count(&count);
  return "there is no ROCm device " + std::to_string(ordinal) + ": this process sees " + std::to_string(count) +
         " (see ROCR_VISIBLE_DEVICES and HIP_VISIBLE_DEVICES)";
}

int32_t find_device(const HipApi& api, int32_t ordinal, std::string* why) {
  int32_t code = api.init(0), count = 0;
  if (code == kVmmSuccess) code = api.device_count(&count);
  if (code != kVmmSuccess) {
    char text[120];
    describe(code, text, sizeof text);
    *why = std::string("no AMD GPU can be used, HIP says ") + text + "; check /dev/kfd, /dev/dri and their groups";
    return code;
  }
  if (ordinal >= 0 && ordinal < count) return kVmmSuccess;
  *why = why_no_device(api, ordinal);
  return kVmmInvalidDevice;
}

std::string why_not_given_back(const GiveBackProof& proof) {
  const auto mib = [](uint64_t bytes) { return std::to_string(bytes >> 20) + " MiB"; };
  return "of " + mib(proof.released) + " released only " + mib(proof.came_back) +
         " came back in every way tried; update ROCm (6.4.0, 6.4.1 and 7.2 have this)";
}

// What was found goes into the facts; only a runtime that cannot even map memory is a failure.
int32_t probe_give_back(HipDevice& device, const Options& options, int32_t version, std::string* why) {
  const GiveBackProof proof = find_give_back(device, options.ways);
  if (!proof.mapped) {
    char text[120];
    describe(proof.code, text, sizeof text);
    *why = std::string("mapping memory for a trial failed with ") + text;
    return proof.code;
  }
  const char* const unproved = proof.free_moves ? "none works" : "plain, unproved";
  const char* const way = proof.proved ? name_of(proof.way) : unproved;
  device.set_found(proof.proved || !proof.free_moves, proof.free_moves, why_not_given_back(proof));
  device.set_version("HIP " + version_text(version) + " (release: " + way + ")");
  return kVmmSuccess;
}

int32_t open_device(int32_t ordinal, const char* text, std::unique_ptr<HipDevice>* out, std::string* why) {
  Options options;
  *why = parse_options(text, &options);
  if (!why->empty()) return kVmmInvalidValue;
  HipApi api{};
  int32_t version = 0;
  int32_t code = load_api(&api, &version, why);
  if (code != kVmmSuccess) return code;
  code = find_device(api, ordinal, why);
  if (code != kVmmSuccess) return code;
  auto opened = std::make_unique<HipDevice>(api, ordinal);
  if (opened->attribute(kVirtualMemory) == 0) {
    *why = "this GPU or its kernel driver does not support HIP's virtual memory management";
    return kVmmNotSupported;
  }
  code = opened->read_facts(version, options.common, why);
  if (code == kVmmSuccess) code = probe_give_back(*opened, options, version, why);
  if (code == kVmmSuccess) *out = std::move(opened);
  return code;
}

int32_t open(int32_t ordinal, const char* options, void** context, char* why, size_t why_size) {
  std::unique_ptr<HipDevice> device;
  std::string reason;
  const int32_t code = open_device(ordinal, options, &device, &reason);
  std::snprintf(why, why_size, "%s", reason.c_str());
  if (code == kVmmSuccess) *context = static_cast<VmmDevice*>(device.release());
  return code;
}

hal_driver make_table() {
  hal_driver table = vmm_driver_table("rocm", open, describe);
  table.classify = classify;
  table.vacate = [](void* c, hal_address address, uint64_t size, hal_address* got) {
    return static_cast<HipDevice*>(static_cast<VmmDevice*>(c))->vacate(address, size, got);
  };
  return table;
}

}  // namespace
}  // namespace hal

extern "C" const hal_driver* hal_rocm_driver(void) {
  static const hal_driver table = hal::make_table();
  return &table;
}
