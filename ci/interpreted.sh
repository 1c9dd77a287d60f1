#!/usr/bin/env bash
# The Triton kernels without a device, in Triton's interpreter: in the environment of vLLM's tests, which has Triton.
# Usage: ci/interpreted.sh PYTHON [pytest's arguments]
# PYTHON is the environment of the other tests: it has libhal.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${1:?the python that has the package}
library=$("$python" -P -c 'import hal.native; print(hal.native.library_path())')
environment=${VLLM_VENV:-$root/.venv/vllm}
bash "$root/ci/vllm_venv.sh" "$environment"
bash "$root/ci/lay_out.sh" "$root/build/vllm/package" "$library"
cd "$root"
export PYTHONPATH=$root/build/vllm/package OMP_NUM_THREADS=1
# Tests skip where the interpreter does not run; here it has to.
(cd tests && "$environment/bin/python" -c '
import sys, triton_interpreter
sys.exit(triton_interpreter.interpreter_problem() or None)')
"$environment/bin/pytest" -n 2 -k interpreted tests/unit/test_topk_topp.py tests/unit/test_mla_decode.py "${@:2}"
