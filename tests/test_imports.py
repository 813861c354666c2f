"""Who may import whom: the measuring half and the reading half meet only in the run folder."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "kvlab"
SHARED = {
    *("errors", "units", "records", "rundir", "profile", "counters", "disk", "host", "gpu"),
    *("environment", "model", "plain_yaml", "progress", "agenda", "shapes", "sizing.model"),
}
MEASURING = {
    *("client", "sse", "prompts", "stack", "workloads", "experiment", "preflight"),
    *("storage", "runtime", "slow_mount", "slow_files", "fio", "loading"),
}
ENGINE = {"engine"}
WHOLE = {"cli", "reproduce", "notebook", "notebook_run", "batch"}
"""The command line and the notebooks' driver put the halves together."""
ENGINE_LIBRARIES = {"torch", "vllm", "lmcache", "transformers", "tokenizers"}


def modules() -> dict[Path, str]:
    """Every module of the package with the part that it belongs to."""
    return {
        path: part_of(path.relative_to(PACKAGE).with_suffix("").parts)
        for path in sorted(PACKAGE.rglob("*.py"))
        if path != PACKAGE / "__init__.py" and "notebooks" not in path.parts
    }


def part_of(names: Sequence[str]) -> str:
    """Part of a dotted name: the model arithmetic is shared, the rest of sizing is not."""
    return ".".join(names[:2]) if tuple(names[:2]) == ("sizing", "model") else names[0]


def imports(path: Path) -> set[str]:
    """Dotted names that a module imports anywhere, type-checking blocks included."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = ".".join(("kvlab", *path.relative_to(PACKAGE).parts[: -node.level]))
            found |= {f"{base}.{node.module or ''}.{alias.name}" for alias in node.names}
    return found


def parts(path: Path) -> set[str]:
    """The parts of kvlab that a module imports."""
    return {part_of(name.split(".")[1:]) for name in imports(path) if name.startswith("kvlab.")} - {
        "__version__"
    }


def reading() -> set[str]:
    return set(modules().values()) - SHARED - MEASURING - ENGINE - WHOLE


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    part = modules()[path]
    used = parts(path)
    if part in SHARED:
        allowed = SHARED | ({"engine"} if part == "engine" else set())
    elif part in MEASURING:
        allowed = SHARED | MEASURING
    elif part in ENGINE:
        allowed = ENGINE | {"errors"}
    elif part in WHOLE:
        allowed = set(modules().values()) - ENGINE
    else:
        allowed = SHARED | reading()
    assert used <= allowed, f"{part} must not import {sorted(used - allowed)}"


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_only_the_engine_part_imports_the_engine_libraries(path: Path) -> None:
    libraries = {name.split(".")[0] for name in imports(path)}
    assert modules()[path] == "engine" or not libraries & ENGINE_LIBRARIES


@pytest.mark.parametrize("command", [["-c", "import kvlab"], ["-m", "kvlab.cli", "--help"]])
def test_kvlab_and_its_help_import_nothing_heavy(command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *command], capture_output=True, text=True, check=True
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    heavy = {"matplotlib", "pandas", "docker", "scipy", "numpy", "papermill", "httpx", "pydantic"}
    assert not loaded & heavy


def test_there_is_no_import_cycle() -> None:
    """At load time, modules import each other without a circle."""
    graph = {
        ".".join(("kvlab", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in modules()
    }
    edges = {name: _loaded_with(path, graph) - {name} for name, path in graph.items()}
    while edges:
        leaves = {name for name, used in edges.items() if not used}
        assert leaves, f"circle among {sorted(edges)}"
        edges = {name: used - leaves for name, used in edges.items() if name not in leaves}


def _loaded_with(path: Path, graph: dict[str, Path]) -> set[str]:
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found & set(graph)
