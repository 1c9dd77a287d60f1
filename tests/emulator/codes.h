// The CUresult values that the emulated libcuda returns, by itself or when a test asks for them.
#pragma once

#include <cstdint>

namespace emu {

enum Code : int32_t {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kIllegalState = 401,
  kIllegalAddress = 700,
  kContextIsDestroyed = 709,
  kHostAlreadyRegistered = 712,
  kHostNotRegistered = 713,
  kLaunchFailed = 719,
  kNotSupported = 801,
  kCaptureUnsupported = 900,
  kCaptureInvalidated = 901,
  kCaptureImplicit = 906,
  kUnknown = 999,
};

struct CodeText {
  int32_t code;
  const char* name;
  const char* text;
};

// Null for a code that this libcuda has no words for.
const CodeText* find_code(int32_t code);

}  // namespace emu
