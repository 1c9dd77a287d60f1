"""The report's page in a real browser, without a display: what people see, and that it works."""

from __future__ import annotations

import html
import re
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from hal.core.verify.matrix.html import page
from hal.core.verify.matrix.plan import MatrixOptions, make_plan
from hal.core.verify.matrix.report import CellResult

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="chromium is not installed: apt-get install chromium"
)
CELLS = ("base", "model=mla,sleep=level-2", "wake=alternating,cycles=50", "execution=graphs")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")


class Silent:
    def finished(self, result: CellResult) -> None: ...


def write_page(path: Path, break_name: str | None = None) -> Path:
    options = MatrixOptions(platform="cpu", cells=CELLS, requests=8, jobs=0, break_name=break_name)
    path.write_text(page(make_plan(options).run(Silent()).as_dict()))
    return path


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("page") / "report.html")


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_page(tmp_path_factory.mktemp("page") / "report.html", "stale-index")


def chromium(path: Path, *arguments: str) -> str:
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={path.parent / 'profile'}", *arguments]
    done = subprocess.run(
        [*command, path.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def text_of(dom: str) -> str:
    return html.unescape(
        re.sub(r"<[^>]+>", " ", re.sub(r"<(script|style).*?</\1>", "", dom, flags=re.DOTALL))
    )


def test_the_page_shows_verdict_matrix_memory_rates_and_commands(passing: Path) -> None:
    dom = chromium(passing, "--dump-dom")
    text = text_of(dom)
    assert "3 cells, every wake bit-exact" in text
    assert "4 of 4 cells" in text, "the script has counted the rows"
    assert "hal verify --platform cpu --cell wake=alternating,cycles=50 --requests 8" in text
    assert "the host has no device graphs" in html.unescape(dom)
    assert "MiB a cycle over 34 cycles" in text
    assert "of the link" in text
    assert dom.count("<svg") >= 4
    assert len(re.findall(r"<path class=\"c\d\"", dom)) >= 8
    assert re.search(r"<td class=\"unsupported\"><button", dom)


def test_the_page_of_a_defect_leads_with_it(failing: Path) -> None:
    text = text_of(chromium(failing, "--dump-dom"))
    assert "3 of 3 cells failed" in text
    assert "What failed" in text
    assert "requests differ from the awake round" in text
    assert "--break stale-index" in text


def test_the_page_needs_nothing_from_elsewhere(passing: Path) -> None:
    source = passing.read_text()
    assert not re.search(r"(?:src|href)\s*=|url\(|@import|https?://(?!www\.w3\.org)", source)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_draws_in_light_and_dark(passing: Path, tmp_path: Path, scheme: str) -> None:
    picture = tmp_path / "page.png"
    dark = (
        ("--force-dark-mode", "--blink-settings=preferredColorScheme=0") if scheme == "dark" else ()
    )
    chromium(passing, f"--screenshot={picture}", "--window-size=1280,900", *dark)
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:]) == (1280, 900)


def test_text_of_others_cannot_break_the_page(passing: Path) -> None:
    from hal.core.verify.matrix.compare import read  # noqa: F401 - the page takes plain values

    options = MatrixOptions(platform="cpu", cells=("base",), requests=8, jobs=0, bench=False)
    report = make_plan(options).run(Silent()).as_dict()
    report["cells"][0]["why"] = "</td><script>alert('x')</script>"
    report["notes"] = ["<b>bold</b> $title"]
    source = page(report)
    assert "<script>alert" not in source
    assert "&lt;b&gt;bold&lt;/b&gt; $title" in source
