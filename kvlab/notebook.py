"""Running notebooks as programs: parameters are checked before, and every cell after.

``execute`` runs a notebook with the interpreter that runs kvlab, whatever kernel its metadata
names. A notebook that does not reach its end raises NotebookFailed; its page is written all the
same, with a banner in the place of any result.
"""

from __future__ import annotations

import ast
import difflib
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from kvlab.errors import NotebookFailed, UsageError

Notebook = Any
"""An nbformat NotebookNode."""

MARK = "kvlab"
PARAMETERS = "parameters"
INJECTED = "injected-parameters"
PAPERMILL_MARKER = "papermill-error-cell-tag"
SHOWN_LINES = 20
"""A cell's log keeps this many of its last lines when it is longer than ``LONG_LINES``."""
LONG_LINES = 200
LONG_TEXT = 40_000
KERNEL_ARGUMENTS = ("-m", "ipykernel_launcher", "-f", "{connection_file}")


def find(name: str) -> Path:
    """The notebook of that name: of the checkout, or of the installed package."""
    package = Path(__file__).parent
    places = (package.parent / "notebooks", package / "notebooks")
    for place in places:
        path = place / f"{name}.ipynb"
        if path.is_file():
            return path
    known = sorted(p.stem for place in places for p in place.glob("*.ipynb"))
    raise UsageError(f"there is no notebook {name!r}", hint=f"known: {', '.join(known)}")


def execute(
    notebook: Path,
    output: Path,
    parameters: Mapping[str, Any],
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Path:
    """The path of the executed notebook; ``on_progress`` is told cells done and cells in all.

    Raises NotebookFailed, after writing ``output`` and its page beside it, when a cell failed, was
    never run, or the kernel died.
    """
    source = _read(notebook)
    given = {name: _plain(value) for name, value in parameters.items()}
    check_parameters(source, given, notebook.name)
    output.parent.mkdir(parents=True, exist_ok=True)
    died = _run(notebook, output, given, len(source.cells), on_progress)
    executed = _read(output)
    if died is not None:
        executed.cells[died].metadata[MARK] = {"died": True}
    for cell in executed.cells:
        _cap(cell)
    _write(executed, output)
    if died is None and _given(executed) != given:
        raise NotebookFailed(
            f"{notebook.name} did not receive its parameters", hint="update papermill"
        )
    found = failures(executed)
    if found:
        page = to_html(output, output.with_suffix(".html"))
        raise NotebookFailed(
            f"{notebook.name} did not run to its end: {describe(found[0])}",
            hint=f"see {page}",
        )
    return output


def check_parameters(notebook: Notebook, parameters: Mapping[str, Any], name: str) -> None:
    """Raise unless exactly one cell is tagged ``parameters`` and sets every name that is passed."""
    tagged = [cell for cell in notebook.cells if PARAMETERS in cell.metadata.get("tags", [])]
    if len(tagged) != 1:
        raise UsageError(
            f"{name} has {len(tagged)} cells tagged `parameters`",
            hint="tag exactly one cell, the one that sets the defaults",
        )
    known = _assigned(tagged[0].source)
    for parameter in parameters:
        if parameter not in known:
            near = difflib.get_close_matches(parameter, known, n=1)
            raise UsageError(
                f"{name} has no parameter {parameter!r}",
                hint=f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}",
            )


def failures(notebook: Notebook) -> list[dict[str, Any]]:
    """Every cell that failed or was never run: its number, and what happened; empty when all ran.

    The exit code of whatever ran the notebook is not asked: the cells themselves are.
    """
    found, number = [], 0
    for cell in notebook.cells:
        if {INJECTED, PAPERMILL_MARKER} & set(cell.metadata.get("tags", [])):
            continue  # not a cell of the notebook as its author knows it
        number += 1
        what = _failure(cell) if cell.cell_type == "code" and cell.source.strip() else None
        if what is not None:
            found.append({"cell": number, "what": what})
    return found


def describe(failure: Mapping[str, Any]) -> str:
    """One failure in plain English, for errors and logs."""
    words = {"died": "the kernel died", "never ran": "was not run"}
    return f"cell {failure['cell']}: {words.get(failure['what'], failure['what'])}"


def record(name: str, value: Any) -> None:
    """Show a value in a notebook and note it under a name, for whoever executed the notebook."""
    from IPython.display import publish_display_data

    publish: Any = publish_display_data
    publish({"text/plain": f"{name}: {value}"}, {MARK: {"value": {name: _plain(value)}}})


def value(executed: Path, name: str) -> Any:
    """What an executed notebook recorded under a name; None when it recorded nothing."""
    found = None
    for cell in _read(executed).cells:
        for output in cell.get("outputs", []):
            values = output.get("metadata", {}).get(MARK, {}).get("value", {})
            found = values.get(name, found)
    return found


