// The emulated machine: cards with tiles, contexts, command lists, and whose memory is where.
#pragma once

#include <level_zero/ze_api.h>
#include <level_zero/zes_api.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "../memory.h"
#include "../settings.h"
#include "../streams.h"
#include "emuze.h"

namespace emuze {

constexpr int kMaxCards = 4, kMaxTiles = 4;
constexpr int kWholeCard = -1;

struct CardSettings {
  uint64_t total = uint64_t{512} << 20, taken = 0;
  int tiles = 1;
  bool integrated = false;
  uint32_t bus = 0;
};

enum SysmanFree { kTrue = 0, kFrozen = 1, kZero = 2, kTotal = 3 };

struct Settings {
  int cards = 1, first = 0;
  CardSettings card[kMaxCards];
  int poison = 0xA5;
  uint64_t delay_us = 0, pin_limit = 0;
  bool import = true, late_memory = false, share = false;
  bool sysman_reversed = false, sysman_modules = true, sysman_processes = true;
  int sysman_free = kTrue;
};

// The first word belongs to the loader.
struct Driver {
  void* loaders = nullptr;
};
struct Gpu {
  void* loaders = nullptr;
  int card = 0, tile = kWholeCard;
};
struct Module {  // memory module of Sysman
  void* loaders = nullptr;
  int card = 0, tile = 0;
};
struct Context {
  void* loaders = nullptr;
};

struct List {
  void* loaders = nullptr;
  Context* context = nullptr;
  int owner = 0;  // the memory owner of its device, see Machine::owner
  bool synchronous = false;
  std::shared_ptr<emu::Stream> stream;
  std::vector<emu::Stream::Operation> unordered;  // since the last barrier
  std::atomic<bool> in_use{false};
};

class Machine {
 public:
  static Machine& instance();

  // The start of every function: counts it; returns what it must fail with, or 0.
  ze_result_t enter(const char* call) { return static_cast<ze_result_t>(faults.enter(call)); }
  void reset();
  Settings settings() const;
  template <typename Change>
  void configure(Change&& change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    change(settings_);
  }

  Driver* driver() { return &driver_; }
  // The devices as hierarchy and mask let this process see them.
  std::vector<Gpu*> visible_gpus();
  Gpu* card(int index) { return &cards_[index]; }
  Gpu* tile(int card, int index) { return &tiles_[card][index]; }
  Module* module(int card, int tile) { return &modules_[card][tile]; }
  uint64_t total_of(const Gpu& gpu) const;
  uint64_t used_on(int card) const;
  uint64_t free_of(int card, int tile) const;  // kWholeCard: of all tiles

  Context* create_context();
  ze_result_t destroy_context(Context* context);
  Context* engine_context();

  ze_result_t reserve(Context* context, uint64_t hint, uint64_t size, uint64_t* out);
  ze_result_t unreserve(Context* context, uint64_t address, uint64_t size);
  ze_result_t create(const Gpu& gpu, uint64_t size, uint64_t* out);
  ze_result_t destroy(uint64_t physical);
  ze_result_t map(Context* context, uint64_t address, uint64_t size, uint64_t physical, uint32_t access);
  ze_result_t unmap(Context* context, uint64_t address, uint64_t size);
  // Whether a range is device memory that kernels and copies of a context may touch (-1: it is not device memory).
  int reaches(Context* context, uint64_t address, uint64_t size) const;

  List* create_list(Context* context, const Gpu& gpu, bool synchronous);
  ze_result_t destroy_list(List* list);
  ze_result_t append(List* list, emu::Stream::Operation operation);
  ze_result_t barrier(List* list);
  ze_result_t synchronize(List* list);

  ze_result_t import_host(uint64_t address, uint64_t size);
  ze_result_t release_host(uint64_t address);

  void stats(int card, emuze_stats* out) const;
  // What `sysman_free` makes of a module's free bytes.
  uint64_t reported_free(int card, int tile);

  emu::Memory memory;
  emu::Faults faults;

 private:
  struct Physical {
    int owner;
    uint64_t size, mappings;
  };
  struct Mapping {
    uint64_t size, physical;
    Context* context;
    bool reachable;
  };

  Machine();
  static int owner(const Gpu& gpu) { return gpu.card * kMaxTiles + (gpu.tile == kWholeCard ? 0 : gpu.tile); }
  uint64_t limit(int owner) const;
  void flush(List* list);
  ze_result_t lost() const;

  mutable std::recursive_mutex books_;  // of what is created, mapped and listed
  mutable std::mutex mutex_;            // of the settings
  Settings settings_;
  Driver driver_;
  Gpu cards_[kMaxCards], tiles_[kMaxCards][kMaxTiles];
  Module modules_[kMaxCards][kMaxTiles];
  std::map<uint64_t, std::pair<uint64_t, Context*>> reservations_;
  std::map<uint64_t, Physical> physical_;
  std::map<uint64_t, Mapping> mappings_;
  std::map<uint64_t, uint64_t> imports_;
  std::map<std::pair<int, int>, uint64_t> frozen_;
  std::set<Context*> contexts_;
  std::set<List*> lists_;
  Context* engine_ = nullptr;
  std::atomic<int32_t> sticky_{0};
  uint64_t imported_bytes_ = 0, shared_mappings_ = 0;
  std::atomic<uint64_t> concurrent_uses_{0};
};

}  // namespace emuze
