// The arena's books: budget, chunks and free extents. Touches the system through Storage only.
#include "arena.h"

#include <algorithm>
#include <iterator>

#include "device_memory.h"
#include "step_sizes.h"

namespace hal {
namespace {

uint64_t round_up(uint64_t bytes) {
  return (bytes + backup_alignment() - 1) / backup_alignment() * backup_alignment();
}

// What a codec that is worth its while saves of weights; a growth that begins with too little goes on step by step.
constexpr double kExpectedRatio = 0.68;

Status open_storage(Primitives& primitives, const hal_arena_options& options, std::unique_ptr<Storage>* out) {
  if (options.backing != HAL_FILE) {
    *out = std::make_unique<MemoryStorage>(primitives.faults());
    return {};
  }
  std::unique_ptr<FileStorage> file;
  HAL_TRY(FileStorage::open(options.directory == nullptr ? "" : options.directory, primitives.faults(), &file));
  *out = std::move(file);
  return {};
}

}  // namespace

Status Arena::create(Primitives& primitives, const hal_arena_options& options, std::unique_ptr<Arena>* out) {
  if (options.backing < HAL_ANONYMOUS || options.backing > HAL_PINNED) {
    return Status::invalid("arena create", "there is no such backing; there are anonymous, file and pinned");
  }
  const bool can_pin = primitives.has(HAL_FACT_PIN_HOST);
  if (options.backing == HAL_PINNED && options.require_pinned != 0 && !can_pin) {
    return Status::error(HAL_UNSUPPORTED, "arena create", 0,
                         std::string("host memory cannot be pinned: ") + primitives.why_not(HAL_FACT_PIN_HOST));
  }
  std::unique_ptr<Codec> codec;
  if (options.codec != nullptr) HAL_TRY(Codec::open(primitives, options, &codec));
  std::unique_ptr<Storage> storage;
  HAL_TRY(open_storage(primitives, options, &storage));
  out->reset(new Arena(primitives, options, std::move(storage), std::move(codec)));
  return {};
}

Arena::Arena(Primitives& primitives, const hal_arena_options& options, std::unique_ptr<Storage> storage,
             std::unique_ptr<Codec> codec)
    : primitives_(primitives),
      storage_(std::move(storage)),
      codec_(std::move(codec)),
      shrinks_to_(codec_ == nullptr ? 1.0 : kExpectedRatio),
      budget_(options.budget),
      verify_(options.verify != 0 || options.backing == HAL_FILE),
      pinned_(options.backing == HAL_PINNED && primitives.has(HAL_FACT_PIN_HOST)),
      require_pinned_(options.require_pinned != 0),
      fell_back_(options.backing == HAL_PINNED && !pinned_) {}

Arena::~Arena() {
  collect_left();
  trim();
}

void Arena::leave(Segment&& memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  left_.push_back(std::move(memory));
}

void Arena::collect_left() {
  std::vector<Segment> left;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    left.swap(left_);
  }
  for (Segment& memory : left) {
    if (!hal::give_back(primitives_, memory)) leave(std::move(memory));
  }
}

// Bytes that have to be taken from the system for `bytes` of backups, or why they cannot be.
Status Arena::missing_for(uint64_t bytes, uint64_t* missing) {
  uint64_t unused;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    unused = held_ - used_;
  }
  const uint64_t wanted = round_up(expected(bytes));
  *missing = wanted - std::min(wanted, unused);
  return *missing == 0 ? Status() : check_limit(*missing, bytes);
}

// Whether `more` bytes can be taken from the system for backups of `bytes`.
Status Arena::check_limit(uint64_t more, uint64_t bytes) {
  uint64_t held, unused, room = 0;
  HAL_TRY(storage_->available(&room));
  {
    std::lock_guard<std::mutex> lock(mutex_);
    held = held_;
    unused = held_ - used_;
  }
  const uint64_t limit = budget_ == 0 ? held + room : std::min(budget_, held + room);
  if (held + more <= limit) return {};
  const bool by_budget = limit == budget_;
  Status status = Status::error(HAL_HOST_MEMORY, "arena grow", 0,
                                by_budget           ? "the backup budget is too small"
                                : file() != nullptr ? "the disk has too little free space for the backups"
                                                    : "the host has too little available memory for the backups",
                                bytes);
  status.set_memory(bytes, unused + (limit - std::min(limit, held)), limit);
  return status;
}

uint64_t Arena::expected(uint64_t bytes) const {
  return codec_ == nullptr ? bytes : static_cast<uint64_t>(static_cast<double>(bytes) * shrinks_to_);
}

void Arena::learn(uint64_t plain, uint64_t stored) {
  constexpr double kMargin = 1.01;  // one sleep's contents are much like the last one's
  if (plain > 0) shrinks_to_ = std::min(1.0, kMargin * static_cast<double>(stored) / static_cast<double>(plain));
}

Status Arena::check(uint64_t bytes) {
  uint64_t missing = 0;
  return missing_for(bytes, &missing);
}

Status Arena::reserve(uint64_t bytes, bool touch, std::unique_ptr<Growth>* growth) {
  *growth = std::make_unique<Growth>(*this);
  uint64_t missing = 0;
  HAL_TRY(missing_for(bytes, &missing));
  const bool prepare = file() == nullptr && (pinned_ || touch);
  while (missing > 0) {
    const uint64_t size = std::min(missing, kLargestChunk);
    uint64_t position = 0;
    HAL_TRY(add_chunk(size, prepare ? Readiness::Pending : Readiness::Ready, &position));
    (*growth)->chunks_.push_back(position);
    missing -= size;
  }
  if (prepare) (*growth)->prepare_in_background();
  return {};
}

