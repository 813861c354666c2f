"""Profiles: what is accepted, and in which words the rest is refused."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvlab import profile
from kvlab.errors import ProfileError


@pytest.mark.parametrize("name", profile.names())
def test_packaged_profiles_load_and_survive_a_round_trip(name: str) -> None:
    loaded = profile.load(name)
    assert loaded.name == name
    again = profile.from_dict(loaded.as_dict())
    assert again == loaded
    assert again.sha256 == loaded.sha256


def refused(overrides: dict[str, object], base: str = "embedded") -> ProfileError:
    with pytest.raises(ProfileError) as caught:
        profile.load(base, overrides)
    return caught.value


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        ({"workload.contxts": 3}, "unknown key 'workload.contxts'", "did you mean 'contexts'"),
        ({"wrkload": {}}, "unknown key 'wrkload'", "did you mean 'workload'"),
        ({"engine.zzzzzz": 1}, "unknown key", "known here"),
        ({"workload.contexts": "many"}, "workload.contexts", "docs/profiles.md"),
        ({"workload.contexts": 0}, "greater than or equal to 1", "docs/profiles.md"),
        ({"cache.chunk_tokens": 256}, "not a multiple of engine.block_tokens 224", "use 224"),
        ({"workload.context_tokens": 500}, "shorter than 4 chunks", "at least 897"),
        ({"workload.contexts": 4}, "fits too well in L0", "workload.contexts 15"),
        ({"workload.context_tokens": 2048}, "exceeds engine.max_model_len 2048", "shorten"),
        ({"engine.max_num_batched_tokens": 100}, "smaller than one block", "447"),
        ({"runtime": "docker"}, "needs a container section", "docs/profiles.md"),
        ({"model.preset": None}, "a built model needs a preset", "docs/profiles.md"),
        ({"schema": 2}, "has schema 2", "update kvlab"),
        ({"timeouts.round_s": float("inf")}, "timeouts.round_s", "docs/profiles.md"),
        ({"timeouts.round_s": float("nan")}, "timeouts.round_s", "docs/profiles.md"),
        ({"engine.flags.scale": float("nan")}, "no run folder can keep: NaN", "plain text"),
        ({"engine.flags.seed": 10**30}, "no run folder can keep", "plain text"),
        ({"engine.flags.name": "\ud83d"}, "no run folder can keep", "plain text"),
        ({"workload.contexts": 10**12}, "are more than the 1,000,000", "lower workload.contexts"),
        ({"workload": 3}, "workload", "docs/profiles.md"),
    ],
)
def test_a_wrong_value_is_refused_in_one_sentence_with_a_hint(
    overrides: dict[str, object], message: str, hint: str
) -> None:
    error = refused(overrides)
    assert message in error.message
    assert "\n" not in error.message
    assert error.hint is not None
    assert hint in error.hint
    assert error.exit_code == 2


def test_prefix_suffix_bounds_are_the_published_ones() -> None:
    published = profile.load("dgx-spark")
    work = published.workload
    assert work.prefix_tokens == 6400
    assert work.restorable_tokens(published.cache.chunk_tokens) == 4288
    identical = published.model_copy(
        update={"workload": work.model_copy(update={"shape": "identical"})}
    )
    assert identical.workload.restorable_tokens(2144) == 6432


def test_prefix_suffix_without_room_for_a_suffix_is_refused() -> None:
    error = refused({"workload.shape": "prefix_suffix", "workload.prefix_ratio": 0.98})
    assert "leave no suffix" in error.message


def test_prefix_shorter_than_a_chunk_is_refused() -> None:
    error = refused({"workload.shape": "prefix_suffix", "workload.prefix_ratio": 0.1})
    assert "no whole chunk of 224 tokens" in error.message


def test_l0_check_takes_the_size_that_a_log_states() -> None:
    chosen = profile.load("embedded")
    assert not list(profile.l0_complaints(chosen, 1000))
    assert "fits too well" in next(iter(profile.l0_complaints(chosen, 100_000)))


def test_overrides_are_parsed_as_yaml() -> None:
    assert profile.parse_override("workload.contexts=8") == ("workload.contexts", 8)
    assert profile.parse_override("cache.l2=null") == ("cache.l2", None)
    assert profile.parse_override("engine.flags.block-size=16") == ("engine.flags.block-size", 16)
    for text in ("no equals sign", "=3", "a b=3", "a={"):
        with pytest.raises(ProfileError):
            profile.parse_override(text)


def test_an_override_below_a_single_value_is_refused() -> None:
    assert "is a single value" in refused({"name.x": 1}).message


def test_a_file_extends_a_packaged_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "extends: embedded\nname: mine\nengine:\n  flags:\n    swap-space: 1\n", encoding="utf-8"
    )
    loaded = profile.load(path)
    assert loaded.name == "mine"
    assert loaded.engine.flags["swap-space"] == 1
    assert loaded.engine.flags["block-size"] == 32


def test_profiles_that_extend_each_other_in_a_circle_are_refused(tmp_path: Path) -> None:
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text(f"extends: {two}\n", encoding="utf-8")
    two.write_text(f"extends: {one}\n", encoding="utf-8")
    with pytest.raises(ProfileError, match="in a circle"):
        profile.load(one)


@pytest.mark.parametrize("text", ["a: [", "- 1\n- 2\n", "", "\x00"])
def test_files_that_are_no_profile_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "odd.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError):
        profile.load(path)


def test_unreadable_and_unknown_profiles_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for name in ("embeded", "zz", str(tmp_path / "none.yaml"), str(binary), "../embedded"):
        with pytest.raises(ProfileError) as caught:
            profile.load(name)
        assert caught.value.hint


def test_as_published_takes_every_deviation_back() -> None:
    ours = profile.load("dgx-spark")
    assert ours.engine.host == "127.0.0.1"
    published = profile.as_published(ours)
    assert published.engine.host == "0.0.0.0"
    assert published.deviations == []


yaml_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)


@given(
    key=st.sampled_from(
        ["workload", "engine.flags", "cache.l2", "model.vocabulary", "x", "thresholds", "name"]
    ),
    value=yaml_values,
)
def test_any_yaml_value_gives_a_profile_or_a_profile_error(key: str, value: object) -> None:
    with contextlib.suppress(ProfileError):
        assert profile.load("embedded", {key: value}).name


@given(st.text(max_size=200))
def test_any_text_as_a_file_gives_a_profile_error(text: str) -> None:
    with pytest.raises(ProfileError):
        profile._validate(_tree(text), "text")


def _tree(text: str) -> dict[str, object]:
    try:
        loaded = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return loaded if isinstance(loaded, dict) else {}


def test_overrides_are_those_of_the_profile_that_stands_in() -> None:
    few = {"workload.contexts": 4}  # too few for the embedded profile's L0, enough where it is read
    assert profile.load("embedded", few, experiment="parallel-read").workload.contexts == 4
    with pytest.raises(ProfileError, match="fits too well in L0"):
        profile.load("embedded", few, experiment="two-round")
