"""Commands on one experiment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.show import console, print_json, print_table, say
from harness.errors import CELL_FAILED, NOT_CERTIFIED, InputError, counted, shown
from harness.spec.load import find_spec, load_spec

Experiment = Annotated[
    str, typer.Argument(help="A name in experiments/, or a path to a YAML file.", metavar="EXP")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a spec key, e.g. budget.limit=1e11."),
]
Plugins = Annotated[
    list[Path] | None, typer.Option("--plugin", help="A Python file that defines arms.")
]
Results = Annotated[
    Path | None, typer.Option(help="Where results go. Default: results/<name of the spec>.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def register(app: typer.Typer) -> None:
    for command in (validate, plan, run, amend, status, audit, report, evaluate):
        app.command()(command)


def _context(
    experiment: str, overrides: list[str] | None, plugins: list[Path] | None, results: Path | None
) -> Any:
    from harness.experiment import open_context

    return open_context(find_spec(experiment), overrides or [], plugins or [], results)


def _recorded_context(
    experiment: str, overrides: list[str] | None, plugins: list[Path] | None, results: Path | None
) -> Any:
    """As ``_context``; a folder that has a lock is read by it, whatever options made it."""
    from dataclasses import replace

    from harness.amendments import applied
    from harness.lock import locked, read_lock
    from harness.spec.load import check_spec

    context = _context(experiment, overrides, plugins, results)
    lock = context.results / "spec.lock.yaml"
    if overrides or plugins or not lock.exists():
        return context
    spec = check_spec(applied(read_lock(lock))["spec"], str(lock))
    return locked(replace(context, spec=spec))


def _results_of(experiment: str, results: Path | None) -> Path:
    """The folder of an experiment's results; also a results folder itself."""
    path = results or Path(experiment)
    if results is None and not (path / "spec.lock.yaml").is_file():
        if len(Path(experiment).parts) > 1 and not experiment.endswith((".yaml", ".yml")):
            raise InputError(f"{experiment} is no results folder: it has no spec.lock.yaml")
        path = Path("results") / _name_of(experiment)
    if not path.is_dir():
        raise InputError(f"no results at {path}; run `harness run {experiment}` first")
    return path.resolve()


def _name_of(experiment: str) -> str:
    """What the experiment's spec calls itself, which names its results folder."""
    try:
        return load_spec(find_spec(experiment)).name
    except InputError:  # the spec is not here, or has changed; the results may still be
        return Path(experiment).stem


def validate(
    experiment: Experiment,
    set_: Overrides = None,
    plugin: Plugins = None,
    json: AsJson = False,
) -> None:
    """Check a spec: keys, types, arms, data files and their hashes; run nothing."""
    from harness.plan import make_plan

    context = _context(experiment, set_, plugin, None)
    made = make_plan(context)
    spec = context.spec
    if json:
        print_json({"valid": True, "name": spec.name, "spec": spec.model_dump(mode="json"),
                    "warnings": list(made.warnings)})  # fmt: skip
        return
    arms, seeds = counted(len(spec.arms), "arm"), counted(len(spec.seeds), "seed")
    say(f"{spec.name}: valid. {arms}, {seeds}.")
    for warning in made.warnings:
        say(f"note: {warning}")


def plan(
    experiment: Experiment,
    set_: Overrides = None,
    plugin: Plugins = None,
    jobs: Annotated[int, typer.Option(min=0, help="Cells run at once; 0 for one per core.")] = 0,
    json: AsJson = False,
) -> None:
    """Print what an experiment will cost before it runs: cells, tokens, FLOPs, memory, time."""
    from harness.plan import describe, make_plan

    made = make_plan(_context(experiment, set_, plugin, None), width=jobs or default_width())
    if json:
        print_json(made.to_json())
    else:
        describe(made, console)


def run(
    experiment: Experiment,
    set_: Overrides = None,
    plugin: Plugins = None,
    results: Results = None,
    jobs: Annotated[int, typer.Option(min=0, help="Cells run at once; 0 for one per core.")] = 0,
) -> None:
    """Run what is missing, then audit and report. Stopped at any moment, it goes on from there."""
    from harness.amendments import late
    from harness.cli.progress import View
    from harness.experiment import run_experiment
    from harness.lock import read_lock
    from harness.matrix import Matrix
    from harness.plan import make_plan
    from harness.store import write_json

    context = _context(experiment, set_, plugin, results)
    width = jobs or default_width(context.spec.runtime.device)
    made = make_plan(context, width=width)
    for warning in made.warnings:
        say(f"note: {warning}")
    say(f"{context.spec.name}: preparing {context.results}")

    def locked() -> None:
        if not (context.results / "plan.json").exists():
            write_json(context.results / "plan.json", made.to_json())
        say(f"locked; running with {width} process{'es' * (width != 1)}")
        if made_since := late(read_lock(context.results / "spec.lock.yaml")):
            times = counted(len(made_since), "time")
            say(f"note: amended {times} since the first cell began; what that touches is "
                "exploratory in the report")  # fmt: skip

    view = View(Matrix(context), width)
    with view:
        end = run_experiment(context, width, on_lock=locked, on_end=view.ended, on_tick=view.tick)
    for arm, name, error in end.failed:
        say(f"failed: {arm}/{name}: {error}")
    code = _conclude(context.results)
    if end.failed or end.missing:
        say(f"{counted(end.done, 'cell')} done, {len(end.failed)} failed, {end.missing} not run; "
            "the same command runs what is missing")  # fmt: skip
        raise typer.Exit(CELL_FAILED)
    raise typer.Exit(code)


