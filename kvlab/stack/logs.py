"""What the servers' logs say: named facts from raw bytes, last lines, causes, and no secrets.

Preflight (``kvlab check --log``), readiness and the evidence all read logs through this table. Its
patterns are taken from real output of the versions in ``TESTED``; older and rarer wordings stand
beside them. A line that never came leaves no fact, and neither does one that another version words
differently: so facts name the versions that are not tested.
"""

from __future__ import annotations

import copy
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TAIL_LINES = 50
TAIL_BYTES = 256 * 1024
KEPT_LINES = 5
"""So many lines of a kind are kept as examples; the rest is counted."""
LONGEST_LINE = 64 * 1024
"""Of a longer line only so many bytes are read: a log without line ends must not fill memory."""
PIECE_BYTES = 1024 * 1024

TESTED = {"vLLM": "0.32", "LMCache": "0.5"}
"""The versions in whose real output the patterns were looked up."""

_LINE_END = re.compile(rb"\r\n|\n|\r")
_COLOUR = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_VLLM_HEAD = re.compile(r"^(?:\([^)]*\) )?(?:[A-Z]+ )?\d\d-\d\d \d\d:\d\d:\d\d (?:\[[^\]]*\] ?)?")
_LMCACHE_HEAD = re.compile(r"^\[[-\d :,]+\] LMCache [A-Z]+: ?")


class Lines:
    """Whole lines out of pieces that end anywhere; a carriage return ends a line as well."""

    def __init__(self) -> None:
        self._rest = b""
        self._after_return = False

    def feed(self, piece: bytes) -> Iterator[str]:
        """The lines that the piece completes."""
        if self._after_return and piece:
            piece = piece.removeprefix(b"\n")  # the second half of a CRLF that was cut in two
            self._after_return = False
        self._after_return = self._after_return or piece.endswith(b"\r")
        *whole, rest = _LINE_END.split(self._rest + piece)
        self._rest = rest[:LONGEST_LINE]
        yield from map(_decode, whole)

    def pending(self) -> str | None:
        """The line that has not ended yet, as far as it has come."""
        return _decode(self._rest) if self._rest else None

    def finish(self) -> Iterator[str]:
        """The last line, if it was never ended."""
        if self._rest:
            yield _decode(self._rest)
        self._rest = b""


def lines(data: bytes) -> Iterator[str]:
    """The lines of a whole log, without colours; bytes that are no UTF-8 become U+FFFD."""
    reader = Lines()
    yield from reader.feed(data)
    yield from reader.finish()


def _decode(line: bytes) -> str:
    return _COLOUR.sub("", line[:LONGEST_LINE].decode("utf-8", "replace"))


def _count(text: str) -> int:
    return int(text.replace(",", ""))


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _switch(text: str) -> str:
    return "on" if text == "True" else "off"


Keep = Literal["value", "flag", "lines"]


@dataclass(frozen=True, slots=True)
class Pattern:
    """A named fact: where its line is recognised and what is kept of it."""

    name: str
    regex: re.Pattern[str]
    keep: Keep = "value"
    """value: the last match's group; flag: that it was seen; lines: how many, with examples."""
    read: Callable[[str], Any] = str
    seen: tuple[str, ...] = ()
    """The versions whose output or source has the wording."""


VLLM = ("vLLM 0.32",)
LMCACHE = ("LMCache 0.5",)


def _pattern(
    seen: tuple[str, ...],
    name: str,
    regex: str,
    keep: Keep = "value",
    read: Callable[[str], Any] = str,
) -> Pattern:
    return Pattern(name, re.compile(regex), keep, read, seen)


_ENGINE = r"Initializing a V1 LLM engine .*?[ ,(]"
"""The line in which vLLM prints its resolved settings."""

