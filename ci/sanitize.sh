#!/usr/bin/env bash
# Builds and runs the native tests under AddressSanitizer with UndefinedBehaviorSanitizer, then under ThreadSanitizer.
# Usage: ci/sanitize.sh [build-directory]; needs CMake and a C++17 compiler with the sanitizers' libraries.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
builds=${1:-$root/build/sanitize}
jobs=$(nproc)
generator=()
if command -v ninja >/dev/null; then generator=(-G Ninja); fi

# Backups in files need a disk; the build directory is on one.
run() {
  local name=$1 sanitizers=$2
  local build=$builds/$name
  echo "== $sanitizers"
  cmake -S "$root" -B "$build" "${generator[@]}" -DCMAKE_BUILD_TYPE=Release -DHAL_BUILD_TESTS=ON \
    -DHAL_SANITIZE="$sanitizers" >/dev/null
  cmake --build "$build" --target native_tests --parallel "$jobs" >"$build/build.log" 2>&1 || { cat "$build/build.log"; return 1; }
  mkdir -p "$build/scratch"
  HAL_TEST_DIRECTORY=$build/scratch ctest --test-dir "$build" --output-on-failure --parallel "$jobs"
}

export ASAN_OPTIONS=${ASAN_OPTIONS:-detect_stack_use_after_return=1}
export UBSAN_OPTIONS=${UBSAN_OPTIONS:-print_stacktrace=1}
export TSAN_OPTIONS=${TSAN_OPTIONS:-second_deadlock_stack=1}

run address address,undefined
run thread thread
