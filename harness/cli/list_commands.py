"""Commands that say what there is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.show import print_groups, print_json, print_table, say
from harness.errors import BAD_INPUT, InputError, counted, suggest

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Plugins = Annotated[
    list[Path] | None, typer.Option("--plugin", help="A Python file that defines arms.")
]


def register(app: typer.Typer) -> None:
    app.command(name="list")(list_)
    app.command()(diff)
    app.command()(doctor)


BETWEEN = "between two arms"


def list_(
    what: Annotated[str, typer.Argument(help="arms, tasks, prompts or experiments.")],
    plugin: Plugins = None,
    json: AsJson = False,
) -> None:
    """List arms (by the axes in which they differ), tasks, prompts or experiments."""
    lists: dict[str, Callable[[list[Path]], list[dict[str, Any]]]]
    lists = {"arms": _arms, "tasks": _tasks, "prompts": _prompts, "experiments": _experiments}
    if what not in lists:
        raise InputError(f"list {what!r}: no such list.{suggest(what, lists)}")
    rows = lists[what](plugin or [])
    if json:
        print_json(rows)
    elif not rows:
        say(f"no {what}")
    elif what == "arms":
        _print_arms(rows)
    elif what == "experiments":
        _print_experiments(rows)
    else:
        columns = list(rows[0])
        print_table(what, columns, [[row[c] for c in columns] for row in rows])


def _arms(plugins: list[Path]) -> list[dict[str, Any]]:
    """Every arm, with the axes in short, the source, and its parts in full."""
    from harness.arm import parts
    from harness.arms import ARMS, EXTERNAL, GOLD, OFFLINE, list_arms
    from harness.labels import axes_of, family

    def shipped(name: str, origin: str) -> bool:
        """Or a plugin's; the rest are rungs and mixtures."""
        return name in ARMS | EXTERNAL | OFFLINE | GOLD or origin != "built-in"

    return [
        {
            "name": name,
            "origin": found.origin,
            "family": family(found.arm) if shipped(name, found.origin) else BETWEEN,
            "axes": axes_of(found.arm),
            "source": found.arm.source,
            "parts": parts(found.arm),
        }
        for name, found in list_arms(plugins).items()
    ]


COLUMNS = {
    "mean": ("mean",),
    "std": ("std",),
    "kl": ("kl",),
    "ratio": ("ratio",),
    "clip": ("clip",),
    "average": ("average",),
    "sampling": ("sampling", "exclude"),
    "shaping": ("shaping", "imitate", "reward"),
}


def _print_arms(rows: list[dict[str, Any]]) -> None:
    """One row an arm, under what it compares scores with; those of plugins under where they are."""
    from harness.labels import AXES

    groups: dict[str, list[list[str]]] = {}
    for row in rows:
        cells = [_cell(row["axes"], names) for names in COLUMNS.values()]
        heading = row["family"] if row["origin"] == "built-in" else row["origin"]
        groups.setdefault(heading, []).append([row["name"], *cells])
    groups = dict(sorted(groups.items(), key=lambda group: group[0] == BETWEEN))
    print_groups(["arm", *COLUMNS], groups)
    say("")
    for column, axes in COLUMNS.items():
        say(f"{column:<8}  {'; '.join(AXES[axis] for axis in axes if axis in AXES)}")
    arms = counted(len(rows), "arm")
    say(f"{arms}; their parts in full: --json; where two differ: harness diff A B")


def _cell(axes: dict[str, str], names: tuple[str, ...]) -> str:
    """An axis, and what a second one adds to it."""
    first, *others = (axes.get(name, "none") for name in names)
    added = [word for word in others if word != "none"]
    return ", ".join(added if added and first == "none" else [first, *added])


def _tasks(plugins: list[Path]) -> list[dict[str, Any]]:
    from harness.tasks import TASKS
    from harness.tasks.loading import data_root

    root = data_root()
    rows = []
    for task in TASKS.values():
        more = "and steps" if task.steps else "and turns" if task.environment else ""
        for split, info in task.splits.items():
            path = getattr(info, "path", None)
            here = bool(path and root and (root / path).is_file())
            rows.append({
                "task": task.name, "split": split, "problems": info.size,
                "file": str(path) if path else None,
                "here": "generated" if task.procedural else ("yes" if here else "no"),
                "judges": f"answers {more}".strip(),
            })  # fmt: skip
    return rows


def _prompts(plugins: list[Path]) -> list[dict[str, Any]]:
    from harness.tasks.prompts import PROMPTS

    return [
        {"name": p.name, "chat": p.chat, "version": p.version, "template": p.template}
        for p in PROMPTS.values()
    ]


def _experiments(plugins: list[Path]) -> list[dict[str, Any]]:
    """Every spec in ``experiments/``; of one that cannot be read, why."""
    from harness.spec.load import EXPERIMENTS, load_spec
    from harness.spec.sweep import load_sweep

    rows = []
    for path in sorted(EXPERIMENTS.glob("*.y*ml")):
        row = dict.fromkeys(("question", "arms", "model", "seeds", "cases", "error"))
        try:
            sweep = load_sweep(path)
            spec = sweep.cases[0].spec if sweep else load_spec(path)
        except InputError as error:
            row["error"] = " ".join(str(error).split())
        else:
            row |= {"question": spec.question, "arms": ", ".join(spec.arms),
                    "model": spec.model.name, "seeds": len(spec.seeds),
                    "cases": len(sweep.cases) if sweep else 1}  # fmt: skip
        rows.append({"name": path.stem, **row})
    return rows


def _print_experiments(rows: list[dict[str, Any]]) -> None:
    columns = [column for column in rows[0] if column != "error"]
    sound = [row for row in rows if row["error"] is None]
    if sound:
        print_table("experiments", columns, [[row[c] for c in columns] for row in sound])
    for row in rows:
        if row["error"] is not None:
            say(f"error: {row['error']}")


def diff(
    arm_a: Annotated[str, typer.Argument(metavar="ARM_A")],
    arm_b: Annotated[str, typer.Argument(metavar="ARM_B")],
    plugin: Plugins = None,
    json: AsJson = False,
) -> None:
    """Print where two arms differ, part by part."""
    from harness.arm import parts
    from harness.arms import find_arms
    from harness.identity import difference
    from harness.labels import brief

    if arm_a == arm_b:
        raise InputError(f"diff: {arm_a!r} twice; name two arms")
    a, b = find_arms([arm_a, arm_b], plugin or []).values()
    found = difference(parts(a.arm), parts(b.arm))
    if json:
        print_json({path: list(pair) for path, pair in found.items()})
        return
    order = [*parts(a.arm), *parts(b.arm)]
    paths = sorted(found, key=lambda path: order.index(path.partition(".")[0]))
    rows = [(path, *map(brief, found[path])) for path in paths]
    if not rows:
        say(f"{a.arm.name} and {b.arm.name} have the same parts")
        return
    title = counted(len(rows), "difference")
    print_table(title, ["where", a.arm.name, b.arm.name], rows)


def doctor(json: AsJson = False) -> None:
    """Check this machine: packages, data, folders. Exit code 2 if something needs mending."""
    from harness.doctor import diagnose

    checks = diagnose()
    if json:
        print_json([{"name": c.name, "ok": c.ok, "found": c.found, "mend": c.mend} for c in checks])
    else:
        rows = [("ok" if c.ok else "!!", c.name, c.found, c.mend) for c in checks]
        print_table("doctor", ["", "check", "found", "mend"], rows)
    raise typer.Exit(0 if all(c.ok for c in checks) else BAD_INPUT)