PATTERNS: tuple[Pattern, ...] = (
    # vLLM: geometry and memory
    _pattern(VLLM, "attention_block_tokens", r"attention block size to (\d+) tokens", read=int),
    _pattern(VLLM, "mamba_padding_percent", r"Padding mamba page size by ([\d.]+)%", read=float),
    _pattern(VLLM, "kv_cache_tokens", r"KV cache size: (\d[\d,]*) tokens", read=_count),
    _pattern(VLLM, "kv_cache_gib", r"Available KV cache memory: ([\d.]+) GiB", read=float),
    _pattern(VLLM, "kv_cache_gib", r"Explicitly set \(([\d.]+)/[\d.]+\) GiB for KV", read=float),
    _pattern(VLLM, "gpu_blocks_override", r"num_gpu_blocks_override=(\d+)", read=int),
    _pattern(VLLM, "max_num_batched_tokens", r"max_num_batched_tokens=(\d+)\.?$", read=int),
    _pattern(VLLM, "max_num_seqs", r"non-default args: .*'max_num_seqs': (\d+)", read=int),
    _pattern(VLLM, "max_model_len", r"Using max model len (\d+)", read=int),
    _pattern(VLLM, "hybrid_manager_off", r"Turning off hybrid kv cache manager", "flag"),
    _pattern(VLLM, "ssm_state_reset", r"Reset SSM cache type to (\w+)"),
    _pattern(VLLM, "dtype", _ENGINE + r"dtype=torch\.(\w+)"),
    _pattern(VLLM, "kv_cache_dtype", _ENGINE + r"kv_cache_dtype=([\w.]+)"),
    _pattern(VLLM, "prefix_caching", _ENGINE + r"enable_prefix_caching=(True|False)", read=_switch),
    _pattern(VLLM, "trust_remote_code", _ENGINE + r"trust_remote_code=(True|False)", read=_switch),
    _pattern(
        (*VLLM, "vLLM 0.28", "vLLM 0.25", "vLLM 0.23"),
        "mamba_blocks_exceeded",
        r"(max_num_seqs \(\d+\) exceeds available Mamba cache blocks \(\d+\))",
    ),
    # vLLM: identity
    _pattern(VLLM, "vllm_version", r"Initializing a V1 LLM engine \(v([^)]+)\)"),
    _pattern((*VLLM, "vLLM 0.17"), "vllm_version", r"[▀▄█] +version (\S+)"),
    _pattern(("vLLM 0.7",), "vllm_version", r"vLLM API server version (\S+)"),
    _pattern(VLLM, "connector", r"Creating v1 connector with name: (\S+)"),
    _pattern(VLLM, "vllm_host", r"Starting vLLM server on \w+://\[?([^\s\]/]+?)\]?:\d+(?:\s|$)"),
    # LMCache's connector, inside vLLM
    _pattern(
        LMCACHE, "cache_model_name", r"LMCache MP geometry: .*cache_model_name=(.+?)(?: \(|$)"
    ),
    _pattern(
        LMCACHE,
        "cache_block_tokens",
        r"LMCache MP geometry: .*scheduler_block_size=(\d+)",
        read=int,
    ),
    _pattern(
        LMCACHE,
        "group_block_tokens",
        r"LMCache MP geometry: .*group_tokens_per_block=\[([\d, ]+)\]",
        read=_counts,
    ),
    _pattern(LMCACHE, "worker_transfer_mode", r"Creating transfer context \(.*mode=(\w+)\)"),
    _pattern(LMCACHE, "engine_transfer", r"Worker engine-driven context registered \(.*mode=(\w+)"),
    _pattern(LMCACHE, "isolated_ipc", r"lmcache\.mp\.isolated_ipc = (True|False)", read=_switch),
    # LMCache's server
    _pattern(LMCACHE, "chunk_tokens", r"TokenHasher initialized: chunk_size=(\d+)", read=int),
    _pattern(LMCACHE, "hash_algorithm", r"TokenHasher initialized: .*hash_algorithm=(\w+)"),
    _pattern(LMCACHE, "transfer_mode", r"Supported transfer mode: (\w+)"),
    _pattern(LMCACHE, "l2_adapter", r"Initialized (\w+L2Adapter\w*) "),
    _pattern(
        LMCACHE,
        "lmcache_host",
        r"Starting LMCache HTTP server on \w+://\[?([^\s\]/]+?)\]?:\d+(?:\s|$)",
    ),
    _pattern(
        LMCACHE,
        "registered_workers",
        r"Registered KV cache for GPU ID \d+ with \d+ layers"
        r"|Registered non-GPU context for instance \d+",
        "lines",
    ),
    # Slow paths that still work
    _pattern(
        (*LMCACHE, "LMCache 0.4"),
        "slow_paths",
        r"(?i)skipping backend|fall(?:ing)?[ -]?back to|using pickle|pickle (?:non-GPU )?trans"
        r"|EngineDrivenContextPickle|/dev/shm (?:capacity|space|too small)|verify /dev/shm"
        r"|Running fallback mode|No DeviceSpec registered for",
        "lines",
    ),
    # What went wrong without ending the server
    _pattern(
        LMCACHE,
        "failed_stores",
        r"processing the store request for|Cannot store keys due to|Rejecting STORE for"
        r"|STORE block ID underflow|Store task \d+ to adapter \d+ failed|failed to store"
        r"|store task \d+ failed|Failed to submit store task|Dropping store for request",
        "lines",
    ),
    _pattern(
        LMCACHE,
        "failed_retrieves",
        r"processing the retrieve request for|Cannot retrieve keys due to|Rejecting RETRIEVE for"
        r"|RETRIEVE block ID underflow|Some keys not found during retrieve",
        "lines",
    ),
    _pattern(
        LMCACHE,
        "unregistered",
        r"(?i)No registered (?:non-)?(?:GPU )?context|No GPU context found for model"
        r"|No group layout descs found|Failed to re-register KV caches",
        "lines",
    ),
    _pattern(
        LMCACHE,
        "recomputed",
        r"Bypassing LMCache for request|entering degraded mode|Marking (?:server as )?unhealthy",
        "lines",
    ),
    _pattern(LMCACHE, "reaped_workers", r"Reaped (?:non-)?GPU instance \d+", "lines"),
    # What usually ends the server
    _pattern(
        (*VLLM, *LMCACHE),
        "ipc_errors",
        r"cudaIpc\w+Handle failed|cuMem(?:Export|Import|Retain)\w+(?:\(\w+\))? failed"
        r"|cannot export VMM allocation|VMM allocation is only POSIX-fd exportable"
        r"|No VMM fd resolver installed|Error: .*(?:MapBufferObjectFailed"
        r"|mapping of buffer object failed|invalid resource handle|CUDA_ERROR_INVALID_CONTEXT)"
        r"|Device UUID \S* ?not found",
        "lines",
    ),
    _pattern(
        (*VLLM, "vLLM 0.11", "vLLM 0.7"),
        "out_of_memory",
        r"OutOfMemoryError: |Error: (?:CUDA|HIP)(?: error:)? out of memory|Error: No available"
        r" memory for the cache blocks|DefaultCPUAllocator: (?:can't|not enough) .*memory"
        r"|std::bad_alloc|(?:^|[ :])MemoryError\b|Error: \[Errno 12\] Cannot allocate memory"
        r"|Out of memory: Killed process",
        "lines",
    ),
    _pattern(VLLM, "fitting_model_len", r"estimated maximum model length is (\d+)", read=int),
    _pattern(
        (*VLLM, "vLLM 0.10", *LMCACHE),
        "unknown_flags",
        r"error: unrecognized arguments: (.*\S)",
    ),
    _pattern((*VLLM, *LMCACHE), "refused_flag", r"error: argument (\S.*\S)"),
)


