"""Both sides of every rule: cases in which it fires, and near ones in which it must not.

Each row is the rule, the trap that it decides (see the links of that trap in the rule's source),
whether it fires, and the case.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvlab.preflight.blocks import HYBRID_CONFIG
from kvlab.preflight.rule import Example

SPARK_CONFIG = json.loads(
    (Path(__file__).parents[1] / "sizing/configs/qwen3.6-35b-a3b-like.json").read_text()
)
SPARK_HOST: dict[str, Any] = {
    "system": "Linux",
    "machine": "aarch64",
    "memory_gib": 121.0,
    "gpus": [{"name": "NVIDIA GB10", "memory_mib": None, "driver": "580.95"}],
    "limits": {"cpus_allowed": 20, "cpu_quota": None, "memory_gib": None},
    "container_engine": {"name": "docker", "version": "28.5.1"},
    "proxy_variables": [],
    "now": {"load_average": [0.1, 0.1, 0.1], "memory_available_gib": 112.0, "swap_used_gib": 0.0},
    "disk": {
        "filesystem": "ext4",
        "device": "/dev/nvme0n1p2",
        "total_gib": 3700.0,
        "free_gib": 3100.0,
    },
}
"""A DGX Spark as kvlab.host describes one, with a large empty disk."""


@dataclass(frozen=True)
class Row:
    rule: str
    fires: bool
    example: Example
    trap: str = ""

    @property
    def name(self) -> str:
        side = "fires" if self.fires else "quiet"
        return f"{self.rule}-{self.trap or 'issue'}-{side}"


def fires(rule: str, trap: str = "", **case: Any) -> Row:
    return Row(rule, True, Example(**case), trap)


def quiet(rule: str, trap: str = "", **case: Any) -> Row:
    return Row(rule, False, Example(**case), trap)


def block(tokens: int) -> str:
    return f"INFO [config.py:281] Setting attention block size to {tokens} tokens to ensure that"


def n784(**settings: Any) -> dict[str, Any]:
    """A hybrid with N = 784 as the profile says it."""
    return {
        "engine.block_tokens": 784,
        "cache.chunk_tokens": 784,
        "engine.max_num_batched_tokens": 1567,
        "engine.max_model_len": 16_384,
        "engine.kv_cache_tokens": None,
        "workload.context_tokens": 12_000,
        **settings,
    }


def gpu_now(use: float, clock: float, slowed: list[str] | None = None) -> dict[str, Any]:
    """What a GB10 does now."""
    return {
        "name": "NVIDIA GB10",
        "utilization_percent": float(use),
        "clock_mhz": float(clock),
        "max_clock_mhz": 2411.0,
        "slowed": slowed,
    }


GROUPS = "Resolved LMCache MP geometry: group_tokens_per_block=[{}], scheduler_block_size={}, "
MTP = {"method": "mtp", "num_speculative_tokens": 3}
SPARK = {"profile": "dgx-spark"}
DOCKER = {"profile": "embedded-docker"}
MANY = {"workload.contexts": 800, "engine.kv_cache_tokens": None}
TRANSFER = "engine.flags.kv-transfer-config"
MP_ISOLATED = "lmcache.mp.isolated_ipc"

ROWS = [
    # Blocks, chunks and batches
    fires("KV002", "P-24", settings=n784(**{"engine.max_num_batched_tokens": 8192})),
    fires("KV002", "P-24", settings=n784(**{"engine.max_num_batched_tokens": 1568})),
    fires("KV002", "P-24", **SPARK, log=block(784)),
    quiet("KV002", "P-24", settings=n784()),
    quiet("KV002", settings={"model.hybrid": False, "engine.max_num_batched_tokens": 8192}),
    fires(
        "KV010",
        "P-21",
        **SPARK,
        log=block(784),
        settings={"engine.block_tokens": 256, "cache.chunk_tokens": 256},
    ),
    fires(
        "KV010",
        "P-21",
        **SPARK,
        log=block(816),
        settings={"engine.block_tokens": 784, "cache.chunk_tokens": 784},
    ),
    fires(
        "KV010",
        "P-21",
        **SPARK,
        probe={"cached_block": 544},
        settings={"engine.block_tokens": 512, "cache.chunk_tokens": 512},
    ),
    fires("KV010", settings=n784(), log=f"{block(784)}\n{GROUPS.format('784, 784', 1568)}"),
    fires("KV010", "P-21", settings=n784(), log=GROUPS.format("784, 1568", 784)),
    quiet("KV010", settings=n784(), log=f"{block(784)}\n{GROUPS.format('784, 392', 784)}"),
    quiet("KV010", "P-21", settings=n784(**{"cache.chunk_tokens": 1568}), log=block(784)),
    fires(
        "KV011",
        "P-21",
        settings=n784(**{"engine.flags.speculative-config": MTP}),
        log=block(816),
        probe={"cached_block": 784},
    ),
    fires("KV011", settings=n784(), probe={"cached_block": 816, "cached_run": "a run"}),
    quiet("KV011", "P-21", settings=n784(), log=block(784), probe={"cached_block": 816}),
    fires(
        "KV012",
        settings={"engine.flags.mamba-ssm-cache-dtype": "float32"},
        probe={"config": HYBRID_CONFIG},
    ),
    quiet("KV012", probe={"config": HYBRID_CONFIG}),
    quiet(
        "KV012",
        settings={"engine.flags.mamba-ssm-cache-dtype": "float32"},
        log=block(224),
        probe={"config": HYBRID_CONFIG},
    ),
    fires("KV013", **SPARK),
    quiet("KV013", **SPARK, probe={"config": SPARK_CONFIG}),
    quiet("KV013", **SPARK, log=block(2144)),
    quiet("KV013", settings={"model.hybrid": False}),
    fires("KV014", **SPARK, log=block(4288), settings={"workload.context_tokens": 30_000}),
    quiet("KV014", **SPARK, log=block(2144)),
    fires("KV015", settings={"engine.max_num_batched_tokens": 224}),
    quiet("KV015", settings={"engine.max_num_batched_tokens": 225}),
    quiet("KV015", settings={"engine.max_num_batched_tokens": 224, "model.hybrid": False}),
    fires("KV016", "P-24", settings={"engine.mamba_cache_mode": None}),
    fires("KV016", settings={"engine.mamba_cache_mode": "all"}),
    quiet("KV016", "P-24"),
    quiet("KV016", settings={"engine.mamba_cache_mode": None, "model.hybrid": False}),
    fires("KV017", "P-24", settings={"engine.prefix_caching": False}),
    quiet("KV017", settings={"engine.prefix_caching": False, "model.hybrid": False}),
    fires("KV018", "P-07", settings={"engine.prompt_tokens_details": False}),
    quiet("KV018", "P-07"),
    fires(
        "KV019",
        **SPARK,
        log="ValueError: max_num_seqs (16) exceeds available Mamba cache blocks (12)",
    ),
    fires("KV019", settings={"engine.max_num_seqs": 64}),
    quiet(
        "KV019",
        **SPARK,
        settings={"engine.max_num_seqs": 12},
        log="ValueError: max_num_seqs (16) exceeds available Mamba cache blocks (12)",
    ),
    quiet("KV019", settings={"engine.max_num_seqs": 48}),
    quiet("KV019", settings={"engine.max_num_seqs": 64, "model.hybrid": False}),
    # Connector, network, IPC and transfer
    fires("KV020", "P-26", settings={TRANSFER: {"kv_connector": "LMCacheConnectorV1"}}),
    fires("KV020", "P-26", settings={TRANSFER: '{"kv_connector":"LMCacheConnectorV1"}'}),
    fires(
        "KV020",
        settings={TRANSFER: {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_producer"}},
    ),
    fires("KV020", "P-26", log="Creating v1 connector with name: LMCacheConnectorV1 and id"),
    quiet("KV020", log="Creating v1 connector with name: LMCacheMPConnector and id"),
    quiet(
        "KV020",
        "P-26",
        settings={TRANSFER: {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both"}},
    ),
    fires("KV021", **SPARK, settings={"engine.connector_config": {"lmcache.mp.port": 6555}}),
    fires("KV021", **SPARK, settings={"engine.connector_config": {"lmcache.mp.host": "10.0.0.2"}}),
    fires("KV021", settings={"engine.connector_config": {"lmcache.mp.port": 5555}}),
    quiet(
        "KV021",
        **SPARK,
        settings={
            "engine.connector_config": {"lmcache.mp.port": 5555, "lmcache.mp.host": "127.0.0.1"}
        },
    ),
    fires("KV022", settings={TRANSFER: {"kv_connector": "LMCacheMPConnector"}}),
    fires("KV022", settings={"engine.flags.kv_transfer_config": "{}"}),
    quiet("KV022"),
    fires("KV023", settings={"engine.flags.max-num-batched-tokens": 8192}),
    fires("KV023", settings={"engine.flags.enable_prefix_caching": False}),
    fires("KV023", settings={"engine.flags.no-enable-prefix-caching": True}),
    fires("KV023", settings={"cache.flags.chunk-size": 256}),
    fires("KV023", settings={"cache.flags.l1_size_gb": None}),
    quiet("KV023", **SPARK),
    fires("KV024", "P-28", **SPARK, settings={"cache.flags.isolated-ipc": True}),
    fires("KV024", "P-28", **SPARK, settings={"engine.connector_config": {MP_ISOLATED: "true"}}),
    quiet(
        "KV024",
        **SPARK,
        settings={"cache.flags.isolated_ipc": True, "engine.connector_config": {MP_ISOLATED: True}},
    ),
    quiet("KV024", **SPARK, settings={"engine.connector_config": {MP_ISOLATED: "false"}}),
    fires("KV025", "P-28", **SPARK, settings={"container.ipc": "private"}),
    quiet("KV025", "P-28", **SPARK, settings={"container.ipc": "container:bench-lmcache"}),
    quiet(
        "KV025",
        **SPARK,
        settings={
            "container.ipc": "private",
            "cache.flags.isolated-ipc": True,
            "engine.connector_config": {MP_ISOLATED: True},
        },
    ),
    fires(
        "KV026",
        **SPARK,
        settings={"cache.flags.isolated-ipc": True, "engine.flags.enable-sleep-mode": True},
    ),
    fires(
        "KV026",
        **SPARK,
        settings={
            "cache.flags.isolated-ipc": True,
            "engine.env.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        },
    ),
    quiet("KV026", **SPARK, settings={"engine.flags.enable-sleep-mode": True}),
    quiet("KV026", **SPARK, settings={"cache.flags.isolated-ipc": True}),
    fires("KV027", "P-28", **SPARK, settings={"container.network": "bridge"}),
    quiet("KV027", **SPARK, settings={"container.network": "bridge", "cache.host": "lmcache"}),
    quiet("KV027", "P-28", **SPARK),
    fires(
        "KV028",
        "P-27",
        **SPARK,
        probe={"shm_gib": 0.0625},
        settings={"cache.transfer_mode": "auto"},
    ),
    fires(
        "KV028",
        "P-27",
        **SPARK,
        settings={
            "cache.transfer_mode": "engine_driven",
            "container.ipc": "shareable",
            "container.shm_size": "8g",
        },
    ),
    quiet(
        "KV028",
        "P-27",
        **SPARK,
        settings={"cache.transfer_mode": "auto", "container.ipc": "shareable"},
    ),
    quiet("KV028", **SPARK, probe={"shm_gib": 60.0}, settings={"cache.transfer_mode": "auto"}),
    quiet("KV028", **SPARK, probe={"shm_gib": 0.0625}),
    fires("KV029", **SPARK, settings={"cache.transfer_mode": "engine_driven"}),
    quiet("KV029", settings={"cache.transfer_mode": "engine_driven"}),
    quiet("KV029", **SPARK),
    fires("KV030", settings={"cache.transfer_mode": "engine_driven"}),
    fires("KV030", settings={"engine.connector_config": {}}),
    quiet("KV030"),
    quiet("KV030", settings={"cache.transfer_mode": "engine_driven", "model.hybrid": False}),
    quiet("KV030", **SPARK),
    fires("KV031", "P-22", settings={"engine.connector": "stock"}),
    quiet("KV031", "P-22"),
    quiet("KV031", settings={"engine.connector": "stock", "model.hybrid": False}),
    fires("KV031", "P-22", **DOCKER, settings={"engine.connector": "stock"}),
    quiet("KV031", **SPARK),
    fires("KV032", "P-28", **SPARK, settings={"engine.env.CUDA_VISIBLE_DEVICES": "1"}),
    fires("KV032", "P-28", **SPARK, settings={"cache.env.HIP_VISIBLE_DEVICES": "0"}),
    quiet(
        "KV032",
        "P-28",
        **SPARK,
        settings={"engine.env.CUDA_VISIBLE_DEVICES": "1", "cache.env.CUDA_VISIBLE_DEVICES": "1"},
    ),
    # Memory, eviction and GPUs
    fires("KV004", **SPARK),
    quiet("KV004"),
    fires("KV040", **SPARK, host=SPARK_HOST, settings={"cache.l1_size_gb": 80}),
    fires("KV040", host={"memory_gib": 64.0, "limits": {"memory_gib": 4.0}}),
    quiet("KV040", **SPARK, host=SPARK_HOST),
    quiet("KV040", host={"memory_gib": 8.0}),
    quiet("KV040", profile="mi308x", host={"memory_gib": 104.0}),  # its GPU has its own memory
    fires("KV040", profile="mi308x", host={"memory_gib": 96.0}),
    quiet("KV040", settings={"cache.l1_size_gb": 800}),  # nothing is known of the host
    fires("KV041", "P-31", **SPARK, host={**SPARK_HOST, "now": {"memory_available_gib": 30.0}}),
    quiet("KV041", "P-31", **SPARK, host=SPARK_HOST),
    fires("KV042", **SPARK, settings={"cache.l1_init_size_gb": 40}),
    quiet("KV042", **SPARK),
    fires("KV043", "P-17", settings={"cache.eviction_policy": "IsolatedLRU"}),
    quiet("KV043", "P-17"),
    fires("KV044", experiments=("shared-cache",)),
    quiet("KV044", experiments=("shared-cache",), settings={"cache.flags.max-gpu-workers": 2}),
    quiet("KV044"),
    fires("KV045", "P-42", **SPARK, host={"gpus": []}),
    fires("KV045", "P-42", **SPARK, host={"gpus": None}),
    quiet("KV045", "P-42", **SPARK, host=SPARK_HOST),
    quiet("KV045", host={"gpus": []}),
    fires("KV046", "P-19", **SPARK, probe={"gpus_now": (gpu_now(97, 650),)}),
    fires("KV046", "P-19", **SPARK, probe={"gpus_now": (gpu_now(5, 500, ["power cap"]),)}),
    quiet("KV046", "P-19", **SPARK, probe={"gpus_now": (gpu_now(97, 2405),)}),
    quiet("KV046", "P-19", **SPARK, probe={"gpus_now": (gpu_now(0, 208),)}),
    quiet("KV046", **SPARK, probe={"gpus_now": ({"name": "x", "clock_mhz": None},)}),
    fires("KV047", "P-29", **DOCKER, settings={"cache.l1_size_gb": 8}),
    fires("KV047", "P-29", **DOCKER, settings={"engine.env.VLLM_CPU_KVCACHE_SPACE": "16"}),
    quiet("KV047", "P-29", **DOCKER),
    quiet("KV047", **SPARK, host=SPARK_HOST),
    fires("KV048", **SPARK, host={**SPARK_HOST, "container_engine": None}),
    quiet("KV048", **SPARK, host=SPARK_HOST),
    quiet("KV048", host={"container_engine": None}),
    # The disk tier
    fires("KV050", "P-35", **SPARK, host={"disk": {"filesystem": "tmpfs"}}),
    quiet("KV050", "P-35", **SPARK, host=SPARK_HOST),
    quiet("KV050", host={"disk": {"filesystem": "tmpfs"}}),
    fires("KV051", "P-35", host={"disk": {"filesystem": "ramfs"}}),
    quiet("KV051", "P-35", host={"disk": {"filesystem": "xfs"}}),
    quiet("KV051", settings={"cache.l2": None}, host={"disk": {"filesystem": "tmpfs"}}),
    fires("KV052", "P-35", host={"disk": {"filesystem": "overlay"}}),
    quiet("KV052", "P-35", host={"disk": {"filesystem": "ext4"}}),
    fires("KV053", "P-16", host={"disk": {"filesystem": "nfs4", "device": "nas:/x"}}),
    fires("KV053", host={"disk": {"filesystem": "fuse.sshfs", "device": "nas:/x"}}),
    quiet("KV053", "P-16", host={"disk": {"filesystem": "btrfs"}}),
    fires(
        "KV054",
        "P-35",
        **SPARK,
        probe={"config": SPARK_CONFIG},
        host={"disk": {"filesystem": "ext4", "free_gib": 120.0}},
    ),
    quiet("KV054", "P-35", **SPARK, probe={"config": SPARK_CONFIG}, host=SPARK_HOST),
    quiet("KV054", **SPARK, host={"disk": {"filesystem": "ext4", "free_gib": 1.0}}),
    fires("KV055", "P-36", **SPARK, probe={"direct_io": "write: Invalid argument"}),
    quiet("KV055", "P-36", **SPARK, probe={"direct_io": ""}),
    quiet("KV055", probe={"direct_io": "write: Invalid argument"}),
    fires("KV056", "P-36", **SPARK, settings={"model.name": "/models/" + "m" * 200}),
    fires("KV056", "P-36", probe={"name_limit": 80}),
    quiet("KV056", "P-36", **SPARK),
    fires("KV057", "P-35", **SPARK, probe={"l2_records": 377, "l2_bytes": 32_000_000_000}),
    fires(
        "KV057",
        "P-35",
        **SPARK,
        probe={"config": SPARK_CONFIG},
        host={"disk": {"filesystem": "ext4", "free_gib": 700.0}},
    ),
    fires("KV057", **SPARK, host=SPARK_HOST, experiments=("soak",)),
    quiet("KV057", "P-35", **SPARK, probe={"config": SPARK_CONFIG}, host=SPARK_HOST),
    quiet(
        "KV057",
        "P-35",
        **SPARK,
        probe={"l2_records": 377},
        settings={"cache.l2.adapter": {"type": "fs_native"}},
    ),
    fires(
        "KV058",
        "P-35",
        settings={"cache.l2.adapter": {"type": "fs_native", "max_capacity_gb": 4000}},
    ),
    quiet(
        "KV058",
        "P-35",
        settings={
            "cache.l2.adapter": {
                "type": "fs_native",
                "max_capacity_gb": 4000,
                "eviction": {"eviction_policy": "LRU"},
            }
        },
    ),
    fires("KV059", "P-45", **SPARK, probe={"l2_writable": False}),
    quiet("KV059", "P-45", **SPARK, probe={"l2_writable": True}),
    fires("KV060", "P-10", settings={"cache.l2.base_path": "/srv/l2"}, probe={"l2_records": 1}),
    fires(
        "KV060",
        "P-39",
        settings={"cache.l2.base_path": "/srv/l2"},
        probe={"l2_records": 9, "l2_foreign": "kv_dtype fp8 there, auto here"},
    ),
    quiet("KV060", "P-10", settings={"cache.l2.base_path": "/srv/l2"}, probe={"l2_records": 0}),
    quiet("KV060", probe={"l2_records": 4}),
    fires(
        "KV061",
        "P-39",
        experiments=("restart",),
        log="TokenHasher initialized: chunk_size=224, hash_algorithm=builtin",
        settings={"cache.env": {}},
    ),
    fires(
        "KV061",
        "P-39",
        experiments=("acceptance",),
        settings={
            "cache.env": {"PYTHONHASHSEED": "random"},
            "cache.flags.hash-algorithm": "builtin",
        },
    ),
    quiet(
        "KV061",
        "P-39",
        experiments=("restart",),
        settings={"cache.flags.hash-algorithm": "builtin"},
    ),
    quiet(
        "KV061",
        "P-39",
        experiments=("restart",),
        settings={"cache.env": {}},
        log="TokenHasher initialized: chunk_size=224, hash_algorithm=blake3",
    ),
    quiet("KV061", settings={"cache.env": {}, "cache.flags.hash-algorithm": "builtin"}),
    # The workload
    fires("KV006", "P-25", **SPARK),
    fires("KV006", "P-25", settings={"cache.separate_object_groups": False}),
    quiet("KV006", "P-25"),
    quiet("KV006", settings={"cache.separate_object_groups": None, "model.hybrid": False}),
    fires("KV070", "P-09", log="CPU KV cache size: 65,536 tokens"),
    quiet("KV070", "P-09", log="CPU KV cache size: 10,922 tokens"),
    fires("KV071", "P-17", settings={"cache.l2": None}, probe={"config": HYBRID_CONFIG}),
    quiet(
        "KV071",
        "P-17",
        settings={"cache.l2": None, "cache.l1_size_gb": 1},
        probe={"config": HYBRID_CONFIG},
    ),
    quiet("KV071", settings={"cache.l2": None}),
    fires("KV072", settings={"cache.l1_size_gb": 1}, probe={"config": HYBRID_CONFIG}),
    quiet("KV072", probe={"config": HYBRID_CONFIG}),
    quiet("KV072", **SPARK, probe={"config": SPARK_CONFIG}),
    fires(
        "KV073",
        "P-13",
        settings=n784(
            **{
                "engine.block_tokens": 528,
                "cache.chunk_tokens": 528,
                "workload.shape": "prefix_suffix",
                "workload.context_tokens": 1224,
                "engine.max_num_batched_tokens": 1055,
            }
        ),
    ),
    quiet("KV073", "P-13", **SPARK),
    quiet("KV073", "P-13"),
    fires("KV074", "P-05", **SPARK, log="Using max model len 8000"),
    quiet("KV074", "P-05", **SPARK, log="Using max model len 8192"),
    fires("KV075", "P-14", settings={"workload.output_tokens": 128}),
    quiet("KV075", "P-14", settings={"workload.output_tokens": 4}),
    fires("KV076", "P-22", settings={"engine.flags.speculative-config": MTP}),
    fires("KV076", "P-22", settings={"engine.flags.speculative-config": json.dumps(MTP)}),
    quiet("KV076", "P-22", **SPARK),  # resumes at block 2 of 3
    quiet("KV076", "P-22"),
    quiet("KV076", settings={"engine.flags.speculative-config": MTP, "model.hybrid": False}),
    fires("KV077", settings={"cache.flags.engine-type": "blend"}),
    fires("KV077", settings={"engine.env.LMCACHE_ENABLE_BLENDING": "True"}),
    fires("KV077", settings={"cache.l2.adapter": {"type": "fs", "serde": {"type": "cachegen"}}}),
    quiet("KV077", settings={"engine.env.LMCACHE_ENABLE_BLENDING": "False"}),
    quiet("KV077", settings={"cache.flags.engine-type": "blend", "model.hybrid": False}),
    # Servers, images and flags
    fires("KV001", probe={"engine_missing": "there is no engine environment in x"}),
    quiet("KV001"),
    fires("KV003", **SPARK, settings={"engine.host": "0.0.0.0"}),
    fires("KV003", **SPARK, settings={"cache.flags.http-host": None}),
    fires("KV003", settings={"cache.host": "::"}),
    quiet("KV003", **SPARK),
    quiet("KV003", settings={"cache.flags.http-host": None}),
    fires("KV005", "P-26", **SPARK),
    quiet(
        "KV005",
        "P-26",
        **SPARK,
        settings={"container.image": "vllm/vllm-openai:latest@sha256:ab12"},
    ),
    quiet("KV005", **SPARK, settings={"container.image": "vllm/vllm-openai:v0.25.1"}),
    fires("KV008", "P-26", **SPARK, settings={"container.image": "vllm/vllm-openai:v0.25.1"}),
    quiet("KV008", "P-26", **SPARK, settings={"container.image": "vllm/vllm-openai@sha256:ab12"}),
    quiet("KV008", **SPARK),
    fires("KV009", **SPARK),
    fires("KV009", **SPARK, probe={"config": {"auto_map": {"AutoModel": "modeling.Model"}}}),
    quiet("KV009", **SPARK, probe={"config": SPARK_CONFIG}),
    quiet("KV009"),
    fires("KV078", "P-33", settings={"cache.flags.prometheus-port": 9090}),
    quiet("KV078", "P-33"),
    fires("KV079", settings={"cache.flags.disable_observability": True}),
    quiet("KV079", settings={"cache.flags.disable-metrics": False}),
    fires("KV080", "P-34", **SPARK, probe={"ports": {8100: "python"}}),
    fires("KV080", "P-34", **SPARK, probe={"ports": {8080: "nginx (pid 1)"}}),
    quiet("KV080", "P-34", **SPARK, probe={"ports": {9090: "prometheus"}}),
    fires("KV081", "P-08", host={"proxy_variables": ["HTTPS_PROXY"]}),
    quiet("KV081", "P-08", host={"proxy_variables": []}),
    fires("KV082", "P-31", probe={"leftovers": 1}),
    quiet("KV082", "P-31", probe={"leftovers": 0}),
    fires(
        "KV083",
        "P-26",
        probe={
            "parsers": "vLLM 0.32.0",
            "parsed": (
                {"service": "vllm", "word": "--chunk", "problem": "unknown flag", "nearest": None},
            ),
        },
    ),
    quiet("KV083", "P-26", probe={"parsers": "vLLM 0.32.0", "parsed": ()}),
    # What a log shows
    fires(
        "KV090",
        "P-27",
        log="INFO  skipping backend lmcache.c_ops: predicate false\n"
        "WARN  /dev/shm too small: need 68719476736 have 67108864, using pickle",
    ),
    quiet("KV090", "P-27", log="INFO loaded backend lmcache.c_ops"),
    fires("KV091", "P-36", log="ERROR Store task 7 to adapter 0 failed"),
    fires("KV091", "P-30", log="Cannot retrieve keys due to timeout"),
    quiet("KV091", "P-36", log="INFO Stored 4 keys"),
    fires("KV092", "P-20", log="No registered context for instance 7"),
    fires("KV092", "P-20", log="Bypassing LMCache for request 12"),
    fires("KV092", "P-30", log="Reaped GPU instance 11"),
    quiet("KV092", "P-20", log="Registered KV cache for GPU ID 1 with 4 layers"),
    fires("KV093", "P-18", log="Turning off hybrid kv cache manager because"),
    quiet("KV093", "P-18", log="GPU KV cache size: 412,160 tokens", settings=MANY),
    fires(
        "KV094",
        "P-18",
        settings=MANY,
        log="GPU KV cache size: 412,160 tokens\n---\nGPU KV cache size: 268,800 tokens",
    ),
    quiet(
        "KV094",
        "P-18",
        settings=MANY,
        log="GPU KV cache size: 412,160 tokens\n---\nGPU KV cache size: 409,000 tokens",
    ),
    fires("KV095", "P-26", **SPARK, probe={"lmcache_versions": {"a": "0.5.3", "b": "0.4.5"}}),
    quiet("KV095", "P-26", **SPARK, probe={"lmcache_versions": {"a": "0.5.3", "b": "0.5.3"}}),
    fires("KV096", "P-26", log="Initializing a V1 LLM engine (v0.41.0) with config: model='m'"),
    quiet("KV096", "P-26", log="Initializing a V1 LLM engine (v0.32.0) with config: model='m'"),
    fires("KV097", "P-29", log="torch.OutOfMemoryError: CUDA out of memory."),
    quiet("KV097", "P-29", log="INFO Available KV cache memory: 55.31 GiB"),
    fires("KV098", "P-28", log="RuntimeError: cudaIpcOpenMemHandle failed: invalid argument"),
    quiet("KV098", "P-28", log="RuntimeError: Connection refused"),
]
