# Sourced by scripts that run tests in vLLM's environment: makes it where it is not there, and lays the package out for it.
# Expects the Python that has the package, with libhal, as the first argument; sets $environment and PYTHONPATH, and goes to
# the project's folder.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${1:?the python that has the package}
library=$("$python" -P -c 'import hal.native; print(hal.native.library_path())')
environment=${VLLM_VENV:-$root/.venv/vllm}
bash "$root/ci/vllm_venv.sh" "$environment"
bash "$root/ci/lay_out.sh" "$root/build/vllm/package" "$library"
export PYTHONPATH=$root/build/vllm/package OMP_NUM_THREADS=1  # each suite works with one thread
cd "$root"
