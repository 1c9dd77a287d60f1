# Sourced by the scripts of the platforms: a Python that has the package and what its tests need, sections whose
# verdicts add up, and the table of verdicts. Expects $platform, $sections, and a function section_NAME for each.
# shellcheck shell=bash

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
results=${OUT:-$root/build/$platform}
python=${PYTHON:-python3}
rows=$(mktemp)
trap 'rm -f "$rows"' EXIT
export PYTHONUNBUFFERED=1  # so that a run that is cut short leaves its log

# Everything that a run imports; the package with its native library last. -P: the checkout is no installed package.
needs='import torch, rich, typer, hypothesis, pytest, pytest_timeout, psutil'
has_needs() { "$1" -P -c "$needs" 2>/dev/null; }
has_package() { has_needs "$1" && "$1" -P -c 'import hal.core, hal.native; hal.native.library()' 2>/dev/null; }

# The package as it is; else built in place, where the container has all that it needs; else installed into .venv beside
# the container's torch, which stays as it is.
find_python() {
  local installed=$root/.venv/bin/python
  if has_package "$python"; then return; fi
  if [[ -x $installed ]] && has_package "$installed"; then python=$installed; return; fi
  if has_needs "$python" && command -v cmake >/dev/null && build_in_place; then return; fi
  install_package
  python=$installed
}

build_in_place() {
  local build=$root/build/in-place
  echo "building libhal in $build"
  cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=Release >"$build.log" 2>&1 || { cat "$build.log"; return 1; }
  cmake --build "$build" --parallel >>"$build.log" 2>&1 || { cat "$build.log"; return 1; }
  rm -rf "$build/source" && mkdir -p "$build/source/hal"
  ln -s "$root"/hal/* "$root/core" "$build/source/hal/"
  export PYTHONPATH=$build/source${PYTHONPATH:+:$PYTHONPATH} HAL_LIBRARY=$build/libhal.so
  has_package "$python"
}

install_package() {
  local constraints=$root/build/constraints.txt
  command -v c++ >/dev/null || { echo "libhal needs a C++17 compiler: install g++" >&2; exit 1; }
  echo "installing the package into $root/.venv"
  "$python" -m venv --system-site-packages "$root/.venv"
  "$root/.venv/bin/python" "$root/ci/constraints.py" >"$constraints"
  "$root/.venv/bin/python" -m pip --disable-pip-version-check -qq install --constraint "$constraints" \
    --editable "$root[test]"
}

# Tests skip what a machine lacks; a run for a platform must not pass because everything was skipped.
require_platform() {
  "$python" -P -c '
import sys
from hal.detect import survey
why_not = survey()[sys.argv[1]]
sys.exit(why_not and f"{sys.argv[1]} cannot be used here: {why_not}")' "$platform"
}

# section NAME COMMAND...: runs it, shows and logs what it prints, and notes how it ended.
section() {
  local name=$1 before=$SECONDS output status
  shift
  output=$(mktemp)
  printf '\n== %s: %s\n' "$name" "$*" | tee -a "$log"
  set +e
  "$@" 2>&1 | tee -a "$log" "$output"
  status=${PIPESTATUS[0]}
  set -e
  printf '%s\t%s\t%s\t%s\n' "$name" "$status" "$((SECONDS - before))" "$(last_line "$output")" >>"$rows"
  rm -f "$output"
}

last_line() { grep -v '^[[:space:]]*$' "$1" | tail -n 1 | tr '\t' ' ' | sed 's/^=* *//; s/ *=*$//'; }

# verdict: prints the table, writes verdict.json, and returns 1 when a section failed.
verdict() { "$python" -P "$root/ci/verdict.py" "$platform" "$rows" "$results/verdict.json"; }

# run_sections [NAME...]: calls the functions section_NAME, all of $sections when none is named.
run_sections() {
  local name
  for name in "$@"; do
    if [[ " $sections " != *" $name "* ]]; then
      echo "$0: there is no section '$name'; sections: $sections" >&2
      exit 2
    fi
  done
  mkdir -p "$results" "$root/build"
  results=$(cd "$results" && pwd)
  log=$results/log.txt
  : >"$log"
  cd "$root"
  find_python
  require_platform
  # shellcheck disable=SC2086
  for name in ${*:-$sections}; do "section_$name"; done
  verdict
}

hal() { "$python" -P -m hal.core.cli "$@"; }
bench() { "$python" "$root/bench/$1.py" --platform "$platform" --json "$results/$1.json" "${@:2}"; }

# matrix_of PLATFORM [OPTION...]: the matrix at $TIER (default: ci), with its reports in $results/matrix.
matrix_of() {
  section "matrix-${TIER:-ci}" hal verify --platform "$1" --matrix "${TIER:-ci}" --report "$results/matrix" "${@:2}"
}
# backups_of PLATFORM [OPTION...]: every pair of the ways in which backups are kept.
backups_of() {
  section backups hal verify --platform "$1" --matrix backups --no-bench --report "$results/backups" "${@:2}"
}
soak_of() {
  section soak hal soak --platform "$1" --minutes "${SOAK_MINUTES:-0.5}" --seed "${SOAK_SEED:-1}" \
    --json "$results/soak.json"
}
tests() { "$python" -P -m pytest -q -p no:cacheprovider "$@"; }

# The emulated vendors join as another package's platforms would: by entry points. Their classes are in tests/emulator.
register_emulated() {
  local site=$root/build/emulated-site
  local info=$site/hal_emulated-1.dist-info
  mkdir -p "$info" "$root/build/emulated-processes"
  printf 'Metadata-Version: 2.1\nName: hal-emulated\nVersion: 1\n' >"$info/METADATA"
  printf '[hal.platforms]\n%s\n' \
    'cuda-emulated = emulator.registered:RegisteredCuda
rocm-emulated = emulator.registered:RegisteredRocm
xpu-emulated = emulator.registered:RegisteredXpu' >"$info/entry_points.txt"
  export PYTHONPATH=$root/tests:$site${PYTHONPATH:+:$PYTHONPATH} EMUCUDA_PROCESSES=$root/build/emulated-processes
}