def to_html(notebook: Path, output: Path, lang: str | None = None) -> Path:
    """The path of the page of an executed notebook: its text and outputs, no code.

    A report notebook gives the same page as the report itself, in the report's own language.
    """
    from kvlab import notebook_page

    output.parent.mkdir(parents=True, exist_ok=True)
    node = _read(notebook)
    html = notebook_page.of_notebook(node, failures(node), notebook.stem, lang)
    output.write_text(html, encoding="utf-8")
    return output


def _run(
    notebook: Path,
    output: Path,
    parameters: dict[str, Any],
    cells: int,
    on_progress: Callable[[int, int], None] | None,
) -> int | None:
    """Run every cell; the place of the cell in which the kernel died, or None."""
    import papermill
    from nbclient.exceptions import DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    started = 0
    log = output.with_suffix(".kernel.log")

    def start(cell: Notebook, cell_index: int) -> None:
        nonlocal started
        started = cell_index

    def executed(cell: Notebook, cell_index: int, execute_reply: Any) -> None:
        if on_progress is not None:
            on_progress(cell_index + 1, max(cells, cell_index + 1))

    with log.open("wb") as errors:
        try:
            papermill.execute_notebook(
                str(notebook),
                str(output),
                parameters=parameters,
                kernel_name="python3",
                language="python",
                progress_bar=False,
                kernel_manager_class=_own_kernel(errors),
                on_cell_start=start,
                on_cell_executed=executed,
            )
        except PapermillExecutionError:
            return None  # the cell that failed is in the output, which is read next
        except DeadKernelError:
            return started
    log.unlink()  # it holds at most what a kernel says while it is stopped
    return None


def _own_kernel(errors: IO[bytes]) -> type:
    """A kernel manager that starts the interpreter running now, with the kvlab running now.

    What the kernel process itself writes as errors, unlike what its cells print, goes to a file.
    """
    from jupyter_client.kernelspec import KernelSpec
    from jupyter_client.manager import AsyncKernelManager

    here = str(Path(__file__).parent.parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    spec = KernelSpec(
        argv=[sys.executable, *KERNEL_ARGUMENTS],
        display_name="kvlab",
        language="python",
        env={"PYTHONPATH": os.pathsep.join(paths)},
    )

    class OwnKernel(AsyncKernelManager):
        @property
        def kernel_spec(self) -> KernelSpec:
            return spec

        async def _async_pre_start_kernel(self, **options: Any) -> Any:
            return await super()._async_pre_start_kernel(**{"stderr": errors, **options})

        pre_start_kernel = _async_pre_start_kernel

    return OwnKernel


def _failure(cell: Notebook) -> str | None:
    if cell.metadata.get(MARK, {}).get("died"):
        return "died"
    for output in cell.get("outputs", []):
        if output.output_type == "error":
            return f"{output.ename}: {output.evalue}"
    papermill = cell.metadata.get("papermill", {})
    if papermill.get("exception"):
        return "failed"
    if papermill.get("status", "completed") != "completed" or cell.get("execution_count") is None:
        return "never ran"
    return None


def _assigned(source: str) -> set[str]:
    """The names that a cell assigns at its top level."""
    names: set[str] = set()
    for statement in ast.parse(source).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _given(notebook: Notebook) -> dict[str, Any]:
    """The parameters that the executed notebook says it ran with."""
    injected = [c for c in notebook.cells if INJECTED in c.metadata.get("tags", [])]
    return dict(notebook.metadata.get("papermill", {}).get("parameters", {})) if injected else {}


def _cap(cell: Notebook) -> None:
    """Keep the end of a long log; whole logs lie in the run folder."""
    for output in cell.get("outputs", []):
        if output.output_type == "stream":
            output.text = _tail(output.text)
        elif "text/plain" in output.get("data", {}):
            output.data["text/plain"] = output.data["text/plain"][:LONG_TEXT]


def _tail(text: str) -> str:
    lines = text.splitlines(keepends=True)
    if len(lines) > LONG_LINES:
        left_out = len(lines) - SHOWN_LINES
        text = f"[… +{left_out}]\n{''.join(lines[-SHOWN_LINES:])}"
    return text[-LONG_TEXT:]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _read(path: Path) -> Notebook:
    import nbformat

    read: Any = nbformat.read
    try:
        return read(path, as_version=4)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{path} cannot be read as a notebook: {error}", hint="give the path of an .ipynb file"
        ) from error


def _write(notebook: Notebook, path: Path) -> None:
    import nbformat

    write: Any = nbformat.write
    write(notebook, path)
