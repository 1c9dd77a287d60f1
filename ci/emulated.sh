#!/usr/bin/env bash
# The vendors' own drivers over emulated devices, where there is no accelerator: the named cells of the matrix on each,
# and a soak. It shows that everything above the vendor's library holds; it says nothing about the vendor's hardware.
# Usage: ci/emulated.sh [cuda] [rocm] [xpu]; without an argument all of them.
#
#   OUT            where JSON and the log go (default: build/emulated)
#   PYTHON         a Python of version 3.11 or newer (default: python3)
#   SOAK_MINUTES, SOAK_SEED  of each vendor's soak (default: 0.5 and 1)
#
# Exit status: 0 when everything passed, 1 when a section failed, 2 for bad usage.
set -euo pipefail
platform=emulated
sections="cuda rocm xpu"
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

require_platform() { register_emulated; }

section_cuda() {
  section_of cuda-emulated
  backups_of cuda-emulated
}
section_rocm() { section_of rocm-emulated; }
section_xpu() { section_of xpu-emulated; }

section_of() {
  section "matrix-$1" hal verify --platform "$1" --matrix quick --no-bench --report "$results/$1"
  section "soak-$1" hal soak --platform "$1" --minutes "${SOAK_MINUTES:-0.5}" --seed "${SOAK_SEED:-1}" \
    --json "$results/soak-$1.json"
}

run_sections "$@"
