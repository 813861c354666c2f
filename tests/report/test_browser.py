"""Pages in a real browser: nothing is asked from the network, nothing overflows, no complaint."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.report import cases

BROWSER = shutil.which("chromium")
WIDTHS = (390, 768, 1000, 1440)
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

USE = """
<script>
const say = (name, what) => {
  const line = document.createElement("p");
  line.className = name;
  line.textContent = JSON.stringify(what);
  document.body.append(line);
};
onload = () => {
  const frame = document.querySelector("iframe");
  const page = frame.contentDocument;
  const last = (row) => row.cells[row.cells.length - 1].textContent.trim();
  const table = [...page.querySelectorAll("table:has(button.sort)")].find(
    (table) => [...table.tBodies[0].rows].every((row) => /^[%−-]?\\d/.test(last(row))));
  const buttons = [...table.querySelectorAll("button.sort")];
  const column = buttons.length - 1;
  const shown = () => [...table.tBodies[0].rows].map((row) => row.cells[column].textContent.trim());
  const before = shown();
  const states = [0, 1].map(() => {
    buttons[column].click();
    return [buttons[column].parentElement.getAttribute("aria-sort"), shown()];
  });
  say("sorted", {before, states});
  frame.contentWindow.URL.createObjectURL = (blob) => {
    blob.text().then((text) => say("saved", text));
    return "data:,";
  };
  page.querySelector("button.csv").click();
  say("tables", ["main table", "button.csv"].map((which) => page.querySelectorAll(which).length));
};
</script>
"""

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="chromium is not installed"),
]


def browse(page: Path, folder: Path) -> tuple[str, str]:
    """The page's document, and what the browser's console says, in a world without any host.

    A page that asks for anything from the network is complained of in the console.
    """
    done = subprocess.run(
        [
            str(BROWSER),
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            "--host-resolver-rules=MAP * ~NOTFOUND",
            f"--user-data-dir={folder / 'profile'}",
            *("--enable-logging=stderr", "--window-size=1600,900"),
            *("--virtual-time-budget=20000", "--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return done.stdout, "\n".join(console)


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
    document, console = browse(page, tmp_path)
    measured = re.findall(r'<p class="measured">(\d+);(\d+);(\d+);(.*?)</p>', document)
    assert [int(width) for width, *_ in measured] == list(WIDTHS)
    for width, scrolled, shown, wide in measured:
        assert not wide, f"at {width} px: {html.unescape(wide)}"
        assert int(scrolled) <= int(shown), f"at {width} px the page scrolls sideways"
    assert not console


def test_a_page_opens_by_itself(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(cases.html("wrong", "article", "zh"), encoding="utf-8")
    document, console = browse(page, tmp_path)
    assert 'id="verdict"' in document
    assert not console


def test_the_console_does_complain(tmp_path: Path) -> None:
    """The two tests above would see a page that asks for something."""
    page = tmp_path / "page.html"
    asking = cases.html("wrong", "article", "zh").replace(
        "<main", "<img src='http://a.test/'><main"
    )
    page.write_text(asking, encoding="utf-8")
    _, console = browse(page, tmp_path)
    assert "a.test" in console


@pytest.mark.parametrize("lang", ["tr", "zh", "en"])
def test_tables_sort_and_are_saved_as_csv(lang: str, tmp_path: Path) -> None:
    source = html.escape(cases.html("proven", "technical", lang), quote=True)
    page = tmp_path / "use.html"
    page.write_text(
        f'<!doctype html><meta charset=utf-8>{USE}<iframe width="1000" srcdoc="{source}"></iframe>',
        encoding="utf-8",
    )
    document, console = browse(page, tmp_path)
    assert not console

    def said(name: str) -> Any:
        found = re.search(rf'<p class="{name}">(.*?)</p>', document, re.DOTALL)
        assert found is not None, f"no {name}"
        return json.loads(html.unescape(found[1]))

    use = said("sorted")
    (up, ascending), (down, descending) = use["states"]
    assert (up, down) == ("ascending", "descending")
    assert sorted(ascending) == sorted(descending) == sorted(use["before"])
    numbers = [number(shown, lang) for shown in ascending]
    assert numbers == sorted(numbers)
    assert len(set(numbers)) > 1
    assert [number(shown, lang) for shown in descending] == numbers[::-1]
    tables, buttons = said("tables")
    assert tables == buttons > 0
    rows = list(csv.reader(io.StringIO(said("saved").lstrip("\ufeff"))))
    assert len(rows) > 2
    assert all(rows)


def number(shown: str, lang: str) -> float:
    """The first number of a cell, written as the language writes it."""
    plain = shown.replace(".", "").replace(",", ".") if lang == "tr" else shown.replace(",", "")
    found = re.search(r"-?\d+(?:\.\d+)?", plain.replace("−", "-"))
    assert found is not None, shown
    return float(found[0])
