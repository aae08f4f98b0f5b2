"""The report in a real browser: it asks for nothing, fits a phone, and prints."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from PIL import Image

sys.path.insert(0, str(Path(__file__).parent))  # the suite imports by path, and adds none
from report_fixture import write_fixture

from harness.report import write_report

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium or google-chrome is installed")

PHONE, DESK = 390, 1280
# A page in a frame of the wanted width, as a window of a browser without a head is never narrower
# than 500 px. The page measures itself and tells the frame's owner, which keeps it in its root.
FRAME = """<!DOCTYPE html><html><body style="margin: 0"><script>
addEventListener("message", e => { document.documentElement.dataset.found = e.data; });
</script><iframe src="PAGE" style="border: 0; width: WIDTHpx; height: 900px"></iframe></body></html>
"""
MEASURE = """<script>
addEventListener("load", () => {
  const hidden = e => e.closest(".scroll, .picture, pre, .skip");
  const out = [...document.body.querySelectorAll("*")].filter(
    e => !hidden(e) && e.getBoundingClientRect().right > innerWidth + 1);
  parent.postMessage(JSON.stringify({
    inner: innerWidth, scroll: document.documentElement.scrollWidth,
    images: document.images.length,
    broken: [...document.images].filter(i => !i.naturalWidth).length,
    out: out.map(e => e.tagName + "." + e.className).slice(0, 5),
    phrases: [...document.querySelectorAll("td.phrase, td.prose")].map(
      e => e.getBoundingClientRect().width),
  }), "*");
});
</script>"""


@dataclass(frozen=True)
class Visit:
    """What a browser found: console messages, addresses asked for, and measures in CSS pixels."""

    console: list[str]
    asked: list[str]
    inner: int
    scroll: int
    images: int
    broken: int
    out: list[str]
    phrases: list[float]


def chromium(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A run of the browser with a profile of its own, cut off from every host."""
    assert BROWSER is not None
    return subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--v=0",
            "--virtual-time-budget=2000", *arguments,
        ],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip


def visit(page: Path, width: int, folder: Path) -> Visit:
    """Open a copy of a page that measures itself, in a frame of so many CSS pixels."""
    copy, frame, log = (folder / f"{width}.{kind}" for kind in ("html", "frame.html", "json"))
    html = page.read_text(encoding="utf-8")
    assert "</body>" in html
    copy.write_text(html.replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    frame.write_text(FRAME.replace("PAGE", copy.name).replace("WIDTH", str(width)))
    ran = chromium(folder, "--window-size=1400,900", f"--log-net-log={log}", "--dump-dom",
                   frame.as_uri())  # fmt: skip
    found = re.search(r'data-found="([^"]*)"', ran.stdout)
    assert found, f"the page was not measured; {ran.stderr[-500:]}"
    console = [line for line in ran.stderr.splitlines() if "CONSOLE" in line]
    return Visit(console, _asked(log), **json.loads(found[1].replace("&quot;", '"')))


def _asked(log: Path) -> list[str]:
    """What pages asked the network for, by the browser's own log of it.

    The browser asks its makers for updates by itself: such requests have no page that began them.
    """
    kept = json.loads(log.read_text(encoding="utf-8"))
    began = kept["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    begun = [e.get("params", {}) for e in kept["events"] if e["type"] == began]
    urls = {r["url"] for r in begun if "url" in r and r.get("initiator") != "not an origin"}
    return sorted(url for url in urls if not url.startswith(("file:", "data:")))


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(write_fixture(tmp_path_factory.mktemp("browser") / "invented")).html


@pytest.fixture(scope="module")
def phone(report: Path, tmp_path_factory: pytest.TempPathFactory) -> Visit:
    return visit(report, PHONE, tmp_path_factory.mktemp("phone"))


def test_a_page_that_errs_asks_and_overflows_is_found_out(tmp_path: Path):
    """The checks below would see what they look for."""
    page = tmp_path / "bad.html"
    page.write_text(
        '<!DOCTYPE html><html><head><meta name="viewport" content="width=device-width"></head>'
        '<body><div class="wide" style="width: 900px">wide</div>'
        '<img src="http://tracker.invalid/pixel.png"><iframe src="http://frame.invalid/"></iframe>'
        "<script>undefinedFunction()</script></body></html>"
    )
    found = visit(page, PHONE, tmp_path)
    assert any("undefinedFunction is not defined" in line for line in found.console)
    assert found.asked == ["http://frame.invalid/", "http://tracker.invalid/pixel.png"]
    assert (found.inner, found.images, found.broken) == (PHONE, 1, 1)
    assert found.scroll > 900
    assert found.out == ["DIV.wide"]


def test_the_report_asks_the_network_for_nothing(phone: Visit):
    assert phone.asked == []


def test_the_report_leaves_the_console_clean(phone: Visit):
    assert phone.console == []


def test_every_figure_is_drawn(phone: Visit, report: Path):
    assert phone.images == len(list((report.parent / "figures").glob("*.svg"))) > 5
    assert phone.broken == 0


def test_the_body_does_not_scroll_sideways_on_a_phone(phone: Visit):
    assert phone.inner == PHONE
    assert phone.scroll <= PHONE, phone.out
    assert phone.out == []


def test_long_texts_in_tables_have_room_on_a_desk(report: Path, tmp_path: Path):
    found = visit(report, DESK, tmp_path)
    assert (found.inner, found.asked, found.console, found.out) == (DESK, [], [], [])
    assert found.scroll <= DESK
    assert found.phrases
    assert min(found.phrases) >= 170  # about 11 rem: four or five words a line


@pytest.mark.parametrize("width", [PHONE, DESK])
def test_a_screenshot_shows_the_page(report: Path, width: int, tmp_path: Path):
    shot = tmp_path / "shot.png"
    chromium(
        tmp_path, "--hide-scrollbars", f"--window-size={width},900", f"--screenshot={shot}",
        report.as_uri(),
    )  # fmt: skip
    with Image.open(shot) as image:
        assert image.size == (width, 900)
        colours = image.convert("L").histogram()
    assert sum(colours[:100]) > 0.005 * width * 900  # ink
    assert sum(colours[240:]) > 0.5 * width * 900  # paper


def test_the_report_prints(report: Path, tmp_path: Path):
    pdf = tmp_path / "report.pdf"
    chromium(tmp_path, "--no-pdf-header-footer", f"--print-to-pdf={pdf}", report.as_uri())
    content = pdf.read_bytes()
    assert content.startswith(b"%PDF-")
    pages = len(re.findall(rb"/Type\s*/Page\b(?!s)", content))
    assert 5 <= pages <= 40
    if shutil.which("pdftotext"):
        done = subprocess.run(
            ["pdftotext", "-layout", str(pdf), "-"], capture_output=True, text=True, check=True
        )
        assert "Score at matched budget" in done.stdout
        assert "Skip to the report" not in done.stdout  # nor what only serves a screen
