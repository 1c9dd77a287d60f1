// nvCOMP's batched interface (nvcomp/ans.h of nvCOMP 5 and 6, whose structures and calls are the same but for three
// bytes that version 6 took from what was reserved).
#include "nvcomp.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>

#include "vendor_library.h"
#include "vmm_family.h"

namespace hal {
namespace {

constexpr int32_t kOldest = 5, kNewest = 6;
constexpr int32_t kRefused = 1;

// nvcompType_t
enum ContentType : int32_t { kBytes = 0, kFloat8 = 9, kFloat16 = 10, kFromStream = 0xff };

struct EncodeOptions {
  int32_t algorithm = 0;  // rANS
  int32_t type = kBytes;
  uint8_t reserved[56] = {};
};
static_assert(sizeof(EncodeOptions) == 64, "nvcompBatchedANSCompressOpts_t");

struct DecodeOptions {
  int32_t backend = 0;  // nvCOMP's choice
  int32_t type = 0;     // since version 6
  uint8_t reserved[56] = {};
};
static_assert(sizeof(DecodeOptions) == 64, "nvcompBatchedANSDecompressOpts_t");

struct Properties {
  uint32_t version = 0, cuda_runtime = 0;
};

struct NvcompApi {
  int32_t (*properties)(Properties*);
  int32_t (*encode_scratch)(size_t count, size_t chunk, EncodeOptions, size_t* bytes, size_t total, void* stream);
  int32_t (*encoded_bound)(size_t chunk, EncodeOptions, size_t* bytes);
  int32_t (*encode)(const hal_address* plain, const size_t* plain_sizes, size_t chunk, size_t count,
                    hal_address scratch, size_t scratch_size, const hal_address* encoded, size_t* encoded_sizes,
                    EncodeOptions, int32_t* statuses, void* stream);
  int32_t (*decode_scratch)(size_t count, size_t chunk, DecodeOptions, size_t* bytes, size_t total, void* stream);
  int32_t (*decode)(const hal_address* encoded, const size_t* encoded_sizes, const size_t* rooms, size_t* plain_sizes,
                    size_t count, hal_address scratch, size_t scratch_size, const hal_address* plain, DecodeOptions,
                    int32_t* statuses, void* stream);
};

// What a call needs beside the chunks, as arrays on the device and with the same layout on the host.
struct Table {
  explicit Table(uint64_t chunks) : count(chunks) {}
  uint64_t sizes() const { return 0; }  // these two first: the host finds them there
  uint64_t results() const { return 8 * count; }
  uint64_t plain() const { return 16 * count; }
  uint64_t plain_sizes() const { return 24 * count; }
  uint64_t encoded() const { return 32 * count; }
  uint64_t encoded_sizes() const { return 40 * count; }
  uint64_t end() const { return (48 * count + 255) / 256 * 256; }  // the library's own scratch is aligned
  const uint64_t count;
};

class Nvcomp {
 public:
  Nvcomp(VmmDevice& device, const NvcompApi& api, int32_t type, uint32_t version) : device_(device), api_(api) {
    encode_options_.type = type;
    if (version / 1000 >= 6) decode_options_.type = kFromStream;
  }

  int32_t limits(uint64_t chunk, uint32_t count, uint64_t* encoded, uint64_t* scratch, uint64_t* host);
  int32_t encode(const hal_chunk* chunks, uint32_t count, hal_address scratch, void* host, uint32_t stream);
  int32_t decode(const hal_chunk* chunks, uint32_t count, hal_address scratch, void* host, uint32_t stream);

 private:
  template <typename Call>
  int32_t on_device(Call&& call);
  int32_t send(const hal_chunk* chunks, const Table& table, hal_address scratch, void* host, uint32_t stream);
  int32_t fetch(const Table& table, hal_address scratch, void* host, uint32_t stream);

