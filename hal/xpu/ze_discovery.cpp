// Enumerates drivers and devices. Keeps nothing.
#include "ze_discovery.h"

#include <cstdio>
#include <vector>

namespace hal {
namespace {

struct Gpu {
  ZeHandle driver, device;
  ZeDeviceProperties properties;
  std::string pci;  // "" where the driver does not tell
};

template <typename List>
std::vector<ZeHandle> listed(List&& list) {
  uint32_t count = 0;
  if (list(&count, nullptr) != kZeSuccess) return {};
  std::vector<ZeHandle> handles(count);
  if (list(&count, handles.data()) != kZeSuccess) return {};
  handles.resize(count);
  return handles;
}

std::string pci_address(const ZeApi& api, ZeHandle device) {
  ZePciProperties pci;
  if (api.pci_properties == nullptr || api.pci_properties(device, &pci) != kZeSuccess) return "";
  char text[32];
  std::snprintf(text, sizeof text, "%04x:%02x:%02x.%x", pci.domain, pci.bus, pci.device, pci.function);
  return text;
}

std::vector<Gpu> all_gpus(const ZeApi& api) {
  std::vector<Gpu> gpus;
  for (ZeHandle driver : listed([&](uint32_t* n, ZeHandle* out) { return api.drivers(n, out); })) {
    for (ZeHandle device : listed([&](uint32_t* n, ZeHandle* out) { return api.devices(driver, n, out); })) {
      ZeDeviceProperties properties;
      if (api.device_properties(device, &properties) != kZeSuccess || properties.type != kZeDeviceGpu) continue;
      gpus.push_back({driver, device, properties, pci_address(api, device)});
    }
  }
  return gpus;
}

std::string hexadecimal(const uint8_t (&uuid)[16]) {
  std::string text;
  for (const uint8_t byte : uuid) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", byte);
    text += digits;
  }
  return text;
}

// "#number" of a tile: by its own word, or where every tile is a device of its own, by its place among those of its
// card.
std::string tile_suffix(const Gpu& gpu, const std::vector<Gpu>& gpus) {
  if ((gpu.properties.flags & kZeSubdevice) != 0) return "#" + std::to_string(gpu.properties.subdevice);
  int32_t place = 0, of_card = 0;
  for (const Gpu& other : gpus) {
    if (gpu.pci.empty() || other.pci != gpu.pci) continue;
    if (other.device == gpu.device) place = of_card;
    ++of_card;
  }
  return of_card > 1 ? "#" + std::to_string(place) : "";
}

void describe(const Gpu& gpu, const std::vector<Gpu>& gpus, ZeHandles* out) {
  out->driver = gpu.driver;
  out->device = gpu.device;
  out->management_id = (gpu.pci.empty() ? hexadecimal(gpu.properties.uuid) : gpu.pci) + tile_suffix(gpu, gpus);
}

const Gpu* choose(const std::vector<Gpu>& gpus, int32_t ordinal, const std::string& uuid) {
  for (const Gpu& gpu : gpus) {
    if (!uuid.empty() && hexadecimal(gpu.properties.uuid) == uuid) return &gpu;
  }
  const auto index = static_cast<size_t>(ordinal);
  return uuid.empty() && ordinal >= 0 && index < gpus.size() ? &gpus[index] : nullptr;
}

}  // namespace

void describe_device(const ZeApi& api, ZeHandles* handles) {
  const std::vector<Gpu> gpus = all_gpus(api);
  for (const Gpu& gpu : gpus) {
    if (gpu.device == handles->device) describe(gpu, gpus, handles);
  }
}

int32_t find_device(const ZeApi& api, int32_t ordinal, const std::string& uuid, ZeHandles* out, std::string* why) {
  const std::vector<Gpu> gpus = all_gpus(api);
  const Gpu* gpu = choose(gpus, ordinal, uuid);
  if (gpu == nullptr) {
    *why = "there is no Intel GPU " + (uuid.empty() ? std::to_string(ordinal) : "with UUID " + uuid) +
           ": Level Zero shows this process " + std::to_string(gpus.size()) + " (see ZE_AFFINITY_MASK)";
    return kZeInvalidArgument;
  }
  describe(*gpu, gpus, out);
  const ZeContextDescription description;
  const int32_t code = api.context_create(gpu->driver, &description, &out->context);
  out->owns_context = code == kZeSuccess;
  if (code != kZeSuccess) *why = "zeContextCreate failed with " + ze_name(code);
  return code;
}

}  // namespace hal
