#!/usr/bin/env bash
# What a ROCm pipeline runs on real hardware, from a fresh ROCm container with its torch to a self-contained report: what
# the platform is and how it gives memory back, the contract suite, and bit-exact wakes over 50 cycles.
# Usage: ci/rocm.sh [probe] [tests] [verify] [matrix] [soak]; without an argument all of them.
#
#   OUT            where the report (log.txt), JSON and the verdict go (default: build/rocm)
#   TIER           of the matrix: quick, ci or full (default: ci)
#   SOAK_MINUTES, SOAK_SEED  of the soak (default: 0.5 and 1)
#   PYTHON         the container's Python, which has torch (default: python3)
#   HAL_LIBRARY    with PYTHONPATH: a library and a source tree to use as they are
#
# Exit status: 0 when everything passed, 1 when a section failed, 2 for bad usage.
set -euo pipefail
platform=rocm
sections="probe tests verify matrix soak"
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

section_probe() { section probe hal probe --platform rocm; }

# Not side by side: tests that fill the device, or look at what is free on it, need it for themselves.
section_tests() { section contract tests -m rocm tests/contract; }

section_verify() {
  local execution
  for execution in eager graphs; do
    section "verify-$execution" hal verify --platform rocm --execution "$execution" --cycles 50 \
      --json "$results/verify-$execution.json"
  done
}

section_matrix() { matrix_of rocm --requests 553; }

section_soak() { soak_of rocm; }

run_sections "$@"
