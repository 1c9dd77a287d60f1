// Keeps the state of all cards. Never destroyed: lists may still run while the process exits.
#include "machine.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <sstream>
#include <thread>

#include "../codes.h"

namespace emuze {
namespace {

using Lock = std::lock_guard<std::recursive_mutex>;
constexpr uint32_t kAll = 3;  // of emu::Memory: read and write

Settings usual_settings() {
  Settings settings;
  for (int i = 0; i < kMaxCards; ++i) settings.card[i].bus = 0x3au + static_cast<uint32_t>(i);
  return settings;
}

ze_result_t translated(int32_t code) {
  switch (code) {
    case emu::kSuccess:
      return ZE_RESULT_SUCCESS;
    case emu::kOutOfMemory:
      return ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
    case emu::kIllegalAddress:
      return ZE_RESULT_ERROR_DEVICE_LOST;
    default:
      return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  }
}

bool is_composite() {
  const char* mode = std::getenv("ZE_FLAT_DEVICE_HIERARCHY");
  return mode != nullptr && std::string(mode) == "COMPOSITE";
}

uint64_t page_of(uint64_t size) {
  return size < (2u << 20) ? 64u << 10 : 2u << 20;
}

}  // namespace

Machine& Machine::instance() {
  static Machine* const machine = new Machine;
  return *machine;
}

Machine::Machine() : settings_(usual_settings()) {
  for (int card = 0; card < kMaxCards; ++card) {
    cards_[card] = {nullptr, card, kWholeCard};
    for (int tile = 0; tile < kMaxTiles; ++tile) {
      tiles_[card][tile] = {nullptr, card, tile};
      modules_[card][tile] = {nullptr, card, tile};
    }
  }
}

void Machine::reset() {
  configure([](Settings& settings) { settings = usual_settings(); });
  faults.clear();
  memory.forget_double_releases();
  const Lock lock(books_);
  frozen_.clear();
  shared_mappings_ = 0;
  concurrent_uses_ = 0;
  sticky_ = 0;
}

Settings Machine::settings() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return settings_;
}

std::vector<Gpu*> Machine::visible_gpus() {
  const Settings now = settings();
  std::vector<Gpu*> all;
  for (int i = now.first; i < now.first + now.cards; ++i) {
    const bool is_one = is_composite() || now.card[i].tiles == 1;
    for (int t = 0; t < (is_one ? 1 : now.card[i].tiles); ++t) all.push_back(is_one ? card(i) : tile(i, t));
  }
  const char* mask = std::getenv("ZE_AFFINITY_MASK");
  if (mask == nullptr) return all;
  std::vector<Gpu*> chosen;
  std::istringstream entries(mask);
  for (std::string entry; std::getline(entries, entry, ',');) {
    const size_t index = std::strtoul(entry.c_str(), nullptr, 10), dot = entry.find('.');
    if (dot != std::string::npos && index < static_cast<size_t>(now.cards)) {
      chosen.push_back(tile(now.first + static_cast<int>(index), std::atoi(entry.c_str() + dot + 1)));
    } else if (dot == std::string::npos && index < all.size()) {
      chosen.push_back(all[index]);
    }
  }
  return chosen;
}

uint64_t Machine::total_of(const Gpu& gpu) const {
  const CardSettings card = settings().card[gpu.card];
  return gpu.tile == kWholeCard ? card.total : card.total / static_cast<uint64_t>(card.tiles);
}

uint64_t Machine::used_on(int card) const {
  uint64_t used = 0;
  for (int tile = 0; tile < kMaxTiles; ++tile) used += memory.use(card * kMaxTiles + tile).used_bytes;
  return used;
}

uint64_t Machine::free_of(int card, int tile) const {
  const CardSettings& set = settings().card[card];
  const auto tiles = static_cast<uint64_t>(set.tiles);
  const bool is_whole = tile == kWholeCard || tiles == 1;
  const uint64_t total = is_whole ? set.total : set.total / tiles;
  const uint64_t held = (is_whole ? set.taken : set.taken / tiles) +
                        (is_whole ? used_on(card) : memory.use(card * kMaxTiles + tile).used_bytes);
  return total > held ? total - held : 0;
}

uint64_t Machine::reported_free(int card, int tile) {
  const Settings now = settings();
  const uint64_t truth = free_of(card, tile);
  if (now.sysman_free == kZero) return 0;
  if (now.sysman_free == kTotal) return now.card[card].total / static_cast<uint64_t>(now.card[card].tiles);
  if (now.sysman_free != kFrozen) return truth;
  const Lock lock(books_);
  return frozen_.emplace(std::make_pair(card, tile), truth).first->second;
}

Context* Machine::create_context() {
  const Lock lock(books_);
  return *contexts_.insert(new Context).first;
}

