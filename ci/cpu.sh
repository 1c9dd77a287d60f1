#!/usr/bin/env bash
# What has to hold on the host as the device, beside the tests of `make test`: bit-exact wakes in every nesting order,
# cycles without creep, and the measurements.
# Usage: ci/cpu.sh [verify] [matrix] [backups] [soak] [cycles] [bench]; without an argument all of them.
#
#   OUT            where JSON and the log go (default: build/cpu)
#   TIER           of the matrix: quick, ci or full (default: ci)
#   SOAK_MINUTES, SOAK_SEED  of the soak (default: 0.5 and 1)
#   PYTHON         a Python of version 3.11 or newer (default: python3)
#
# Exit status: 0 when everything passed, 1 when a section failed, 2 for bad usage.
set -euo pipefail
platform=cpu
sections="verify matrix backups soak cycles bench"
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

section_verify() {
  local nesting
  for nesting in lifo fifo flatten; do
    section "verify-$nesting" hal verify --platform cpu --nesting "$nesting" --json "$results/verify-$nesting.json"
  done
}

section_cycles() { section cycles bench cycles --cycles 300; }

section_bench() {
  section transfer bench transfer
  section pools bench pools --rounds 3
}

section_matrix() { matrix_of cpu; }
section_backups() { backups_of cpu; }

section_soak() { soak_of cpu; }

run_sections "$@"
