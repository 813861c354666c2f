"""The planned flags against the parsers of the engine that is installed; nothing is started."""

from __future__ import annotations

from typing import Any

import pytest

from kvlab import environment, profile
from kvlab.preflight import parsers

pytestmark = pytest.mark.engine


def refused(name: str, **settings: Any) -> dict[str, tuple[str, str | None]]:
    found, whose = parsers.parse(profile.load(name, settings))
    assert "vLLM 0." in whose
    assert "LMCache 0." in whose
    return {one["word"]: (one["problem"], one["nearest"]) for one in found}


def test_every_flag_of_the_published_commands_is_known() -> None:
    assert environment.engine_python()
    assert refused("dgx-spark") == {}


def test_every_wrong_flag_is_named_with_the_nearest_valid_one() -> None:
    found = refused(
        "dgx-spark",
        **{
            "engine.flags.max-num-batchd-tokens": 4287,
            "engine.flags.kv-cache-dtype": "fp9",
            "engine.flags.speculative-config": "{not json",
            "cache.flags.l1-use-lazi": True,
        },
    )
    assert found["--max-num-batchd-tokens"] == ("unknown flag", "--max-num-batched-tokens")
    assert found["--l1-use-lazi"] == ("unknown flag", "--l1-use-lazy")
    assert "fp9" in found["--kv-cache-dtype"][0]
    assert "--speculative-config" in found
    assert len(found) == 4


def test_what_the_parser_takes_and_the_configuration_refuses_is_found() -> None:
    found = refused("embedded", **{"cache.l2.adapter": {"type": "no-such-adapter"}})
    ((problem, _),) = found.values()  # every other flag of the embedded engine is known
    assert "no-such-adapter" in problem
