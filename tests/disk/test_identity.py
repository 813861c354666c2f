"""Whose records an L2 folder holds: foreign ones are refused in words (P-39)."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlab.disk import identity
from kvlab.disk.inventory import record_name, survey
from kvlab.errors import MeasurementError


def test_another_number_type_is_refused(tmp_path: Path) -> None:
    identity.write(tmp_path, {"kv_dtype": "fp8", "chunk": 784})
    with pytest.raises(MeasurementError, match="kv_dtype fp8 there, auto here") as caught:
        identity.refuse_foreign(tmp_path, {"kv_dtype": "auto", "chunk": 784})
    assert "chunk" not in caught.value.message
    assert caught.value.hint
    identity.refuse_foreign(tmp_path, {"kv_dtype": "fp8", "chunk": 784})


def test_hashes_that_differ_between_processes_are_refused() -> None:
    with pytest.raises(MeasurementError, match="builtin"):
        identity.refuse_unstable({"hash_algorithm": "builtin", "hash_seed": None})
    with pytest.raises(MeasurementError, match="PYTHONHASHSEED"):
        identity.refuse_unstable({"hash_algorithm": "builtin", "hash_seed": "random"})
    identity.refuse_unstable({"hash_algorithm": "builtin", "hash_seed": "0"})
    identity.refuse_unstable({"hash_algorithm": "blake3", "hash_seed": None})


@pytest.mark.parametrize("text", [None, "", "[1]", "{"])
def test_records_without_a_manifest_are_refused(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / identity.FILE).write_text(text, encoding="utf-8")
    with pytest.raises(MeasurementError, match="nothing says whose records"):
        identity.refuse_foreign(tmp_path, {"chunk_tokens": 224})


def test_the_manifest_is_no_odd_file(tmp_path: Path) -> None:
    (tmp_path / record_name("org/model")).write_bytes(b"x" * 8)
    identity.write(tmp_path, {"chunk_tokens": 224})
    found = survey(tmp_path)
    assert (found.files, found.odd) == (1, 0)
    assert identity.read(tmp_path) == {"chunk_tokens": 224}


def test_what_the_servers_do_not_say_is_unknown() -> None:
    assert set(identity.learnt({}).values()) == {None}
    said = identity.learnt({"versions": {"vllm": "1"}, "facts": {"hash_algorithm": "blake3"}})
    assert (said["vllm"], said["hash_algorithm"]) == ("1", "blake3")
