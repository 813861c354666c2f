"""Facts from logs as the pinned versions write them, whatever pieces they arrive in."""

# ruff: noqa: E501 - the servers' own lines
from __future__ import annotations

import itertools
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlab.stack import logs

VLLM = b"""\
(APIServer pid=8) INFO 11-30 17:27:54 [api_utils.py:347]  \xe2\x96\x84\xe2\x96\x84 \xe2\x96\x84\xe2\x96\x88 \xe2\x96\x88     \xe2\x96\x88  version 0.32.0
(APIServer pid=8) INFO 11-30 17:27:54 [model.py:2152] Using max model len 2048
(APIServer pid=8) INFO 11-30 17:27:54 [scheduler.py:307] Chunked prefill is enabled with max_num_batched_tokens=447.
(EngineCore pid=9) INFO 11-30 17:28:01 [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: model='m'
Loading safetensors checkpoint shards:   0% Completed | 0/1\rLoading safetensors checkpoint shards: 100% Completed | 1/1\r
(Worker pid=10) INFO 11-30 17:28:09 [interface.py:1096] Setting attention block size to 224 tokens to ensure that attention page size is >= mamba page size.
(EngineCore pid=9) INFO 11-30 17:28:10 [kv_cache_utils.py:2619] Overriding num_gpu_blocks=7489 with num_gpu_blocks_override=64
(EngineCore pid=9) INFO 11-30 17:28:10 [kv_cache_utils.py:2327] CPU KV cache size: 10,922 tokens, Maximum concurrency for 2,048 tokens per request: 5.33x
(Worker pid=10) INFO 11-30 17:28:10 [factory.py:62] Creating v1 connector with name: SharedStateMPConnector and engine_id: e0b66350
\x1b[32;20m[2026-11-30 17:28:10,339] LMCache INFO:\x1b[0m Resolved LMCache MP geometry: group_tokens_per_block=[224, 224], scheduler_block_size=224, cache_model_name=/models/hybrid \x1b[3m(lmcache_mp_connector.py:667:x)\x1b[0m
\x1b[32;20m[2026-11-30 17:28:10,341] LMCache INFO:\x1b[0m Creating transfer context (device_type=cpu, mode=lmcache_driven) \x1b[3m(x.py:1)\x1b[0m
"""

LMCACHE = b"""\
\x1b[33;20m[2026-11-30 17:27:48,759] LMCache WARNING:\x1b[0m LazyMemoryAllocator requires memory pinning which is not supported on the current backend. Disabling l1-use-lazy. \x1b[3m(config.py:349:x)\x1b[0m
\x1b[32;20m[2026-11-30 17:27:48,780] LMCache INFO:\x1b[0m OTel MeterProvider initialised with Prometheus fallback (standalone metrics HTTP server disabled) \x1b[3m(x)\x1b[0m
\x1b[32;20m[2026-11-30 17:27:48,795] LMCache INFO:\x1b[0m TokenHasher initialized: chunk_size=224, hash_algorithm=blake3 \x1b[3m(token_hasher.py:67:x)\x1b[0m
\x1b[32;20m[2026-11-30 17:27:48,795] LMCache INFO:\x1b[0m Supported transfer mode: lmcache_driven \x1b[3m(server.py:244:x)\x1b[0m
"""

BROKEN = b"""\
(APIServer pid=8) WARNING 11-30 17:27:54 [system_utils.py:255] Found ulimit of 20000. This can cause fd limit errors like `OSError: [Errno 24] Too many open files`.
(Worker pid=10) ERROR 11-30 17:28:10 [multiproc_executor.py:1063] Traceback (most recent call last):
(Worker pid=10) ERROR 11-30 17:28:10 [multiproc_executor.py:1063] ValueError: Mamba-hybrid models with LMCache require max_num_batched_tokens >= block_size
(EngineCore pid=9) ERROR 11-30 17:28:10 [core.py:1510] RuntimeError: Worker failed with error
RuntimeError: Engine core initialization failed. See root cause above.
"""


