"""Renew data/sample's summaries and reports/sample's pages from the sample's records.

``python -m tests.sample`` after a change of the summary, a template, a catalogue or a figure. The
records themselves are those of a real run and are never touched.
"""

from __future__ import annotations

from pathlib import Path

from kvlab import report, summary
from kvlab.i18n import LANGUAGES
from kvlab.rundir import RunDir

ROOT = Path(__file__).resolve().parents[1]


def renew() -> list[Path]:
    """The pages written, one for each language."""
    for manifest in sorted((ROOT / "data" / "sample").glob("*/manifest.json")):
        summary.conclude(RunDir.open(manifest.parent))
    told = report.load(ROOT / "data" / "sample")
    return [report.write(told, ROOT / "reports" / "sample", lang=lang) for lang in LANGUAGES]


if __name__ == "__main__":
    for page in renew():
        print(page.relative_to(ROOT))
