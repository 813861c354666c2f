"""What a batch measures: its cells, from a grid or a list, and the order of the visits. Pure.

A cell is one combination of settings. A visit measures one cell once: one executed notebook, one
run folder. Cells that are compared are never measured in blocks: every pass visits all of them, in
an order of its own that follows from the sweep's seed.
"""

from __future__ import annotations

import difflib
import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvlab import plain_yaml, profile
from kvlab.errors import ProfileError, UsageError
from kvlab.profile import Profile
from kvlab.rundir import sha256_json

MAX_CELLS = 1000


class Sweep(BaseModel):
    """One file below ``kvlab/sweeps``, or of the user's own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_: Literal[1] = Field(alias="schema")
    name: str = Field(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=60)
    title: str
    profile: str
    experiment: str = "two-round"
    settings: dict[str, Any] = Field(default={}, alias="set")
    """Overrides of the profile that every cell shares, by dotted key."""
    grid: dict[str, list[Any]] = {}
    """Values by dotted key: every combination is a cell."""
    cells: list[dict[str, Any]] = []
    """Combinations by themselves, beside those of the grid."""
    passes: int = Field(default=1, ge=1, le=100)
    """How often each cell is measured."""
    seed: int = Field(default=0, ge=0)


@dataclass(frozen=True, slots=True)
class Cell:
    """A combination of settings; its number counts from 1 in the order of the file."""

    number: int
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The settings that tell it from the other cells, in a line."""
        return ", ".join(f"{key} {value}" for key, value in self.settings.items()) or "as it is"


@dataclass(frozen=True, slots=True)
class Visit:
    """One measurement of one cell."""

    turn: int
    """The pass that it belongs to, from 1."""
    cell: Cell

    @property
    def key(self) -> str:
        return f"{self.turn}/{self.cell.number}"


def load(name_or_path: str | Path) -> Sweep:
    """The sweep of that name or file; ProfileError when it is none."""
    name = str(name_or_path)
    origin, text = _text(name)
    try:
        tree = plain_yaml.load(text)
    except ValueError as error:
        raise ProfileError(
            f"{origin} is not valid YAML: {error}", hint="check the indentation there"
        ) from error
    if not isinstance(tree, dict):
        raise ProfileError(f"{origin} holds no sweep", hint="see docs/batches.md for one")
    return _validated(tree, origin)


def names() -> list[str]:
    """The names of the sweeps that come with kvlab."""
    folder = resources.files("kvlab") / "sweeps"
    return sorted(p.name.removesuffix(".yaml") for p in folder.iterdir())


def cells(sweep: Sweep) -> list[Cell]:
    """Every combination of the grid, then the listed ones."""
    keys = list(sweep.grid)
    combined = [
        dict(zip(keys, values, strict=True))
        for values in itertools.product(*sweep.grid.values())
        if keys
    ]
    found = [*combined, *sweep.cells] or [{}]
    return [Cell(number, settings) for number, settings in enumerate(found, start=1)]


def visits(sweep: Sweep, chosen: list[Cell]) -> list[Visit]:
    """The visits in their order: pass by pass, each in an order drawn from the seed."""
    return [visit for turn in range(1, sweep.passes + 1) for visit in one_pass(sweep, chosen, turn)]


def one_pass(sweep: Sweep, chosen: Sequence[Cell], turn: int) -> list[Visit]:
    """The visits of one pass, in an order that its number and the sweep's seed decide."""
    order = list(chosen)
    random.Random(f"{sweep.seed}/{turn}").shuffle(order)
    return [Visit(turn, cell) for cell in order]


def overrides(sweep: Sweep, cell: Cell) -> dict[str, Any]:
    """What a visit of the cell overrides in the sweep's profile."""
    return {**sweep.settings, **cell.settings}


def profile_of(sweep: Sweep, cell: Cell) -> Profile:
    """The cell's profile, checked whole; ProfileError names what is wrong with the cell."""
    return profile.load(sweep.profile, overrides(sweep, cell))


def sha256(sweep: Sweep) -> str:
    """The hash of everything that the sweep says."""
    return sha256_json(sweep.model_dump(by_alias=True))


def _validated(tree: dict[str, Any], origin: str) -> Sweep:
    try:
        sweep = Sweep.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ProfileError(f"{origin}: {place}: {first['msg']}", hint=_nearest(first)) from error
    count = sum(1 for _ in itertools.islice(_combinations(sweep), MAX_CELLS + 1))
    if count > MAX_CELLS:
        raise ProfileError(
            f"{origin} has more than {MAX_CELLS} cells", hint="split it into several sweeps"
        )
    empty = [key for key, values in sweep.grid.items() if not values]
    if empty:
        raise ProfileError(
            f"{origin}: the grid gives no value for {empty[0]}", hint="name one, or leave it out"
        )
    return sweep


def _combinations(sweep: Sweep) -> itertools.chain[Any]:
    return itertools.chain(itertools.product(*sweep.grid.values()), sweep.cells)


def _nearest(error: Any) -> str | None:
    if error["type"] != "extra_forbidden":
        return None
    known = [field.alias or name for name, field in Sweep.model_fields.items()]
    near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}"


def _text(name: str) -> tuple[str, str]:
    packaged = resources.files("kvlab") / "sweeps" / f"{name}.yaml"
    if name in names() and packaged.is_file():
        return f"sweep {name}", packaged.read_text(encoding="utf-8")
    path = Path(name)
    try:
        return str(path), path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        near = difflib.get_close_matches(name, names(), n=1)
        raise UsageError(
            f"there is no sweep {name!r}",
            hint=f"did you mean {near[0]!r}?"
            if near
            else f"known: {', '.join(names())}; or give a YAML file",
        ) from error
