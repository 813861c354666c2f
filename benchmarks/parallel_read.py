"""How fast LMCache's L2 adapters read records, on an emulated slow mount and on the local disk.

Arms: LMCache's ``fs`` and ``fs_native``, kvlab's ``parallel_fs``, and as a ceiling fio with the
same sizes. All in one run, the order reversed in every second pass; printed as ratios with the
targets beside them. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

KIB, MIB = 1 << 10, 1 << 20
ALIGNED_BYTES = 4096
PARALLEL, FS = "parallel_fs", "fs"
TARGETS = {  # on the emulated mount, by requests in flight: over fs, over the faster fs_native
    1: (10.0, 2.0),
    8: (5.3, 1.0),
    16: (4.5, 0.95),
}
SETTINGS = ("keys", "record_mb", "workers", "passes", "local_times", "rounds")
LOCAL_CEILING, NOT_SLOWER = 0.9, 0.05


def adapters(workers: int) -> dict[str, dict[str, Any]]:
    """By arm its JSON without the folder; every arm reads past the page cache."""
    native = {"type": "fs_native", "use_odirect": True}
    return {
        FS: {"type": "fs", "use_odirect": True},
        "fs_native x32": {**native, "num_workers": 32},
        f"fs_native x{workers}": {**native, "num_workers": workers},
        PARALLEL: {
            "type": "plugin",
            "module_path": "kvlab.engine.parallel_fs",
            "class_name": "ParallelFSL2Adapter",
            "adapter_params": {"num_workers": workers, "use_odirect": True},
        },
    }


def with_folder(adapter: dict[str, Any], folder: Path) -> dict[str, Any]:
    if adapter["type"] != "plugin":
        return {**adapter, "base_path": str(folder)}
    return {**adapter, "adapter_params": {**adapter["adapter_params"], "base_path": str(folder)}}


# --- in the engine's Python: one adapter after the other, told by lines of JSON ------------------


def drive() -> None:
    """Read orders from standard input, answer each with one line; all else goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import torch
    from lmcache.cli.commands.bench.l2_adapter_bench import data, runner
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename

    for line in sys.stdin:
        order = json.loads(line)
        spec = argparse.Namespace(l2_adapter=[json.dumps(order["adapter"])])
        (config,) = parse_args_to_l2_adapters_config(spec).adapters
        in_flight, keys, size = order["in_flight"], order["keys"], order["size"]
        buffer = data.make_aligned_tensor(in_flight * keys * size, ALIGNED_BYTES)
        objects = [
            data.make_memory_objects(buffer, keys, size, number * keys * size)
            for number in range(in_flight)
        ]
        names = [
            data.make_object_keys(keys, key_offset=number * keys) for number in range(in_flight)
        ]
        if order["do"] == "store":
            buffer.random_(0, 256)
        adapter = create_l2_adapter(config)
        common: dict[str, Any] = {
            "in_flight": in_flight,
            "num_keys": keys,
            "data_size": size,
            "rounds": order["rounds"] + 1,
            "keys_for_round": lambda _, names=names: names,
            "objs_for_round": lambda _, objects=objects: objects,
            "log": lambda _: None,
        }
        began, used = cpu_times(), time.process_time()
        call = runner.bench_store if order["do"] == "store" else runner.bench_load
        result = call(adapter, **common)
        used, machine = time.process_time() - used, cpu_share(began, cpu_times())
        adapter.close()
        paths = [Path(order["records"]) / _object_key_to_filename(key) for n in names for key in n]
        stored = torch.frombuffer(bytearray().join(map(Path.read_bytes, paths)), dtype=torch.uint8)
        answer = {
            "seconds": result.round_durations[1:],  # the first one also starts the workers
            "complete": result.success_counts == [in_flight * keys] * (order["rounds"] + 1),
            "equal": torch.equal(buffer, stored),
            "cpu_s": used,
            "machine_busy": machine,
        }
        print(json.dumps(answer), file=answers, flush=True)