def test_a_healthy_vllm() -> None:
    assert logs.read_facts(VLLM) == {
        "vllm_version": "0.32.0",
        "max_model_len": 2048,
        "max_num_batched_tokens": 447,
        "attention_block_tokens": 224,
        "gpu_blocks_override": 64,
        "kv_cache_tokens": 10_922,
        "connector": "SharedStateMPConnector",
        "cache_block_tokens": 224,
        "group_block_tokens": [224, 224],
        "cache_model_name": "/models/hybrid",
        "worker_transfer_mode": "lmcache_driven",
    }


def test_what_vllm_prints_of_its_settings() -> None:
    line = (
        b"(EngineCore pid=9) INFO 11-30 17:55:50 [core.py:133] Initializing a V1 LLM engine (v0.32.0)"
        b" with config: model='m', trust_remote_code=False, dtype=torch.bfloat16, max_seq_len=2048,"
        b" quantization=None, kv_cache_dtype=auto, device_config=cpu, seed=0,"
        b" served_model_name=m, enable_prefix_caching=True, enable_chunked_prefill=True\n"
    )
    assert logs.read_facts(line) == {
        "vllm_version": "0.32.0",
        "trust_remote_code": "off",
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "prefix_caching": "on",
    }


def test_a_healthy_lmcache_has_no_slow_path() -> None:
    assert logs.read_facts(LMCACHE) == {
        "chunk_tokens": 224,
        "hash_algorithm": "blake3",
        "transfer_mode": "lmcache_driven",
        "unknown_versions": ["LMCache (unstated)"],  # only its /version says it
    }


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("GPU KV cache size: 412,160 tokens", "kv_cache_tokens", 412_160),
        ("Setting attention block size to 784 tokens", "attention_block_tokens", 784),
        ("Turning off hybrid kv cache manager because", "hybrid_manager_off", True),
        ("Padding mamba page size by 4.48% to ensure", "mamba_padding_percent", 4.48),
        ("Reset SSM cache type to float32 for accelerated GDN", "ssm_state_reset", "float32"),
        (
            "ValueError: max_num_seqs (256) exceeds available Mamba cache blocks (64). Each",
            "mamba_blocks_exceeded",
            "max_num_seqs (256) exceeds available Mamba cache blocks (64)",
        ),
        (
            "Worker engine-driven context registered (instance_id=3, mode=pickle)",
            "engine_transfer",
            "pickle",
        ),
        ("Available KV cache memory: 9.51 GiB", "kv_cache_gib", 9.51),
        ("Explicitly set (1.0/11.71) GiB for KV cache on node 0.", "kv_cache_gib", 1.0),
        ("non-default args: {'port': 1, 'max_num_seqs': 16, 'x': 2}", "max_num_seqs", 16),
        ("estimated maximum model length is 123872. Try", "fitting_model_len", 123_872),
        ("Starting vLLM server on http://0.0.0.0:8000", "vllm_host", "0.0.0.0"),
        ("Starting LMCache HTTP server on http://[::1]:8080 (x)", "lmcache_host", "::1"),
        ("lmcache.mp.isolated_ipc = True (overridden, default: False)", "isolated_ipc", "on"),
        ("Initialized FSL2Adapter with base_path=/l2,", "l2_adapter", "FSL2Adapter"),
        (
            "api_server.py: error: unrecognized arguments: --foo --bar 3",
            "unknown_flags",
            "--foo --bar 3",
        ),
        (
            "lmcache server: error: argument --port: invalid int value: 'x'",
            "refused_flag",
            "--port: invalid int value: 'x'",
        ),
    ],
)
def test_single_facts(line: str, name: str, value: object) -> None:
    assert logs.read_facts(line.encode())[name] == value


