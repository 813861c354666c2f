"""The command line: thin, and the only place where errors are caught and shown.

Heavy modules are imported inside the commands, so that ``kvlab --help`` answers at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvlab import __version__
from kvlab.errors import KvlabError, UsageError

app = typer.Typer(
    name="kvlab",
    help="Measure what KV-cache offloading (LMCache) does for vLLM on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Profile = Annotated[str, typer.Argument(help="A profile's name, or the path of a YAML file.")]
RunPath = Annotated[Path, typer.Argument(help="A run folder below data/runs.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one setting; may be repeated."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Runs = Annotated[Path, typer.Option(help="Where run folders are kept.")]
L2Path = Annotated[Path, typer.Argument(help="The folder of an L2 adapter.")]
Pull = Annotated[
    bool, typer.Option("--pull", help="Fetch the profile's container image first; else never.")
]
RUNS = Path("data/runs")
MODELS = Path(os.environ.get("KVLAB_MODELS", "data/models"))
disk = typer.Typer(
    help="See and prune the records in an L2 folder; LMCache's fs adapter never frees space.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(disk, name="disk")


def main() -> None:
    """Run the command line and exit: 0 done, 1 a verdict or check failed, 2 wrong use."""
    try:
        app()
    except KvlabError as error:
        typer.echo(f"kvlab: {error}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, asyncio.CancelledError):
        typer.echo("kvlab: stopped; what was measured is kept, continue with --resume", err=True)
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except OSError as error:  # a full disk, a folder that cannot be written
        typer.echo(f"kvlab: {error.filename or 'the system'}: {error.strerror or error}", err=True)
        typer.echo("hint: check that the place exists and may be written", err=True)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvlab {__version__}")
        raise typer.Exit


@app.callback()
def kvlab(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Measure what KV-cache offloading (LMCache) does for vLLM on this machine."""


@app.command(epilog="Example: kvlab profiles --show embedded")
def profiles(
    show: Annotated[str | None, typer.Option(help="Print this profile, resolved.")] = None,
    as_json: Json = False,
) -> None:
    """List the profiles that come with kvlab, one line each."""
    import yaml

    from kvlab import profile

    if show is not None:
        resolved = profile.load(show).as_dict()
        typer.echo(
            _json(resolved) if as_json else yaml.safe_dump(resolved, sort_keys=False).rstrip()
        )
        return
    known = [profile.load(name) for name in profile.names()]
    if as_json:
        typer.echo(_json([{"name": p.name, "title": p.title} for p in known]))
        return
    for one in known:
        typer.echo(f"{one.name:<14} {one.runtime:<8} {one.title}")


