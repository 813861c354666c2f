"""Run by the engine's Python: prints as JSON what the connector does to a small cache.

Two layers share one storage, as in the embedded model: a recurrent one, which holds its own conv
and SSM views, and an attention layer, which holds the registered tensor itself.
"""

import json
from types import SimpleNamespace

import torch
from lmcache.v1.platform.devices.cpu.shm import migrate_to_shm_and_wrap
from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma
from vllm.utils.func_utils import supports_kw

from kvlab.engine import connector

BLOCKS, PAGE = 4, 64


def make_cache():
    storage = torch.zeros(BLOCKS * PAGE, dtype=torch.int8)
    recurrent = storage.view(BLOCKS, 1, 1, PAGE)
    attention = storage.view(torch.bfloat16).view(BLOCKS, 1, 8, 4)
    pages = recurrent.squeeze(dim=(1, 2))
    states = (pages[:, :16].view(torch.bfloat16), pages[:, 16:].view(torch.bfloat16))
    registered = {"recurrent": recurrent, "attention": attention}
    return registered, {"recurrent": states, "attention": attention}


def refusal(call, *arguments):
    try:
        call(*arguments)
    except connector.ConnectorError as error:
        return str(error)
    return None


def written_state_reaches_lmcache():
    registered, bound = make_cache()
    connector.share_storages(registered, bound.values())
    connector.require_shared(registered, bound)
    bound["recurrent"][1][2].fill_(1.5)
    seen = migrate_to_shm_and_wrap(registered["recurrent"]).to_tensor()
    restored = seen[2, 0, 0, 16:].view(torch.bfloat16)
    seen[3, 0, 0, :16].view(torch.bfloat16).fill_(2.5)
    return bool((restored == 1.5).all()), bool((bound["recurrent"][0][3] == 2.5).all())


def stock_migration_is_noticed():
    registered, bound = make_cache()
    migrate_to_shm_and_wrap(registered["recurrent"])
    return refusal(connector.require_shared, registered, bound)


def padded_page_is_refused():
    padded = torch.zeros(BLOCKS, 1, 1, PAGE + 8, dtype=torch.int8)[..., :PAGE]
    return refusal(connector.share_storages, {"recurrent": padded}, [padded])


class Future:
    """A store that ends when somebody waits for it, or never."""

    def __init__(self, ends):
        self.ends, self.waited = ends, False

    def wait(self, timeout):
        assert timeout == connector.STORE_S
        self.waited = True
        return self.ends


def stores_are_awaited():
    """Whether the connector submits first, then waits for every store, also past one that hangs."""
    order = []
    one = object.__new__(connector.SharedStateMPConnector)
    futures = {"a": Future(ends=False), "b": Future(ends=True)}
    one.worker_adapter = SimpleNamespace(store_futures=futures)
    stock = connector.LMCacheMPConnector.wait_for_save
    connector.LMCacheMPConnector.wait_for_save = lambda self: order.append("submitted")
    try:
        one.wait_for_save()
    finally:
        connector.LMCacheMPConnector.wait_for_save = stock
    return order == ["submitted"] and all(future.waited for future in futures.values())


stored, restored = written_state_reaches_lmcache()
print(
    json.dumps(
        {
            "stored": stored,
            "restored": restored,
            "stock": stock_migration_is_noticed(),
            "padded": padded_page_is_refused(),
            "auto": refusal(connector.require_transfer_mode, {}),
            "driven": refusal(
                connector.require_transfer_mode, {connector.TRANSFER_MODE_KEY: "lmcache_driven"}
            ),
            "awaited": stores_are_awaited(),
            "hma": supports_hma(connector.SharedStateMPConnector),
            "signature": supports_kw(connector.SharedStateMPConnector, "kv_cache_config"),
        }
    )
)