def cpu_times() -> tuple[int, int]:
    """Ticks in which any processor worked, and all ticks, since the machine started."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def cpu_share(before: tuple[int, int], after: tuple[int, int]) -> float | None:
    """Share of all processors that was at work, between two looks."""
    return (after[0] - before[0]) / (after[1] - before[1]) if after[1] > before[1] else None


# --- in the lab's Python --------------------------------------------------------------------------


@dataclass
class Row:
    """One arm at one concurrency on one path."""

    path: str
    arm: str
    in_flight: int
    volume: float
    """MB of one round."""
    seconds: dict[int, list[float]]
    """By pass, of each round."""
    busy: list[float]
    """Share of all processors at work, by pass."""

    @property
    def rate(self) -> float:
        """MB/s: the median over passes of the median over rounds."""
        return self.volume / statistics.median(map(statistics.median, self.seconds.values()))

    @property
    def arm_times(self) -> dict[int, dict[int, float]]:
        """As `kvlab.stats` takes them."""
        return {number: dict(enumerate(values)) for number, values in self.seconds.items()}


class Driver:
    """The engine's Python, ready for orders."""

    def __init__(self, python: Path, args: argparse.Namespace) -> None:
        self.args = args
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
        root = str(Path(__file__).resolve().parents[1])
        quiet = {"LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_TRACK_USAGE": "false"}
        self.process = subprocess.Popen(
            [str(python), "-W", "ignore", __file__, "--drive"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env={**os.environ, **quiet, "PYTHONPATH": root},
        )

    def order(
        self, do: str, adapter: dict[str, Any], records: Path, in_flight: int, rounds: int
    ) -> dict[str, Any]:
        """The seconds of each round; RuntimeError when a byte was not what it should be."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        order = {"do": do, "adapter": adapter, "records": str(records), "in_flight": in_flight}
        order |= {"rounds": rounds, "keys": self.args.keys, "size": int(self.args.record_mb * MIB)}
        print(json.dumps(order), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(self.log.read().decode(errors="replace")[-3000:])
        answer = json.loads(line)
        if not answer["complete"] or not answer["equal"]:
            raise RuntimeError(f"{adapter}: records were missed, or other bytes came: {answer}")
        return answer

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()
        self.log.close()


@contextmanager
def slow_mount(args: argparse.Namespace, source: Path, at: Path) -> Iterator[str]:
    from kvlab import slow_mount as mounts

    with mounts.mounted(source, at, latency_s=args.latency_ms / 1000) as mount:
        yield mount.label


def measure(args: argparse.Namespace) -> tuple[dict[str, Any], list[Row]]:
    """The settings, and every arm's times."""
    arms = adapters(args.workers)
    driver = Driver(args.engine_python, args)
    rows: dict[tuple[str, str, int], Row] = {}
    label = None
    try:
        with tempfile.TemporaryDirectory(dir=args.folder) as place:
            source, at = Path(place) / "records", Path(place) / "mount"
            driver.order("store", with_folder(arms[FS], source), source, max(args.in_flight), 1)
            if "mount" in args.paths:
                with slow_mount(args, source, at) as label:
                    take_turns(args, driver, arms, "mount", source, at, rows)
            if "local" in args.paths:
                take_turns(args, driver, arms, "local", source, source, rows)
    finally:
        driver.close()
    settings = {name: getattr(args, name) for name in SETTINGS}
    return {**settings, "mount": label, "cpus": os.cpu_count()}, list(rows.values())


def take_turns(
    args: argparse.Namespace,
    driver: Driver,
    arms: dict[str, dict[str, Any]],
    path: str,
    source: Path,
    folder: Path,
    rows: dict[tuple[str, str, int], Row],
) -> None:
    """Every arm at every concurrency in every pass; the order is reversed in each second one."""
    from kvlab import storage

    names = [*arms, "fio"]
    passes = args.passes * (args.local_times if path == "local" else 1)
    for number, in_flight in itertools.product(range(passes), args.in_flight):
        for arm in names if number % 2 == 0 else names[::-1]:
            if path == "local":
                storage.drop_pages(folder)
            volume = in_flight * args.keys * args.record_mb * MIB / 1e6
            fresh = Row(path, arm, in_flight, volume, {}, [])
            row = rows.setdefault((path, arm, in_flight), fresh)
            if arm == "fio":
                row.seconds[number] = [volume / fio_rate(args, folder, in_flight, path)]
                continue
            adapter = with_folder(arms[arm], folder)
            answer = driver.order("load", adapter, source, in_flight, args.rounds)
            row.seconds[number] = answer["seconds"]
            row.busy.append(answer["machine_busy"])
            rate = volume / statistics.median(answer["seconds"])
            print(f"{path} {in_flight} {arm}: {rate:.0f} MB/s", file=sys.stderr)


def fio_rate(args: argparse.Namespace, folder: Path, in_flight: int, path: str) -> float:
    """MB/s of fio there: on the disk with whole records, on the mount with single requests."""
    from kvlab import fio

    record = int(args.record_mb * MIB)
    job = fio.Job(
        kind="read",
        block_bytes=record if path == "local" else 128 * KIB,
        jobs=in_flight * args.keys if path == "local" else args.workers,
        file_bytes=record,
        runtime_s=args.fio_s,
    )
    place = folder / "fio"
    place.mkdir(exist_ok=True)
    rate = fio.run(job, place)
    fio.clear(place)
    return 1000 * rate.gb_per_s


# --- the table ------------------------------------------------------------------------------------


def judge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each target with its ratio and interval, and whether it is met."""
    found = {(row.path, row.arm, row.in_flight): row for row in rows}
    verdicts = []
    for (path, arm, in_flight), ours in found.items():
        if arm != PARALLEL:
            continue
        place = [row for row in rows if (row.path, row.in_flight) == (path, in_flight)]
        native = max(
            (row for row in place if row.arm.startswith("fs_native")), key=lambda row: row.rate
        )
        head = f"{path}, {in_flight} in flight, over"
        if path == "mount" and in_flight in TARGETS:
            over_fs, over_native = TARGETS[in_flight]
            verdicts.append(at_least(f"{head} fs", ours, found[path, FS, in_flight], over_fs))
            verdicts.append(at_least(f"{head} {native.arm}", ours, native, over_native))
        if path == "local":
            ceiling = at_least(f"{head} fio", ours, found[path, "fio", in_flight], LOCAL_CEILING)
            busy = 100 * statistics.fmean(ours.busy)
            verdicts += [ceiling | {"note": f"processors {busy:.0f} % at work"}]
            verdicts.append(not_slower(f"{head} {native.arm}", ours, native))
    return verdicts


def at_least(what: str, ours: Row, other: Row, target: float) -> dict[str, Any]:
    value = ours.rate / other.rate
    return {
        "what": what,
        "ratio": value,
        "interval": interval(ours, other),
        "target": target,
        "word": "PASS" if value >= target else "FAIL",
    }


def not_slower(what: str, ours: Row, other: Row) -> dict[str, Any]:
    """PASS when the one-sided 95 % bound of our time is at most 5 % above the other's."""
    from kvlab import stats

    answer = stats.not_slower(other.arm_times, ours.arm_times, margin=NOT_SLOWER, seed=0)
    words = {"not slower": "PASS", "slower": "FAIL", "undecided": "UNDECIDED", None: "UNDECIDED"}
    return {
        "what": what,
        "ratio": ours.rate / other.rate,
        "interval": interval(ours, other),
        "target": 1.0,
        "word": words[answer and answer.answer],
        "note": f"not slower, within {100 * NOT_SLOWER:.0f} %",
    }


def interval(ours: Row, other: Row) -> tuple[float, float] | None:
    """The 95 % interval of how many times faster ours is; fio has one value per pass."""
    from kvlab import stats

    if len(next(iter(other.seconds.values()))) == 1:
        medians = {n: [statistics.median(values)] for n, values in ours.seconds.items()}
        ours = Row(ours.path, ours.arm, ours.in_flight, ours.volume, medians, [])
    ratio = stats.ratio(other.arm_times, ours.arm_times, seed=0)
    return (ratio.low, ratio.high) if ratio else None


def table(settings: dict[str, Any], rows: Sequence[Row], verdicts: list[dict[str, Any]]) -> str:
    lines = [
        f"{settings['keys']} keys x {settings['record_mb']:g} MiB per request, MB/s, medians of "
        f"{settings['passes']} passes (local: {settings['local_times']} times as many) x "
        f"{settings['rounds']} rounds, {settings['cpus']} processors"
    ]
    for path in dict.fromkeys(row.path for row in rows):
        some = [row for row in rows if row.path == path]
        slots = sorted({row.in_flight for row in some})
        head = settings["mount"] if path == "mount" else "local disk"
        lines += ["", head, f"{'in flight':<18}" + "".join(f"{n:>10}" for n in slots)]
        for arm in dict.fromkeys(row.arm for row in some):
            rates = {row.in_flight: row.rate for row in some if row.arm == arm}
            lines.append(f"{arm:<18}" + "".join(f"{rates[n]:>10.1f}" for n in slots))
    lines += ["", f"{'parallel_fs':<38}{'ratio':>8}{'95 % interval':>18}  target"]
    for verdict in verdicts:
        low, high = verdict["interval"] or (float("nan"),) * 2
        line = f"{verdict['what']:<38}{verdict['ratio']:>8.2f}{f'{low:.2f} to {high:.2f}':>18}"
        line += f"  >= {verdict['target']:<6g}{verdict['word']}  {verdict.get('note', '')}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--latency-ms", type=float, default=10.0, help="of the mount, per 128 KiB")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 8, 16], help="requests")
    parser.add_argument("--keys", type=int, default=4, help="records per request")
    parser.add_argument("--record-mb", type=float, default=2, help="MiB of a record")
    parser.add_argument(
        "--workers", type=int, default=64, help="of parallel_fs and of one fs_native"
    )
    parser.add_argument("--passes", type=int, default=4)
    parser.add_argument("--local-times", type=int, default=2, help="passes on the disk per pass")
    parser.add_argument("--rounds", type=int, default=3, help="per pass, arm and concurrency")
    parser.add_argument("--fio-s", type=float, default=1, help="seconds of each fio run")
    parser.add_argument(
        "--paths", nargs="+", choices=("mount", "local"), default=["mount", "local"]
    )
    parser.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    parser.add_argument("--engine-python", type=Path, default=Path(".venv-engine/bin/python"))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--drive", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drive:
        drive()
        return 0
    settings, rows = measure(args)
    verdicts = judge(rows)
    if args.json:
        shown = [{**asdict(row), "rate": row.rate} for row in rows]
        print(json.dumps({"settings": settings, "rows": shown, "verdicts": verdicts}, indent=2))
    else:
        print(table(settings, rows, verdicts))
    return 0 if all(verdict["word"] == "PASS" for verdict in verdicts) else 1


if __name__ == "__main__":
    raise SystemExit(main())
