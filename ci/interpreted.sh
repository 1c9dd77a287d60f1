#!/usr/bin/env bash
# The Triton kernels without a device, in Triton's interpreter: in the environment of vLLM's tests, which has Triton.
# Usage: ci/interpreted.sh PYTHON [pytest's arguments]
# PYTHON is the environment of the other tests: it has libhal.
set -euo pipefail
# shellcheck source=ci/vllm_environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/vllm_environment.sh"
# Tests skip where the interpreter does not run; here it has to.
(cd tests && "$environment/bin/python" -c '
import sys, triton_interpreter
sys.exit(triton_interpreter.interpreter_problem() or None)')
"$environment/bin/pytest" -n 2 -k interpreted tests/unit/test_topk_topp.py tests/unit/test_mla_decode.py "${@:2}"
