"""The rules that keep the rooms apart, checked on the sources; every rule is shown to catch its
breach.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("cpu", "cuda", "rocm", "xpu")
VENDOR_WORDS = frozenset(
    "amd amdgpu amdsmi cu cuda hip hsa intel nccl nvcc nvidia nvml oneapi pynvml pyzes rccl rocm "
    "sycl xpu ze zes".split()
)
ROOM_LINES = 280
"""About 250 lines a file; a vendor that needs more gets a second file beside it."""

# (file, top-level name): data that has to name vendors. Nothing else may.
VENDOR_TABLES = {
    ("hal/detect.py", "VENDORS"),
    ("core/integrations/vllm/vendors.py", "VENDORS"),  # what vLLM calls each vendor's parts
}

# file -> names of other projects' public interfaces, which say a vendor's name for any device.
FOREIGN_NAMES = {"core/integrations/torch_memory_saver/saver.py": frozenset({"cuda_graph"})}


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def native_files() -> list[Path]:
    found = (path for folder in ("hal", "core") for path in (ROOT / folder).rglob("*"))
    return sorted(path for path in found if path.suffix in {".cpp", ".h", ".in"})


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def room_of(path: Path) -> str | None:
    parts = path.relative_to(ROOT).parts
    return parts[1] if parts[0] == "hal" and parts[1] in ROOMS else None


# ---- vendors' names ------------------------------------------------------------------------------
# ----------------------------------------------------------------------------------------------


def words(text: str) -> set[str]:
    """The words of identifiers and sentences: `torch.cuda`, `isCuda` and `HAS_CUDA` all hold
    "cuda".
    """
    split = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", text)
    return {word.lower() for word in re.findall(r"[A-Za-z]+", split)}


def texts(node: ast.AST) -> Iterator[str]:
    """The names and strings that one node itself brings in."""
    for field in ("id", "attr", "arg", "name", "module", "asname"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def without_prose(tree: ast.Module, tables: Iterable[str] = ()) -> ast.Module:
    """The tree less docstrings (any string that is a statement) and the named tables."""

    class Strip(ast.NodeTransformer):
        def visit_Expr(self, node: ast.Expr) -> ast.AST:
            is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
            return ast.Pass() if is_text else node

        def visit_Assign(self, node: ast.Assign) -> ast.AST:
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            return ast.Pass() if names & set(tables) else node

    return Strip().visit(tree)  # type: ignore[no-any-return]


def vendor_words_in(
    source: str, tables: Iterable[str] = (), foreign: Iterable[str] = ()
) -> list[str]:
    tree = without_prose(ast.parse(source), tables)
    found = [
        (getattr(node, "lineno", 0), word)
        for node in ast.walk(tree)
        for text in texts(node)
        if text not in foreign
        for word in words(text) & VENDOR_WORDS
    ]
    return [f"line {line}: {word}" for line, word in sorted(set(found))]


@pytest.mark.parametrize(
    "source",
    [
        "torch.cuda.empty_cache()",
        "from torch.xpu import synchronize",
        "import pynvml as nvml",
        "if platform.name == 'rocm': pass",
        "def is_hip(): pass",
        "f(f'{x} on nvidia')",
        "HAS_CUDA = True",
    ],
)
def test_vendor_rule_catches(source: str) -> None:
    assert vendor_words_in(source)


@pytest.mark.parametrize(
    "source",
    ['"""On CUDA and ROCm."""', "CUDAGRAPH = 'cudagraph'", "level = 1", "x = 'cute'", "# cuda\n"],
)
def test_vendor_rule_leaves_alone(source: str) -> None:
    assert not vendor_words_in(source)


@pytest.mark.parametrize(
    "path", [p for p in python_files("hal", "core") if room_of(p) is None], ids=name_of
)
def test_r106_no_vendor_is_named_outside_its_room(path: Path) -> None:
    tables = [table for file, table in VENDOR_TABLES if file == name_of(path)]
    foreign = FOREIGN_NAMES.get(name_of(path), ())
    assert not vendor_words_in(path.read_text(), tables, foreign)


def test_every_exception_to_the_vendor_rule_is_needed() -> None:
    for file, table in VENDOR_TABLES:
        source = (ROOT / file).read_text()
        assert vendor_words_in(source)
        assert not vendor_words_in(source, [table])
    for file, names in FOREIGN_NAMES.items():
        source = (ROOT / file).read_text()
        for name in names:
            assert vendor_words_in(source, foreign=names - {name})


def vendor_conditionals(source: str) -> list[str]:
    lines = re.findall(r"^[ \t]*#[ \t]*(?:if|ifdef|ifndef|elif)\b.*$", source, re.MULTILINE)
    return [line.strip() for line in lines if words(line) & VENDOR_WORDS]


@pytest.mark.parametrize(
    "line", ["#ifdef __HIP_PLATFORM_AMD__", " # if defined(CUDA)", "#elif XPU"]
)
def test_conditional_rule_catches(line: str) -> None:
    assert vendor_conditionals(f"int x;\n{line}\n")


@pytest.mark.parametrize("path", [p for p in native_files() if room_of(p) is None], ids=name_of)
def test_no_conditional_on_a_vendor_in_shared_native_code(path: Path) -> None:
    assert not vendor_conditionals(path.read_text())


# ---- rooms ---------------------------------------------------------------------------------------


def imports_of(source: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"^(?:hal(?:\.\w+)+|core(?:\.\w+)*)$", node.value))
    return found


def core_imports(source: str) -> set[str]:
    return {name for name in imports_of(source) if re.match(r"(hal\.)?core(\.|$)", name)}


@pytest.mark.parametrize(
    "source",
    [
        "import hal.core",
        "from hal.core.tags import Policy",
        "from hal import core",
        "import core.sleep",
        "importlib.import_module('hal.core.sleep')",
    ],
)
def test_direction_rule_catches(source: str) -> None:
    assert core_imports(source)


@pytest.mark.parametrize("path", python_files("hal"), ids=name_of)
def test_hal_never_imports_core(path: Path) -> None:
    assert not core_imports(path.read_text())


def imported_rooms(source: str) -> set[str]:
    found = (re.match(r"hal\.(\w+)", name) for name in imports_of(source))
    return {match[1] for match in found if match} & set(ROOMS)


def included_rooms(source: str) -> set[str]:
    """The rooms whose headers a source includes: they are found by their bare names."""
    names = re.findall(r'^[ \t]*#[ \t]*include[ \t]*"(?:.*/)?(.+)"', source, re.MULTILINE)
    return {room for path in native_files() if path.name in names and (room := room_of(path))}


@pytest.mark.parametrize(
    "source",
    [
        "import hal.cuda.nvml",
        "from hal.cuda import nvml",
        "def f():\n    from hal import cuda",
        "importlib.import_module('hal.cuda.nvml')",
    ],
)
def test_neighbour_rule_catches(source: str) -> None:
    assert imported_rooms(source) == {"cuda"}


@pytest.mark.parametrize("header", ["libcuda.h", "hal/cuda/libcuda.h", "../cuda/libcuda.h"])
def test_neighbour_rule_catches_headers(header: str) -> None:
    source = f'#include <vector>\n#include "driver.h"\n#include "{header}"\n'
    assert included_rooms(source) == {"cuda"}


@pytest.mark.parametrize("path", [p for p in python_files("hal") if room_of(p)], ids=name_of)
def test_no_vendor_imports_another(path: Path) -> None:
    assert imported_rooms(path.read_text()) <= {room_of(path)}


@pytest.mark.parametrize("path", [p for p in native_files() if room_of(p)], ids=name_of)
def test_no_vendor_includes_another(path: Path) -> None:
    assert included_rooms(path.read_text()) <= {room_of(path)}


@pytest.mark.parametrize(
    "path", [p for p in python_files("hal", "core") if room_of(p)], ids=name_of
)
def test_rooms_have_only_short_python_files(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= ROOM_LINES


@pytest.mark.parametrize("path", [p for p in native_files() if room_of(p)], ids=name_of)
def test_rooms_have_only_short_native_files(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= ROOM_LINES


def test_rooms_are_the_ones_that_exist() -> None:
    rooms = {path.parent.name for path in (ROOT / "hal").glob("*/platform.py")}
    assert "cpu" in rooms
    assert rooms <= set(ROOMS)


# ---- failures are errors -------------------------------------------------------------------------
# -----------------------------------------------------------------------------------------

EXITS = {"sys.exit", "os._exit", "os.abort", "exit", "quit"}
MAY_EXIT = {"hal/__main__.py", "core/cli.py"}


def asserts_and_exits(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Assert):
            found.append(f"line {node.lineno}: assert")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in EXITS:
            found.append(f"line {node.lineno}: {ast.unparse(node.func)}")
    return found


@pytest.mark.parametrize("source", ["assert x", "import sys\nsys.exit(1)", "os._exit(0)", "exit()"])
def test_exit_rule_catches(source: str) -> None:
    assert asserts_and_exits(source)


@pytest.mark.parametrize(
    "path", [p for p in python_files("hal", "core") if name_of(p) not in MAY_EXIT], ids=name_of
)
def test_no_assert_and_no_exit_in_the_library(path: Path) -> None:
    assert not asserts_and_exits(path.read_text())


def native_exits(source: str) -> list[str]:
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", source, flags=re.DOTALL)
    code = re.sub(r'"(?:\\.|[^"\\\n])*"', '""', code)
    return re.findall(r"\b(?:abort|_?exit|quick_exit|terminate|assert)\s*\(", code)


@pytest.mark.parametrize("source", ["std::abort();", "exit (1);", "_exit(1);", "assert(x);"])
def test_native_exit_rule_catches(source: str) -> None:
    assert native_exits(source)
    assert not native_exits(f"// {source}")
    assert not native_exits(f'say("{source}"); static_assert(true);')


@pytest.mark.parametrize("path", native_files(), ids=name_of)
def test_no_native_code_ends_the_process(path: Path) -> None:
    assert not native_exits(path.read_text())


def test_the_checks_look_at_the_sources() -> None:
    assert len(python_files("hal", "core")) > 15
    assert len(native_files()) > 5
