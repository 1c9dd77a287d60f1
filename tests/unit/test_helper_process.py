"""A helper process: its answers, also those that come together, and what counts as lost."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator

import pytest

from hal.helper_process import HelperLost, HelperProcess

Start = Callable[[str], HelperProcess]

SILENT = "import sys; sys.stdin.read()"
TWO_AT_ONCE = """
import sys
print('{"n": 1}\\n{"n": 2}', flush=True)
sys.stdin.read()
"""
ECHO = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"owner": int(sys.argv[1]), "asked": json.loads(line)}), flush=True)
"""
HALF_AN_ANSWER = f"print('{{', end='', flush=True); {SILENT}"


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts helpers that run some code, and ends them with the test."""
    started: list[HelperProcess] = []

    def begin(code: str) -> HelperProcess:
        started.append(HelperProcess([sys.executable, "-I", "-S", "-c", code]))
        return started[-1]

    yield begin
    for helper in started:
        helper.close()


def test_answers_that_come_together_are_all_heard(start: Start) -> None:
    helper = start(TWO_AT_ONCE)
    assert helper.answer(30) == {"n": 1}
    assert helper.answer(30) == {"n": 2}
    assert helper.is_alive


def test_it_is_told_its_owner_and_answers_requests(start: Start) -> None:
    request = {"call": "state"}
    assert start(ECHO).ask(request, 30) == {"owner": os.getpid(), "asked": request}


@pytest.mark.parametrize(
    ("code", "seconds", "how"),
    [
        (SILENT, 0.1, "gave no answer in 0.1 s"),
        (HALF_AN_ANSWER, 1.0, "gave no answer in 1 s"),
        ("", 30.0, "ended"),
    ],
)
def test_a_lost_helper_has_ended(start: Start, code: str, seconds: float, how: str) -> None:
    helper = start(code)
    with pytest.raises(HelperLost, match=how):
        helper.answer(seconds)
    assert not helper.is_alive
    with pytest.raises(HelperLost, match="closed"):
        helper.ask({}, 30)
