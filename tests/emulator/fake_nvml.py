"""A machine with NVIDIA cards for tests without a GPU: nvidia-ml-py over a library of our own."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

SOURCE = Path(__file__).with_name("fake_nvml.c")
SONAME = "libnvidia-ml.so.1"
VARIABLE = "FAKE_NVML"

NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
DRIVER_NOT_LOADED = 9
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15


def build(folder: Path) -> Path:
    """Compile the library into `folder`, which can then stand in LD_LIBRARY_PATH."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise RuntimeError("no C compiler was found: install gcc or clang to run these tests")
    library = folder / SONAME
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O1", "-shared", "-fPIC", f"-Wl,-soname,{SONAME}"]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(library), "-pthread"], check=True)
    return library


class FakeNvml:
    """The machine's description, sizes in bytes; the next call into NVML sees every change."""

    def __init__(self, library: Path, description: Path) -> None:
        self.library, self.description = library, description
        self._lines: list[str] = []
        self._write()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let nvidia-ml-py use this machine until the test ends."""
        import pynvml

        monkeypatch.setenv(VARIABLE, str(self.description))
        monkeypatch.setattr(pynvml, "nvmlLib", ctypes.CDLL(str(self.library)))
        monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})

    def environment(self) -> dict[str, str]:
        """What another process needs in its environment to see this machine."""
        return {VARIABLE: str(self.description), "LD_LIBRARY_PATH": str(self.library.parent)}

    def card(
        self,
        uuid: str,
        *,
        bus: str = "00000000:01:00.0",
        name: str = "H200",
        total: int = 0,
        reserved: int = 0,
        used: int = 0,
        mig: bool = False,
    ) -> None:
        sizes = f"total={total} reserved={reserved} used={used}"
        self._add(f"card uuid={uuid} bus={bus} name={name} {sizes} mig={int(mig)}")

    def slice(self, card: str, uuid: str, *, total: int, reserved: int = 0, used: int = 0) -> None:
        sizes = f"total={total} reserved={reserved} used={used}"
        self._add(f"slice card={card} uuid={uuid} {sizes}")

    def process(self, device: str, used: int | None, *, pid: int = 0, mps: bool = False) -> None:
        """A process with a context; pid 0 is whoever asks, `used` None is not available."""
        amount = -1 if used is None else used
        listed = " list=mps" if mps else ""
        self._add(f"process device={device} pid={pid} used={amount}{listed}")

    def fail(self, call: str, code: int, *, device: str = "") -> None:
        """Let an NVML call fail from now on, on one device or on all."""
        self._add(f"fail call={call} code={code}" + (f" device={device}" if device else ""))

    def clear(self) -> None:
        """Take everything out of the machine."""
        self._lines.clear()
        self._write()

    def _add(self, line: str) -> None:
        self._lines.append(line)
        self._write()

    def _write(self) -> None:
        whole = self.description.with_suffix(".new")
        whole.write_text("".join(f"{line}\n" for line in self._lines))
        whole.replace(self.description)