Context* Machine::engine_context() {
  const Lock lock(books_);
  if (engine_ == nullptr) engine_ = new Context;
  return engine_;
}

ze_result_t Machine::destroy_context(Context* context) {
  const Lock lock(books_);
  if (contexts_.erase(context) == 0) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
  delete context;
  return ZE_RESULT_SUCCESS;
}

// ---- memory ------------------------------------------------------------------------------------------------------

ze_result_t Machine::lost() const {
  return sticky_.load() == 0 ? ZE_RESULT_SUCCESS : ZE_RESULT_ERROR_DEVICE_LOST;
}

ze_result_t Machine::reserve(Context* context, uint64_t hint, uint64_t size, uint64_t* out) {
  if (size == 0 || size % page_of(size) != 0) return ZE_RESULT_ERROR_UNSUPPORTED_SIZE;
  const Lock lock(books_);
  const int32_t code = memory.reserve(size, page_of(size), hint, out);
  if (code != emu::kSuccess) return ZE_RESULT_ERROR_OUT_OF_HOST_MEMORY;
  reservations_[*out] = {size, context};
  return ZE_RESULT_SUCCESS;
}

ze_result_t Machine::unreserve(Context* context, uint64_t address, uint64_t size) {
  const Lock lock(books_);
  const auto found = reservations_.find(address);
  if (found == reservations_.end() || found->second != std::make_pair(size, context)) {
    return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  }
  const ze_result_t result = translated(memory.unreserve(address, size));
  if (result == ZE_RESULT_SUCCESS) reservations_.erase(found);
  return result;
}

ze_result_t Machine::create(const Gpu& gpu, uint64_t size, uint64_t* out) {
  if (size == 0 || size % page_of(size) != 0) return ZE_RESULT_ERROR_UNSUPPORTED_SIZE;
  if (lost() != ZE_RESULT_SUCCESS) return lost();
  const Settings now = settings();
  const CardSettings& card = now.card[gpu.card];
  const uint64_t taken = gpu.tile == kWholeCard ? card.taken : card.taken / static_cast<uint64_t>(card.tiles);
  const uint64_t total = total_of(gpu);
  const uint64_t limit = now.late_memory ? UINT64_MAX : total - std::min(taken, total);
  const Lock lock(books_);
  const ze_result_t result = translated(memory.create(owner(gpu), size, limit, now.poison, false, out));
  if (result == ZE_RESULT_SUCCESS) physical_[*out] = {owner(gpu), size, 0};
  return result;
}

ze_result_t Machine::destroy(uint64_t physical) {
  const Lock lock(books_);
  const auto found = physical_.find(physical);
  if (found != physical_.end() && found->second.mappings > 0) return ZE_RESULT_ERROR_HANDLE_OBJECT_IN_USE;
  if (found != physical_.end()) physical_.erase(found);
  return translated(memory.release(physical));
}

ze_result_t Machine::map(Context* context, uint64_t address, uint64_t size, uint64_t physical, uint32_t access) {
  const Lock lock(books_);
  const auto found = physical_.find(physical);
  const auto reserved = reservations_.upper_bound(address);
  if (found == physical_.end() || reserved == reservations_.begin() || size % page_of(size) != 0) {
    return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  }
  if (std::prev(reserved)->second.second != context) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  const int owner = found->second.owner;
  const Settings now = settings();
  if (now.late_memory && memory.use(owner).used_bytes > now.card[owner / kMaxTiles].total) {
    return ZE_RESULT_ERROR_OUT_OF_DEVICE_MEMORY;
  }
  const bool is_shared = found->second.mappings > 0;
  const ze_result_t result = translated(memory.map(address, size, physical));
  if (result != ZE_RESULT_SUCCESS) return result;
  shared_mappings_ += is_shared ? 1 : 0;
  ++found->second.mappings;
  // Some backends answer success when memory is mapped a second time, and its pages fault.
  const bool reachable = (!is_shared || now.share) && access != ZE_MEMORY_ACCESS_ATTRIBUTE_NONE;
  const uint32_t flags = access == ZE_MEMORY_ACCESS_ATTRIBUTE_READWRITE ? kAll : 1;
  if (reachable) memory.set_access(address, size, owner, flags);
  mappings_[address] = {size, physical, context, reachable && flags == kAll};
  return ZE_RESULT_SUCCESS;
}

ze_result_t Machine::unmap(Context* context, uint64_t address, uint64_t size) {
  const Lock lock(books_);
  const auto found = mappings_.find(address);
  if (found == mappings_.end() || found->second.size != size || found->second.context != context) {
    return ZE_RESULT_ERROR_INVALID_ARGUMENT;  // one whole mapping a call
  }
  const ze_result_t result = translated(memory.unmap(address, size));
  if (result != ZE_RESULT_SUCCESS) return result;
  --physical_.at(found->second.physical).mappings;
  mappings_.erase(found);
  return ZE_RESULT_SUCCESS;
}

