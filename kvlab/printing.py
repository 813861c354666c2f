"""A page as PDF, printed by the Chromium of the machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from kvlab.errors import KvlabError, UsageError

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PATIENCE_S = 120
QUIET = (
    *("--headless", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-pdf-header-footer"),
)


def to_pdf(page: Path) -> Path:
    """The path of the PDF, beside the page; UsageError when there is no Chromium."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise UsageError(
            "no Chromium was found to print a PDF with",
            hint="install chromium, or print the page from your browser",
        )
    pdf = page.with_suffix(".pdf")
    # Chromium's own sandbox does not work for root, who should not browse; these pages are local.
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with tempfile.TemporaryDirectory() as profile:
        command = [browser, *QUIET, *sandbox, f"--user-data-dir={profile}"]
        command += [f"--print-to-pdf={pdf.resolve()}", page.resolve().as_uri()]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise KvlabError(
                f"{browser} did not print {page} within {PATIENCE_S} s",
                hint="print the page from your browser",
            ) from error
    if done.returncode or not pdf.is_file():
        raise KvlabError(
            f"{browser} could not print {page}: exit code {done.returncode}",
            hint="print the page from your browser",
            log_tail="\n".join(done.stderr.splitlines()[-5:]),
        )
    return pdf