def amend(
    experiment: Experiment,
    why: Annotated[str, typer.Option(help="Why the declaration changes; kept with it.")],
    set_: Overrides = None,
    plugin: Plugins = None,
    results: Results = None,
    json: AsJson = False,
) -> None:
    """Record that the spec now declares otherwise (margin, family, more seeds or arms): no cell
    changes, and what it touches is exploratory from then on."""
    from harness.lock import amend as append

    context = _context(experiment, set_, plugin, results)
    made = append(context, why)
    if json:
        print_json(made)
        return
    for path, change in made["changes"].items():
        say(f"{path}: {shown(change['new'])}, was {shown(change['old'])}")
    begun = made["cells_begun"]
    meaning = (
        f"{counted(begun, 'cell')} had begun: what this touches is exploratory"
        if begun
        else "no cell had begun: the declaration is still one made in advance"
    )
    say(f"amendment {made['number']} recorded in {context.results / 'spec.lock.yaml'}; {meaning}")


def _conclude(results: Path) -> int:
    """Certificate and report of what stands on disk."""
    from harness.certificate import write_certificate
    from harness.report import write_report

    certificate = write_certificate(results)
    written = write_report(results)
    state = "certified" if certificate.certified else "NOT certified"
    say(f"{state}: {results / 'certificate.json'}")
    for violation in certificate.violations[:10]:
        say(f"violation: {violation.message}")
    say(f"report: {written.html}")
    return 0 if certificate.certified else NOT_CERTIFIED


def default_width(device: str = "auto") -> int:
    """One cell per core, or per GPU where there is one."""
    if device != "cpu":
        import torch

        if torch.cuda.is_available():
            return torch.cuda.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def status(
    experiment: Experiment,
    set_: Overrides = None,
    plugin: Plugins = None,
    results: Results = None,
    json: AsJson = False,
) -> None:
    """Show the matrix: which cells are done, running, failed or waiting."""
    from harness.cli.status import matrix_rows

    rows = matrix_rows(_recorded_context(experiment, set_, plugin, results))
    if json:
        print_json(rows)
        return
    print_table(
        f"{experiment}: {sum(r['state'] == 'done' for r in rows)} of {len(rows)} cells done",
        ["arm", "cell", "state", "budget spent", "note"],
        [(r["arm"], r["cell"], r["state"], f"{r['share']:.0%}", r["note"]) for r in rows],
    )


def audit(experiment: Experiment, results: Results = None, json: AsJson = False) -> None:
    """Check from the records that the arms really were matched. Exit code 3 if not."""
    from harness.certificate import write_certificate

    certificate = write_certificate(_results_of(experiment, results))
    if json:
        print_json(certificate.to_json())
    else:
        print_table(
            "certified" if certificate.certified else "NOT certified",
            ["check", "result"],
            [(c.name, "holds" if c.passed else "VIOLATED") for c in certificate.checks],
        )
        for violation in certificate.violations:
            say(f"violation: {violation.message}")
    raise typer.Exit(0 if certificate.certified else NOT_CERTIFIED)


def report(experiment: Experiment, results: Results = None, json: AsJson = False) -> None:
    """Write tables, figures and report.html again, from the stored runs alone."""
    from harness.report import write_report

    written = write_report(_results_of(experiment, results))
    if json:
        print_json({"html": str(written.html), "files": [str(f) for f in written.files]})
    else:
        say(f"report: {written.html}")


def evaluate(
    experiment: Experiment,
    arm: Annotated[str, typer.Option(help="The arm whose trained weights are evaluated, or base.")],
    seed: Annotated[int, typer.Option(help="The training seed of the run.")] = 0,
    split: Annotated[str, typer.Option(help="validation, or test.NAME.")] = "",
    samples: Annotated[
        int, typer.Option(min=0, help="Completions per problem; 0 as in the spec.")
    ] = 0,
    set_: Overrides = None,
    plugin: Plugins = None,
    results: Results = None,
    json: AsJson = False,
) -> None:
    """Evaluate a finished run's weights anew; writes nothing into the results."""
    from harness.cli.evaluate_weights import evaluate_weights

    context = _recorded_context(experiment, set_, plugin, results)
    found = evaluate_weights(context, arm, seed, split, samples)
    if json:
        print_json(found)
        return
    rows = [(name, f"{value:.4f}") for name, value in found["metrics"].items()]
    drawn = counted(found["samples"], "sample")
    print_table(f"{arm} seed {seed} on {found['split']}, {drawn}", ["metric", "value"], rows)
