"""What a batch adds to the time of its cells: read from a batch that was run.

    kvlab batch embedded-8
    python benchmarks/batch_overhead.py data/batches/<batch>

A cell's own time is that of its executed notebook, as papermill recorded it: what the same cell
takes when it is run alone. What the batch adds is the rest of each visit, and the time between
visits. Only visits that follow each other without an interruption are counted.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path

from kvlab.batch.ledger import Entry, Ledger

BREAK_S = 60.0
"""A longer silence between two visits is an interruption of the batch, not its own work."""


def main(path: Path) -> None:
    """Print the share that the batch adds."""
    ledger = Ledger.open(path)
    began: dict[str, Entry] = {}
    own_s = batch_s = 0.0
    last: datetime | None = None
    visits = 0
    for entry in ledger.entries():
        at = datetime.fromisoformat(entry.at)
        if entry.state == "started":
            began[entry.key] = entry
            if last is not None and (at - last).total_seconds() < BREAK_S:
                batch_s += (at - last).total_seconds()
        elif entry.state == "finished" and entry.run and entry.key in began:
            notebook_s = _notebook_s(Path(entry.run))
            if notebook_s is None:
                continue
            start = datetime.fromisoformat(began[entry.key].at)
            own_s += notebook_s
            batch_s += (at - start).total_seconds() - notebook_s
            visits += 1
        last = at
    if not visits:
        sys.exit(f"{path}: no finished visit with a notebook")
    share = batch_s / own_s
    mark = "PASS" if share < 0.02 else "FAIL"
    print(f"{visits} visits, own time {own_s:.1f} s, added by the batch {batch_s:.2f} s")
    print(f"share added: {share:.2%} (target below 2 %): {mark}")


def _notebook_s(run: Path) -> float | None:
    """How long the visit's notebook took by papermill's own record; None when it is not there."""
    for path in sorted((run / "notebooks").glob("*.ipynb")):
        told = json.loads(path.read_text(encoding="utf-8"))["metadata"].get("papermill") or {}
        if told.get("duration") is not None:
            return float(told["duration"])
    return None


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python benchmarks/batch_overhead.py data/batches/<batch>")
    main(Path(sys.argv[1]))
