// A codec that was opened for one arena: its calls with fault points and typed failures.
#pragma once

#include <memory>

#include "primitives.h"

namespace hal {

class Codec {
 public:
  static Status open(Primitives& primitives, const hal_arena_options& options, std::unique_ptr<Codec>* out);
  ~Codec() { table_.close(context_); }
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;

  struct Limits {
    uint64_t encoded = 0, scratch = 0, host = 0;  // bytes: a chunk at most, of device memory a call, of host memory
  };
  Status limits(uint64_t chunk, uint32_t count, Limits* out);
  Status encode(const hal_chunk* chunks, uint32_t count, hal_address scratch, void* host, uint32_t stream);
  Status decode(const hal_chunk* chunks, uint32_t count, hal_address scratch, void* host, uint32_t stream);

 private:
  Codec(Primitives& primitives, const hal_codec& table, void* context)
      : primitives_(primitives), table_(table), context_(context) {}
  Status wait(uint32_t stream);
  template <typename Call>
  Status checked(const char* name, Call&& call);

  Primitives& primitives_;
  const hal_codec& table_;
  void* const context_;
};

// zstd on memory that the host can read; for drivers that have HAL_FACT_HOST_ACCESS.
const hal_codec* zstd_codec();

}  // namespace hal
