"""A report as one self-contained page: no script from elsewhere, no font, no picture.

It is read by people on a wide screen or a phone, in light or dark, and works when it is printed or
opened from an attachment; without scripts everything but the switching of views is there.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Template
from typing import Any

from hal.core.verify.matrix.charts import memory_chart, rate_chart

_PAGE = Path(__file__).with_name("page.html")
_AXIS_ORDER = (
    "sleep",
    "wake",
    "lifecycle",
    "backing",
    "compress",
    "retain",
    "park",
    "nesting",
    "cycles",
    "fault",
)
"""Axes that make the columns of the heat map, one after the other; the rows are engines."""
_WORST = ("failed", "passed", "unsupported")
_SHOWN_TIMELINES = 12

Cell = Mapping[str, Any]


def page(report: Mapping[str, Any]) -> str:
    """The page of a report, which is what `MatrixReport.as_dict` gives."""
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        title=_text(f"hal verify: {report['platform']} {report['tier']}"),
        verdict="passed" if report["passed"] else "failed",
        headline=_headline(report),
        facts=_facts(report),
        problems=_problems(report),
        heat_map=_heat_map(report["cells"]),
        failures=_failures(report["cells"]),
        rates=_rates(report),
        timelines=_timelines(report["cells"]),
        table=_table(report["cells"]),
        environment=_environment(report["environment"]),
        command=_text(_run_command(report)),
    )


def _text(value: object) -> str:
    return html.escape(str(value), quote=True)


def _count(cells: Sequence[Cell], verdict: str) -> int:
    return sum(cell["verdict"] == verdict for cell in cells)


def _headline(report: Mapping[str, Any]) -> str:
    cells = report["cells"]
    failed, problems = _count(cells, "failed"), len(report["problems"])
    if report["passed"]:
        return f"{_count(cells, 'passed')} cells, every wake bit-exact"
    what = [f"{failed} of {failed + _count(cells, 'passed')} cells failed"] if failed else []
    what += [f"{problems} problems with the set of cells"] if problems else []
    return " and ".join(what) or "no cell ran"


def _facts(report: Mapping[str, Any]) -> str:
    """The numbers of the run, as tiles."""
    cells = report["cells"]
    facts = (
        ("requests compared", f"{sum(cell['compared'] for cell in cells):,}"),
        ("damaged", f"{sum(cell['damaged'] for cell in cells):,}"),
        ("unstable", f"{sum(cell['unstable'] for cell in cells):,}"),
        ("faults survived", f"{sum(cell['faults'] for cell in cells):,}"),
        ("cells unsupported", f"{_count(cells, 'unsupported'):,}"),
        ("steepest device slope", _steepest(cells, "device_slope")),
        ("steepest host slope", _steepest(cells, "host_slope")),
        ("wall clock", f"{report['seconds'] / 60:.1f} of {report['budget_minutes']:g} min"),
    )
    return "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)


def _steepest(cells: Sequence[Cell], key: str) -> str:
    slopes = [cell[key]["bytes_per_cycle"] for cell in cells if cell[key]]
    return f"{max(slopes, key=abs) / 2**20:+.3f} MiB/cycle" if slopes else "not measured"


def _problems(report: Mapping[str, Any]) -> str:
    lines = [("problem", text) for text in report["problems"]]
    lines += [("note", text) for text in report["notes"]]
    if not lines:
        return ""
    items = "".join(f'<li class="{kind}">{_text(text)}</li>' for kind, text in lines)
    return f'<ul class="problems">{items}</ul>'


# ---- the heat map: engines by what happens to them -----------------------------------------------


def _heat_map(cells: Sequence[Cell]) -> str:
    """Engines (rows) by values of the other axes (columns), each field the worst of its cells."""
    columns = [
        (axis, value)
        for axis in _AXIS_ORDER
        for value in dict.fromkeys(cell["values"][axis] for cell in cells)
    ]
    rows = _engines(cells)
    return "".join(
        (
            "<table class='heat'><thead>",
            _axis_row(columns),
            _value_row(columns),
            "</thead><tbody>",
            *(_heat_row(name, own, columns) for name, own in rows.items()),
            "</tbody></table>",
        )
    )


def _engines(cells: Sequence[Cell]) -> dict[str, list[Cell]]:
    """The cells of each value that an engine can have."""
    found: dict[str, list[Cell]] = {}
    for axis in (axis for axis in cells[0]["values"] if axis not in _AXIS_ORDER):
        for cell in cells:
            found.setdefault(f"{axis} {cell['values'][axis]}", []).append(cell)
    return found


def _axis_row(columns: Sequence[tuple[str, str]]) -> str:
    spans: dict[str, int] = {}
    for axis, _ in columns:
        spans[axis] = spans.get(axis, 0) + 1
    heads = "".join(f"<th colspan='{n}' scope='colgroup'>{axis}</th>" for axis, n in spans.items())
    return f"<tr><td></td>{heads}</tr>"


def _value_row(columns: Sequence[tuple[str, str]]) -> str:
    seen: set[str] = set()
    heads = []
    for axis, value in columns:
        edge = "" if axis in seen else " class='edge'"
        seen.add(axis)
        heads.append(f"<th scope='col'{edge}><span>{_text(value)}</span></th>")
    return f"<tr class='values'><td></td>{''.join(heads)}</tr>"


def _heat_row(name: str, cells: Sequence[Cell], columns: Sequence[tuple[str, str]]) -> str:
    axis, value = name.split(" ", 1)
    fields = "".join(_field(name, cells, column) for column in columns)
    head = f"<th scope='row'><small>{_text(axis)}</small> {_text(value)}</th>"
    return f"<tr>{head}{fields}</tr>"


def _field(name: str, cells: Sequence[Cell], column: tuple[str, str]) -> str:
    axis, value = column
    own = [cell for cell in cells if cell["values"][axis] == value]
    if not own:
        return "<td class='none'></td>"
    worst = next(v for v in _WORST if any(cell["verdict"] == v for cell in own))
    counts = ", ".join(f"{n} {v}" for v in _WORST if (n := _count(own, v)))
    reasons = dict.fromkeys(cell["reason"] for cell in own if cell["reason"])
    title = "\n".join((f"{name} × {axis} {value}: {counts}", *list(reasons)[:3]))
    shown = _count(own, worst)
    data = f"data-engine='{_text(name)}' data-axis='{axis}' data-value='{_text(value)}'"
    button = f"<button type='button' {data} title='{_text(title)}'>{shown}</button>"
    return f"<td class='{worst}'>{button}</td>"


# ---- failures, rates and memory ------------------------------------------------------------------


def _failures(cells: Sequence[Cell]) -> str:
    failed = [cell for cell in cells if cell["verdict"] == "failed"]
    if not failed:
        return ""
    return f"<section><h2>What failed</h2>{''.join(map(_failure, failed))}</section>"


def _failure(cell: Cell) -> str:
    findings = cell["findings"] or [{"gate": "process", "text": cell["reason"]}]
    items = "".join(f"<li><b>{_text(f['gate'])}</b> {_text(f['text'])}</li>" for f in findings[:8])
    return (
        f"<article class='failure'><h3>{_text(cell['name'])}</h3><ul>{items}</ul>"
        f"<pre>{_text(cell['command'])}</pre></article>"
    )


def _rates(report: Mapping[str, Any]) -> str:
    bench = report["bench"]
    if not bench:
        return "<p class='quiet'>Rates were not measured in this run.</p>"
    size = bench["bytes"] / 2**20
    note = f"{size:,.0f} MiB of weights, backups in {_text(bench['backing'])} memory; medians"
    return f"{rate_chart(bench)}<p class='quiet'>{note} of the same run.</p>"


def _timelines(cells: Sequence[Cell]) -> str:
    """Charts of the cells with the most cycles."""
    longest = sorted(
        (cell for cell in cells if len(cell["timeline"]) > 1),
        key=lambda cell: (-len(cell["timeline"]), cell["name"]),
    )[:_SHOWN_TIMELINES]
    if not longest:
        return "<p class='quiet'>No cell has a timeline.</p>"
    options = "".join(
        f"<option value='t{index}'>{_text(cell['name'])}</option>"
        for index, cell in enumerate(longest)
    )
    charts = "".join(
        f"<figure id='t{index}'{'' if index == 0 else ' hidden'}>{memory_chart(cell)}</figure>"
        for index, cell in enumerate(longest)
    )
    return f"<label class='pick'>Cell <select id='timeline'>{options}</select></label>{charts}"


# ---- every cell ----------------------------------------------------------------------------------


def _table(cells: Sequence[Cell]) -> str:
    return "".join(_row(cell) for cell in cells)


def _row(cell: Cell) -> str:
    verdict = cell["verdict"]
    reason = cell["reason"] or cell["why"]
    fields = (
        f"<td class='{verdict}'><span>{verdict}</span></td>",
        f"<td><b>{_text(cell['name'])}</b><small>{_text(reason)}</small></td>",
        f"<td class='n'>{cell['compared']:,}</td>",
        f"<td class='n'>{cell['faults'] or ''}</td>",
        f"<td class='n'>{cell['seconds']:.1f}</td>",
        f"<td><code>{_text(cell['command'])}</code></td>",
    )
    return f"<tr data-values='{_text(json.dumps(cell['values']))}'>{''.join(fields)}</tr>"


def _environment(environment: Mapping[str, Any]) -> str:
    return "".join(
        f"<tr><th scope='row'>{_text(name)}</th><td>{_text(value)}</td></tr>"
        for name, value in _environment_rows(environment)
    )


def _environment_rows(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from environment["versions"].items()
    for name, value in environment["capabilities"].items():
        if isinstance(value, Mapping):
            answer = "yes" if value["available"] else "no"
            yield name, f"{answer}{f' ({reason})' if (reason := value['reason']) else ''}"
        else:
            yield name, str(value)


def _run_command(report: Mapping[str, Any]) -> str:
    options = report["options"]
    parts = [f"hal verify --platform {report['platform']} --matrix {report['tier']}"]
    parts += [f"--requests {options['requests']} --seed {options['seed']}"]
    return " ".join(parts)
