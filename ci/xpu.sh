#!/usr/bin/env bash
# What an XPU pipeline runs on real hardware, from a fresh Intel container with its torch to a self-contained report: what
# the platform is, where nested scopes put tensors, the contract suite, and bit-exact wakes over 50 cycles.
# Usage: ci/xpu.sh [probe] [tests] [verify] [matrix] [soak]; without an argument all of them.
#
#   OUT            where the report (log.txt), JSON and the verdict go (default: build/xpu)
#   TIER           of the matrix: quick, ci or full (default: ci)
#   SOAK_MINUTES, SOAK_SEED  of the soak (default: 0.5 and 1)
#   PYTHON         the container's Python, which has torch (default: python3)
#   HAL_LIBRARY    with PYTHONPATH: a library and a source tree to use as they are
#
# Exit status: 0 when everything passed, 1 when a section failed, 2 for bad usage.
set -euo pipefail
platform=xpu
sections="probe tests verify matrix soak"
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

section_probe() { section probe hal probe --platform xpu; }

# Not side by side: tests that fill the device, or look at what is free on it, need it for themselves.
section_tests() { section contract tests -m xpu tests/contract; }

# As the nesting order was probed, and with the outer scope left while the inner one is open.
section_verify() {
  section verify hal verify --platform xpu --cycles 50 --json "$results/verify.json"
  section verify-flatten hal verify --platform xpu --nesting flatten --cycles 50 \
    --json "$results/verify-flatten.json"
}

section_matrix() { matrix_of xpu --requests 553; }

section_soak() { soak_of xpu; }

run_sections "$@"