class Reader:
    """The facts of one log that arrives in pieces of any size; what is kept does not grow."""

    def __init__(self) -> None:
        self._lines = Lines()
        self._facts: dict[str, Any] = {}

    def feed(self, piece: bytes) -> None:
        """Take the next bytes of the log."""
        for line in self._lines.feed(piece):
            _take(self._facts, line)

    def facts(self) -> dict[str, Any]:
        """What the log states so far, a line that has not ended yet included."""
        found = copy.deepcopy(self._facts)
        if (pending := self._lines.pending()) is not None:
            _take(found, pending)
        if unknown := unknown_versions(found):
            found["unknown_versions"] = unknown
        return found


def _take(facts: dict[str, Any], line: str) -> None:
    """Add what one line states."""
    for pattern in PATTERNS:
        match = pattern.regex.search(line)
        if match is None:
            continue
        if pattern.keep == "value":
            facts[pattern.name] = pattern.read(match.group(1))
        elif pattern.keep == "flag":
            facts[pattern.name] = True
        else:
            entry = facts.setdefault(pattern.name, {"count": 0, "lines": []})
            entry["count"] += 1
            if len(entry["lines"]) < KEPT_LINES:
                entry["lines"].append(mask(line.strip())[:300])


def read_facts(data: bytes | Iterable[bytes]) -> dict[str, Any]:
    """What a log states, by name, from all of its bytes or from its pieces; see ``PATTERNS``.

    A ``lines`` fact is ``{"count": n, "lines": [first ones]}``. A value that is stated twice is the
    later one: vLLM adjusts its block size more than once. ``unknown_versions`` names the servers
    whose wording may differ; see ``unknown_versions``.
    """
    reader = Reader()
    for piece in [data] if isinstance(data, bytes) else data:
        reader.feed(piece)
    return reader.facts()


def read_file(path: Path) -> dict[str, Any]:
    """The facts of a log file; none when there is no such file."""
    try:
        with path.open("rb") as stream:
            return read_facts(iter(lambda: stream.read(PIECE_BYTES), b""))
    except FileNotFoundError:
        return {}


