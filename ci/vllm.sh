#!/usr/bin/env bash
# The vLLM plugin with real engines on the host: one in the tests' process, one behind a server.
# Usage: ci/vllm.sh PYTHON [pytest's arguments]
# PYTHON is the environment of the other tests: it has libhal.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${1:?the python that has the package}
library=$("$python" -P -c 'import hal.native; print(hal.native.library_path())')
environment=${VLLM_VENV:-$root/.venv/vllm}
bash "$root/ci/vllm_venv.sh" "$environment"
bash "$root/ci/lay_out.sh" "$root/build/vllm/package" "$library"
cd "$root"
# Each suite has an engine of its own, which works with one thread.
OMP_NUM_THREADS=1 PYTHONPATH=$root/build/vllm/package "$environment/bin/pytest" -n 2 --dist loadfile \
  --ignore tests/integrations/vllm/test_allocator.py tests/integrations/vllm "${@:2}"
