"""`docs/field_cases.md` and the tests agree: every case has a test of its number, or a reason."""

from __future__ import annotations

import re

import pytest

import field_cases

CASES = (
    "R01 R02 R03 R04 R06 R08 R09 R10 R11 R13 R14 R16 R17 R19 R21 R22 R23 "
    "R24 R25 R26 R27 R29 R30 R31 R33 R34 R35 R36 R38 R39 R40 "
    "R41 R43 R45 R46 R47 R49 R51 R53 R54 R56 R57 R58 R59 R60 R61 R62 R63 "
    "R64 R66 R68 R69 R71 R72 "
    "R73 R74 R76 R78 R80 R81 R82 R84 R85 R86 R87 R89 R90 R91 R92 R93 R95 R96 "
    "R97 R98 R100 R101 R103 R104 R105 R106 "
    "R107 R108 R110 R111 R112 R114 R115 R117 R118 R119 R120 R122 R124 R125 R127"
).split()
TEXT = field_cases.DOCUMENT.read_text()
ROWS = field_cases.rows(TEXT)


def test_the_list_has_every_case() -> None:
    assert list(ROWS) == CASES


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_a_test_or_a_reason(case: str) -> None:
    assert re.fullmatch(r"`test_r\d+_\w+`(<br>`\w+`)*|— .{20,}", ROWS[case])


def test_the_list_names_the_tests_that_are_there() -> None:
    tests = field_cases.numbered_tests()
    assert len(tests) > 20
    assert tests.keys() <= set(CASES)
    assert field_cases.updated(TEXT, tests) == TEXT, "run: python ci/field_cases.py"


def test_an_update_replaces_reasons_by_tests_and_notices_lost_ones() -> None:
    text = "| R01 | what | — no device so far |\n| R02 | what | `test_r02_gone` |\n"
    after = field_cases.updated(text, {"R01": ["test_r01_a", "test_r01_b"]})
    assert field_cases.rows(after) == {
        "R01": "`test_r01_a`<br>`test_r01_b`",
        "R02": "**no test and no reason**",
    }
