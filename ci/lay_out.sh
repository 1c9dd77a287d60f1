#!/usr/bin/env bash
# Lay the package out in a folder for PYTHONPATH, entry points included, for a machine on which nothing is installed.
# Usage: ci/lay_out.sh FOLDER LIBHAL
set -euo pipefail
folder=${1:?the folder to make} library=${2:?the file of libhal.so}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
rm -rf "$folder"
mkdir -p "$folder/hal" "$folder/accel_hal-0.1.0.dist-info"
(cd "$root/hal" && find . -name '*.py' | tar -cf - -T -) | tar -xf - -C "$folder/hal"
mkdir -p "$folder/hal/core"
(cd "$root/core" && find . -name '*.py' | tar -cf - -T -) | tar -xf - -C "$folder/hal/core"
cp "$library" "$folder/hal/libhal.so"
python3 - "$root/pyproject.toml" "$folder/accel_hal-0.1.0.dist-info" <<'EOF'
import sys, tomllib, pathlib
project = tomllib.loads(pathlib.Path(sys.argv[1]).read_text())["project"]
target = pathlib.Path(sys.argv[2])
(target / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
with (target / "entry_points.txt").open("w") as points:
    for group, entries in project["entry-points"].items():
        print(f"[{group}]", *(f"{name} = {value}" for name, value in entries.items()), "", sep="\n", file=points)
(target / "RECORD").touch()
EOF
du -sh "$folder"
