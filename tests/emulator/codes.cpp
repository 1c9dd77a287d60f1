#include "codes.h"

namespace emu {

const CodeText* find_code(int32_t code) {
  static constexpr CodeText kCodes[] = {
      {kSuccess, "CUDA_SUCCESS", "no error"},
      {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
      {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
      {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
      {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
      {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
      {kInvalidContext, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
      {kInvalidHandle, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
      {kIllegalState, "CUDA_ERROR_ILLEGAL_STATE", "the operation cannot be performed in the present state"},
      {kIllegalAddress, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
      {kContextIsDestroyed, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
      {kHostAlreadyRegistered, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part of the memory is registered already"},
      {kHostNotRegistered, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered one"},
      {kLaunchFailed, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
      {kNotSupported, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
      {kCaptureUnsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
       "operation not permitted when stream is capturing"},
      {kCaptureInvalidated, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "an earlier call broke the capture"},
      {kCaptureImplicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "operation would depend on a capturing stream"},
      {kUnknown, "CUDA_ERROR_UNKNOWN", "unknown error"},
  };
  for (const CodeText& entry : kCodes) {
    if (entry.code == code) return &entry;
  }
  return nullptr;
}

}  // namespace emu