def merge(every: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The facts of several logs as one: lines are counted together, of values the last one counts.

    ``unknown_versions`` is decided again by ``unknown_versions``, where versions are known.
    """
    merged: dict[str, Any] = {}
    for facts in every:
        for name, value in facts.items():
            known = merged.get(name)
            if isinstance(value, dict) and isinstance(known, dict):
                value = {
                    "count": known["count"] + value["count"],
                    "lines": (known["lines"] + value["lines"])[:KEPT_LINES],
                }
            elif isinstance(value, list) and isinstance(known, list):
                value = list(dict.fromkeys(known + value))
            merged[name] = value
    return merged


def unknown_versions(
    facts: Mapping[str, Any], versions: Mapping[str, str] | None = None
) -> list[str]:
    """The servers whose logs may word a fact differently: ``vLLM 0.35.1``, ``LMCache (unstated)``.

    ``versions`` by role is what the servers themselves answer; LMCache's log states none.
    """
    versions = versions or {}
    spoken = {
        "vLLM": versions.get("vllm") or facts.get("vllm_version"),
        "LMCache": versions.get("lmcache"),
    }
    present = {
        "vLLM": "max_model_len" in facts or "kv_cache_tokens" in facts,
        "LMCache": "chunk_tokens" in facts,
    }
    return [
        f"{name} {version or '(unstated)'}"
        for name, version in spoken.items()
        if (version or present[name]) and not _is_tested(name, version)
    ]


def _is_tested(name: str, version: str | None) -> bool:
    return version is not None and f"{version}.".startswith(f"{TESTED[name]}.")


def tail(path: Path, count: int = TAIL_LINES) -> str:
    """The last lines of a log file, secrets masked; empty when there is none."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - TAIL_BYTES))
            data = stream.read()
    except FileNotFoundError:
        return ""
    last = [line for line in lines(data) if line.strip()][-count:]
    return mask("\n".join(last))


_RAISED = re.compile(r"(?:[\w.]+\.)?\w*(?:Error|Exception): \S.*|\S+: error: .+")


def cause(data: bytes) -> str | None:
    """The first error that a log states, which is where the later ones come from; or None."""
    for line in lines(data):
        message = _LMCACHE_HEAD.sub("", _VLLM_HEAD.sub("", line))
        if _RAISED.match(message):
            return mask(message.strip())[:500]
    return None


_NAMES = (
    r"(?:(?:x-)?api[-_]?keys?|(?:hf|hugging[-_]?face(?:[-_]hub)?|access|auth|api|secret|bearer)"
    r"[-_]?token|(?:aws[-_])?secret(?:[-_]access)?(?:[-_]key)?|password|passwd|authorization)"
)
_SECRETS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\b(hf|sk|ghp|glpat|nvapi)([-_])[A-Za-z0-9_-]{16,}"), r"\1\2***"),
    (re.compile(r"(?i)\b(bearer|basic) +[A-Za-z0-9._~+/=-]{6,}"), r"\1 ***"),
    (re.compile(r"(://[^/\s:@]*):[^/\s@]+@"), r"\1:***@"),
    (
        re.compile(
            rf"(?i)((?<![a-z0-9])(?:[a-z0-9]+_)*{_NAMES}['\"]?(?:\s*[:=]\s*|\s+(?=['\"]?[^\s'\"]))"
            r"\[?['\"]?)(?!(?:None|null|true|false|bearer|basic|is|was|and|not|for)\b)[^\s'\",}\])]+"
        ),
        r"\1***",
    ),
)


def mask(text: str) -> str:
    """The text with every token, key and password that it shows replaced by ``***``."""
    for pattern, shown in _SECRETS:
        text = pattern.sub(shown, text)
    return text


def mask_file(path: Path) -> bool:
    """Whether a log file held secrets; they are masked in place, every other byte stays."""
    try:
        with path.open("rb") as stream:
            if not any(_masked(line) != line for line in stream):
                return False
            stream.seek(0)
            with tempfile.NamedTemporaryFile(
                "wb", dir=path.parent, prefix=f".{path.name}.", delete=False
            ) as clean:
                clean.writelines(map(_masked, stream))
    except FileNotFoundError:
        return False
    masked = Path(clean.name)
    masked.chmod(0o644)
    masked.replace(path)
    return True


_HINTS = re.compile(
    rb"(?i)token|key|secret|passw|authorization|bearer|basic|hf_|sk-|ghp|glpat|nvapi|://[^/\s]*@"
)
"""Without one of these a line holds no secret; most lines are spared the slow search."""


def _masked(line: bytes) -> bytes:
    if not _HINTS.search(line):
        return line
    return mask(line.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
