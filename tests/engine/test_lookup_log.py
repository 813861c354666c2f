"""The lookup log as LMCache itself writes it is what kvlab reads."""

import subprocess

import pytest

from kvlab import environment
from kvlab.sizing import trace

pytestmark = pytest.mark.engine

WRITER = """
import sys
from lmcache.v1.mp_observability.event import Event, EventType
from lmcache.v1.mp_observability.subscribers.logging import lookup_hash

log = lookup_hash.LookupHashLoggingSubscriber(
    lookup_hash.LookupHashLogConfig(output_dir=sys.argv[1])
)
(on_lookup,) = log.get_subscriptions().values()
for at_s, chunks in ((1000.0, 2), (1001.5, 3)):
    detail = {
        "request_id": "r", "model_name": "m", "chunk_size": 224, "seq_len": 224 * chunks + 1,
        "dtypes": ["bfloat16"], "shapes": [[2, 224, 80]],
        "chunk_hashes": [bytes([number]) * 32 for number in range(chunks)],
    }
    on_lookup(Event(event_type=EventType.MP_LOOKUP, timestamp=at_s, metadata=detail))
log.shutdown()
"""


def test_lmcaches_own_log_is_read(tmp_path):
    command = [str(environment.engine_python()), "-c", WRITER, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, second = trace.lookup_log([tmp_path], model="m")
    assert [(one.tokens, len(one.keys), one.at_s) for one in (first, second)] == [
        (449, 2, 0.0),
        (673, 3, 1.5),
    ]
    assert list(second.keys)[:2] == list(first.keys)
