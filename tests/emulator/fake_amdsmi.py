"""A fake `libamd_smi.so` under the real Python package amdsmi: compiled here, configured by
environment variables (`fake_amdsmi.c`).
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from emulator import emucuda

SOURCE = Path(__file__).resolve().with_name("fake_amdsmi.c")
FLAGS = ["-std=c11", "-O1", "-fPIC", "-shared", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror"]
_BOUND = re.compile(r"_libraries\['libamd_smi\.so'\]\.(\w+)")
_DEFINED = re.compile(r"^int (amdsmi_\w+)\(", re.MULTILINE)


@dataclass(frozen=True)
class FakeGpu:
    """One GPU of the library, in its own order."""

    address: str
    serial: str = "0x0"
    total_mib: int = 16384
    used_mib: int = 0


def build() -> Path:
    """The folder of a ROCm installation that has the library in `lib`; compiled once."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler was found: install gcc or clang to run these tests")
    stubs = _stubs()
    folder = emucuda.CACHE / emucuda._digest([SOURCE, Path(__file__)], compiler + stubs)
    library = folder / "lib" / "libamd_smi.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        rest = folder / "rest.c"
        rest.write_text(stubs)
        emucuda._run_into(library, [compiler, *FLAGS, str(SOURCE), str(rest)])
    return folder


def _stubs() -> str:
    """What the package binds when it is imported, besides what the source defines."""
    spec = importlib.util.find_spec("amdsmi")
    if spec is None or spec.origin is None:
        raise RuntimeError("amdsmi is not installed: pip install amdsmi to run these tests")
    wrapper = Path(spec.origin).with_name("amdsmi_wrapper.py").read_text()
    missing = set(_BOUND.findall(wrapper)) - set(_DEFINED.findall(SOURCE.read_text()))
    return "".join(f"int {name}(void) {{ return 2; }}\n" for name in sorted(missing))


def environment(
    *gpus: FakeGpu,
    processes: tuple[tuple[int, int, int], ...] = (),
    init: int = 0,
    refused: tuple[str, ...] = (),
) -> dict[str, str]:
    """The variables that make it so; `processes` are (index of the GPU, pid, bytes)."""
    return {
        "FAKE_AMDSMI": ";".join(
            f"{gpu.address} {gpu.serial} {gpu.total_mib} {gpu.used_mib}" for gpu in gpus
        ),
        "FAKE_AMDSMI_PROCESSES": ";".join(" ".join(map(str, entry)) for entry in processes),
        "FAKE_AMDSMI_INIT": str(init),
        "FAKE_AMDSMI_REFUSED": ",".join(refused),
    }