@app.command(epilog="Example: kvlab check dgx-spark --log vllm.log --experiment restart")
def check(
    profile: Profile = "embedded",
    log: Annotated[
        list[Path] | None, typer.Option(help="A server's log that says more; may be repeated.")
    ] = None,
    host: Annotated[
        Path | None, typer.Option(help="Another machine's facts: the manifest.json of a run there.")
    ] = None,
    experiment: Annotated[
        list[str] | None,
        typer.Option(help="What is about to run; may be repeated. two-round by default."),
    ] = None,
    against_engine: Annotated[
        bool,
        typer.Option("--against-engine", help="Let the engine's own parsers read every flag."),
    ] = False,
    runs: Runs = RUNS,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Find what would stop or spoil a run of the profile here; exit 1 when there is an error."""
    from kvlab import experiment as experiments
    from kvlab import preflight
    from kvlab import profile as profiles_

    for name in experiment or ():
        experiments.refuse_unknown(name)
    only = experiment[0] if experiment and len(experiment) == 1 else None
    case = preflight.gather(
        profiles_.load(profile, _overrides(set_), experiment=only),
        logs=log or (),
        host=preflight.read_host(host) if host else None,
        experiments=experiment or ("two-round",),
        runs=runs,
        against_engine=against_engine,
    )
    findings = preflight.evaluate(case)
    if as_json:
        typer.echo(_json([finding.as_dict() for finding in findings]))
    else:
        typer.echo(preflight.text(case, findings), nl=False)
    if any(finding.severity == "error" for finding in findings):
        raise typer.Exit(1)


@app.command(epilog="Example: kvlab plan dgx-spark --shell --as-published")
def plan(
    profile: Profile = "embedded",
    scenario: Annotated[
        list[str] | None, typer.Option(help="baseline, lmcache or control; may be repeated.")
    ] = None,
    shell: Annotated[bool, typer.Option("--shell", help="Only the commands.")] = False,
    published: Annotated[
        bool, typer.Option("--as-published", help="Take the profile's deviations back.")
    ] = False,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Print exactly what would be started, in which order, and what is waited for."""
    import dataclasses

    from kvlab import profile as profiles_
    from kvlab.stack import plan as plans

    chosen = _load(profile, set_)
    if published:
        chosen = profiles_.as_published(chosen)
    scenarios = scenario or ["baseline", "lmcache"]
    if as_json:
        steps = [plans.plan(chosen, name) for name in scenarios]
        typer.echo(json.dumps([dataclasses.asdict(s) for s in steps], default=_plain, indent=2))
    elif shell:
        typer.echo(plans.shell_text(chosen, scenarios), nl=False)
    else:
        typer.echo(plans.describe(chosen, scenarios), nl=False)


@app.command(epilog="Example: kvlab run two-round embedded --repeats 3 --set workload.contexts=20")
def run(
    experiment: Annotated[
        str, typer.Argument(help="two-round, restart, object-groups, acceptance, shared-cache, …")
    ],
    profile: Profile = "embedded",
    repeats: Annotated[int | None, typer.Option(min=1, help="Repeats of each scenario.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Continue this interrupted run.")] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Compare the baseline with itself (A/A).")
    ] = False,
    runs: Runs = RUNS,
    pull: Pull = False,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Run one experiment, judge it, and print the verdict; exit 1 unless it is as it should be."""
    from kvlab import experiment as experiments
    from kvlab import summary, verdict

    overrides = _overrides(set_)
    if repeats is not None:
        overrides[f"experiments.{experiment.replace('-', '_')}.repeats"] = repeats
    if pull:
        _pull(profile, overrides)
    folder = experiments.run(
        experiment, profile, overrides=overrides, runs=runs, resume=resume, control=control
    )
    result = summary.conclude(folder)
    typer.echo(_json(result) if as_json else summary.text(result))
    typer.echo(f"run folder: {folder.path}", err=as_json)
    if not verdict.is_healthy(result):
        raise typer.Exit(1)


@app.command(epilog="Example: kvlab report data/runs/<run> --lang tr,zh,en --genre technical")
def report(
    run: Annotated[list[Path], typer.Argument(help="Run folders below data/runs.")],
    lang: Annotated[str, typer.Option(help="Languages, comma-separated: tr,zh,en.")] = "tr,zh,en",
    genre: Annotated[
        str | None,
        typer.Option(help="technical or article; by default technical, and article for zh."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the pages go.")] = Path("reports"),
    pdf: Annotated[
        bool, typer.Option("--pdf", help="Also as PDF, printed by a headless Chromium.")
    ] = False,
) -> None:
    """Render the reports again from the run folder alone."""
    from kvlab import printing
    from kvlab import report as reports
    from kvlab.report import index

    for result in reports.load_all(run):
        for language in _languages(lang):
            page = reports.write(result, out / result["run"], lang=language, genre=genre)
            typer.echo(str(page))
            if pdf:
                typer.echo(str(printing.to_pdf(page)))
    typer.echo(str(index.write(out, lang=_languages(lang)[0])))


@app.command(epilog="Example: kvlab verify data/runs/<run>; kvlab verify reports/report-en.html")
def verify(
    run: Annotated[Path, typer.Argument(help="A run folder, or the page of a report.")],
    runs: Runs = RUNS,
    as_json: Json = False,
) -> None:
    """Recompute every number of a run, or of a report's page, from raw records; exit 1 on any
    difference."""
    from kvlab import page_check
    from kvlab import verify as verification
    from kvlab.rundir import RunDir

    if run.suffix == ".html":
        differences = page_check.check(run, runs)
    else:
        differences = verification.verify(RunDir.open(run))
    if as_json:
        typer.echo(_json([str(difference) for difference in differences]))
    else:
        for difference in differences:
            typer.echo(str(difference))
        typer.echo(f"{run}: {len(differences)} differences" if differences else f"{run}: verified")
    if differences:
        raise typer.Exit(1)


@app.command(epilog="Example: kvlab export data/runs/<run> --format parquet --out tables")
def export(
    run: RunPath,
    fmt: Annotated[str, typer.Option("--format", help="csv or parquet.")] = "csv",
    out: Annotated[
        Path | None, typer.Option(help="Where the tables go; by default tables/<run>.")
    ] = None,
) -> None:
    """Write a run as tidy tables: requests, counters, events, figures."""
    from kvlab import export as exporting
    from kvlab.rundir import RunDir

    opened = RunDir.open(run)
    for path in exporting.write(opened, out or Path("tables") / opened.id, fmt):
        typer.echo(str(path))


@app.command(epilog="Example: kvlab compare data/runs/<one> data/runs/<other>")
def compare(
    first: RunPath,
    second: RunPath,
    different_hosts: Annotated[
        bool, typer.Option("--different-hosts", help="Compare although the hosts differ.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="Also as a page, at this path.")] = None,
    lang: Annotated[str, typer.Option(help="The page's language: tr, zh or en.")] = "en",
    as_json: Json = False,
) -> None:
    """Compare two runs with the statistics of one; refuses runs of different hosts."""
    from kvlab import compare as comparison
    from kvlab.rundir import RunDir

    result = comparison.compare(
        RunDir.open(first), RunDir.open(second), allow_different_hosts=different_hosts
    )
    typer.echo(_json(result) if as_json else comparison.text(result))
    if html is not None:
        from kvlab.report import comparison as page

        typer.echo(str(page.write(result, html, lang=lang)), err=as_json)


@app.command(epilog="Example: kvlab predict embedded --run data/runs/<run>")
def predict(
    profile: Profile = "embedded",
    run: Annotated[
        Path | None, typer.Option(help="A two-round run of the machine, for its times.")
    ] = None,
    models: Annotated[Path, typer.Option(help="Where built models lie.")] = MODELS,
    set_: Set = None,
    as_json: Json = False,
) -> None:
    """Say what the profile's workload would do on its machine, without starting anything."""
    from kvlab.sizing import answers

    found = answers.answer(_load(profile, set_), models=models, run=run)
    typer.echo(_json(found) if as_json else answers.text(found))


@app.command(epilog="Example: kvlab gates data/runs/<one> data/runs/<other> --json")
def gates(
    run: Annotated[list[Path], typer.Argument(help="Run folders of one machine.")],
    as_json: Json = False,
) -> None:
    """Judge the acceptance gates G1 to G4 from run folders; exit 1 when one fails."""
    from kvlab import gates as acceptance
    from kvlab.rundir import RunDir

    result = acceptance.judge([RunDir.open(path) for path in run])
    typer.echo(_json(result) if as_json else acceptance.text(result))
    if any(gate["status"] == acceptance.FAIL for gate in result["gates"]):
        raise typer.Exit(1)


@app.command(epilog="Example: kvlab reproduce embedded --lang tr,zh,en")
def reproduce(
    profile: Profile = "embedded",
    experiment: Annotated[
        list[str] | None,
        typer.Option(help="Only this one, after two-round; may be repeated. All by default."),
    ] = None,
    lang: Annotated[str, typer.Option(help="Languages of the reports.")] = "tr,zh,en",
    runs: Runs = RUNS,
    reports: Annotated[Path, typer.Option(help="Where the pages go.")] = Path("reports"),
    pull: Pull = False,
    set_: Set = None,
) -> None:
    """Run every notebook on the profile and write the reports; exit 1 unless all is well."""
    from kvlab import reproduce as reproduction

    if pull:
        _pull(profile, _overrides(set_))
    outcome = reproduction.reproduce(
        profile,
        experiments=experiment,
        overrides=_overrides(set_),
        languages=_languages(lang),
        runs=runs,
        reports=reports,
    )
    typer.echo(outcome.text())
    if not outcome.healthy:
        raise typer.Exit(1)


@app.command(epilog="Example: kvlab batch embedded-8 --dry-run")
def batch(
    sweep: Annotated[
        str, typer.Argument(help="A sweep's name, or the path of a YAML file.")
    ] = "embedded-8",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List cells, order, time and disk; start nothing.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option(help="Continue this batch at its first missing visit.")
    ] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Leave out cells that cannot run.")
    ] = False,
    until_ci: Annotated[
        float | None,
        typer.Option(help="Add passes until each speedup's 95 % interval is within this share."),
    ] = None,
    max_passes: Annotated[
        int | None, typer.Option(min=1, help="Passes at most with --until-ci; 10 by default.")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="A Dask scheduler: tcp://HOST:8786.")
    ] = None,
    batches: Annotated[Path, typer.Option(help="Where batch folders are kept.")] = Path(
        "data/batches"
    ),
    runs: Runs = RUNS,
    lang: Annotated[str, typer.Option(help="Languages of the page.")] = "tr,zh,en",
    as_json: Json = False,
) -> None:
    """Measure every cell of a sweep, a run folder each; exit 1 unless all of them finished."""
    from kvlab.batch import results, visits
    from kvlab.batch import sweep as sweeps
    from kvlab.batch.ledger import Ledger
    from kvlab.report import batch_page

    if dry_run:
        chosen = sweeps.load(sweep)
        told = visits.describe(chosen, visits.prospects(chosen, runs=runs))
        typer.echo(_json(told) if as_json else visits.text(told))
        if any(cell["problem"] for cell in told["cells"]):
            raise typer.Exit(1)
        return
    if resume is not None:
        outcome = visits.Outcome(Ledger.open(resume))
    else:
        outcome = visits.start(
            sweeps.load(sweep),
            batches=batches,
            runs=runs,
            keep_going=keep_going,
            until_ci=until_ci,
            max_passes=max_passes,
        )
    if scheduler is None:
        visits.carry_on(outcome, runs=runs)
    else:
        from kvlab.batch import cluster

        cluster.carry_on(outcome, scheduler, runs=runs)
    told = results.conclude(outcome.ledger)
    typer.echo(_json(told) if as_json else outcome.text())
    for path in results.write_tables(told, outcome.ledger.path):
        typer.echo(f"table: {path}", err=as_json)
    for language in _languages(lang):
        page = batch_page.write(told, outcome.ledger.path, lang=language)
        typer.echo(f"page: {page}", err=as_json)
    if not outcome.healthy:
        raise typer.Exit(1)


