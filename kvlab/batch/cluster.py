"""A batch over several machines: a Dask cluster hands each host one visit at a time.

A machine measures one thing at a time, so hosts are what is scheduled here, not workers. A run
folder comes back whole, with its checksums compared. A host that dies loses the visit it was
making; that visit is made once more, on another host, and its entry says so.
"""

from __future__ import annotations

import io
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab.batch.ledger import Ledger
from kvlab.batch.sweep import Sweep, Visit
from kvlab.batch.visits import Measure, Outcome, measure_alone, settle
from kvlab.errors import HostBusy, KvlabError, RunFolderError, UsageError
from kvlab.rundir import RunDir, from_home

RESOURCE = "kvlab"
"""What a worker offers one of: ``dask worker … --resources kvlab=1``."""
ATTEMPTS = 2
LOOK_S = 0.5
CONNECT_S = 20.0


@dataclass(slots=True)
class Flight:
    """A visit under way: on which worker, for the how manieth time."""

    visit: Visit
    worker: str
    attempt: int
    future: Any


def carry_on(
    outcome: Outcome,
    scheduler: str,
    *,
    runs: Path = Path("data/runs"),
    measure: Measure = measure_alone,
    host_of: Callable[[Mapping[str, Any]], str] = lambda worker: str(worker["host"]),
) -> Outcome:
    """The outcome after every missing visit was made by the cluster at ``scheduler``.

    ``measure`` runs on the workers, which need kvlab and an engine. UsageError when there is no
    such cluster, or none of its workers offers the resource; HostBusy when all of them have gone.
    """
    place = from_home(runs)
    place.mkdir(parents=True, exist_ok=True)
    with _client(scheduler) as client:
        return settle(
            outcome, lambda ledger: _Tower(client, ledger, place, measure, host_of).work()
        )


@dataclass(slots=True)
class _Tower:
    """Hands out the missing visits, one to a host, until all have landed or failed."""

    client: Any
    ledger: Ledger
    runs: Path
    measure: Measure
    host_of: Callable[[Mapping[str, Any]], str]
    waiting: list[tuple[Visit, int]] = field(default_factory=list)
    flights: list[Flight] = field(default_factory=list)

    def work(self) -> None:
        self.waiting = [(visit, 1) for visit in self.ledger.missing()]
        while self.waiting or self.flights:
            workers = _workers(self.client)
            self._gather(workers)
            if not workers and not self.flights and self.waiting:
                raise HostBusy(
                    f"no worker of the cluster offers {RESOURCE}",
                    hint=f"on each host: dask worker SCHEDULER --resources {RESOURCE}=1",
                )
            self._hand_out(workers)
            time.sleep(LOOK_S)

    def _gather(self, workers: Mapping[str, Any]) -> None:
        for flight in list(self.flights):
            if flight.worker not in workers:
                self.flights.remove(flight)
                _lost(self.ledger, flight, self.waiting)
            elif flight.future.done():
                self.flights.remove(flight)
                _landed(self.ledger, flight, self.runs)

    def _hand_out(self, workers: Mapping[str, Any]) -> None:
        busy = {self.host_of(workers[flight.worker]) for flight in self.flights}
        for address, about in workers.items():
            if self.waiting and self.host_of(about) not in busy:
                visit, attempt = self.waiting.pop(0)
                busy.add(self.host_of(about))
                self.ledger.append(visit, "started", host=address, attempt=attempt)
                self.flights.append(Flight(visit, address, attempt, self._submit(visit, address)))

    def _submit(self, visit: Visit, address: str) -> Any:
        return self.client.submit(
            _there,
            self.ledger.sweep.model_dump(by_alias=True, mode="json"),
            visit,
            self.measure,
            workers=[address],
            resources={RESOURCE: 1},
            pure=False,
            retries=0,
        )


def _client(scheduler: str) -> Any:
    try:
        from distributed import Client
    except ImportError as error:
        raise UsageError(
            "Dask distributed is not installed", hint="pip install 'kvlab[cluster]'"
        ) from error
    try:
        connect: Any = Client
        return connect(scheduler, timeout=CONNECT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"there is no Dask scheduler at {scheduler}: {error}",
            hint="start one: dask scheduler; its address is tcp://HOST:8786",
        ) from error


def _workers(client: Any) -> dict[str, Mapping[str, Any]]:
    """The workers that offer the resource, by address, in a stable order."""
    known = client.scheduler_info(n_workers=-1)["workers"]
    return {
        address: known[address]
        for address in sorted(known)
        if known[address].get("resources", {}).get(RESOURCE)
    }


def _lost(ledger: Ledger, flight: Flight, waiting: list[tuple[Visit, int]]) -> None:
    """A worker went away in the middle of a visit: once more elsewhere, or failed."""
    flight.future.cancel()
    if flight.attempt < ATTEMPTS:
        waiting.insert(0, (flight.visit, flight.attempt + 1))
        return
    ledger.append(
        flight.visit,
        "failed",
        host=flight.worker,
        attempt=flight.attempt,
        error=f"its worker {flight.worker} went away, and so did the one before",
    )


def _landed(ledger: Ledger, flight: Flight, runs: Path) -> None:
    """Keep what a visit brought, or why it failed."""
    where = {"host": flight.worker, "attempt": flight.attempt}
    failure = flight.future.exception()
    if failure is not None:
        message = failure.message if isinstance(failure, KvlabError) else repr(failure)
        ledger.append(flight.visit, "failed", error=message, **where)
        return
    try:
        run = unpack(flight.future.result(), runs)
    except KvlabError as error:
        ledger.append(flight.visit, "failed", error=error.message, **where)
        return
    ledger.append(flight.visit, "finished", run=str(run.resolve()), **where)


def _there(sweep: dict[str, Any], visit: Visit, measure: Measure) -> bytes:
    """On the worker: the run folder of one visit, packed."""
    with tempfile.TemporaryDirectory(prefix="kvlab-batch-") as place:
        folder = Path(place)
        return pack(
            measure(Sweep.model_validate(sweep), visit, folder=folder, runs=folder / "runs")
        )


def pack(run: Path) -> bytes:
    """A run folder as a compressed archive."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.add(run, arcname=run.name)
    return packed.getvalue()


def unpack(packed: bytes, runs: Path) -> Path:
    """The run folder after it was unpacked; RunFolderError when it is not what was sealed."""
    with tempfile.TemporaryDirectory(dir=runs) as place:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            archive.extractall(place, filter="data")
        (folder,) = Path(place).iterdir()
        run = RunDir.open(folder)
        if run.sealed_checksums() != run.checksums():
            raise RunFolderError(
                f"{folder.name} did not arrive as it was sealed",
                hint="measure the cell again; a disk or the network damaged it",
            )
        if (runs / folder.name).exists():
            raise RunFolderError(
                f"{runs / folder.name} is there already", hint="use another --runs"
            )
        return folder.rename(runs / folder.name)
