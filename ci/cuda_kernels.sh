#!/usr/bin/env bash
# The kernels and their memory on a CUDA device, in about four minutes: their GPU tests, and the measurements beside
# the peers that are there.
# Usage: ci/cuda_kernels.sh [tests] [bench] [sweep]; without an argument tests and bench.
#
#   PEERS          archives (.tar.xz) of packages that the image lacks, to test and to measure against: first FlashInfer
#                  with its kernels built beforehand, then vLLM. Each is unpacked once; nothing is installed
#   OUT, PYTHON, HAL_LIBRARY    as for ci/cuda.sh
#
# Exit status: 0 when everything passed, 1 when a section failed, 2 for bad usage.
set -euo pipefail
platform=cuda
sections="tests bench sweep"
# shellcheck source=ci/common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Each archive in a folder of its own, on the path in the order that they are given in.
unpack_peers() {
  local archive folder peers=${TMPDIR:-/tmp}/hal-peers
  for archive in ${PEERS:-}; do
    folder=$peers/$(sha256sum "$archive" | cut -c1-16)
    if [[ ! -e $folder/.ready ]]; then
      mkdir -p "$folder"
      "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="tar")' \
        "$archive" "$folder"
      touch "$folder/.ready"
    fi
    export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$folder
  done
  # FlashInfer: no compiler on the device, a folder to write its generated sources and its log to.
  export FLASHINFER_WORKSPACE_BASE=$peers FLASHINFER_DISABLE_JIT=1 VLLM_LOGGING_LEVEL=ERROR
  mkdir -p "$peers"
}

section_tests() {
  unpack_peers
  section kernels tests -m cuda tests/gpu/test_cuda_kernels.py tests/unit/test_mla_decode.py \
    tests/unit/test_topk_topp.py tests/contract/test_workspace.py tests/contract/test_kv_init.py \
    tests/contract/test_decode_steps.py
}

section_bench() {
  unpack_peers
  section kernels-bench bench kernels --batches 1 64 1024 --heads 128 16
}

section_sweep() {
  section kernels-sweep bench kernels --sweep --kernels mla --mla-batches 1 64 --lengths 8192 \
    --heads 128 16 --json "$results/kernels-sweep.json"
}

[[ $# -gt 0 ]] || set -- tests bench
run_sections "$@"
