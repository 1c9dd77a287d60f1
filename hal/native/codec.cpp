#include "codec.h"

namespace hal {

Status Codec::open(Primitives& primitives, const hal_arena_options& options, std::unique_ptr<Codec>* out) {
  const hal_codec* table = primitives.codec();
  if (table == nullptr || std::string(table->name) != options.codec) {
    return Status::error(HAL_UNSUPPORTED, "codec open", 0,
                         std::string("no codec '") + options.codec + "' works on this device's memory" +
                             (table == nullptr ? "" : std::string("; there is '") + table->name + "'"));
  }
  char why[200] = "";
  void* context = nullptr;
  const auto text = [](const char* option) { return option == nullptr ? "" : option; };
  const int32_t code = table->open(primitives.context(), text(options.codec_library), text(options.codec_kind),
                                   &context, why, sizeof why);
  if (code != 0) return Status::error(HAL_UNSUPPORTED, "codec open", code, why);
  out->reset(new Codec(primitives, *table, context));
  return {};
}

Status Codec::wait(uint32_t stream) {
  return table_.immediate != 0 ? primitives_.synchronize(stream) : Status();
}

template <typename Call>
Status Codec::checked(const char* name, Call&& call) {
  int32_t code = 0;
  if (!primitives_.faults().fires(name, &code)) code = call();
  if (code == 0) return {};
  char text[200] = "";
  table_.describe(code, text, sizeof text);
  return Status::error(HAL_DRIVER_ERROR, name, code, text);
}

Status Codec::limits(uint64_t chunk, uint32_t count, Limits* out) {
  return checked("codec limits",
                 [&] { return table_.limits(context_, chunk, count, &out->encoded, &out->scratch, &out->host); });
}

Status Codec::encode(const hal_chunk* chunks, uint32_t count, hal_address scratch, void* host, uint32_t stream) {
  HAL_TRY(wait(stream));
  return checked("encode", [&] { return table_.encode(context_, chunks, count, scratch, host, stream); });
}

Status Codec::decode(const hal_chunk* chunks, uint32_t count, hal_address scratch, void* host, uint32_t stream) {
  HAL_TRY(wait(stream));
  return checked("decode", [&] { return table_.decode(context_, chunks, count, scratch, host, stream); });
}

}  // namespace hal
