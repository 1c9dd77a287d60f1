// zstd (RFC 8878) on host memory, by the system's library: opened at run time, at its fastest level.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <memory>

#include "codec.h"
#include "parallel.h"
#include "vendor_library.h"

namespace hal {
namespace {

constexpr int kLevel = 1;
constexpr int32_t kNoLibrary = 1, kNoKind = 2;

struct Zstd {
  size_t (*bound)(size_t size);
  size_t (*compress)(void* to, size_t room, const void* from, size_t size, int level);
  size_t (*decompress)(void* to, size_t room, const void* from, size_t size);
  unsigned (*is_error)(size_t code);
};

int32_t open(void*, const char* library, const char* kind, void** codec, char* why, size_t why_size) {
  if (*kind != '\0') {
    std::snprintf(why, why_size, "zstd takes every content as bytes; leave '%s' out", kind);
    return kNoKind;
  }
  auto api = std::make_unique<Zstd>();
  void* handle = dlopen(*library == '\0' ? "libzstd.so.1" : library, RTLD_NOW | RTLD_LOCAL);
  if (handle != nullptr) {
    bind_symbols(
        handle,
        {required_symbol("ZSTD_compressBound", api->bound, 0), required_symbol("ZSTD_compress", api->compress, 0),
         required_symbol("ZSTD_decompress", api->decompress, 0), required_symbol("ZSTD_isError", api->is_error, 0)});
  }
  if (handle == nullptr || !api->bound || !api->compress || !api->decompress || !api->is_error) {
    std::snprintf(why, why_size, "libzstd.so.1 was not found; install the package libzstd1");
    return kNoLibrary;
  }
  *codec = api.release();
  return 0;
}

void close(void* codec) {
  delete static_cast<Zstd*>(codec);
}

int32_t limits(void* codec, uint64_t chunk, uint32_t count, uint64_t* encoded, uint64_t* scratch, uint64_t* host) {
  *encoded = static_cast<Zstd*>(codec)->bound(chunk);
  *scratch = 0;
  *host = count * (sizeof(uint64_t) + sizeof(int32_t));
  return 0;
}

void* at(hal_address address) {
  return reinterpret_cast<void*>(address);
}

void note(const Zstd& api, void* host, uint32_t count, size_t index, size_t size) {
  auto* sizes = static_cast<uint64_t*>(host);
  sizes[index] = size;
  reinterpret_cast<int32_t*>(sizes + count)[index] = static_cast<int32_t>(api.is_error(size));
}

int32_t encode(void* codec, const hal_chunk* chunks, uint32_t count, hal_address, void* host, uint32_t) {
  const Zstd& api = *static_cast<Zstd*>(codec);
  parallel_for(count, processors(8), [&](size_t i) {
    const hal_chunk& c = chunks[i];
    note(api, host, count, i, api.compress(at(c.encoded), c.encoded_size, at(c.plain), c.plain_size, kLevel));
  });
  return 0;
}

int32_t decode(void* codec, const hal_chunk* chunks, uint32_t count, hal_address, void* host, uint32_t) {
  const Zstd& api = *static_cast<Zstd*>(codec);
  parallel_for(count, processors(8), [&](size_t i) {
    const hal_chunk& c = chunks[i];
    note(api, host, count, i, api.decompress(at(c.plain), c.plain_size, at(c.encoded), c.encoded_size));
  });
  return 0;
}

void describe(int32_t code, char* text, size_t size) {
  std::snprintf(text, size, "zstd failed with code %d", code);
}

}  // namespace

const hal_codec* zstd_codec() {
  static const hal_codec table = {"zstd", 1, open, close, limits, encode, decode, describe};
  return &table;
}

}  // namespace hal