Status Arena::add_chunk(uint64_t size, Readiness readiness, uint64_t* position) {
  Status status = storage_->add(size, position);
  if (!status.ok()) {
    status.set_memory(size, kUnknownBytes, budget_);
    return status;
  }
  std::lock_guard<std::mutex> lock(mutex_);
  HeldChunk chunk;
  chunk.size = size;
  chunk.readiness = readiness;
  chunks_[*position] = chunk;
  free_[*position] = size;
  held_ += size;
  return {};
}

// Gives a whole chunk back unless a backup lies in it; returns whether it is gone.
bool Arena::remove_chunk(uint64_t position) {
  HeldChunk chunk;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    chunk = chunks_.at(position);
    const auto extent = free_.find(position);
    if (extent == free_.end() || extent->second != chunk.size) return false;
    free_.erase(extent);  // nobody takes from it any more
  }
  const bool unregistered = !chunk.registered || primitives_.host_unregister(host(position), chunk.size).ok();
  if (unregistered) storage_->remove(position, chunk.size);
  std::lock_guard<std::mutex> lock(mutex_);
  if (!unregistered) {  // the driver still knows the memory, so it has to stay
    free_[position] = chunk.size;
    return false;
  }
  chunks_.erase(position);
  held_ -= chunk.size;
  if (chunk.registered) pinned_bytes_ -= chunk.size;
  return true;
}

// Cuts a free extent out of its chunk, which goes on as what is left on either side.
void Arena::carve(uint64_t position, uint64_t size) {
  const auto chunk = chunk_of(position);
  const uint64_t begin = chunk->first, end = begin + chunk->second.size;
  HeldChunk rest = chunk->second;
  chunks_.erase(chunk);
  if (position > begin) {
    rest.size = position - begin;
    chunks_[begin] = rest;
  }
  if (position + size < end) {
    rest.size = end - (position + size);
    chunks_[position + size] = rest;
  }
  held_ -= size;
}

Arena::Chunks::iterator Arena::chunk_of(uint64_t position) {
  return std::prev(chunks_.upper_bound(position));
}

std::vector<Range> Arena::take(uint64_t bytes) {
  uint64_t wanted = round_up(bytes);
  std::vector<Range> extents;
  std::lock_guard<std::mutex> lock(mutex_);
  while (wanted > 0 && !free_.empty()) {
    const auto extent = free_.begin();
    const Range taken{extent->first, std::min(extent->second, wanted)};
    const uint64_t left = extent->second - taken.size;
    free_.erase(extent);
    if (left > 0) free_[taken.offset + taken.size] = left;
    used_ += taken.size;
    wanted -= taken.size;
    extents.push_back(taken);
  }
  return extents;
}

bool Arena::take_whole(uint64_t bytes, uint64_t* position) {
  const uint64_t wanted = round_up(bytes);
  std::lock_guard<std::mutex> lock(mutex_);
  const auto extent =
      std::find_if(free_.begin(), free_.end(), [&](const auto& candidate) { return candidate.second >= wanted; });
  if (extent == free_.end()) return false;
  *position = extent->first;
  const uint64_t left = extent->second - wanted;
  free_.erase(extent);
  if (left > 0) free_[*position + wanted] = left;
  used_ += wanted;
  return true;
}

void Arena::give_back(uint64_t position, uint64_t size) {
  const uint64_t bytes = round_up(size);
  std::lock_guard<std::mutex> lock(mutex_);
  used_ -= bytes;
  const auto chunk = chunk_of(position);
  uint64_t begin = position, end = position + bytes;
  auto next = free_.lower_bound(begin);
  if (next != free_.end() && next->first == end && end < chunk->first + chunk->second.size) {
    end += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin() && begin > chunk->first) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second == begin) {
      begin = previous->first;
      free_.erase(previous);
    }
  }
  free_[begin] = end - begin;
}

bool Arena::ready(uint64_t position) {
  std::lock_guard<std::mutex> lock(mutex_);
  return chunk_of(position)->second.readiness == Readiness::Ready;
}

Status Arena::wait_ready(uint64_t position) {
  std::unique_lock<std::mutex> lock(mutex_);
  const auto chunk = chunk_of(position);
  changed_.wait(lock, [&] { return chunk->second.readiness != Readiness::Pending; });
  return chunk->second.readiness == Readiness::Ready ? Status() : pin_failure_.copy();
}

uint64_t Arena::trim() {
  std::lock_guard<std::mutex> growth(growth_mutex_);
  std::vector<uint64_t> registered;
  std::vector<Range> unused;
  uint64_t before;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    before = held_;
    for (const auto& [position, size] : free_) {
      if (chunk_of(position)->second.registered) {
        registered.push_back(chunk_of(position)->first);
      } else {
        unused.push_back({position, size});
      }
    }
    for (const Range& extent : unused) {
      free_.erase(extent.offset);
      carve(extent.offset, extent.size);
    }
  }
  for (const Range& extent : unused) storage_->remove(extent.offset, extent.size);
  // A chunk that the driver knows goes as a whole or not at all.
  std::sort(registered.begin(), registered.end());
  registered.erase(std::unique(registered.begin(), registered.end()), registered.end());
  for (uint64_t position : registered) remove_chunk(position);
  std::lock_guard<std::mutex> lock(mutex_);
  return before - held_;
}

void Arena::stats(hal_arena_stats* out) {
  std::lock_guard<std::mutex> lock(mutex_);
  out->held_bytes = held_;
  out->used_bytes = used_;
  out->pinned_bytes = pinned_bytes_;
  out->chunks = chunks_.size();
  out->fell_back = fell_back_ ? 1 : 0;
  out->direct_io = file() != nullptr && file()->direct() ? 1 : 0;
}

}  // namespace hal
