"""Turn the notes of a run into a table, a JSON file and an exit status.

Usage: python ci/verdict.py PLATFORM NOTES JSON. A line of the notes is a section: name, exit
status, seconds and the last line of its output, with tabs between.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Section:
    """How one section of a run ended; `said` is the last line of its output."""

    name: str
    status: int
    seconds: int
    said: str

    @property
    def passed(self) -> bool:
        return self.status == 0

    @classmethod
    def of(cls, line: str) -> Section:
        name, status, seconds, said = line.split("\t", 3)
        return cls(name, int(status), int(seconds), said)


def table(sections: Sequence[Section]) -> list[str]:
    """One line a section."""
    width = max((len(section.name) for section in sections), default=0)
    return [
        f"{s.name:<{width}}  {'passed' if s.passed else 'FAILED'}  {s.seconds:>4} s  {s.said}"
        for s in sections
    ]


def main(platform: str, notes: Path, path: Path) -> int:
    sections = [Section.of(line) for line in notes.read_text().splitlines()]
    passed = bool(sections) and all(section.passed for section in sections)
    report = {
        "schema_version": SCHEMA_VERSION,
        "platform": platform,
        "passed": passed,
        "sections": [asdict(section) | {"passed": section.passed} for section in sections],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\n{platform}: {'passed' if passed else 'FAILED'}")
    print("\n".join(table(sections)))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], *map(Path, sys.argv[2:])))
