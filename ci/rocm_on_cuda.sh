#!/usr/bin/env bash
# The ROCm driver over a real CUDA driver, through the HIP-on-CUDA runtime of tests/emulator/hip, with real torch tensors
# on a CUDA device: the contract suite and bit-exact wakes. It shows that the driver's calls, chunks, ranges and quirks
# hold together on a real device; it says nothing about AMD's hardware or its runtime.
# Usage: ci/rocm_on_cuda.sh [probe] [tests] [verify] [quirks]; without an argument all of them.
#
#   OUT             where JSON and the log go (default: build/rocm-on-cuda)
#   PYTHON          a Python that has a CUDA build of torch (default: python3)
#   HAL_LIBRARY     with PYTHONPATH: a library and a source tree to use as they are
#   HAL_LIBAMDHIP64 the runtime, where there is no compiler to build it
#
# Exit status: 0 when everything passed, 1 when a section failed, 2 for bad usage.
set -euo pipefail
platform=rocm-on-cuda
sections="probe tests verify quirks"
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# The platform joins as another package's would: by an entry point. Its class is in tests/emulator.
register_platform() {
  local site=$root/build/rocm-on-cuda-site
  local info=$site/hal_rocm_on_cuda-1.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: hal-rocm-on-cuda\nVersion: 1\n' >"$info/METADATA"
  printf '[hal.platforms]\nrocm-on-cuda = emulator.rocm_on_cuda:RocmOnCudaPlatform\n' >"$info/entry_points.txt"
  export PYTHONPATH=$root/tests:$site${PYTHONPATH:+:$PYTHONPATH}
}

build_runtime() {
  "$python" -P -c 'from emulator import emuhip; print(emuhip.build())'
}

section_probe() { section probe hal probe --platform rocm-on-cuda; }

section_tests() { section contract tests -k rocm-on-cuda tests/contract; }

section_verify() {
  local execution
  for execution in eager graphs; do
    section "verify-$execution" hal verify --platform rocm-on-cuda --execution "$execution" \
      --json "$results/verify-$execution.json"
  done
}

# Memory that stays in use until its range is freed: every sleep gives its addresses up and takes them again.
section_quirks() {
  EMUHIP_QUIRKS=hold-hard section verify-placeholder hal verify --platform rocm-on-cuda \
    --json "$results/verify-placeholder.json"
  EMUHIP_QUIRKS=refuse-align,access-early section verify-refusals hal verify --platform rocm-on-cuda --requests 60 \
    --cycles 5 --json "$results/verify-refusals.json"
}

register_platform
HAL_LIBAMDHIP64=${HAL_LIBAMDHIP64:-$(build_runtime)}
export HAL_LIBAMDHIP64
unset EMUHIP_LIBCUDA EMUHIP_QUIRKS EMUHIP_VERSION
run_sections "$@"
