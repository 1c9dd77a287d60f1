"""The README and the documents: their code runs, their commands exist, their links lead
somewhere.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[pytest.param]:  # type: ignore[valid-type]
    return [
        pytest.param(code, id=f"{path.name}-{number}")
        for path in DOCUMENTS
        for number, (found, code) in enumerate(FENCE.findall(path.read_text()))
        if found == language
    ]


@pytest.mark.parametrize("code", blocks("python"))
def test_python_blocks_run(run_python, tmp_path: Path, code: str) -> None:  # type: ignore[no-untyped-def]
    script = tmp_path / "block.py"
    script.write_text(code)
    done = run_python(str(script))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("code", blocks("sh"))
def test_make_targets_in_shell_blocks_exist(code: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wanted = set(re.findall(r"\bmake ([a-z]+)", code))
    assert wanted <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_in_prose_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"`make ([a-z]+)", path.read_text())) <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_to_files(path: Path) -> None:
    links = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text())
    for link in links:
        if "://" not in link:
            assert (path.parent / link).exists(), link


def test_the_readme_has_the_two_commands_and_a_python_example() -> None:
    readme = (ROOT / "README.md").read_text()
    assert re.search(r"^make verify$", readme, re.MULTILINE)
    assert re.search(r"^make test$", readme, re.MULTILINE)
    assert any(language == "python" for language, _ in FENCE.findall(readme))


def test_the_readmes_example_is_the_one_in_the_folder() -> None:
    readme = (ROOT / "README.md").read_text()
    example = (ROOT / "examples/custom_engine.py").read_text()
    codes = [code for language, code in FENCE.findall(readme) if language == "python"]
    assert any(code.strip() in example for code in codes)
