"""Commands that say what there is."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer

from harness.cli.show import print_json, print_table, say
from harness.errors import BAD_INPUT, InputError, suggest

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Plugins = Annotated[
    list[Path] | None, typer.Option("--plugin", help="A Python file that defines arms.")
]


def register(app: typer.Typer) -> None:
    app.command(name="list")(list_)
    app.command()(diff)
    app.command()(doctor)


def list_(
    what: Annotated[str, typer.Argument(help="arms, tasks, prompts or experiments.")],
    plugin: Plugins = None,
    json: AsJson = False,
) -> None:
    """List arms (with where each comes from), tasks, prompts or experiments."""
    lists = {"arms": _arms, "tasks": _tasks, "prompts": _prompts, "experiments": _experiments}
    if what not in lists:
        raise InputError(f"list {what!r}: no such list.{suggest(what, lists)}")
    rows = lists[what](plugin or [])
    if json:
        print_json(rows)
    elif rows:
        columns = [key for key in rows[0] if key not in ("parts", "source")]
        print_table(what, columns, [[_plain(row[c]) for c in columns] for row in rows])
    else:
        say(f"no {what}")


def _arms(plugins: list[Path]) -> list[dict[str, Any]]:
    from harness.arm import PARTS, parts
    from harness.arms import list_arms

    rows = []
    for name, found in list_arms(plugins).items():
        tree = parts(found.arm)
        axes = {axis: _brief(tree[axis]) for axis in PARTS}
        rows.append({"name": name, "origin": found.origin} | axes
                    | {"source": found.arm.source, "parts": tree})  # fmt: skip
    return rows


def _brief(part: Any) -> str:
    """A part in few words: its class and the settings that are not None."""
    if part is None or part == []:
        return "-"
    if isinstance(part, list):
        return " + ".join(_brief(p) for p in part)
    hidden = ("part", "version", "module")
    inner = [
        f"{k}={_brief(v) if isinstance(v, dict) else v}"
        for k, v in part.items()
        if k not in hidden and v is not None
    ]
    return part["part"] + (f"({', '.join(inner)})" if inner else "")


def _plain(cell: Any) -> Any:
    """A part's class without its settings, so that a row of axes fits a screen."""
    return re.sub(r"\([^()]*(\([^()]*\))*[^()]*\)", "", cell) if isinstance(cell, str) else cell


def _tasks(plugins: list[Path]) -> list[dict[str, Any]]:
    from harness.tasks import TASKS
    from harness.tasks.loading import data_root

    root = data_root()
    rows = []
    for task in TASKS.values():
        for split, info in task.splits.items():
            path = getattr(info, "path", None)
            here = bool(path and root and (root / path).is_file())
            rows.append({
                "task": task.name, "split": split, "problems": info.size,
                "file": str(path) if path else None,
                "here": "generated" if task.procedural else ("yes" if here else "no"),
                "judges": "answers and steps" if task.steps else "answers",
            })  # fmt: skip
    return rows


def _prompts(plugins: list[Path]) -> list[dict[str, Any]]:
    from harness.tasks.prompts import PROMPTS

    return [
        {"name": p.name, "chat": p.chat, "version": p.version, "template": p.template}
        for p in PROMPTS.values()
    ]


def _experiments(plugins: list[Path]) -> list[dict[str, Any]]:
    from harness.spec.load import EXPERIMENTS, load_spec

    rows = []
    for path in sorted(EXPERIMENTS.glob("*.y*ml")):
        spec = load_spec(path)
        rows.append({"name": path.stem, "question": spec.question, "arms": ", ".join(spec.arms),
                     "model": spec.model.name, "seeds": len(spec.seeds)})  # fmt: skip
    return rows


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

    if arm_a == arm_b:
        raise InputError(f"diff: {arm_a!r} twice; name two arms")
    a, b = find_arms([arm_a, arm_b], plugin or []).values()
    found = difference(parts(a.arm), parts(b.arm))
    if json:
        print_json({path: list(pair) for path, pair in found.items()})
        return
    rows = [(path, _shown(left), _shown(right)) for path, (left, right) in found.items()]
    print_table(f"{len(rows)} differences", ["where", a.arm.name, b.arm.name], rows)


def _shown(value: Any) -> str:
    return _brief(value) if isinstance(value, (dict, list)) or value is None else str(value)


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