def test_the_later_block_size_counts() -> None:
    line = b"Setting attention block size to %d tokens\n"
    assert logs.read_facts(line % 784 + line % 816)["attention_block_tokens"] == 816


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("slow_paths", "INFO  skipping backend lmcache.c_ops: predicate false"),
        ("slow_paths", "WARN  /dev/shm too small: need 68719476736 have 67108864, using pickle"),
        ("slow_paths", "Insufficient /dev/shm capacity: need 6 bytes, have 5 bytes. Disabling SHM"),
        ("slow_paths", "Insufficient /dev/shm space for CPU KV cache: need 6 bytes"),
        ("slow_paths", "Cannot verify /dev/shm capacity; disabling SHM."),
        ("slow_paths", "Failed to initialize SHM context (shm_name=x), falling back to pickle"),
        ("slow_paths", "Creating EngineDrivenContextPickle (pickle transport)"),
        ("slow_paths", "Using pickle non-GPU transfer strategy"),
        ("failed_stores", "Something went wrong when processing the store request for r=1"),
        ("failed_stores", "Store task 3 to adapter 0 failed for keys: [1]"),
        ("failed_stores", "FSL2Adapter failed to store /l2/x.data"),
        ("failed_stores", "Rejecting STORE for unregistered GPU instance ID 3"),
        (
            "failed_retrieves",
            "Something went wrong when processing the retrieve request for request_id=1, "
            "result=False",
        ),
        ("failed_retrieves", "Some keys not found during retrieve!"),
        ("unregistered", "No registered GPU context found for instance ID 3"),
        ("unregistered", "No GPU context found for model m with world size 1 during lookup!"),
        ("recomputed", "Bypassing LMCache for request r after a failed async KV load"),
        ("recomputed", "LMCache server is unhealthy — entering degraded mode"),
        (
            "slow_paths",
            "No DeviceSpec registered for 'cuda'; using fallback with no-op capabilities.",
        ),
        ("unregistered", "Failed to re-register KV caches after server recovery; will retry on"),
        ("registered_workers", "Registered KV cache for GPU ID 5091 with 4 layers"),
        (
            "registered_workers",
            "Registered non-GPU context for instance 3 (model=m, world_size=1)",
        ),
        (
            "out_of_memory",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 224.00 MiB. GPU 0 has",
        ),
        ("out_of_memory", "ValueError: No available memory for the cache blocks. Try increasing"),
        (
            "out_of_memory",
            "RuntimeError: [enforce fail] DefaultCPUAllocator: can't allocate memory",
        ),
        ("out_of_memory", "OSError: [Errno 12] Cannot allocate memory"),
        ("ipc_errors", "RuntimeError: cudaIpcGetMemHandle failed: 1 (ptr=0x7f)"),
        ("ipc_errors", "RuntimeError: cuMemExportToShareableHandle(fabric) failed: 800"),
        ("ipc_errors", "torch.AcceleratorError: CUDA error: mapping of buffer object failed"),
        ("ipc_errors", "RuntimeError: cuCtxSetCurrent: Error: CUDA_ERROR_INVALID_CONTEXT"),
        ("reaped_workers", "Reaped GPU instance 5: silent for 130.0s (pinged=True)"),
    ],
)
def test_what_goes_wrong_is_counted_by_line(name: str, line: str) -> None:
    facts = logs.read_facts((line + "\n").encode() * 7)
    assert facts[name]["count"] == 7
    assert facts[name]["lines"] == [line] * logs.KEPT_LINES


def test_two_slow_paths_are_two_warnings() -> None:
    text = (
        b"INFO  skipping backend lmcache.c_ops: predicate false\n"
        b"WARN  /dev/shm too small: need 68719476736 have 67108864, using pickle\n"
    )
    assert logs.read_facts(text)["slow_paths"]["count"] == 2


@pytest.mark.parametrize(
    "line",
    [
        "If reserved memory is large set PYTORCH_CUDA_ALLOC_CONF to avoid CUDA out of memory",
        "OTel MeterProvider initialised with Prometheus fallback (standalone server disabled)",
        "lmcache.mp.isolated_ipc = False",
        "This can cause fd limit errors like `OSError: [Errno 24] Too many open files`",
    ],
)
def test_what_only_sounds_like_trouble(line: str) -> None:
    lines = {p.name for p in logs.PATTERNS if p.keep == "lines"}
    assert not lines & logs.read_facts(line.encode()).keys()


# Versions


def test_every_pattern_says_where_its_wording_was_seen() -> None:
    tested = {f"{name} {version}" for name, version in logs.TESTED.items()}
    assert all(pattern.seen for pattern in logs.PATTERNS)
    by_name: dict[str, set[str]] = {}
    for pattern in logs.PATTERNS:
        by_name.setdefault(pattern.name, set()).update(pattern.seen)
    assert all(seen & tested for seen in by_name.values())


