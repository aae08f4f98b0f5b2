"""Commands on one experiment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.contexts import context as one_context
from harness.cli.contexts import contexts, recorded_contexts, results_of
from harness.cli.import_logs import audit_logs
from harness.cli.show import console, print_json, print_table, say
from harness.errors import BAD_INPUT, CELL_FAILED, NOT_CERTIFIED, InputError, counted, shown
from harness.spec.load import find_spec
from harness.store import SWEEP_FILE

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
OneCase = Annotated[str | None, typer.Option("--case", help="One case of a sweep; all without.")]
Audited = Annotated[
    list[str],
    typer.Argument(help="As of other commands; with --import, folders or logs.", metavar="EXP"),
]
Imported = Annotated[
    str | None,
    typer.Option("--import", metavar="LIBRARY", help="Whose logs these are: trl, verl, openrlhf."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def register(app: typer.Typer) -> None:
    for command in (validate, plan, run, amend, status, audit, report, evaluate):
        app.command()(command)


def validate(
    experiment: Experiment,
    set_: Overrides = None,
    plugin: Plugins = None,
    json: AsJson = False,
    case: OneCase = None,
) -> None:
    """Check a spec: keys, types, arms, data files and their hashes; run nothing."""
    from harness.plan import make_plan

    found = []
    for one in contexts(experiment, set_, plugin, None, case):
        made, spec = make_plan(one), one.spec
        found.append({"valid": True, "name": spec.name, "spec": spec.model_dump(mode="json"),
                      "warnings": list(made.warnings)})  # fmt: skip
        if not json:
            arms, seeds = counted(len(spec.arms), "arm"), counted(len(spec.seeds), "seed")
            say(f"{spec.name}: valid. {arms}, {seeds}.")
            for warning in made.warnings:
                say(f"note: {warning}")
    if json:
        print_json(found if len(found) > 1 else found[0])


def plan(
    experiment: Experiment,
    set_: Overrides = None,
    plugin: Plugins = None,
    jobs: Annotated[int, typer.Option(min=0, help="Cells run at once; 0 for one per core.")] = 0,
    pilot: Annotated[
        Path | None, typer.Option(help="A results folder that tells how much seeds differ.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit 2 if the verdict cannot be counted on.")
    ] = False,
    json: AsJson = False,
    case: OneCase = None,
) -> None:
    """Print what an experiment will cost before it runs, and whether it can show what it asks."""
    from harness.plan import describe, make_plan
    from harness.plan.describe import describe_power
    from harness.plan.power import design_power

    found = contexts(experiment, set_, plugin, None, case)
    if len(found) > 1:
        if pilot or strict:
            raise InputError("--pilot and --strict look at one case of a sweep; name it by --case")
        _plan_sweep(found, jobs or default_width(), json)
        return
    made = make_plan(found[0], width=jobs or default_width())
    sizes = {s.name.removeprefix("test."): s.problems for s in made.data if "test." in s.name}
    power = design_power(found[0].spec, sizes, pilot)
    if json:
        print_json(made.to_json() | {"power": power.to_json()})
    else:
        describe(made, console)
        describe_power(power, console)
    if strict and power.refusals:
        raise typer.Exit(BAD_INPUT)


def _plan_sweep(found: list[Any], width: int, json: bool) -> None:
    """A line per case, and the whole."""
    from harness.plan import make_plan

    made = [make_plan(context, width=width) for context in found]
    if json:
        print_json([one.to_json() for one in made])
        return
    rows = [
        (context.results.name, sum(c.cells for arm in one.arms for c in arm.cells),
         f"{one.time.hours:.2f}", f"{one.time.wall_hours[width]:.2f}")
        for context, one in zip(found, made, strict=True)
    ]  # fmt: skip
    hours, wall = (sum(float(row[i]) for row in rows) for i in (2, 3))
    rows.append(("all", sum(row[1] for row in rows), f"{hours:.2f}", f"{wall:.2f}"))
    unit = made[0].time.unit
    print_table(f"{counted(len(found), 'case')}; one in full with --case",
                ["case", "cells", unit, f"hours at {width} at once"], rows)  # fmt: skip


def run(
    experiment: Experiment,
    set_: Overrides = None,
    plugin: Plugins = None,
    results: Results = None,
    jobs: Annotated[int, typer.Option(min=0, help="Cells run at once; 0 for one per core.")] = 0,
    case: OneCase = None,
) -> None:
    """Run what is missing, then audit and report. Stopped at any moment, it goes on from there."""
    from harness.experiment import open_contexts, write_sweep

    file = find_spec(experiment)
    contexts = open_contexts(file, set_ or [], plugin or [], results, case)
    folder = write_sweep(file, set_ or [], results)
    codes = []
    for number, context in enumerate(contexts, 1):
        if folder is not None:
            say(f"case {number} of {len(contexts)}: {context.results.name}")
        codes.append(_run_one(context, jobs))
    if folder is not None:
        codes.append(_conclude_sweep(folder))
    raise typer.Exit(CELL_FAILED if CELL_FAILED in codes else max(codes))


def _run_one(context: Any, jobs: int) -> int:
    """Run one experiment to its report; the exit code."""
    from harness.amendments import late
    from harness.cli.progress import View
    from harness.experiment import run_experiment
    from harness.lock import read_lock
    from harness.matrix import Matrix
    from harness.plan import make_plan
    from harness.store import write_json

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
        return CELL_FAILED
    return code


def amend(
    experiment: Experiment,
    why: Annotated[str, typer.Option(help="Why the declaration changes; kept with it.")],
    set_: Overrides = None,
    plugin: Plugins = None,
    results: Results = None,
    json: AsJson = False,
    case: OneCase = None,
) -> None:
    """Record that the spec now declares otherwise (margin, family, more seeds or arms): no cell
    changes, and what it touches is exploratory from then on."""
    from harness.lock import amend as append

    context = one_context(experiment, set_, plugin, results, case)
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


def _conclude_sweep(folder: Path) -> int:
    """The pooled report of a sweep's cases."""
    from harness.report.sweep import write_sweep_report

    written = write_sweep_report(folder)
    say(f"report of the sweep: {written.html}")
    return 0


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
    case: OneCase = None,
) -> None:
    """Show the matrix: which cells are done, running, failed or waiting."""
    from harness.cli.status import matrix_rows

    found = recorded_contexts(experiment, set_, plugin, results, case)
    rows = []
    for context in found:
        name = {"case": context.results.name} if len(found) > 1 else {}
        rows += [name | row for row in matrix_rows(context)]
    if json:
        print_json(rows)
        return
    print_table(
        f"{experiment}: {sum(r['state'] == 'done' for r in rows)} of {len(rows)} cells done",
        [*(["case"] if len(found) > 1 else []), "arm", "cell", "state", "budget spent", "note"],
        [
            (
                *([r["case"]] if "case" in r else []),
                r["arm"],
                r["cell"],
                r["state"],
                f"{r['share']:.0%}",
                r["note"],
            )
            for r in rows
        ],
    )


