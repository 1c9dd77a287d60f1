// An nvCOMP for the emulated libcuda: the batched ANS calls of its versions 5 and 6, with zstd for the entropy coder.
// Arrays and chunks are in emulated device memory, which the host reads. A call waits for its stream and is done when
// it returns: a stronger order than the real one's, so it hides no missing wait of the caller's results.
//
//   EMUNVCOMP_VERSION   what nvcompGetProperties answers (default 6000)
//   EMUNVCOMP_DAMAGE=n  the nth decoded chunk of the process reports a failure
#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

#define EMU_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int32_t kSuccess = 0, kInvalidValue = 10, kCannotDecompress = 12, kCudaError = 1000;

struct Options {
  int32_t first, type;
  uint8_t reserved[56];
};

struct Properties {
  uint32_t version, cuda_runtime;
};

struct Zstd {
  size_t (*bound)(size_t);
  size_t (*compress)(void*, size_t, const void*, size_t, int);
  size_t (*decompress)(void*, size_t, const void*, size_t);
  unsigned (*is_error)(size_t);
};

template <typename Function>
void look_up(void* library, const char* name, Function*& out) {
  out = reinterpret_cast<Function*>(dlsym(library, name));
}

const Zstd& zstd() {
  static const Zstd api = [] {
    Zstd made{};
    void* library = dlopen("libzstd.so.1", RTLD_NOW);
    look_up(library, "ZSTD_compressBound", made.bound);
    look_up(library, "ZSTD_compress", made.compress);
    look_up(library, "ZSTD_decompress", made.decompress);
    look_up(library, "ZSTD_isError", made.is_error);
    return made;
  }();
  return api;
}

int32_t wait_for(void* stream) {
  static int32_t (*const synchronize)(void*) = [] {
    int32_t (*found)(void*) = nullptr;
    void* library = dlopen(std::getenv("HAL_LIBCUDA"), RTLD_NOW | RTLD_NOLOAD);
    look_up(library, "cuStreamSynchronize", found);
    return found;
  }();
  return synchronize(stream) == 0 ? kSuccess : kCudaError;
}

uint32_t version() {
  const char* text = std::getenv("EMUNVCOMP_VERSION");
  return text == nullptr ? 6000 : static_cast<uint32_t>(std::atoi(text));
}

bool damaged() {
  static std::atomic<int> decoded{0};
  const char* text = std::getenv("EMUNVCOMP_DAMAGE");
  return ++decoded == (text == nullptr ? 0 : std::atoi(text));
}

}  // namespace

EMU_API int32_t nvcompGetProperties(Properties* out) {
  *out = {version(), 13000};
  return kSuccess;
}

EMU_API int32_t nvcompBatchedANSCompressGetMaxOutputChunkSize(size_t chunk, Options, size_t* bytes) {
  *bytes = zstd().bound(chunk);
  return kSuccess;
}

EMU_API int32_t nvcompBatchedANSCompressGetTempSize(size_t count, size_t, Options, size_t* bytes, size_t, void*) {
  *bytes = count * 64;
  return kSuccess;
}

EMU_API int32_t nvcompBatchedANSDecompressGetTempSize(size_t count, size_t, Options, size_t* bytes, size_t, void*) {
  *bytes = count * 32;
  return kSuccess;
}

EMU_API int32_t nvcompBatchedANSCompressAsync(const void* const* plain, const size_t* plain_sizes, size_t chunk,
                                              size_t count, void*, size_t scratch, void* const* encoded,
                                              size_t* encoded_sizes, Options options, int32_t* statuses, void* stream) {
  if (options.first != 0 || scratch < count * 64) return kInvalidValue;
  if (wait_for(stream) != kSuccess) return kCudaError;
  for (size_t i = 0; i < count; ++i) {
    const bool fits = plain_sizes[i] <= chunk && reinterpret_cast<uintptr_t>(encoded[i]) % 16 == 0;
    const size_t size =
        fits ? zstd().compress(encoded[i], zstd().bound(plain_sizes[i]), plain[i], plain_sizes[i], 1) : 0;
    statuses[i] = fits && zstd().is_error(size) == 0 ? kSuccess : kInvalidValue;
    encoded_sizes[i] = size;
  }
  return kSuccess;
}

EMU_API int32_t nvcompBatchedANSDecompressAsync(const void* const* encoded, const size_t* encoded_sizes,
                                                const size_t* rooms, size_t* plain_sizes, size_t count, void*,
                                                size_t scratch, void* const* plain, Options options, int32_t* statuses,
                                                void* stream) {
  const int32_t type = version() >= 6000 ? 0xff : 0;  // "read it from the stream", which version 5 has no field for
  if (options.type != type || scratch < count * 32) return kInvalidValue;
  if (wait_for(stream) != kSuccess) return kCudaError;
  for (size_t i = 0; i < count; ++i) {
    const size_t size = zstd().decompress(plain[i], rooms[i], encoded[i], encoded_sizes[i]);
    const bool failed = zstd().is_error(size) != 0 || damaged();
    statuses[i] = failed ? kCannotDecompress : kSuccess;
    plain_sizes[i] = failed ? 0 : size;
  }
  return kSuccess;
}