  VmmDevice& device_;
  const NvcompApi api_;
  EncodeOptions encode_options_;
  DecodeOptions decode_options_;
  uint64_t chunk_ = 0;
  size_t encode_scratch_ = 0, decode_scratch_ = 0;
};

// The library launches its kernels in the calling thread's context.
template <typename Call>
int32_t Nvcomp::on_device(Call&& call) {
  uint64_t previous = 0;
  const int32_t code = device_.make_current(&previous);
  if (code != kVmmSuccess) return code;
  const int32_t result = call();
  device_.restore(previous);
  return result;
}

int32_t Nvcomp::limits(uint64_t chunk, uint32_t count, uint64_t* encoded, uint64_t* scratch, uint64_t* host) {
  return on_device([&] {
    chunk_ = chunk;
    size_t bound = 0;
    int32_t code = api_.encoded_bound(chunk, encode_options_, &bound);
    if (code == 0) {
      code = api_.encode_scratch(count, chunk, encode_options_, &encode_scratch_, count * chunk, nullptr);
    }
    if (code == 0) {
      code = api_.decode_scratch(count, chunk, decode_options_, &decode_scratch_, count * chunk, nullptr);
    }
    const Table table(count);
    *encoded = bound;
    *scratch = table.end() + std::max(encode_scratch_, decode_scratch_);
    *host = table.end();
    return code;
  });
}

int32_t Nvcomp::send(const hal_chunk* chunks, const Table& table, hal_address scratch, void* host, uint32_t stream) {
  auto* bytes = static_cast<uint8_t*>(host);
  const auto column = [&](uint64_t offset) { return reinterpret_cast<uint64_t*>(bytes + offset); };
  std::memset(bytes, 0, table.end());
  for (uint64_t i = 0; i < table.count; ++i) {
    column(table.plain())[i] = chunks[i].plain;
    column(table.plain_sizes())[i] = chunks[i].plain_size;
    column(table.encoded())[i] = chunks[i].encoded;
    column(table.encoded_sizes())[i] = chunks[i].encoded_size;
  }
  return device_.copy_to_device(scratch, host, table.end(), stream);
}

int32_t Nvcomp::fetch(const Table& table, hal_address scratch, void* host, uint32_t stream) {
  return device_.copy_to_host(host, scratch, table.plain(), stream);
}

int32_t Nvcomp::encode(const hal_chunk* chunks, uint32_t count, hal_address scratch, void* host, uint32_t stream) {
  const Table table(count);
  int32_t code = send(chunks, table, scratch, host, stream);
  if (code != 0) return code;
  void* queue = nullptr;
  code = device_.copy_stream(stream, &queue);
  if (code != 0) return code;
  const auto array = [&](uint64_t offset) { return reinterpret_cast<size_t*>(scratch + offset); };
  code = on_device([&] {
    return api_.encode(array(table.plain()), array(table.plain_sizes()), chunk_, count, scratch + table.end(),
                       encode_scratch_, array(table.encoded()), array(table.sizes()), encode_options_,
                       reinterpret_cast<int32_t*>(scratch + table.results()), queue);
  });
  return code != 0 ? code : fetch(table, scratch, host, stream);
}

int32_t Nvcomp::decode(const hal_chunk* chunks, uint32_t count, hal_address scratch, void* host, uint32_t stream) {
  const Table table(count);
  int32_t code = send(chunks, table, scratch, host, stream);
  if (code != 0) return code;
  void* queue = nullptr;
  code = device_.copy_stream(stream, &queue);
  if (code != 0) return code;
  const auto array = [&](uint64_t offset) { return reinterpret_cast<size_t*>(scratch + offset); };
  code = on_device([&] {
    return api_.decode(array(table.encoded()), array(table.encoded_sizes()), array(table.plain_sizes()),
                       array(table.sizes()), count, scratch + table.end(), decode_scratch_, array(table.plain()),
                       decode_options_, reinterpret_cast<int32_t*>(scratch + table.results()), queue);
  });
  return code != 0 ? code : fetch(table, scratch, host, stream);
}

bool content_type(const std::string& kind, int32_t* type) {
  if (kind.empty() || kind == "bytes")
    *type = kBytes;
  else if (kind == "float16")
    *type = kFloat16;
  else if (kind == "float8")
    *type = kFloat8;
  else
    return false;
  return true;
}

const char* bind(const char* path, NvcompApi* api) {
  void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);  // for good: it has kernels on the device
  if (library == nullptr) return dlerror();
  const std::vector<Symbol> symbols = {
      required_symbol("nvcompGetProperties", api->properties, 0),
      required_symbol("nvcompBatchedANSCompressGetTempSize", api->encode_scratch, 0),
      required_symbol("nvcompBatchedANSCompressGetMaxOutputChunkSize", api->encoded_bound, 0),
      required_symbol("nvcompBatchedANSCompressAsync", api->encode, 0),
      required_symbol("nvcompBatchedANSDecompressGetTempSize", api->decode_scratch, 0),
      required_symbol("nvcompBatchedANSDecompressAsync", api->decode, 0),
  };
  bind_symbols(library, symbols);
  const Symbol* missing = check_symbols(symbols, 0);
  return missing == nullptr ? nullptr : missing->name;
}

std::string why_not(const char* library, const char* kind, NvcompApi* api, int32_t* type, uint32_t* version) {
  if (!content_type(kind, type)) {
    return std::string("contents of kind '") + kind + "' are not known; use bytes, float16 or float8";
  }
  if (const char* wrong = bind(library, api)) {
    return std::string("nvCOMP cannot be used: ") + wrong + "; install nvCOMP 5 or 6, as the extra compress-cu13 does";
  }
  Properties properties;
  if (api->properties(&properties) != 0) return "nvCOMP does not tell its version";
  *version = properties.version;
  const auto major = static_cast<int32_t>(properties.version / 1000);
  if (major >= kOldest && major <= kNewest) return "";
  return "nvCOMP " + std::to_string(major) + " has another interface; install nvCOMP 5 or 6";
}

int32_t open(void* context, const char* library, const char* kind, void** codec, char* why, size_t why_size) {
  NvcompApi api{};
  int32_t type = kBytes;
  uint32_t version = 0;
  const std::string reason = why_not(library, kind, &api, &type, &version);
  std::snprintf(why, why_size, "%s", reason.c_str());
  if (!reason.empty()) return kRefused;
  *codec = new Nvcomp(*static_cast<VmmDevice*>(context), api, type, version);
  return 0;
}

Nvcomp& self(void* codec) {
  return *static_cast<Nvcomp*>(codec);
}

void describe(int32_t code, char* text, size_t size) {
  std::snprintf(text, size, "nvCOMP or CUDA failed with code %d (see nvcompStatus_t and CUresult)", code);
}

}  // namespace

const hal_codec* nvcomp_codec() {
  static const hal_codec table = {
      "ans",
      0,
      open,
      [](void* codec) { delete &self(codec); },
      [](void* codec, uint64_t chunk, uint32_t count, uint64_t* encoded, uint64_t* scratch, uint64_t* host) {
        return self(codec).limits(chunk, count, encoded, scratch, host);
      },
      [](void* codec, const hal_chunk* chunks, uint32_t count, hal_address scratch, void* host, uint32_t stream) {
        return self(codec).encode(chunks, count, scratch, host, stream);
      },
      [](void* codec, const hal_chunk* chunks, uint32_t count, hal_address scratch, void* host, uint32_t stream) {
        return self(codec).decode(chunks, count, scratch, host, stream);
      },
      describe,
  };
  return &table;
}

}  // namespace hal
