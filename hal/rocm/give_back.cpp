// Touches the device only through its primitives; everything that a try has taken is given back before it returns.
#include "give_back.h"

#include <algorithm>

namespace hal {
namespace {

constexpr uint64_t kProbeBytes = uint64_t{64} << 20;
constexpr int kTries = 3;  // other processes may take and give memory in the middle of one
constexpr int kRounds = 2, kLeaks = 2;

bool is_most_of(uint64_t part, uint64_t whole) {
  return part >= whole / 10 * 9;
}

// One piece of memory at one address.
class Piece {
 public:
  Piece(HipDevice& device, uint64_t size) : device_(device), size_(size) {}
  ~Piece() {
    if (mapped_) device_.unmap(address_, size_);
    if (handle_ != 0) device_.release(handle_);
    if (reserved_) device_.unreserve(address_, size_);
  }
  Piece(const Piece&) = delete;
  Piece& operator=(const Piece&) = delete;

  int32_t populate() {
    if (const int32_t code = reserve_once()) return code;
    if (const int32_t code = device_.create(size_, &handle_)) return code;
    if (const int32_t code = device_.map(address_, size_, handle_)) return code;
    mapped_ = true;
    if (const int32_t code = device_.access(address_, size_)) return code;
    return check_usable();
  }

  int32_t empty() {
    if (const int32_t code = device_.unmap(address_, size_)) return code;
    mapped_ = false;
    if (const int32_t code = device_.release(handle_)) return code;
    handle_ = 0;
    hal_address got = 0;
    const int32_t code = device_.vacate(address_, size_, &got);
    reserved_ = code != kHipAddressLost;
    return code;
  }

 private:
  int32_t reserve_once() {
    if (reserved_) return kVmmSuccess;
    const int32_t code = device_.reserve(size_, device_.facts().alignment, 0, &address_);
    reserved_ = code == kVmmSuccess;
    return code;
  }

  int32_t check_usable() {
    constexpr uint8_t kByte = 0x5A;
    uint8_t last = 0;
    if (const int32_t code = device_.fill(address_, kByte, size_, 0)) return code;
    if (const int32_t code = device_.copy_to_host(&last, address_ + size_ - 1, 1, 0)) return code;
    if (const int32_t code = device_.synchronize(0)) return code;
    return last == kByte ? int32_t{kVmmSuccess} : int32_t{kHipNotUsable};
  }

  HipDevice& device_;
  const uint64_t size_;
  hal_address address_ = 0;
  hal_handle handle_ = 0;
  bool reserved_ = false, mapped_ = false;
};

int32_t read_free(HipDevice& device, uint64_t* out) {
  uint64_t total = 0;
  return device.memory_info(out, &total);
}

uint64_t difference(uint64_t more, uint64_t less) {
  return more > less ? more - less : 0;
}

// Populates and empties the piece once.
int32_t run_round(HipDevice& device, Piece& piece, uint64_t size, GiveBackProof* proof) {
  uint64_t before = 0, populated = 0, emptied = 0;
  if (const int32_t code = read_free(device, &before)) return code;
  if (const int32_t code = piece.populate()) return code;
  proof->mapped = true;
  if (const int32_t code = read_free(device, &populated)) return code;
  if (const int32_t code = piece.empty()) return code;
  if (const int32_t code = read_free(device, &emptied)) return code;
  proof->free_moves = is_most_of(difference(before, populated), size);
  proof->came_back = difference(emptied, populated);
  proof->proved = proof->free_moves && is_most_of(proof->came_back, size);
  return kVmmSuccess;
}

void run_rounds(HipDevice& device, uint64_t size, GiveBackProof* proof) {
  Piece piece(device, size);
  for (int round = 0; round < kRounds; ++round) {
    proof->code = run_round(device, piece, size, proof);
    proof->proved = proof->proved && proof->code == kVmmSuccess;
    if (!proof->proved) return;
  }
}

GiveBackProof try_once(HipDevice& device, GiveBack way, uint64_t size) {
  GiveBackProof proof;
  proof.way = way;
  proof.released = size;
  device.set_give_back(way);
  uint64_t before = 0, after = 0;
  const bool known_before = read_free(device, &before) == kVmmSuccess;
  run_rounds(device, size, &proof);
  const bool known = known_before && read_free(device, &after) == kVmmSuccess;
  proof.leaked = proof.mapped && known && is_most_of(difference(before, after), size);
  return proof;
}

// With less where the device has little left. What leaks is not tried for long.
GiveBackProof try_way(HipDevice& device, GiveBack way) {
  GiveBackProof proof;
  uint64_t size = std::max(kProbeBytes, device.facts().granularity);
  for (int done = 0, leaks = 0; done < kTries && leaks < kLeaks && !proof.proved;) {
    proof = try_once(device, way, size);
    leaks += proof.leaked ? 1 : 0;
    const uint64_t half = size / 2 / device.facts().granularity * device.facts().granularity;
    if (proof.code == kVmmOutOfMemory && half > 0) {
      size = half;
    } else {
      ++done;
    }
  }
  return proof;
}

}  // namespace

GiveBackProof find_give_back(HipDevice& device, const std::vector<GiveBack>& ways) {
  GiveBackProof proof;
  for (const GiveBack way : ways) {
    proof = try_way(device, way);
    if (proof.proved || proof.leaked || !proof.mapped || !proof.free_moves) break;
  }
  return proof;
}

}  // namespace hal
