#!/usr/bin/env bash
# The vLLM plugin with real engines on the host: one in the tests' process, one behind a server.
# Usage: ci/vllm.sh PYTHON [pytest's arguments]
# PYTHON is the environment of the other tests: it has libhal.
set -euo pipefail
# shellcheck source=ci/vllm_environment.sh
source "$(dirname "${BASH_SOURCE[0]}")/vllm_environment.sh"
"$environment/bin/pytest" -n 2 --dist loadfile \
  --ignore tests/integrations/vllm/test_allocator.py tests/integrations/vllm "${@:2}"
