import json
import subprocess
from pathlib import Path

import pytest

from kvlab import environment

pytestmark = pytest.mark.engine

PROBE = Path(__file__).with_name("probe_connector.py")
OTHER_LMCACHE = """
import sys, types
sys.modules["lmcache.integration.vllm.lmcache_mp_connector"] = types.ModuleType("other")
import kvlab.engine.connector
"""


def run_engine_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(environment.engine_python()), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def probe() -> dict:
    done = run_engine_python(str(PROBE))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_state_that_a_layer_writes_is_where_lmcache_looks_and_back(probe):
    assert probe["stored"]
    assert probe["restored"]


def test_a_cache_that_only_lmcache_moved_is_refused(probe):
    assert "recurrent does not use the cache" in probe["stock"]


def test_a_padded_page_is_refused_with_the_remedy(probe):
    assert "the cache of recurrent cannot be shared" in probe["padded"]
    assert "hint: on CPU the recurrent-state page must equal the attention page" in probe["padded"]


def test_a_step_ends_when_its_stores_have(probe):
    assert probe["awaited"]


def test_another_transfer_mode_is_refused(probe):
    assert "lmcache_driven" in probe["auto"]
    assert probe["driven"] is None


def test_vllm_accepts_the_class(probe):
    assert probe["hma"]
    assert probe["signature"]


def test_another_lmcache_is_refused_in_a_sentence():
    done = run_engine_python("-c", OTHER_LMCACHE)
    assert done.returncode != 0
    assert "this LMCache does not have what kvlab's CPU connector builds on" in done.stderr
    assert "hint: it fits LMCache 0.5.6 with vLLM 0.32.0" in done.stderr
