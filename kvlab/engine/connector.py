"""The LMCache connector that keeps a hybrid model's recurrent state right on CPU.

Why the stock `LMCacheMPConnector` does not suffice (LMCache 0.5.6, vLLM 0.32.0, CPU build): in
`lmcache_driven` mode LMCache moves the cache into shared memory by re-pointing the tensor objects
that it is handed. Attention layers hold that very object, so they follow. A recurrent layer holds
views of its own (convolution window and state matrices), cut when vLLM bound the cache, and those
keep pointing at the old memory. vLLM then writes its states where LMCache does not look, and
LMCache stores and restores pages that nobody uses: every counter reports full hits and the restored
answers are wrong.

This connector moves the storage itself, before LMCache sees it, and re-points every layer's views
with it. LMCache afterwards finds the storage already shared and leaves it alone. With it, restored
answers equal cold ones to the last bit.

It also waits, at the end of each step, until LMCache has copied what the step computed. With
`--mamba-cache-mode align` vLLM gives the page of an older state away two steps later, and hands it
out first; LMCache submits its stores and returns, so that a state within a prompt could be stored
after another had been written over it. Only a prefix that returns with another end ever asks for
such a state.

Load it by name in vLLM's `--kv-transfer-config`:

    {"kv_connector": "SharedStateMPConnector",
     "kv_connector_module_path": "kvlab.engine.connector", "kv_role": "kv_both",
     "kv_connector_extra_config": {"lmcache.mp.mp_transfer_mode": "lmcache_driven", …}}
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvlab.errors import KvlabError

try:
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector
    from lmcache.v1.platform.devices.cpu.shm import migrate_to_shm_and_wrap
except ImportError as error:
    raise KvlabError(
        f"this LMCache does not have what kvlab's CPU connector builds on: {error}",
        hint="it fits LMCache 0.5.6 with vLLM 0.32.0, which `make engine` installs",
    ) from error

if TYPE_CHECKING:
    import torch

TRANSFER_MODE_KEY = "lmcache.mp.mp_transfer_mode"
TRANSFER_MODE = "lmcache_driven"
STORE_S = 10
"""A store takes milliseconds; a server that does not answer for so long will not hold vLLM up."""
logger = logging.getLogger(__name__)


class ConnectorError(KvlabError):
    """A cache that this connector cannot share, and why."""


class SharedStateMPConnector(LMCacheMPConnector):  # type: ignore[misc]
    """LMCache's multi-process connector, with every layer's views moved into shared memory."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Return nothing; afterwards layers and LMCache use the same shared memory."""
        require_transfer_mode(self._vllm_config.kv_transfer_config.kv_connector_extra_config)
        layers = self._vllm_config.compilation_config.static_forward_context
        share_storages(kv_caches, [layers[name].kv_cache for name in kv_caches])
        super().register_kv_caches(kv_caches)
        require_shared(kv_caches, {name: layers[name].kv_cache for name in kv_caches})

    def wait_for_save(self) -> None:
        """Return nothing, once LMCache has copied the pages of this step."""
        super().wait_for_save()
        for request, future in self.worker_adapter.store_futures.items():
            if not future.wait(timeout=STORE_S):
                logger.error(
                    "the store of request %s did not end within %d s: what LMCache keeps of it "
                    "may hold a later state",
                    request,
                    STORE_S,
                )


def require_transfer_mode(extra_config: Mapping[str, Any]) -> None:
    """Return nothing when LMCache is to move the pages itself, else raise ConnectorError."""
    mode = extra_config.get(TRANSFER_MODE_KEY)
    if mode != TRANSFER_MODE:
        raise ConnectorError(
            f"{TRANSFER_MODE_KEY} is {mode!r}, but only {TRANSFER_MODE!r} shares the cache on CPU",
            hint=f'set "{TRANSFER_MODE_KEY}": "{TRANSFER_MODE}" in kv_connector_extra_config',
        )


def share_storages(kv_caches: Mapping[str, torch.Tensor], bound: Iterable[Any]) -> None:
    """Return nothing; every registered tensor and every bound view then lies in shared memory.

    `bound` is what each layer holds: the registered tensor, another view of it, or several.
    """
    shared: dict[int, torch.UntypedStorage] = {}
    for name, tensor in kv_caches.items():
        address = tensor.untyped_storage().data_ptr()
        shared[address] = _move_to_shared_memory(name, tensor)
    for view in iterate_views(bound):
        storage = shared.get(view.untyped_storage().data_ptr())
        if storage is not None:
            view.set_(storage, view.storage_offset(), view.shape, view.stride())


def require_shared(kv_caches: Mapping[str, torch.Tensor], bound: Mapping[str, Any]) -> None:
    """Return nothing when each layer's views lie in its registered storage, else raise."""
    for name, tensor in kv_caches.items():
        address = tensor.untyped_storage().data_ptr()
        views = list(iterate_views([bound[name]]))
        if not views or any(view.untyped_storage().data_ptr() != address for view in views):
            raise ConnectorError(
                f"{name} does not use the cache that was registered with LMCache: "
                "what it restores would be wrong",
                hint="this connector fits the versions that `make engine` installs",
            )


def iterate_views(bound: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Return every tensor in what layers hold: a tensor, or a tuple or list of tensors."""
    for item in bound:
        if isinstance(item, tuple | list):
            yield from iterate_views(item)
        else:
            yield item


def _move_to_shared_memory(name: str, tensor: torch.Tensor) -> torch.UntypedStorage:
    try:
        migrate_to_shm_and_wrap(tensor)
    except (TypeError, ValueError) as error:
        raise ConnectorError(
            f"the cache of {name} cannot be shared: {error}",
            hint="on CPU the recurrent-state page must equal the attention page, without padding",
        ) from error
    return tensor.untyped_storage()