@app.command(epilog="Example: kvlab engine --target .venv-engine")
def engine(
    target: Annotated[Path, typer.Option(help="Where the environment goes.")] = Path(
        ".venv-engine"
    ),
) -> None:
    """Set up the engine environment: vLLM's CPU build and LMCache, in the locked versions."""
    from kvlab import environment

    environment.install_engine(target)


@app.command(epilog="Example: kvlab clean --dry-run")
def clean(
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be stopped and removed.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Stop what killed runs of kvlab left behind: processes with their memory, and containers."""
    from kvlab import runtime

    found = runtime.clean(dry_run=dry_run)
    if as_json:
        typer.echo(_json({**found, "dry_run": dry_run}))
        return
    processes, containers = found["processes"], found["containers"]
    for line in (*map(str, processes), *containers):
        typer.echo(f"  {line}")
    done = "would be stopped" if dry_run else "stopped"
    gone = "would be removed" if dry_run else "removed"
    typer.echo(f"{len(processes)} left-over processes {done}, {len(containers)} containers {gone}")


@disk.command(epilog="Example: kvlab disk inventory /mnt/nvme/lmcache-l2")
def inventory(path: L2Path, as_json: Json = False) -> None:
    """Count the records in an L2 folder: whose they are, how old, how large, and what is odd."""
    from kvlab.disk import listing

    told = listing.tell(path)
    typer.echo(_json(told) if as_json else listing.text(told))


@disk.command(epilog="Example: kvlab disk prune /mnt/nvme/lmcache-l2 --older-than 9d --yes")
def prune(
    path: L2Path,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Written longer ago: 36h, 9d, 2w.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Of this model.")] = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="The least recently used, until 20GB are left."),
    ] = None,
    odd: Annotated[
        bool, typer.Option("--odd", help="Also empty, short and old temporary files.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Remove them; without it, only list.")] = False,
    as_json: Json = False,
) -> None:
    """List the records that all given rules apply to, and remove them with --yes."""
    from kvlab.disk import listing

    outcome = listing.prune(path, older_than, model, keep, odd=odd, yes=yes)
    typer.echo(_json(outcome) if as_json else listing.pruned_text(outcome))


@disk.command(epilog="Example: kvlab disk watch /mnt/nvme/lmcache-l2 --every 10m")
def watch(
    path: L2Path,
    every: Annotated[str, typer.Option(metavar="TIME", help="Between two looks.")] = "1m",
    looks: Annotated[int | None, typer.Option(min=1, help="Stop after so many.")] = None,
    as_json: Json = False,
) -> None:
    """Print a line at every look: records, bytes, growth since the first look, days until full."""
    from kvlab.disk import listing

    for look in listing.watch(path, every, looks):
        typer.echo(json.dumps(look) if as_json else listing.look_text(look))


def _load(name: str, set_: list[str] | None) -> Any:
    from kvlab import profile

    return profile.load(name, _overrides(set_))


def _pull(name: str, overrides: dict[str, Any]) -> None:
    from kvlab import profile, runtime

    runtime.pull(profile.load(name, overrides))


def _overrides(set_: list[str] | None) -> dict[str, Any]:
    from kvlab import profile

    return dict(profile.parse_override(text) for text in set_ or ())


def _languages(text: str) -> list[str]:
    from kvlab import i18n

    languages = [language.strip() for language in text.split(",") if language.strip()]
    for language in languages:
        if language not in i18n.LANGUAGES:
            raise UsageError(
                f"there is no language {language!r}", hint=f"known: {', '.join(i18n.LANGUAGES)}"
            )
    if not languages:
        raise UsageError("no language is named", hint=f"known: {', '.join(i18n.LANGUAGES)}")
    return languages


def _json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def _plain(value: Any) -> Any:
    return value.model_dump() if hasattr(value, "model_dump") else str(value)


if __name__ == "__main__":
    main()