@pytest.mark.parametrize(
    ("line", "unknown"),
    [
        ("Initializing a V1 LLM engine (v0.32.4) with", []),
        ("Initializing a V1 LLM engine (v0.33.0) with", ["vLLM 0.33.0"]),
        ("Initializing a V1 LLM engine (v0.320) with", ["vLLM 0.320"]),
        ("Using max model len 2048", ["vLLM (unstated)"]),
        ("TokenHasher initialized: chunk_size=224", ["LMCache (unstated)"]),
        ("nothing that is known", []),
    ],
)
def test_an_unknown_version_is_said(line: str, unknown: list[str]) -> None:
    assert logs.read_facts(line.encode()).get("unknown_versions", []) == unknown


def test_what_the_servers_answer_of_their_versions_counts() -> None:
    facts = logs.merge([logs.read_facts(VLLM), logs.read_facts(LMCACHE)])
    assert facts["unknown_versions"] == ["LMCache (unstated)"]
    assert logs.unknown_versions(facts, {"vllm": "0.32.0", "lmcache": "0.5.6"}) == []
    assert logs.unknown_versions(facts, {"lmcache": "0.6.0"}) == ["LMCache 0.6.0"]


def test_facts_of_two_logs_are_counted_together() -> None:
    slow = b"falling back to pickle\n"
    merged = logs.merge([logs.read_facts(slow * 2 + VLLM), logs.read_facts(slow + LMCACHE)])
    assert merged["slow_paths"]["count"] == 3
    assert merged["kv_cache_tokens"] == 10_922
    assert merged["chunk_tokens"] == 224


# Facts out of pieces


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted({cut % (len(data) + 1) for cut in cuts}), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(places)]


WHOLE = VLLM + LMCACHE + BROKEN + "WARN — falling back to pickle ü€\n".encode() * 3 + b"Using max"


@settings(deadline=None)  # a busy machine is no error
@given(st.lists(st.integers(0, 10**6), max_size=40))
def test_where_a_log_is_cut_makes_no_difference(cuts: list[int]) -> None:
    assert logs.read_facts(_pieces(WHOLE, cuts)) == logs.read_facts(WHOLE)


@settings(deadline=None)  # a busy machine is no error
@given(st.lists(st.integers(0, 10**6), max_size=20))
def test_a_line_without_end_is_cut_at_the_same_place(cuts: list[int]) -> None:
    long = b"KV cache size: 1,024 tokens " + b"x" * 70_000 + b" Using max model len 5\n" + VLLM
    facts = logs.read_facts(_pieces(long, cuts))
    assert facts == logs.read_facts(long)
    assert facts["max_model_len"] == 2048


def test_facts_are_there_before_the_line_ends() -> None:
    reader = logs.Reader()
    reader.feed(b"KV cache size: 10,9")
    assert reader.facts() == {}
    reader.feed(b"22 tokens")
    assert reader.facts()["kv_cache_tokens"] == 10_922
    reader.feed(b"\nfalling back to pickle")
    assert reader.facts()["slow_paths"]["count"] == 1
    reader.feed(b"\n")
    assert reader.facts()["slow_paths"]["count"] == 1


def test_a_log_of_any_size_takes_little_memory() -> None:
    reader = logs.Reader()
    tracemalloc.start()
    for _ in range(64):
        reader.feed(b"x" * 100_000)
        reader.feed(b"\rfalling back to pickle\r")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert reader.facts()["slow_paths"]["count"] == 64
    assert peak < 3_000_000


# Lines out of pieces


def test_every_line_end_counts_and_a_cut_crlf_is_one() -> None:
    reader = logs.Lines()
    assert list(reader.feed(b"a\rb\r")) == ["a", "b"]
    assert list(reader.feed(b"\nc")) == []
    assert list(reader.feed(b"\xe2\x82")) == []
    assert list(reader.feed(b"\xac\n\n")) == ["c€", ""]
    assert list(reader.feed(b"half\xff")) == []
    assert list(reader.finish()) == ["half�"]
    assert list(reader.finish()) == []


