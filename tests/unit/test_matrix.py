"""The matrix as data: covers, names, tiers, exclusions, pinned sets and what a platform lacks."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hal.core.verify.matrix import pins
from hal.core.verify.matrix.cover import completion, cover, missing
from hal.core.verify.matrix.lives import case_of, engine_of
from hal.core.verify.matrix.support import unsupported, why_not
from hal.core.verify.matrix.table import Matrix, find_matrix
from hal.cpu.platform import CpuPlatform
from hal.errors import InvalidArgument

ROOT = Path(__file__).resolve().parents[2]
MATRIX = Matrix.load(ROOT / "ci" / "matrix.toml")


def table(**changes: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "axes": {"colour": ["red", "green", "blue"], "size": [1, 2], "shape": ["o", "x"]},
        "tiers": {
            "few": {"strength": 0, "requests": 1, "minutes": 1},
            "pairs": {"strength": 2, "requests": 1, "minutes": 1},
        },
        "cell": [{"why": "the least"}, {"colour": "blue", "why": "blue ones"}],
        "exclude": [{"colour": "green", "size": [2], "why": "green is small"}],
        **changes,
    }


# ---- covers --------------------------------------------------------------------------------------

digits = st.integers(0, 3)
sizes = st.lists(st.integers(1, 4), min_size=2, max_size=6)


@settings(max_examples=60)
@given(
    sizes=sizes, strength=st.integers(1, 3), banned=st.tuples(st.integers(0, 3), st.integers(0, 3))
)
def test_a_cover_meets_every_allowed_combination(
    sizes: list[int], strength: int, banned: tuple[int, int]
) -> None:
    axes = {f"a{i}": [str(v) for v in range(size)] for i, size in enumerate(sizes)}
    first, second = (str(value) for value in banned)

    def allowed(row: Any) -> bool:
        return not (row.get("a0") == first and row.get("a1") == second)

    rows = cover(axes, strength, allowed)
    assert all(allowed(row) and set(row) == set(axes) for row in rows)
    for names in combinations(axes, min(strength, len(axes))):
        met = {tuple(row[name] for name in names) for row in rows}
        for values in product(*(axes[name] for name in names)):
            part = dict(zip(names, values, strict=True))
            assert values in met or completion(axes, part, allowed) is None


def test_a_cover_is_much_smaller_than_the_product_and_the_same_every_time() -> None:
    axes = {f"a{i}": ["0", "1", "2"] for i in range(10)}
    rows = cover(axes, 2)
    assert len(rows) <= 27
    assert rows == cover(axes, 2)


def test_given_rows_count() -> None:
    axes = {"a": ["0", "1"], "b": ["0", "1"]}
    assert len(cover(axes, 2, rows=[{"a": "0", "b": "0"}])) == 3


def test_what_a_cover_misses_is_found() -> None:
    axes = {"a": ["0", "1"], "b": ["0", "1"]}
    rows = cover(axes, 2)
    assert not list(missing(axes, 2, lambda _: True, rows))
    assert list(missing(axes, 2, lambda _: True, rows[1:])) == [rows[0]]


# ---- the table -----------------------------------------------------------------------------------


def test_names_lead_back_to_cells() -> None:
    for cell in MATRIX.cells(MATRIX.tier("ci"), {}):
        again = MATRIX.parse(cell.name)
        assert (again.name, again.values) == (cell.name, cell.values)
    assert MATRIX.parse("base").values == MATRIX.defaults


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("colour=pink", ["'pink'", "red, green, blue"]),
        ("weight=3", ["'weight'", "colour, size, shape"]),
        ("blue", ["axis=value", "'blue'"]),
        ("colour=green,size=2", ["no cell", "green is small"]),
    ],
)
def test_a_bad_name_says_what_is_wrong(name: str, words: list[str]) -> None:
    with pytest.raises(InvalidArgument) as caught:
        Matrix.of(table()).parse(name)
    assert all(word in str(caught.value) for word in words)


def test_a_tier_has_the_named_cells_each_other_value_once_and_its_cover() -> None:
    matrix = Matrix.of(table())
    few = matrix.cells(matrix.tier("few"), {})
    assert [cell.name for cell in few] == [
        "base",
        "colour=blue",
        "colour=green",
        "size=2",
        "shape=x",
    ]
    pairs = matrix.cells(matrix.tier("pairs"), {})
    assert not list(missing(matrix.axes, 2, matrix.allows, [cell.values for cell in pairs]))
    assert all(matrix.allows(cell.values) for cell in pairs)


def test_a_tier_may_leave_values_out() -> None:
    tiers = {"few": {"strength": 0, "requests": 1, "minutes": 1, "without": {"size": [2]}}}
    matrix = Matrix.of(table(tiers=tiers))
    assert "size=2" not in [cell.name for cell in matrix.cells(matrix.tier("few"), {})]
    tiers["few"]["also"] = ["colour=blue,size=2"]
    matrix = Matrix.of(table(tiers=tiers))
    assert matrix.cells(matrix.tier("few"), {})[-1].name == "colour=blue,size=2"


def test_what_a_platform_lacks_is_in_single_cells_and_in_no_cover() -> None:
    matrix = Matrix.of(table())
    lacking = {("shape", "x"): "no crosses here"}
    cells = matrix.cells(matrix.tier("pairs"), lacking)
    assert [cell.name for cell in cells if why_not(cell, lacking)] == ["shape=x"]


@pytest.mark.parametrize(
    ("content", "words"),
    [("schema = 2", "schema 2"), ("axes = [", "cannot be read"), (None, "cannot be read")],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "matrix.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidArgument, match=words):
        Matrix.load(path)


def test_the_matrix_of_this_source_tree_is_found() -> None:
    assert find_matrix() == ROOT / "ci" / "matrix.toml"


@pytest.mark.parametrize("tier", ["ci", "full"])
def test_a_tier_of_the_matrix_covers_what_it_says(tier: str) -> None:
    chosen = MATRIX.tier(tier)
    lacking = unsupported(MATRIX, CpuPlatform(), 0)
    axes = MATRIX._supported(lacking, chosen)
    rows = [cell.values for cell in MATRIX.cells(chosen, lacking)]
    assert not list(missing(axes, chosen.strength, MATRIX.allows, rows))


def test_every_cell_has_an_engine_and_a_life() -> None:
    for cell in MATRIX.cells(MATRIX.tier("full"), {}):
        engine_of(cell, 0)
        case = case_of(cell)
        assert case.rounds >= 2
        assert len(case.steps) > case.rounds


def test_every_exclusion_is_about_values_that_exist() -> None:
    for exclusion in MATRIX.exclusions:
        for axis, values in exclusion.values.items():
            assert set(values) <= set(MATRIX.axes[axis])
        assert exclusion.why


def test_what_the_host_lacks_has_reasons() -> None:
    lacking = unsupported(MATRIX, CpuPlatform(), 0)
    assert lacking["execution", "graphs"] == "the host has no device graphs"
    assert ("ranks", "2") in lacking
    assert all(lacking.values())
    assert ("nesting", "fifo") not in lacking, "the host's allocator can be told how to nest"


# ---- pinned sets ---------------------------------------------------------------------------------


def pinned(tmp_path: Path) -> Path:
    path = tmp_path / "cells" / "p.json"
    pins.write(path, "few", ["a", "b"], {"c": "no c here"})
    return path


def test_the_pinned_set_is_no_problem(tmp_path: Path) -> None:
    assert pins.problems(pinned(tmp_path), "few", ["b", "a"], {"c": "no c here"}) == []


@pytest.mark.parametrize(
    ("cells", "lacking", "words"),
    [
        (["a"], {"c": "no c here"}, "cell b has vanished"),
        (["a", "b", "d"], {"c": "no c here"}, "cell d is not pinned"),
        (["a", "b"], {}, "cell c was expected to be unsupported"),
        (["a", "b"], {"c": "no c here", "e": "no e"}, "cell e is unsupported unexpectedly: no e"),
        (["a", "b"], {"c": "broken"}, "cell c is unsupported for another reason: broken"),
    ],
)
def test_another_set_is_a_problem(
    tmp_path: Path, cells: list[str], lacking: dict[str, str], words: str
) -> None:
    found = pins.problems(pinned(tmp_path), "few", cells, lacking)
    assert len(found) == 1
    assert words in found[0]


def test_a_tier_that_is_not_pinned_is_a_problem_and_a_platform_is_none(tmp_path: Path) -> None:
    assert "has no set for tier many" in pins.problems(pinned(tmp_path), "many", [], {})[0]
    assert pins.problems(tmp_path / "nothing.json", "few", [], {}) == []


def test_large_sets_are_pinned_by_their_digest(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    names = [f"cell {number}" for number in range(pins.LISTED + 1)]
    pins.write(path, "many", names, {})
    assert "cells" not in json.loads(path.read_text())["tiers"]["many"]
    assert pins.problems(path, "many", names, {}) == []
    assert "has changed: 400 now, 401 pinned" in pins.problems(path, "many", names[1:], {})[0]


@pytest.mark.parametrize("tier", ["quick", "ci", "full"])
def test_the_hosts_set_is_pinned(tier: str) -> None:
    lacking = unsupported(MATRIX, CpuPlatform(), 0)
    cells = MATRIX.cells(MATRIX.tier(tier), lacking)
    reasons = {cell.name: why for cell in cells if (why := why_not(cell, lacking))}
    runnable = [cell.name for cell in cells if cell.name not in reasons]
    path = pins.pin_file(ROOT / "ci" / "matrix.toml", "cpu")
    assert path.exists()
    assert pins.problems(path, tier, runnable, reasons) == [], "run: hal verify --matrix … --pin"
