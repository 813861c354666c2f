"""Rules about L2: is it a disk, does it take the records, is there room, whose are they."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvlab.disk import identity
from kvlab.disk.inventory import record_name
from kvlab.preflight.blocks import HYBRID_CONFIG, REPORT
from kvlab.preflight.case import Case
from kvlab.preflight.connection import flag
from kvlab.preflight.rule import Example, Found, rule
from kvlab.units import GIB, byte_size

IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs", "hugetlbfs")
LAYERED = ("overlay", "overlayfs", "aufs", "fuse-overlayfs")
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "lustre", "glusterfs", "beegfs")
NAME_BYTES = 255
ROUNDS_OF_ROOM = 10
"""An adapter that never deletes is spoken of when the disk holds fewer fills than this."""
AFTER_A_RESTART = ("restart", "acceptance")
ADAPTER_TYPES = ("fs",)
"""Adapters that have no way to delete."""


@rule(
    "KV050",
    "error",
    "L2 is no disk",
    why="On a file system in memory the disk tier is a second memory tier: nothing survives a "
    "restart of the machine, and the memory is missing elsewhere.",
    source="LMCache issue 3859",
    example=Example(profile="dgx-spark", host={"disk": {"filesystem": "tmpfs", "device": "tmpfs"}}),
)
def l2_in_memory(case: Case) -> Iterator[Found]:
    if case.l2_named and case.disk.get("filesystem") in IN_MEMORY:
        yield Found(
            text=f"{_path(case)} is on {case.disk['filesystem']}: not a disk",
            settings={"cache.l2.base_path": "<folder on a disk>"},
        )


@rule(
    "KV051",
    "warning",
    "The run folder is in memory",
    why="L2 stands inside the run's own folder here, and what is called disk would be memory.",
    source="LMCache issue 3859",
    example=Example(host={"disk": {"filesystem": "tmpfs", "device": "tmpfs"}}),
)
def run_folder_in_memory(case: Case) -> Iterator[Found]:
    inside = case.profile.cache.l2 is not None and not case.l2_named
    if inside and case.disk.get("filesystem") in IN_MEMORY:
        yield Found(
            text=f"the run folder, and L2 with it, is on {case.disk['filesystem']}",
            settings={"cache.l2.base_path": "<folder on a disk>"},
        )


@rule(
    "KV052",
    "warning",
    "L2 is in a container's layer",
    why="A layered file system copies and caches on its own, and its layer goes with the "
    "container; reads cannot be told apart from the page cache of the layer below.",
    source="LMCache issue 3859",
    example=Example(host={"disk": {"filesystem": "overlay", "device": "overlay"}}),
)
def l2_layered(case: Case) -> Iterator[Found]:
    if case.profile.cache.l2 is not None and case.disk.get("filesystem") in LAYERED:
        yield Found(
            text=f"{_path(case)} is on {case.disk['filesystem']}",
            settings={"cache.l2.base_path": "<folder on a mounted volume>"},
        )


@rule(
    "KV053",
    "note",
    "L2 is on a network file system",
    why="Its reads do not show in this machine's device counters, so the restart experiment "
    "cannot prove that they came from a disk; other machines share its bandwidth.",
    source="docs/metrics.md",
    example=Example(host={"disk": {"filesystem": "nfs4", "device": "server:/export"}}),
)
def l2_over_network(case: Case) -> Iterator[Found]:
    kind = str(case.disk.get("filesystem") or "")
    remote = kind in NETWORK or kind.startswith("fuse.")
    if case.profile.cache.l2 is not None and remote:
        yield Found(
            text=f"{_path(case)} is on {kind} ({case.disk.get('device')})",
            do="for the restart experiment set cache.l2.base_path to a local disk",
        )


@rule(
    "KV054",
    "error",
    "No room for the records",
    why="When the disk is full every store fails while the answers still come, so the disk tier "
    "is empty when it is needed.",
    source="LMCache issue 3859",
    example=Example(
        probe={"config": HYBRID_CONFIG}, host={"disk": {"filesystem": "ext4", "free_gib": 0.02}}
    ),
)
def room(case: Case) -> Iterator[Found]:
    need, free = case.l2_need_bytes, case.disk.get("free_gib")
    if case.profile.cache.l2 is None or need is None or free is None:
        return
    if need > free * GIB:
        yield Found(
            text=f"both rounds need about {byte_size(need)} (30 % margin included) in "
            f"{_path(case)}, where {byte_size(free * GIB)} are free",
            do="free some space, set cache.l2.base_path to a larger disk, or ask fewer contexts",
        )


@rule(
    "KV055",
    "error",
    "O_DIRECT does not work there",
    why="Some file systems accept the flag when a file is opened and refuse the write: every store "
    "then fails, L1 hides it, and only the restart shows an empty disk tier.",
    source="LMCache issue 4364",
    example=Example(profile="dgx-spark", probe={"direct_io": "write: Invalid argument"}),
)
def direct_io(case: Case) -> Iterator[Found]:
    l2 = case.profile.cache.l2
    if l2 is not None and l2.adapter.get("use_odirect") and case.probe.direct_io:
        yield Found(
            text=f"one aligned file with O_DIRECT failed in {_path(case)}: {case.probe.direct_io}",
            settings={"cache.l2.adapter": {**l2.adapter, "use_odirect": False}},
            do="or use a file system that supports it, such as ext4 or xfs",
        )


@rule(
    "KV056",
    "error",
    "File names that are too long",
    why="A record's name holds the model's whole path: longer than the file system allows, every "
    "store fails with Errno 36.",
    source="LMCache issue 4827",
    example=Example(
        profile="dgx-spark", settings={"model.name": "/srv/models/" + "very-long-name/" * 14 + "m"}
    ),
)
def name_length(case: Case) -> Iterator[Found]:
    if case.profile.cache.l2 is None:
        return
    length = len(record_name(case.profile.model.name).encode())
    limit = case.probe.name_limit or NAME_BYTES
    if length > limit:
        yield Found(
            text=f"a record's file name would have {length} bytes; {limit} are allowed",
            do="serve the model under a shorter path, for example through a link near the root",
        )


@rule(
    "KV057",
    "note",
    "Records are never deleted",
    why="LMCache's `fs` adapter deletes nothing and reclaims no space: every run adds its records, "
    "and a full disk fails every store.",
    source=f"{REPORT}, section 2.1; LMCache issue 3859",
    example=Example(profile="dgx-spark", probe={"l2_records": 377, "l2_bytes": 32_000_000_000}),
)
def never_deleted(case: Case) -> Iterator[Found]:
    l2 = case.profile.cache.l2
    if l2 is None or l2.adapter.get("type", "fs") not in ADAPTER_TYPES:
        return
    remedy = "`kvlab disk prune` removes old records; watch the free space"
    if case.l2_named and case.probe.l2_records:
        yield Found(
            text=f"{_path(case)} holds {case.probe.l2_records} records "
            f"({byte_size(case.probe.l2_bytes or 0)}) of earlier runs",
            do=remedy,
        )
    elif case.l2_named and case.fill_bytes and case.disk.get("free_gib"):
        fills = case.disk["free_gib"] * GIB / case.fill_bytes
        if fills < ROUNDS_OF_ROOM:
            yield Found(
                text=f"{_path(case)} has room for the records of {fills:.0f} more fills", do=remedy
            )
    elif case.l2_named and "soak" in case.experiments:
        yield Found(text=f"records in {_path(case)} only accumulate during the soak", do=remedy)


@rule(
    "KV058",
    "warning",
    "A capacity that nothing enforces",
    why="Without an eviction block the declared capacity only feeds the usage counter: a cap of "
    "4 TB was reported with 14 TB written.",
    source="LMCache pull request 4787",
    example=Example(settings={"cache.l2.adapter": {"type": "fs_native", "max_capacity_gb": 100}}),
)
def capacity(case: Case) -> Iterator[Found]:
    l2 = case.profile.cache.l2
    if l2 is None:
        return
    size = l2.adapter.get("max_capacity_gb")
    if size and not l2.adapter.get("eviction"):
        eviction = {"eviction": {"eviction_policy": "LRU"}}
        yield Found(
            text=f"max_capacity_gb {size} without an eviction block",
            settings={"cache.l2.adapter": {**l2.adapter, **eviction}},
        )


@rule(
    "KV059",
    "error",
    "L2's folder cannot be written",
    why="A folder of another user, often root's after a container run, takes no record and cannot "
    "be cleaned up.",
    source="ann-benchmarks issue 225",
    example=Example(settings={"cache.l2.base_path": "/srv/lmcache"}, probe={"l2_writable": False}),
)
def writable(case: Case) -> Iterator[Found]:
    if case.profile.cache.l2 is not None and case.probe.l2_writable is False:
        yield Found(
            text=f"{_path(case)} cannot be written by this user",
            do=f"sudo chown -R $(id -u) {_path(case)}",
        )


@rule(
    "KV060",
    "error",
    "L2 is not empty",
    why="Records of an earlier run make round 1 warm; records of another configuration may even be "
    "loaded as if they fitted, for LMCache finds them by model name and tokens alone.",
    source="LMCache issues 1660 and 4903",
    example=Example(
        settings={"cache.l2.base_path": "/srv/lmcache"},
        probe={
            "l2_records": 12,
            "l2_foreign": "they were written with another configuration: kv_dtype fp8 there, "
            "auto here",
        },
    ),
)
def leftovers(case: Case) -> Iterator[Found]:
    if case.l2_named and case.probe.l2_records and not case.in_containers:
        foreign = f"; {case.probe.l2_foreign}" if case.probe.l2_foreign else ""
        yield Found(
            text=f"{_path(case)} holds {case.probe.l2_records} records{foreign}",
            settings={"cache.l2.base_path": f"{_path(case)}-new"},
            do=f"or empty it: kvlab disk prune {_path(case)}",
        )


@rule(
    "KV061",
    "error",
    "Hashes that change with every process",
    why="With a hash of the process's own seed a restarted server computes other keys for the same "
    "tokens, and no record is ever found.",
    source="LMCache issue 1739",
    example=Example(
        settings={"cache.flags.hash-algorithm": "builtin", "cache.env": {}},
        experiments=("restart",),
    ),
)
def stable_hash(case: Case) -> Iterator[Found]:
    if not set(case.experiments) & set(AFTER_A_RESTART):
        return
    said = case.fact("hash_algorithm") or flag(case.profile.cache.flags, "hash-algorithm")
    seed = case.profile.cache.env.get(identity.SEED)
    if said in identity.PER_PROCESS and seed in (None, "", "random"):
        yield Found(
            text=f"LMCache hashes with {said} and {identity.SEED} is not fixed",
            settings={f"cache.env.{identity.SEED}": "0"},
        )


def _path(case: Case) -> Any:
    l2 = case.profile.cache.l2
    return (l2.base_path if l2 else None) or case.probe.l2_path or "the run folder"