def test_other_separators_stay_inside_a_line() -> None:
    assert list(logs.lines("a\u2028b\x85c\x0cd\n".encode())) == ["a\u2028b\x85c\x0cd"]


@given(st.lists(st.sampled_from([b"\r", b"\n", b"\r\n", b"a", "ü€".encode(), b"\xff", b""])))
def test_pieces_make_no_difference(parts: list[bytes]) -> None:
    reader = logs.Lines()
    pieced = [line for part in parts for line in reader.feed(part)] + list(reader.finish())
    assert pieced == list(logs.lines(b"".join(parts)))


# Last lines, causes, secrets


def test_the_tail_of_a_large_log(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"x" * 1_000_000 + b"\n" + b"".join(b"%d\n\n" % n for n in range(100)))
    assert logs.tail(path, 2) == "98\n99"
    assert len(logs.tail(path).splitlines()) == logs.TAIL_LINES
    assert logs.tail(tmp_path / "nothing") == ""
    assert logs.read_file(tmp_path / "nothing") == {}


def test_the_cause_is_the_first_error_and_not_a_mention() -> None:
    assert logs.cause(BROKEN) == (
        "ValueError: Mamba-hybrid models with LMCache require max_num_batched_tokens >= block_size"
    )
    assert logs.cause(b"api_server.py: error: unrecognized arguments: --foo\n") == (
        "api_server.py: error: unrecognized arguments: --foo"
    )
    assert logs.cause(VLLM + LMCACHE) is None


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hf_abcdefghijklmnopqrstuvwxyz", "hf_***"),
        ("sk-abcdefghijklmnopqrstuvwxyz", "sk-***"),
        ("Authorization: Bearer abc.def.ghi", "Authorization: Bearer ***"),
        ("authorization=Basic dXNlcjpwYXNz", "authorization=Basic ***"),
        ("--api-key secret123 --port 1", "--api-key *** --port 1"),
        ("'api_key': ['secret123'], 'x': 1", "'api_key': ['***'], 'x': 1"),
        ('"api_key": "secret123"', '"api_key": "***"'),
        ("HF_TOKEN=secret123", "HF_TOKEN=***"),
        ("HUGGING_FACE_HUB_TOKEN=secret123 ok", "HUGGING_FACE_HUB_TOKEN=*** ok"),
        ("VLLM_API_KEY=secret123", "VLLM_API_KEY=***"),
        ("AWS_SECRET_ACCESS_KEY=abc/def", "AWS_SECRET_ACCESS_KEY=***"),
        ("password: hunter2", "password: ***"),
        ("http://user:pass@host:1/x", "http://user:***@host:1/x"),
    ],
)
def test_secrets_are_masked(text: str, shown: str) -> None:
    assert logs.mask(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "max_num_batched_tokens=447, api_key=None",
        "http://127.0.0.1:6580/status?token_ids=[1,2]",
        "Setting attention block size to 224 tokens to ensure",
        "special_tokens_map.json tokens=5 token: 7",
        "task-scheduler hf_config model_basic_block",
        "password is not set",
    ],
)
def test_what_is_no_secret_stays(text: str) -> None:
    assert logs.mask(text) == text


def test_real_logs_hold_nothing_to_mask() -> None:
    for text in (VLLM, LMCACHE, BROKEN):
        decoded = text.decode()
        assert logs.mask(decoded) == decoded


def test_a_file_is_masked_in_place_and_every_other_byte_stays(tmp_path: Path) -> None:
    path = tmp_path / "log"
    before = b"\xff\r\n" + b"HF_TOKEN=secret123\r\n" + b"end"
    path.write_bytes(before)
    path.chmod(0o600)
    assert logs.mask_file(path)
    assert path.read_bytes() == before.replace(b"secret123", b"***")
    inode = path.stat().st_ino
    assert not logs.mask_file(path)
    assert path.stat().st_ino == inode
    assert not logs.mask_file(tmp_path / "nothing")
    assert [entry.name for entry in tmp_path.iterdir()] == ["log"]


def test_masking_a_large_file_reads_it_by_the_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"5 tokens in a log\n" * 100_000)
    tracemalloc.start()
    logs.mask_file(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000_000
