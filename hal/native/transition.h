// What sleep and wake share: the segments of a request, taken from the ledger for as long as the transition lasts.
#pragma once

#include <vector>

#include "mover.h"
#include "transfer.h"

namespace hal {

struct Item {
  Segment* segment = nullptr;
  hal_segment_order* order = nullptr;
  std::vector<Range> live;   // sleep: what has to be kept
  std::vector<Range> clean;  // sleep: what a retained backup has already
  bool copied = false;       // sleep: its backup is whole
  bool touched = false;      // wake: its mapping has begun
  hal_segment_state end = HAL_MAPPED;
};

class Transition {
 public:
  Transition(hal_device& device, hal_segment_order* orders, size_t count) : device_(device) { acquire(orders, count); }
  ~Transition() { release(); }
  Transition(const Transition&) = delete;
  Transition& operator=(const Transition&) = delete;

  std::vector<Item>& items() { return items_; }
  // Gives the segments their new states, reports them in the orders and completes frees that came meanwhile.
  void release();
  // Waits for the copy streams after a failure, so that nothing is in flight where things are taken down.
  void quiesce();

 private:
  void acquire(hal_segment_order* orders, size_t count);

  hal_device& device_;
  std::vector<Item> items_;
  std::vector<Ledger::Outcome> outcomes_;  // its room is taken at the start: giving back must not fail
};

// HAL_BUSY while a graph is captured: then the device cannot be waited for, and what is captured must stay mapped.
Status refuse_during_capture(Primitives& primitives, const char* call);
uint64_t physical_bytes(const Segment& segment);
// Offloaded or restored segments in the order given, in groups of about kBatchBytes.
std::vector<std::vector<Item*>> make_batches(const std::vector<Item*>& items);

}  // namespace hal
