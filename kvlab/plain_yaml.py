"""YAML from a file or a command line, read safely: plain values, bounded size and depth.

A few lines of YAML can stand for billions of values, and a deep one ends the parser's recursion.
Settings are small, so anything large is refused before it is used.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import yaml

MAX_CHARACTERS = 1_000_000
MAX_VALUES = 20_000
"""Values with every alias followed."""
MAX_DEPTH = 40


def load(text: str) -> Any:
    """The value that the text stands for; ValueError, in one line, when it is none or too large."""
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it has more than {MAX_CHARACTERS:,} characters")
    try:
        value = yaml.load(text, Loader=_Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(" ".join(str(error).split())) from error
    _bound(value)
    return value


MERGE = "tag:yaml.org,2002:merge"
"""The key ``<<``, under which YAML takes over another mapping."""


class _Loader(yaml.SafeLoader):
    """Safe YAML that is not too deep and has no key twice in one mapping."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise yaml.YAMLError(f"it is nested deeper than {MAX_DEPTH} levels")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key, _ in node.value:
            if key.tag == MERGE:
                continue
            name = self.construct_object(key, deep=True)
            if isinstance(name, Hashable) and name in seen:
                raise yaml.YAMLError(
                    f"the key {name!r} stands twice, again in line {key.start_mark.line + 1}"
                )
            if isinstance(name, Hashable):
                seen.add(name)
        return super().construct_mapping(node, deep=deep)


def _bound(value: Any) -> None:
    waiting, values = [value], 0
    while waiting:
        values += 1
        if values > MAX_VALUES:
            raise ValueError(f"it stands for more than {MAX_VALUES:,} values")
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, list | tuple | set):
            waiting += one
