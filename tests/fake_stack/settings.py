"""How the fake stack behaves: sizes, delays, and which faults it shows."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

Role = Literal["vllm", "lmcache"]

REQUEST_FAULTS = {
    # the stream
    "role_chunk": "an event with a role and empty content comes before the token",
    "empty_chunk": "an event with empty text and no proof of a token comes before the token",
    "error_before_token": "status 200, then an error event, then [DONE]",
    "error_after_token": "a token, then an error event, then [DONE]",
    "no_token": "status 200, then only [DONE]",
    "truncated": "ends after the token, without [DONE]; value 'clean': as HTTP should",
    "hang_before_headers": "nothing is ever answered",
    "hang_after_headers": "the response head, then nothing",
    "hang_after_token": "the token, then nothing",
    "connection_lost": "the connection ends before the response head",
    "http_error": "a status other than 200 (value, default 500)",
    "slow_loris": "one byte at a time, value seconds apart (default 0.0005)",
    "keep_alive": "comment lines before and between the events",
    "coalesced": "all events in one write, at the end (a buffering proxy)",
    "split": "each event in pieces of value bytes (default 7)",
    "crlf": "lines end with CRLF",
    "split_data_lines": "one event's JSON over several data lines",
    "line_separators": "U+2028, U+2029 and U+0085 inside the text",
    "empty_text": "a token whose text is empty; ids and logprobs prove it",
    "reasoning": "the text comes in the field value (default reasoning)",
    "wrong_length": "value output tokens (default 2) instead of those asked for",
    "extra_delay": "value seconds (default 0.05) more before the first token",
    # what it says about the prompt
    "prompt_tokens": "usage counts value tokens more than were sent (+106, -13, +1)",
    "cached_tokens": "usage counts value cached tokens more than there were",
    "null_details": "prompt_tokens_details is null",
    "no_details": "prompt_tokens_details is absent",
    "no_usage": "no usage at all",
    # the cache
    "zero_hits": "LMCache finds nothing",
    "warm_start": "LMCache finds every chunk, also of prompts that it never saw",
    "warm_local": "L0 holds every block, also of prompts that it never saw",
    "stores_missing": "every value-th chunk (default 2nd) is not stored",
    "wrong_logprobs": "restored answers are off by value nat (default 0.4): fast but wrong",
    "flipped_token": "restored answers swap the two best tokens, value nat apart (default 0.01)",
    # the servers
    "exits": "vLLM exits with code value (default 1) instead of answering",
    "killed": "vLLM kills itself with signal value (default 9) instead of answering",
    "lmcache_dies": "LMCache dies (value: exit code, default -9) before the lookup",
}
VLLM_FAULTS = {
    "reset_denied": "/reset_prefix_cache answers success: false and resets nothing",
    "reset_missing": "/reset_prefix_cache answers 404 (development endpoints off)",
    "reset_not_done": "/reset_prefix_cache answers success: true and resets nothing; value: the "
    "first so many (default 0) still do",
    "never_registered": "vLLM never registers with LMCache, and serves without it",
    "kv_cache_tokens": "L0 has value tokens instead of the set size",
    "block_tokens": "the log and the counters state value as block size",
    "wrong_model": "/v1/models names value (default 'someone-elses-model')",
}
LMCACHE_FAULTS = {
    "stale_id": "/status lists the id value (default 11), whom nobody stands behind",
    "stores_hang": "the first value L2 stores (default 0) are written, no more",
    "store_fails": "the L2 stores with the numbers in value (default [1]) fail",
    "cut_record": "the first value records (default 1) are half as long when it stops",
    "lost_records": "the first value records (default 1) are gone when it stops",
    "load_fails": "L2 loads find no file",
    "l1_full": "the first value chunks (default 1) find no room in L1",
    "clear_not_done": "/cache/clear answers ok and clears nothing; value: only the first so many",
    "odd_file": "a foreign file named value (default x.data) appears in the L2 folder",
    "old_status": "/status says gpu_context_meta, as older versions did",
}
SHARED_FAULTS = {
    "exit_at_start": "exits at start after the log line value",
    "slow_start": "listens value seconds (default 0.3) late",
    "unhealthy": "the health endpoint answers 503",
    "ignores_sigterm": "SIGTERM has no effect (process only)",
    "soft_kill": "ends by itself where it was to be killed (FakeLaunch only)",
    "fallback_lines": "the log tells of slow fallbacks (value: the lines)",
    "counters_missing": "series whose name holds one of the words in value are not exported",
    "counters_reset": "counters start again from 0 at the scrape with the number value (default 2)",
    "metrics_error": "/metrics answers 500",
    "version": "says to be version value",
}
FAULTS = {**REQUEST_FAULTS, **VLLM_FAULTS, **LMCACHE_FAULTS, **SHARED_FAULTS}
"""Every fault by name, and what it does."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong, and when."""

    name: str
    value: Any = None
    """None: the default that FAULTS names."""
    nth: int | None = None
    """The request's number among those that match the rest, from 1; None: all of them."""
    visit: Literal["first", "again"] | None = None
    """Prompts that this server sees for the first time, or that it has seen before."""
    tokens: int | None = None
    """Prompts of this length: tells contexts from probes."""
    server: Role = "vllm"
    """Which server shows a fault that either could."""
    scenario: str | None = None
    repeat: int | None = None

    def __post_init__(self) -> None:
        if self.name not in FAULTS:
            raise ValueError(f"there is no fault {self.name!r}; known: {', '.join(FAULTS)}")

    def of(self, role: Role) -> bool:
        """Whether this server shows the fault."""
        if self.name in SHARED_FAULTS:
            return self.server == role
        return role == ("lmcache" if self.name in LMCACHE_FAULTS else "vllm")

    def matches(self, tokens: int, *, seen: bool) -> bool:
        """Whether a request of this length meets the fault; ``nth`` is not looked at."""
        visit = "again" if seen else "first"
        return self.visit in (None, visit) and self.tokens in (None, tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One fake stack. Sizes in tokens, chunks or bytes; delays in seconds."""

    model: str = "fake/model"
    served_name: str = "fake-model"
    block_tokens: int = 16
    chunk_tokens: int = 16
    l0_tokens: int = 256
    max_model_len: int = 4096
    max_batched_tokens: int = 31
    prefix_caching: bool = True
    prompt_tokens_details: bool = True
    dev_endpoints: bool = True
    connector: str = "LMCacheMPConnector"

    l1_chunks: int = 24
    l1_watermark: float = 0.8
    l1_ratio: float = 0.25
    l1_keeps_loaded: bool = False
    """Whether chunks that come from L2 stay in L1; in LMCache's default they do not."""
    l2: bool = True
    l2_chunks: int | None = None
    l2_path: str | None = None
    """None: a temporary folder of the launch's own."""
    object_groups: int = 1
    chunk_bytes: int = 256
    """Bytes of one object, so of one file; a chunk has one per object group."""

    base_s: float = 0.001
    token_s: float = 0.0003
    """Per prompt token that is computed; one request computes at a time."""
    l1_token_s: float = 0.0
    l2_token_s: float = 0.00002
    output_token_s: float = 0.0005
    l2_store_s: float = 0.0
    """Per chunk written to L2, behind the requests' backs."""
    noise_nat: float = 0.0
    """Logprobs differ by up to this between equal requests."""

    leak_bytes_per_s: float = 0.0
    leak_files_per_s: float = 0.0
    """What every server's memory and open files grow by, as ``FakeDeployment.usage`` says."""

    children: int = 0
    """Child processes that a server process starts, as real ones do."""
    oom_killed: bool = False
    """FakeLaunch says of servers that died that the kernel killed them."""
    faults: tuple[Fault, ...] = ()

    def ttft_s(self, prompt_tokens: int, *, local: int = 0, l1: int = 0, l2: int = 0) -> float:
        """The expected TTFT of a request whose tokens came from these tiers, else computed."""
        computed = prompt_tokens - local - l1 - l2
        return self.base_s + self.token_s * computed + self.l1_token_s * l1 + self.l2_token_s * l2

    def with_faults(self, *faults: Fault | str) -> Settings:
        """The same settings with more faults; a plain name is a fault that always shows."""
        more = tuple(Fault(fault) if isinstance(fault, str) else fault for fault in faults)
        return dataclasses.replace(self, faults=self.faults + more)

    def at(self, scenario: str, repeat: int) -> Settings:
        """The settings with only the faults of this launch."""
        kept = tuple(
            fault
            for fault in self.faults
            if fault.scenario in (None, scenario) and fault.repeat in (None, repeat)
        )
        return dataclasses.replace(self, faults=kept)

    def fault(self, role: Role, name: str) -> Fault | None:
        """The fault of that name that this server shows always."""
        return next((f for f in self.faults if f.name == name and f.of(role)), None)

    def to_json(self) -> str:
        """The settings as the ``--config`` of a fake process."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """The settings that ``to_json`` wrote; what is absent has its default."""
        tree = json.loads(text)
        faults = tuple(
            Fault(fault) if isinstance(fault, str) else Fault(**fault)
            for fault in tree.pop("faults", ())
        )
        return cls(**tree, faults=faults)


class Schedule:
    """Which faults the next request meets."""

    def __init__(self, faults: Iterable[Fault]):
        self._faults = [fault for fault in faults if fault.name in REQUEST_FAULTS]
        self._matched: Counter[int] = Counter()

    def next(self, tokens: int, *, seen: bool) -> dict[str, Any]:
        """Name and value of each fault that this request meets; counts the request."""
        met: dict[str, Any] = {}
        for place, fault in enumerate(self._faults):
            if not fault.matches(tokens, seen=seen):
                continue
            self._matched[place] += 1
            if fault.nth in (None, self._matched[place]):
                met[fault.name] = fault.value
        return met
