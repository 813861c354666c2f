"""Log lines as the real servers word them (vLLM 0.32, LMCache 0.5.6), with the fake's facts."""

from __future__ import annotations

import os
import time

from tests.fake_stack.settings import Role, Settings

VERSION = "0.0.0+fake"
FALLBACKS = (
    "INFO  skipping backend lmcache.c_ops: predicate false",
    "\x1b[33;20m[2026-11-30 17:24:51,409] LMCache WARNING:\x1b[0m Insufficient /dev/shm capacity: "
    "need 68719476736 bytes, have 67108864 bytes. Disabling SHM, falling back to pickle. "
    "\x1b[3m(server.py:451:lmcache.v1.multiprocess.server)\x1b[0m",
)


def vllm(settings: Settings, block_tokens: int, kv_cache_tokens: int) -> list[str]:
    """What vLLM says of itself before it listens."""
    concurrency = kv_cache_tokens / settings.max_model_len
    return [
        _vllm("APIServer", "api_utils.py:347", f" ▄▄ ▄█ █  version {VERSION}"),
        _vllm("APIServer", "model.py:733", "Resolved architecture: FakeForCausalLM"),
        _vllm("APIServer", "model.py:2152", f"Using max model len {settings.max_model_len}"),
        _vllm(
            "APIServer",
            "scheduler.py:307",
            "Chunked prefill is enabled with max_num_batched_tokens="
            f"{settings.max_batched_tokens}.",
        ),
        _vllm(
            "Worker",
            "interface.py:1096",
            f"Setting attention block size to {block_tokens} tokens to ensure that attention page "
            "size is >= mamba page size.",
        ),
        _vllm(
            "EngineCore",
            "kv_cache_utils.py:2327",
            f"CPU KV cache size: {kv_cache_tokens:,} tokens, Maximum concurrency for "
            f"{settings.max_model_len:,} tokens per request: {concurrency:.2f}x",
        ),
    ]


def connecting(settings: Settings, instance_id: int) -> list[str]:
    """What vLLM's LMCache connector says when it registers."""
    return [
        _vllm(
            "EngineCore",
            "factory.py:62",
            f"Creating v1 connector with name: {settings.connector} and engine_id: fake",
        ),
        lmcache_line(
            f"LMCache MP worker adapter created with instance_id={instance_id}",
            "vllm_multi_process_adapter.py:1415:"
            "lmcache.integration.vllm.vllm_multi_process_adapter",
        ),
        lmcache_line(
            "Registering kv caches!",
            "lmcache_mp_connector.py:867:lmcache.integration.vllm.lmcache_mp_connector",
        ),
    ]


def lmcache(settings: Settings, l2_path: str | None) -> list[str]:
    """What LMCache says of itself before it listens."""
    said = [
        lmcache_line(
            f"TokenHasher initialized: chunk_size={settings.chunk_tokens}, hash_algorithm=blake3",
            "token_hasher.py:67:lmcache.v1.multiprocess.token_hasher",
        ),
        lmcache_line(
            "Supported transfer mode: lmcache_driven",
            "server.py:244:lmcache.v1.multiprocess.server",
        ),
    ]
    if l2_path is not None:
        said.insert(
            0,
            lmcache_line(
                f"Initialized FSL2Adapter with base_path={l2_path}, relative_tmp_dir=.tmp, "
                "read_ahead_size=None, use_odirect=False",
                "fs_l2_adapter.py:304:lmcache.v1.distributed.l2_adapters.fs_l2_adapter",
            ),
        )
    return said


def registered(instance_id: int) -> str:
    return lmcache_line(
        f"Registered KV cache for GPU ID {instance_id} with 2 layers",
        "lmcache_driven_transfer.py:526:lmcache.v1.multiprocess.modules.lmcache_driven_transfer",
    )


def stored(tokens: int) -> str:
    return lmcache_line(
        f"Stored {tokens} tokens in 0.001 seconds",
        "lmcache_driven_transfer.py:834:lmcache.v1.multiprocess.modules.lmcache_driven_transfer",
    )


def unhealthy() -> str:
    return lmcache_line(
        "LMCache server is unhealthy — entering degraded mode",
        "vllm_multi_process_adapter.py:614:lmcache.integration.vllm.vllm_multi_process_adapter",
        "WARNING",
    )


def listening(role: Role, url: str) -> list[str]:
    first = {
        "vllm": _vllm("APIServer", "entry.py:140", f"Starting vLLM server on {url}"),
        "lmcache": lmcache_line(
            "LMCache cache server is running...", "server.py:511:lmcache.v1.multiprocess.server"
        ),
    }[role]
    return [first, "INFO:     Application startup complete."]


def lmcache_line(text: str, where: str, level: str = "INFO") -> str:
    """A line as LMCache's logger prints it, colours included."""
    colour = 32 if level == "INFO" else 33
    now = time.strftime("%Y-%m-%d %H:%M:%S")
    return f"\x1b[{colour};20m[{now},000] LMCache {level}:\x1b[0m {text} \x1b[3m({where})\x1b[0m"


def _vllm(process: str, where: str, text: str, level: str = "INFO") -> str:
    now = time.strftime("%m-%d %H:%M:%S")
    return f"({process} pid={os.getpid()}) {level} {now} [{where}] {text}"