int Machine::reaches(Context* context, uint64_t address, uint64_t size) const {
  const Lock lock(books_);
  auto reserved = reservations_.upper_bound(address);
  if (reserved == reservations_.begin() || (--reserved)->first + reserved->second.first <= address) return -1;
  const uint64_t end = address + size;
  while (address < end) {
    auto next = mappings_.upper_bound(address);
    if (next == mappings_.begin()) return 0;
    const auto& [start, mapping] = *--next;
    if (start + mapping.size <= address || mapping.context != context || !mapping.reachable) return 0;
    address = start + mapping.size;
  }
  return 1;
}

// ---- lists -------------------------------------------------------------------------------------------------------

namespace {

// Notices two threads in one list.
class Use {
 public:
  Use(List* list, std::atomic<uint64_t>* violations) : list_(list) {
    if (list_->in_use.exchange(true)) ++*violations;
  }
  ~Use() { list_->in_use = false; }
  Use(const Use&) = delete;
  Use& operator=(const Use&) = delete;

 private:
  List* const list_;
};

}  // namespace

List* Machine::create_list(Context* context, const Gpu& gpu, bool synchronous) {
  const Lock lock(books_);
  List* list = new List;
  list->context = context;
  list->owner = owner(gpu);
  list->synchronous = synchronous;
  list->stream = std::make_shared<emu::Stream>(list->owner, false, &sticky_);
  lists_.insert(list);
  return list;
}

ze_result_t Machine::destroy_list(List* list) {
  {
    const Lock lock(books_);
    if (lists_.erase(list) == 0) return ZE_RESULT_ERROR_INVALID_NULL_HANDLE;
  }
  flush(list);
  list->stream->wait();
  delete list;
  return ZE_RESULT_SUCCESS;
}

// Runs what no barrier has ordered the other way round.
void Machine::flush(List* list) {
  for (auto next = list->unordered.rbegin(); next != list->unordered.rend(); ++next) list->stream->enqueue(*next);
  list->unordered.clear();
}

ze_result_t Machine::append(List* list, emu::Stream::Operation operation) {
  const Use use(list, &concurrent_uses_);
  if (lost() != ZE_RESULT_SUCCESS) return lost();
  const uint64_t delay = settings().delay_us;
  list->unordered.push_back([delay, operation = std::move(operation)] {
    if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    return operation();
  });
  if (!list->synchronous) return ZE_RESULT_SUCCESS;
  flush(list);
  list->stream->wait();
  return lost();
}

ze_result_t Machine::barrier(List* list) {
  const Use use(list, &concurrent_uses_);
  flush(list);
  return lost();
}

ze_result_t Machine::synchronize(List* list) {
  const Use use(list, &concurrent_uses_);
  flush(list);
  list->stream->wait();
  return lost();
}

// ---- host memory and statistics ----------------------------------------------------------------------------------

ze_result_t Machine::import_host(uint64_t address, uint64_t size) {
  const uint64_t limit = settings().pin_limit;
  const Lock lock(books_);
  const auto next = imports_.lower_bound(address);
  const bool overlaps = (next != imports_.end() && next->first < address + size) ||
                        (next != imports_.begin() && std::prev(next)->first + std::prev(next)->second > address);
  if (overlaps || (limit != 0 && imported_bytes_ + size > limit)) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  imports_[address] = size;
  imported_bytes_ += size;
  return ZE_RESULT_SUCCESS;
}

ze_result_t Machine::release_host(uint64_t address) {
  const Lock lock(books_);
  const auto found = imports_.find(address);
  if (found == imports_.end()) return ZE_RESULT_ERROR_INVALID_ARGUMENT;
  imported_bytes_ -= found->second;
  imports_.erase(found);
  return ZE_RESULT_SUCCESS;
}

void Machine::stats(int card, emuze_stats* out) const {
  const Lock lock(books_);
  *out = emuze_stats{};
  for (int tile = 0; tile < kMaxTiles; ++tile) {
    const emu::MemoryUse use = memory.use(card * kMaxTiles + tile);
    out->used_bytes += use.used_bytes;
    out->handles += use.handles;
    out->orphans += use.orphans;
    out->mappings += use.mappings;
    out->double_releases = use.double_releases;
  }
  for (const List* list : lists_) out->queued += list->stream->queued() + list->unordered.size();
  out->reservations = reservations_.size();
  out->contexts = contexts_.size();
  out->lists = lists_.size();
  out->shared_mappings = shared_mappings_;
  out->concurrent_uses = concurrent_uses_;
  out->registrations = imports_.size();
  out->registered_bytes = imported_bytes_;
}

}  // namespace emuze
