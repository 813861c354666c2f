"""Pages are valid HTML and have no fault that axe knows."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path
from typing import Any

import axe_core_python
import html5lib
import pytest

from kvlab.report import index
from tests.report import cases
from tests.report.test_browser import browse
from tests.report.test_browser import pytestmark as browser

AXE = (Path(axe_core_python.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
RUN = """
onload = () => axe.run(document, {resultTypes: ["violations"]}).then((found) => {
  const line = document.createElement("pre");
  line.id = "axe-result";
  line.textContent = JSON.stringify(found.violations.map(
    (one) => [one.id, one.impact, one.nodes.slice(0, 3).map((node) => node.html.slice(0, 120))]));
  document.body.append(line);
});
"""


@pytest.mark.parametrize(("genre", "lang"), cases.ALL)
@pytest.mark.parametrize("case", ["proven", "wrong"])
def test_a_page_is_valid_html(case: str, genre: str, lang: str) -> None:
    parser = html5lib.HTMLParser()
    parser.parse(cases.html(case, genre, lang))
    assert parser.errors == []


def test_an_index_is_valid_html(tmp_path: Path) -> None:
    parser = html5lib.HTMLParser()
    parser.parse(index.render([index.Entry(cases.summary(), {})], tmp_path))
    assert parser.errors == []


def violations(page: str, folder: Path) -> list[Any]:
    """What axe finds in a page; its script is let in by taking the page's own policy out."""
    open_page = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page)
    with_axe = open_page.replace("</body>", f"<script>{AXE}</script><script>{RUN}</script></body>")
    path = folder / "page.html"
    path.write_text(with_axe, encoding="utf-8")
    document, _ = browse(path, folder)
    found = re.search(r'<pre id="axe-result">(.*?)</pre>', document, re.DOTALL)
    assert found is not None, "axe did not come to its end"
    result: list[Any] = json.loads(html.unescape(found[1]))
    return result


class TestAxe:
    pytestmark = browser

    @pytest.mark.parametrize(("genre", "lang"), cases.ALL)
    def test_axe_finds_nothing(self, genre: str, lang: str, tmp_path: Path) -> None:
        assert violations(cases.html("proven", genre, lang), tmp_path) == []

    def test_axe_would_find_a_fault(self, tmp_path: Path) -> None:
        faulty = cases.html("proven", "technical", "en").replace(
            '<main id="main"', '<img src="data:,"><main id="main"'
        )
        assert "image-alt" in [name for name, *_ in violations(faulty, tmp_path)]
