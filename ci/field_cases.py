"""Keep `docs/field_cases.md` in step with the tests: `python ci/field_cases.py` rewrites its table.

A test that holds a case carries its number in its name (`test_r13_wake_...`, `test_r26_r38_...`),
in Python and in C++. A case without one keeps its line, which says after a dash why there is none.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs/field_cases.md"
ROW = re.compile(r"^\| (R\d+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
TEST = {".py": r"^ *def (test_r\d+_\w+)\(", ".cpp": r"\b(test_r\d+_\w+)"}
"""How a test's name is found, by the suffix of its file."""
NUMBERS = re.compile(r"_r(\d+)(?=_)")


def rows(text: str) -> dict[str, str]:
    """Case -> its tests or the reason why it has none, as the document says."""
    return {case: cell for case, _, cell in ROW.findall(text)}


def numbered_tests(folder: Path = ROOT / "tests") -> dict[str, list[str]]:
    """Case -> the names of the tests that carry its number, in the order of their files."""
    found: dict[str, list[str]] = {}
    for path in sorted(path for path in folder.rglob("*") if path.suffix in TEST):
        for name in dict.fromkeys(re.findall(TEST[path.suffix], path.read_text(), re.MULTILINE)):
            for number in NUMBERS.findall(name):
                found.setdefault(f"R{int(number):02d}", []).append(name)
    return found


def updated(text: str, tests: dict[str, list[str]]) -> str:
    """The document with the tests that are there; a case that lost its tests is left without."""

    def row(match: re.Match[str]) -> str:
        case, what, cell = match.groups()
        names = "<br>".join(f"`{name}`" for name in tests.get(case, ()))
        reason = cell if cell.startswith("—") else "**no test and no reason**"
        return f"| {case} | {what} | {names or reason} |"

    return ROW.sub(row, text)


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(), numbered_tests()))