def audit(
    experiment: Audited,
    results: Results = None,
    import_: Imported = None,
    json: AsJson = False,
) -> None:
    """Check from the records that the arms really were matched. Exit code 3 if not.

    With --import, the records are logs that another library wrote: they can contradict a
    comparison, and the audit says what they cannot show.
    """
    from harness.certificate import write_certificate

    if import_ is not None:
        raise typer.Exit(audit_logs(import_, experiment, results, json))
    if len(experiment) != 1:
        raise InputError("audit takes one experiment; logs of another library need --import")
    folders = results_of(experiment[0], results)
    found = {folder: write_certificate(folder) for folder in folders}
    if json:
        made = {folder.name: one.to_json() for folder, one in found.items()}
        print_json(made if len(folders) > 1 else made[folders[0].name])
    else:
        for folder, certificate in found.items():
            state = "certified" if certificate.certified else "NOT certified"
            print_table(
                f"{folder.name}: {state}" if len(folders) > 1 else state,
                ["check", "result"],
                [(c.name, "holds" if c.passed else "VIOLATED") for c in certificate.checks],
            )
            for violation in certificate.violations:
                say(f"violation: {violation.message}")
    whole = all(one.certified for one in found.values())
    raise typer.Exit(0 if whole else NOT_CERTIFIED)


def report(experiment: Experiment, results: Results = None, json: AsJson = False) -> None:
    """Write tables, figures and report.html again, from the stored runs alone."""
    from harness.report import write_report

    folders = results_of(experiment, results)
    written = [write_report(folder) for folder in folders]
    if json:
        made = [{"html": str(w.html), "files": [str(f) for f in w.files]} for w in written]
        print_json(made if len(made) > 1 else made[0])
    else:
        for one in written:
            say(f"report: {one.html}")
    if (folders[0].parent / SWEEP_FILE).is_file():
        _conclude_sweep(folders[0].parent)


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
    case: OneCase = None,
) -> None:
    """Evaluate a finished run's weights anew; writes nothing into the results."""
    from harness.cli.evaluate_weights import evaluate_weights

    one_context(experiment, set_, plugin, results, case)  # a sweep must say which case
    (context,) = recorded_contexts(experiment, set_, plugin, results, case)
    found = evaluate_weights(context, arm, seed, split, samples)
    if json:
        print_json(found)
        return
    rows = [(name, f"{value:.4f}") for name, value in found["metrics"].items()]
    drawn = counted(found["samples"], "sample")
    print_table(f"{arm} seed {seed} on {found['split']}, {drawn}", ["metric", "value"], rows)
