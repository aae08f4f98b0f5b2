"""Imports go down, the report needs no torch, and nothing outside ``arms/`` names an arm.

Read from the source with ``ast``: nothing is imported, so a half-written file cannot hide.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from harness.arms import ARMS

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "harness"

# Top to bottom. A module imports only from lines below its own, or from its own entry. A package
# stands for its modules, unless one of them is listed by itself.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("cli",),
    ("plan", "doctor"),
    ("experiment",),
    ("report",),
    ("certificate",),
    ("lock", "matrix"),
    ("cell", "tune"),
    ("footprint", "external"),
    ("train", "evaluate", "checkpoint", "grade_file"),
    ("record",),
    ("grading",),
    ("reward_training",),
    ("reward_model",),
    ("preferences",),
    ("collect",),
    ("loop",),
    ("learner",),
    ("optimizer",),
    ("data", "rewards"),
    ("preference_data",),
    ("samplers", "reference"),
    ("models", "external.offline_settings"),
    ("external.settings",),
    ("warmstart", "ledger", "job"),
    ("recipes", "artefact"),
    ("spec",),
    ("arms", "conformance", "labels", "amendments"),
    ("external.arm",),
    ("external.objective",),
    ("arm",),
    ("combinations",),
    ("parts", "tasks"),
    ("cost", "store", "knobs", "plugins", "types", "axes", "stats"),
    ("pairs",),
    ("schedule", "metrics", "tokenizer", "identity", "code"),
    ("errors",),
)
WITHOUT_TORCH = ("report", "store", "metrics", "certificate", "stats")
TORCH = {"torch", "transformers", "trl", "peft", "accelerate", "jaxtyping"}
# Heavy or foreign libraries, each behind one door.
ONLY_IMPORTER = {"optuna": ("tune",), "vllm": ("samplers",), "ray": ("schedule",)}

FILES = {
    ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
    if path != PACKAGE / "__init__.py"
}
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def entry(module: str) -> str | None:
    """The longest listed name that holds the module."""
    while module and module not in RANK:
        module = module.rpartition(".")[0]
    return module or None


@cache
def source(module: str) -> ast.Module:
    return ast.parse(FILES[module].read_text())


def imports(tree: ast.Module, *, late: bool = True) -> dict[str, int]:
    """What a file imports, with its line; ``late``: inside functions too. Not for type checkers."""
    found: dict[str, int] = {}
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if not late and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name: node.lineno for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports from harness in full"
            found |= {f"{node.module}.{alias.name}": node.lineno for alias in node.names}
        waiting += ast.iter_child_nodes(node)
    return found


def modules_of(module: str, *, late: bool = True) -> dict[str, int]:
    """The harness modules that a module imports."""
    found: dict[str, int] = {}
    for name, line in imports(source(module), late=late).items():
        if not name.startswith("harness."):
            continue
        inner = name.removeprefix("harness.")
        while inner and inner not in FILES:  # the last piece may be a class or a function
            inner = inner.rpartition(".")[0]
        if inner:
            found[inner] = line
    return found


def foreign(module: str, *, late: bool = True) -> set[str]:
    found = imports(source(module), late=late)
    return {name.partition(".")[0] for name in found} - {"harness"}


@pytest.mark.parametrize("module", FILES)
def test_imports_go_down(module: str):
    own = entry(module)
    assert own is not None, f"harness/{module} is in no layer: add it to LAYERS in this file"
    for imported, line in modules_of(module).items():
        other = entry(imported)
        if other is None or other == own:
            continue  # an unlisted file fails for itself
        assert RANK[other] > RANK[own], (
            f"{FILES[module]}:{line} imports harness.{imported}, which is not below {own!r}"
        )


def torch_path(module: str, seen: set[str] | None = None) -> str | None:
    """A chain of imports that loads torch, if there is one.

    The first module may not ask for torch even late, in a function; those it imports may, as
    loading them loads nothing more.
    """
    late = seen is None
    seen = seen if seen is not None else set()
    seen.add(module)  # each module is looked at once, whichever way it is reached
    if foreign(module, late=late) & TORCH:
        return module
    packages = {module.rpartition(".")[0]} & FILES.keys()  # importing a.b runs a/__init__.py too
    following = modules_of(module, late=late).keys() | packages
    for imported in sorted(following):
        if imported in seen:
            continue
        found = torch_path(imported, seen)
        if found is not None:
            return f"{module} -> {found}"
    return None


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_the_report_reaches_no_torch(name: str):
    for module in FILES:
        if entry(module) == name:
            assert torch_path(module) is None


@pytest.mark.parametrize("library", ONLY_IMPORTER)
def test_a_foreign_library_has_one_door(library: str):
    doors = {entry(module) for module in FILES if library in foreign(module)}
    assert doors <= set(ONLY_IMPORTER[library])


# Other libraries name some of their losses and trainers as we name arms.
LOSS_TYPES = (
    "external.objective", "external.settings", "certificate.imported.trl",
    "certificate.imported.verl", "certificate.imported.openrlhf", "certificate.imported.notes",
)  # fmt: skip


@pytest.mark.parametrize("module", FILES)
def test_no_arm_is_named_outside_arms(module: str):
    if entry(module) == "arms":
        return
    tree = source(module)
    for node in ast.walk(tree) if module not in LOSS_TYPES else ():
        if isinstance(node, ast.Constant) and node.value in ARMS:
            pytest.fail(f"{FILES[module]}:{node.lineno} names the arm {node.value!r}")
    named = [name for name in imports(tree) if name.startswith("harness.arms.")]
    built = [name for name in named if name.rpartition(".")[2].isupper()]
    groups = tuple(f"harness.arms.{n}" for n in ("ARMS", "EXTERNAL", "OFFLINE", "GOLD"))
    assert [n for n in built if n not in groups] == [], f"{module} imports an arm"


def test_the_checks_see_what_they_should():
    """The reader of imports finds late, aliased and nested ones."""
    text = (
        "from typing import TYPE_CHECKING\nimport torch.nn as n\n"
        "if TYPE_CHECKING:\n    import optuna\n"
        "def f():\n    from harness.cli import main as m\n"
    )
    early = {"typing.TYPE_CHECKING": 1, "torch.nn": 2}
    assert imports(ast.parse(text)) == early | {"harness.cli.main": 6}
    assert imports(ast.parse(text), late=False) == early
    assert entry("parts.kl") == "parts"
    assert entry("nowhere.at.all") is None
    assert torch_path("parts.kl") == "parts.kl"
    assert torch_path("arms.ppo") is not None
    assert torch_path("identity") is None
    for module in ("cost.shape", "cost.flops"):  # read by the plan and the report
        assert all("torch" not in foreign(m, late=False) for m in (module, "cost"))
