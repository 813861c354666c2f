"""What the servers' logs say: named facts from raw bytes, last lines, causes, and no secrets.

The patterns are taken from real output of vLLM 0.32 and LMCache 0.5; older wordings stand beside
them where they differ. A line that never came leaves no fact.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

TAIL_LINES = 50
TAIL_BYTES = 256 * 1024
KEPT_LINES = 5
"""So many lines of a kind are kept as examples; the rest is counted."""

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
        *whole, self._rest = _LINE_END.split(self._rest + piece)
        yield from map(_decode, whole)

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
    return _COLOUR.sub("", line.decode("utf-8", "replace"))


def _count(text: str) -> int:
    return int(text.replace(",", ""))


@dataclass(frozen=True, slots=True)
class Pattern:
    """A named fact: where its line is recognised and what is kept of it."""

    name: str
    regex: re.Pattern[str]
    keep: Literal["value", "flag", "lines"] = "value"
    """value: the last match's group; flag: that it was seen; lines: how many, with examples."""
    read: Callable[[str], Any] = str


def _pattern(
    name: str,
    regex: str,
    keep: Literal["value", "flag", "lines"] = "value",
    read: Callable[[str], Any] = str,
) -> Pattern:
    return Pattern(name, re.compile(regex), keep, read)


PATTERNS: tuple[Pattern, ...] = (
    # vLLM: geometry and memory
    _pattern("attention_block_tokens", r"attention block size to (\d+) tokens", read=int),
    _pattern("mamba_padding_percent", r"Padding mamba page size by ([\d.]+)%", read=float),
    _pattern("kv_cache_tokens", r"KV cache size: ([\d,]+) tokens", read=_count),
    _pattern("gpu_blocks_override", r"num_gpu_blocks_override=(\d+)", read=int),
    _pattern("max_num_batched_tokens", r"max_num_batched_tokens=(\d+)\.?$", read=int),
    _pattern("max_model_len", r"Using max model len (\d+)", read=int),
    _pattern("hybrid_manager_off", r"Turning off hybrid kv cache manager", "flag"),
    _pattern("ssm_state_reset", r"Reset SSM cache type to (\w+)"),
    _pattern(
        "mamba_blocks_exceeded",
        r"(max_num_seqs \(\d+\) exceeds available Mamba cache blocks \(\d+\))",
    ),
    # vLLM: identity
    _pattern("vllm_version", r"Initializing a V1 LLM engine \(v([^)]+)\)"),
    _pattern("vllm_version", r"[▀▄█] +version (\S+)"),
    _pattern("connector", r"Creating v1 connector with name: (\S+)"),
    # LMCache's connector, inside vLLM
    _pattern("cache_model_name", r"LMCache MP geometry: .*cache_model_name=(.+?)(?: \(|$)"),
    _pattern("cache_block_tokens", r"LMCache MP geometry: .*scheduler_block_size=(\d+)", read=int),
    _pattern("worker_transfer_mode", r"Creating transfer context \(.*mode=(\w+)\)"),
    _pattern("engine_transfer", r"Worker engine-driven context registered \(.*mode=(\w+)"),
    # LMCache's server
    _pattern("chunk_tokens", r"TokenHasher initialized: chunk_size=(\d+)", read=int),
    _pattern("hash_algorithm", r"TokenHasher initialized: .*hash_algorithm=(\w+)"),
    _pattern("transfer_mode", r"Supported transfer mode: (\w+)"),
    # Slow paths that still work
    _pattern(
        "slow_paths",
        r"(?i)skipping backend|fall(?:ing)?[ -]?back to|using pickle|pickle (?:non-GPU )?trans"
        r"|EngineDrivenContextPickle|/dev/shm (?:capacity|space|too small)|verify /dev/shm"
        r"|Running fallback mode",
        "lines",
    ),
    # What went wrong without ending the server
    _pattern(
        "failed_stores",
        r"processing the store request for|Cannot store keys due to|Rejecting STORE for"
        r"|STORE block ID underflow|Store task \d+ to adapter \d+ failed|failed to store"
        r"|store task \d+ failed|Failed to submit store task|Dropping store for request",
        "lines",
    ),
    _pattern(
        "failed_retrieves",
        r"processing the retrieve request for|Cannot retrieve keys due to|Rejecting RETRIEVE for"
        r"|RETRIEVE block ID underflow|Some keys not found during retrieve",
        "lines",
    ),
    _pattern(
        "unregistered",
        r"(?i)No registered (?:non-)?(?:GPU )?context|No GPU context found for model"
        r"|No group layout descs found",
        "lines",
    ),
    _pattern(
        "recomputed",
        r"Bypassing LMCache for request|entering degraded mode|Marking (?:server as )?unhealthy",
        "lines",
    ),
    _pattern("reaped_workers", r"Reaped (?:non-)?GPU instance \d+", "lines"),
)


def read_facts(data: bytes | Iterable[str]) -> dict[str, Any]:
    """What a log states, by name; see ``PATTERNS``.

    A ``lines`` fact is ``{"count": n, "lines": [first ones]}``. A value that is stated twice is the
    later one: vLLM adjusts its block size more than once.
    """
    facts: dict[str, Any] = {}
    for line in lines(data) if isinstance(data, bytes) else data:
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
    return facts


def read_file(path: Path) -> dict[str, Any]:
    """The facts of a log file; none when there is no such file."""
    try:
        return read_facts(path.read_bytes())
    except FileNotFoundError:
        return {}


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
