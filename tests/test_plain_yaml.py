"""YAML that is safe to read: no objects, no bombs, no keys that hide one another."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvlab import plain_yaml, profile
from kvlab.errors import ProfileError

BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
)
WRONG = {
    "bomb": (BOMB, "stands for more than"),
    "circle": ("a: &a [*a]", "stands for more than"),
    "deep": ("a: " + "[" * 100_000, "nested deeper"),
    "deep mapping": ("{a: " * 5000, "nested deeper"),
    "long": ("a: " + "x" * 2_000_000, "characters"),
    "twice": ("a: 1\nb: 2\na: 3", "stands twice, again in line 3"),
    "object": ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "giant integer": ("a: " + "9" * 5000, "integer string"),
    "no date": ("a: 2026-13-45", "month"),
    "tab": ("a:\n\t- b", "cannot start any token"),
}


@pytest.mark.parametrize(("text", "says"), WRONG.values(), ids=WRONG)
def test_what_is_unsafe_is_one_sentence(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        plain_yaml.load(text)
    assert "\n" not in str(caught.value)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ProfileError, match="not valid YAML"):
        profile.load(path)


def test_merged_mappings_are_read() -> None:
    text = "base: &base {a: 1, b: 2}\nmine: {<<: *base, b: 3}"
    assert plain_yaml.load(text)["mine"] == {"a": 1, "b": 3}


@given(st.text(max_size=200))
def test_any_text_is_read_as_safe_yaml_reads_it_or_is_a_value_error(text: str) -> None:
    try:
        value = plain_yaml.load(text)
    except ValueError:
        return
    assert repr(value) == repr(yaml.safe_load(text))


@given(
    st.recursive(st.integers() | st.text(max_size=5), lambda inner: st.lists(inner), max_leaves=9)
)
def test_what_is_safe_is_read_as_it_is(value: object) -> None:
    text = yaml.safe_dump(value, allow_unicode=True)
    assert plain_yaml.load(text) == yaml.safe_load(text)
