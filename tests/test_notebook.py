"""Notebooks as programs: parameters, the kernel, failures that must not look like success."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from kvlab import notebook, report
from kvlab.errors import NotebookFailed, UsageError
from tests.builders import make_run
from tests.report import cases

PARAMETERS = {"metadata": {"tags": ["parameters"]}}


def write(folder: Path, *sources: str, kernel: str = "python3", first: str = "x = 1") -> Path:
    """A notebook with a parameters cell and these cells, a heading before them."""
    cells = [
        nbformat.v4.new_markdown_cell("# A small notebook"),
        nbformat.v4.new_code_cell(first, **PARAMETERS),
        *(nbformat.v4.new_code_cell(source) for source in sources),
    ]
    node = nbformat.v4.new_notebook(
        cells=cells,
        metadata={
            "kernelspec": {"name": kernel, "display_name": kernel, "language": "python"},
            "language_info": {"name": "python"},
        },
    )
    path = folder / "small.ipynb"
    nbformat.write(node, path)
    return path


def run(path: Path, folder: Path, **parameters: Any) -> Path:
    return notebook.execute(path, folder / "out" / path.name, parameters)


def test_a_notebook_runs_with_its_parameters_and_this_interpreter(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = write(
        tmp_path,
        "import sys\nfrom kvlab import notebook",
        "notebook.record('python', sys.executable)\nnotebook.record('x', x)",
        kernel="py310-lab-not-installed",
    )
    done = notebook.execute(
        path,
        tmp_path / "done.ipynb",
        {"x": {"a": [1, None, "ü"]}},
        on_progress=lambda *a: told.append(a),
    )
    import sys

    assert notebook.value(done, "python") == sys.executable
    assert notebook.value(done, "x") == {"a": [1, None, "ü"]}
    assert notebook.value(done, "nothing") is None
    assert told[-1][0] == told[-1][1]
    html = notebook.to_html(done, tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert "<title>A small notebook</title>" in html
    assert "notebook.record" not in html, "no code is shown"
    assert '<html lang="en">' in html
    assert "http://" not in html
    assert "https://" not in html


@pytest.mark.parametrize("tags", [[], ["parameters", "parameters"]])
def test_exactly_one_parameters_cell(tmp_path: Path, tags: list[str]) -> None:
    node = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell("x = 1", metadata={"tags": [tag]}) for tag in tags]
    )
    with pytest.raises(UsageError, match=f"{len(tags)} cells tagged"):
        notebook.check_parameters(node, {}, "n.ipynb")


def test_an_unknown_parameter_names_the_nearest(tmp_path: Path) -> None:
    path = write(tmp_path, first="profile = 'a'\nruns: str = 'b'")
    with pytest.raises(UsageError, match="no parameter 'profil'") as error:
        run(path, tmp_path, profil="x")
    assert error.value.hint == "did you mean 'profile'?"
    with pytest.raises(UsageError) as error:
        run(path, tmp_path, zzz="x")
    assert error.value.hint == "known: profile, runs"


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        (("1 / 0", "print('later')"), "cell 3: ZeroDivisionError: division by zero"),
        (("import sys; sys.exit(0)", "print('later')"), "cell 3: SystemExit: 0"),
        (
            ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "print('later')"),
            "cell 3: the kernel died",
        ),
    ],
)
def test_a_failed_notebook_raises_and_still_gets_its_page(
    tmp_path: Path, sources: tuple[str, ...], complaint: str
) -> None:
    path = write(tmp_path, *sources)
    with pytest.raises(NotebookFailed, match=re.escape(complaint)) as error:
        run(path, tmp_path, x=2)
    page = tmp_path / "out" / "small.html"
    assert str(page) in str(error.value.hint)
    html = page.read_text(encoding="utf-8")
    assert 'class="banner"' in html
    assert "No result is published" in html
    found = notebook.failures(nbformat.read(tmp_path / "out" / "small.ipynb", as_version=4))
    assert found[-1]["what"] == "never ran"


def test_failures_are_seen_whatever_the_runner_says() -> None:
    cell = nbformat.v4.new_code_cell("x", execution_count=1)
    cell.metadata["papermill"] = {"exception": True, "status": "completed"}
    node = nbformat.v4.new_notebook(cells=[cell, nbformat.v4.new_code_cell("y")])
    assert [f["what"] for f in notebook.failures(node)] == ["failed", "never ran"]


def test_a_report_that_failed_shows_no_number(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs", manifest=cases.MANIFEST)
    path = write(
        tmp_path,
        "from kvlab import report\nreport.show(run, lang='tr')",
        "print('speedup: 7.02×')",
        "raise RuntimeError('<b>broke</b>')",
        first="run = ''\nlang = 'tr'",
    )
    with pytest.raises(NotebookFailed):
        run(path, tmp_path, run=folder.path, lang="tr")
    html = (tmp_path / "out" / "small.html").read_text(encoding="utf-8")
    assert '<html lang="tr">' in html
    assert "Sonuç yayımlanmamıştır" in html
    assert "×" not in html
    assert "<b>broke" not in html


@pytest.mark.parametrize(
    ("name", "lang", "genre"),
    [
        ("90_report_tr", "tr", "technical"),
        ("91_report_zh", "zh", "article"),
        ("92_report_en", "en", "technical"),
    ],
)
def test_a_report_notebook_gives_the_same_page_as_the_report(
    tmp_path: Path, name: str, lang: str, genre: str
) -> None:
    folder = make_run(tmp_path / "runs", manifest=cases.MANIFEST)
    done = run(notebook.find(name), tmp_path, run=folder.path)
    html = notebook.to_html(done, tmp_path / "page.html", lang=lang).read_text(encoding="utf-8")
    assert html == report.render(report.load(folder), genre=genre, lang=lang)


def test_some_sections_in_a_notebook_keep_it_a_notebook(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs", manifest=cases.MANIFEST)
    path = write(
        tmp_path,
        "from kvlab import report\nreport.show(run, only=('verdict', 'results'))",
        "print('a line')",
        first="run = ''",
    )
    html = notebook.to_html(run(path, tmp_path, run=folder.path), tmp_path / "p.html").read_text(
        encoding="utf-8"
    )
    assert html.count("<style>") == 1
    assert 'id="verdict"' in html
    assert 'id="summary"' not in html
    assert "a line" in html


def test_long_output_is_cut_to_its_end(tmp_path: Path) -> None:
    done = run(write(tmp_path, "for i in range(5000): print('line', i)"), tmp_path)
    text = nbformat.read(done, as_version=4).cells[-1].outputs[0].text
    assert text.splitlines()[0] == "[… +4980]"
    assert text.splitlines()[-1] == "line 4999"
    assert len(text.splitlines()) == 21


def test_find_knows_the_notebooks_and_names_them() -> None:
    assert notebook.find("10_two_round").name == "10_two_round.ipynb"
    with pytest.raises(UsageError, match="no notebook 'none'") as error:
        notebook.find("none")
    assert "00_preflight" in str(error.value.hint)


def test_what_is_no_notebook_is_said(tmp_path: Path) -> None:
    (tmp_path / "x.ipynb").write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="cannot be read as a notebook"):
        run(tmp_path / "x.ipynb", tmp_path)


def test_preflight_runs_and_starts_nothing(tmp_path: Path) -> None:
    done = run(notebook.find("00_preflight"), tmp_path, profile="dgx-spark")
    html = notebook.to_html(done, tmp_path / "p.html").read_text(encoding="utf-8")
    assert "LMCacheMPConnector" in html
    assert notebook.value(done, "profile_sha256")
    assert "<code>--set cache.eviction_ratio=0.2</code>" in html
    assert "restore at most 4,288 (53.6%)" in html
    assert {"KV004", "KV006"} <= {one["id"] for one in notebook.value(done, "findings")}
