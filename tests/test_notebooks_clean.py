"""Notebooks as they are kept in git: parameters, calls, no definitions, no stored output."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_a_notebook_holds_parameters_and_calls(path: Path) -> None:
    notebook: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    tagged = [c for c in code if "parameters" in c["metadata"].get("tags", [])]
    assert len(tagged) == 1
    for cell in code:
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
        source = "".join(cell["source"])
        tree = compile(
            source, path.name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
        )
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        assert not any(isinstance(node, kinds) for node in ast.walk(tree))
    assert notebook["metadata"]["language_info"]["name"] == "python"


def test_there_are_notebooks() -> None:
    names = {path.stem for path in NOTEBOOKS}
    assert {"00_preflight", "10_two_round", "90_report_tr", "91_report_zh", "92_report_en"} <= names
