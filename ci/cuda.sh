#!/usr/bin/env bash
# Everything that has to hold on a CUDA device, from a fresh CUDA container to a verdict: the contract suite and the GPU
# tests, bit-exact wakes (eager and graphs), 300 cycles without a slope, and the measurements with their targets.
# Usage: ci/cuda.sh [tests] [verify] [matrix] [backups] [soak] [cycles] [bench]; without an argument all of them.
#
#   OUT            where JSON and the log go (default: build/cuda)
#   TIER           of the matrix: quick, ci or full (default: ci)
#   SOAK_MINUTES, SOAK_SEED  of the soak (default: 0.5 and 1)
#   PYTHON         the container's Python, which has torch (default: python3)
#   HAL_LIBRARY    with PYTHONPATH: a library and a source tree to use as they are
#
# Exit status: 0 when everything passed, 1 when a section failed, 2 for bad usage.
set -euo pipefail
platform=cuda
sections="tests verify matrix backups soak cycles bench"
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Not side by side: tests that fill the device, or look at what is free on it, need it for themselves. Parking acts on the
# whole process, which must hold nothing but what the test parks.
section_tests() {
  section contract tests -m cuda tests/contract
  section gpu tests -m cuda tests/gpu --ignore=tests/gpu/test_parking.py
  section parking tests -m cuda tests/gpu/test_parking.py
}

section_verify() {
  local execution
  for execution in eager graphs; do
    section "verify-$execution" hal verify --platform cuda --execution "$execution" \
      --json "$results/verify-$execution.json"
  done
}

section_cycles() { section cycles bench cycles --cycles 300; }

section_bench() {
  section transfer bench transfer
  section pools bench pools
}

section_matrix() { matrix_of cuda --requests 553; }

section_backups() { backups_of cuda; }

section_soak() { soak_of cuda; }

run_sections "$@"
