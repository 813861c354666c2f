"""What SECURITY.md promises and a look at the source can prove."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "kvlab"
SOURCES = sorted(PACKAGE.rglob("*.py"))
RUNS_DATA = {"eval", "exec", "compile", "__import__"}
UNSAFE_MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
SAFE_YAML = "plain_yaml.py"
"""The one place that reads YAML; what it loads with is tested in test_plain_yaml.py."""
UNSAFE_CALLS = {"os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def breaches(source: str) -> list[str]:
    """What a source does that could run data: a shell, a pickle, an evaluation, unsafe YAML."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.Call):
            name = _dotted(node.func)
            if name in RUNS_DATA | UNSAFE_CALLS:
                found.append(name)
            found += [
                f"{name}(shell=…)"
                for keyword in node.keywords
                if keyword.arg == "shell"
                and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
            ]
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_source_runs_data(path: Path) -> None:
    allowed = ["yaml.load"] if path.name == SAFE_YAML else []
    assert breaches(path.read_text(encoding="utf-8")) == allowed


@pytest.mark.parametrize(
    "source",
    [
        "eval(text)",
        "import pickle",
        "from pickle import loads",
        "subprocess.run(command, shell=True)",
        "subprocess.run(command, shell=wanted)",
        "os.system(text)",
        "yaml.load(text)",
    ],
)
def test_the_check_sees_what_it_is_for(source: str) -> None:
    assert breaches(source)
