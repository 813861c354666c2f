"""Pages in a real browser: nothing is asked from the network, nothing overflows, no complaint."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.report import cases

BROWSER = shutil.which("chromium")
WIDTHS = (390, 768, 1440)
MEASURE = """
<script>
onload = () => {
  for (const frame of document.querySelectorAll("iframe")) {
    const root = frame.contentDocument.documentElement;
    const wide = [...frame.contentDocument.querySelectorAll("main *")].filter(
      (e) => !e.closest(".scroll, pre, svg, thead, caption.quiet")
        && e.getBoundingClientRect().right > root.clientWidth + 1);
    const line = document.createElement("p");
    line.className = "measured";
    line.textContent = [frame.width, root.scrollWidth, root.clientWidth,
      wide.map((e) => e.outerHTML.slice(0, 90)).slice(0, 3).join(" | ")].join(";");
    document.body.append(line);
  }
};
</script>
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="chromium is not installed"),
]


def browse(page: Path, folder: Path) -> tuple[str, str, list[str]]:
    """The page's document, the browser's own messages, and every address that it asked for."""
    net_log = folder / "net.json"
    done = subprocess.run(
        [
            str(BROWSER),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            f"--user-data-dir={folder / 'profile'}",
            *("--enable-logging=stderr", f"--log-net-log={net_log}", "--window-size=1600,900"),
            *("--virtual-time-budget=2000", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    events = json.loads(net_log.read_text(encoding="utf-8"))["events"]
    asked = [str(e["params"]["url"]) for e in events if "url" in (e.get("params") or {})]
    return done.stdout, done.stderr, asked


@pytest.mark.parametrize(("genre", "lang"), cases.ALL)
def test_a_page_fits_every_width_and_asks_for_nothing(
    genre: str, lang: str, tmp_path: Path
) -> None:
    source = html.escape(cases.html("proven", genre, lang), quote=True)
    frames = "".join(
        f'<iframe width="{w}" height="800" srcdoc="{source}"></iframe>' for w in WIDTHS
    )
    page = tmp_path / "frames.html"
    page.write_text(f"<!doctype html><meta charset=utf-8>{MEASURE}{frames}", encoding="utf-8")
    document, messages, asked = browse(page, tmp_path)
    measured = re.findall(r'<p class="measured">(\d+);(\d+);(\d+);(.*?)</p>', document)
    assert [int(width) for width, *_ in measured] == list(WIDTHS)
    for width, scrolled, shown, wide in measured:
        assert not wide, f"at {width} px: {html.unescape(wide)}"
        assert int(scrolled) <= int(shown), f"at {width} px the page scrolls sideways"
    assert "CONSOLE" not in messages
    assert not [url for url in asked if url.startswith(("http://", "https://"))], asked


def test_a_page_opens_by_itself(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(cases.html("wrong", "article", "zh"), encoding="utf-8")
    document, messages, asked = browse(page, tmp_path)
    assert 'id="verdict"' in document
    assert "CONSOLE" not in messages
    assert not [url for url in asked if url.startswith("http")]
