"""A report as JUnit XML, which pipelines know how to show."""

from __future__ import annotations

from xml.etree import ElementTree
from xml.etree.ElementTree import Element, SubElement

from hal.core.verify.matrix.report import CellResult, MatrixReport, Verdict


def junit(report: MatrixReport) -> str:
    """One suite: a test case for each cell, and one for the set of cells."""
    failed = len(report.of(Verdict.FAILED)) + bool(report.problems)
    suites = Element("testsuites")
    suite = SubElement(
        suites,
        "testsuite",
        name=_suite_name(report),
        tests=str(len(report.cells) + 1),
        failures=str(failed),
        errors="0",
        skipped=str(len(report.of(Verdict.UNSUPPORTED))),
        time=f"{report.seconds:.3f}",
    )
    properties = SubElement(suite, "properties")
    for name, value in report.environment["versions"].items():
        SubElement(properties, "property", name=name, value=str(value))
    for cell in report.cells:
        _add_cell(suite, report, cell)
    _add_set(suite, report)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=True) + "\n"


def _suite_name(report: MatrixReport) -> str:
    return f"hal.verify.{report.platform}.{report.tier}"


def _add_cell(suite: Element, report: MatrixReport, cell: CellResult) -> None:
    case = _case(suite, report, cell.name, cell.seconds)
    if cell.verdict is Verdict.UNSUPPORTED:
        SubElement(case, "skipped", message=cell.reason)
    elif cell.verdict is Verdict.FAILED:
        failure = SubElement(case, "failure", message=cell.reason)
        lines = [str(finding) for finding in cell.findings] or [cell.reason]
        failure.text = _printable("\n".join([*lines, "", report.command(cell.name)]))


def _add_set(suite: Element, report: MatrixReport) -> None:
    case = _case(suite, report, "the set of cells", 0.0)
    if report.problems:
        failure = SubElement(case, "failure", message=report.problems[0])
        failure.text = "\n".join(report.problems)


def _case(suite: Element, report: MatrixReport, name: str, seconds: float) -> Element:
    return SubElement(
        suite, "testcase", classname=_suite_name(report), name=name, time=f"{seconds:.3f}"
    )


def _printable(text: str) -> str:
    """XML has no way to write most control characters."""
    return "".join(c if c.isprintable() or c in "\n\t" else "�" for c in text)
