"""Real tasks: rows, keys, splits and both sources; needs the data folder where marked."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import datasets
import pytest

from harness.errors import InputError
from harness.tasks import TASKS
from harness.tasks import math as math_task
from harness.tasks.loading import data_root, load_problems
from harness.tasks.math_answers import ALSO_RIGHT, MENDS, join_thousands, last_box
from harness.tasks.source import content_key, words
from harness.tasks.task import problems_sha256

ROOT = data_root()
needs_data = pytest.mark.skipif(
    ROOT is None or not (ROOT / "math" / "train.jsonl").is_file(),
    reason="no local data (set HARNESS_DATA to the data folder)",
)
STORED = [(name, split) for name, task in TASKS.items() if task.parse for split in task.splits]


def rows_of(path: str) -> list[dict]:
    assert ROOT is not None
    return [json.loads(line) for line in (ROOT / path).read_bytes().split(b"\n") if line]


# --- what a split holds -------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize(("task", "split"), STORED)
def test_every_split_has_its_size_unique_ids_and_the_checked_file(task, split):
    info = TASKS[task].splits[split]
    loaded = load_problems(task, split, source="local")
    assert len(loaded.problems) == info.size
    assert len({p.id for p in loaded.problems}) == info.size
    assert loaded.file_sha256 == info.sha256
    assert loaded.sha256 == problems_sha256(loaded.problems)
    assert all(p.question.strip() and p.answer.strip() for p in loaded.problems)


def test_sizes_are_those_of_the_published_data_sets():
    sizes = {f"{t} {s}": TASKS[t].splits[s].rows for t, s in STORED}
    assert sizes["gsm8k train_full"] == 7473
    assert sizes["gsm8k test"] == 1319
    assert sizes["math train_full"] == 7500
    assert sizes["math test"] == 5000
    assert sizes["math math500"] == 500
    assert [sizes[f"aime{y} test"] for y in (24, 25, 26)] == [30, 30, 30]
    assert sizes["amc23 test"] == 40


@needs_data
@pytest.mark.parametrize("task", ["gsm8k", "math"])
def test_train_and_validation_part_the_training_file(task):
    full, train, held = (
        load_problems(task, s).problems for s in ("train_full", "train", "validation")
    )
    left_out = set(TASKS[task].not_for_training)
    assert {p.id for p in train}.isdisjoint(p.id for p in held)
    assert {p.id for p in train} | {p.id for p in held} | left_out == {p.id for p in full}
    # Not even in other punctuation is a validation problem trained on.
    texts = {" ".join(words(p.question)) for p in train}
    assert not [p.id for p in held if " ".join(words(p.question)) in texts]


@needs_data
def test_math_is_not_in_subject_order_and_math500_lies_in_test():
    first = load_problems("math", "test", limit=200).problems
    assert len({p.subject for p in first}) == 7
    test = {p.id: p for p in load_problems("math", "test").problems}
    assert all(test[p.id] == p for p in load_problems("math", "math500").problems)


@needs_data
def test_math_has_level_and_subject():
    levels = Counter(p.level for p in load_problems("math", "train_full").problems)
    assert levels == {
        "Level 1": 564, "Level 2": 1348, "Level 3": 1592, "Level 4": 1690, "Level 5": 2304, None: 2,
    }  # fmt: skip
    problems = load_problems("math", "math500").problems
    assert sum(p.level == "Level 5" for p in problems) == 134
    assert Counter(p.subject for p in problems)["Precalculus"] == 56


# --- keys ---------------------------------------------------------------------------------------


@needs_data
@pytest.mark.parametrize("file", ["train", "test"])
def test_math_keys_are_the_last_box_but_for_the_listed_mends(file):
    rows = rows_of(f"math/{file}.jsonl")
    loaded = {p.id.rsplit("/", 1)[1]: p for p in load_problems("math", f"{file}_full"
              if file == "train" else file).problems}  # fmt: skip
    mended = set()
    for row in rows:
        name = row["unique_id"].removesuffix(".json")
        problem = loaded[content_key(row["problem"], row["solution"])]
        assert last_box(row["solution"]) == (row["answer"] or "")
        if name in MENDS:
            mend = MENDS[name]
            assert mend.key == problem.id.rsplit("/", 1)[1]
            assert (row["answer"] or "", problem.answer) == (mend.found, mend.answer)
            mended.add(name)
        else:
            assert problem.answer == join_thousands(row["answer"])
    assert mended == {name for name in MENDS if name.startswith(file)}


@needs_data
def test_mends_agree_with_the_listed_caveats():
    """Four rows differ on purpose: they ask for one of two values, or the aside was boxed last."""
    caveats = {r["unique_id"][:-5]: r for r in rows_of("math/answer_caveats.jsonl")}
    differing = {
        "test/intermediate_algebra/25", "test/intermediate_algebra/702",
        "test/intermediate_algebra/747", "train/precalculus/982",
    }  # fmt: skip
    for name, caveat in caveats.items():
        key = MENDS[name].answer if name in MENDS else caveat["answer_field"]
        assert (key == caveat["likely_answer"]) == (name not in differing), name
    assert differing <= set(ALSO_RIGHT)


@needs_data
def test_notes_count_what_was_mended():
    train = load_problems("math", "train_full").notes
    test = load_problems("math", "test").notes
    assert "2 keys mended: empty box" in train
    assert "12 keys mended: one box per part" in train
    assert "2 problems have no level in the source" in train
    assert "8 keys mended: one box per part" in test
    assert "3 keys mended: last box is not the answer" in test
    assert not [n for n in train + test if "NOT mended" in n or "differs" in n]
    assert load_problems("gsm8k", "test").notes == ("14 answers lost their thousands separators",)
    assert any("train/geometry/175904bb873a" in n for n in load_problems("math", "train").notes)


@needs_data
def test_gsm8k_keys_are_integers_and_solutions_hold_no_calculator_notes():
    for split in ("train_full", "test"):
        problems = load_problems("gsm8k", split).problems
        assert all(re.fullmatch(r"-?\d+", p.answer) for p in problems)
        assert not [p.id for p in problems if "<<" in (p.solution or "")]
        assert all((p.solution or "").replace(",", "").endswith(f"#### {p.answer}")
                   for p in problems)  # fmt: skip
    assert load_problems("gsm8k", "test", limit=1).problems[0].answer == "18"


@pytest.mark.parametrize(
    ("answer", "joined"),
    [
        (r"10,\!080", "10080"),
        (r"11,\! 111,\! 111,\! 100", "11111111100"),
        ("1{,}008{,}016", "1008016"),
        (r"\dfrac{1}{29,\!322,\!216}", r"\dfrac{1}{29322216}"),
        ("(100,101)", "(100,101)"),
        ("81, 256", "81, 256"),
        ("70,110", "70,110"),
    ],
)
def test_join_thousands_joins_separators_and_no_lists(answer, joined):
    assert join_thousands(answer) == joined


@pytest.mark.parametrize(
    ("solution", "box"),
    [
        (r"so $\boxed{\frac{1}{2}}$", r"\frac{1}{2}"),
        (r"$\boxed{1}$ then $\boxed{\{2,3\}}$.", r"\{2,3\}"),
        (r"is $\boxed 2$.", "2"),
        (r"\fbox{7}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{never closed", None),
        ("nothing", None),
    ],
)
def test_last_box(solution, box):
    assert last_box(solution) == box


# --- the hub gives the same problems ------------------------------------------------------------

SLUGS = {
    "Algebra": "algebra", "Counting & Probability": "counting_and_probability",
    "Geometry": "geometry", "Intermediate Algebra": "intermediate_algebra",
    "Number Theory": "number_theory", "Prealgebra": "prealgebra", "Precalculus": "precalculus",
}  # fmt: skip


def hub_rows(repo: str, config: str | None, split: str) -> list[dict]:
    """Rows with the columns, order and answer forms of the hub data sets, from the local files."""
    if repo == "openai/gsm8k":
        assert config == "main"
        return rows_of(f"gsm8k/{split}.jsonl")
    if repo == "EleutherAI/hendrycks_math":
        keep = ("problem", "level", "type", "solution")
        rows = [r for r in rows_of(f"math/{split}.jsonl") if SLUGS[r["type"]] == config]
        return [{k: r[k] for k in keep} for r in reversed(rows)]
    assert config is None
    if repo == "HuggingFaceH4/MATH-500":
        return rows_of("math/math500.jsonl")
    if repo == "HuggingFaceH4/aime_2024":  # shuffled, by address, with leading zeros
        wiki = "https://artofproblemsolving.com/wiki/index.php/2024_AIME_{}_Problems/Problem_{}"
        return [
            {"id": 60 + i, "problem": r["problem"], "solution": "", "year": "2024",
             "answer": r["answer"].zfill(3), "url": wiki.format(r["exam"], r["number"])}
            for i, r in enumerate(sorted(rows_of("aime/aime2024.jsonl"), key=lambda r: r["answer"]))
        ]  # fmt: skip
    if repo == "math-ai/aime25":
        rows = rows_of("aime/aime2025.jsonl")
        return [{"problem": r["problem"], "answer": r["answer"], "id": str(i)}
                for i, r in enumerate(rows)]  # fmt: skip
    if repo == "MathArena/aime_2026":
        rows = rows_of("aime/aime2026.jsonl")
        return [{"problem_idx": i, "problem": r["problem"], "answer": int(r["answer"])}
                for i, r in enumerate(rows, start=1)]  # fmt: skip
    assert repo == "math-ai/amc23"
    return [{"id": r["source_id"], "question": r["problem"], "answer": r["answer"] + ".0",
             "url": r["url"]} for r in rows_of("amc23/amc23.jsonl")]  # fmt: skip


@needs_data
@pytest.mark.parametrize(("task", "split"), STORED)
def test_hub_and_local_give_the_same_problems(task, split, monkeypatch):
    asked = []

    def load_dataset(repo, config=None, *, split, revision):
        asked.append((repo, revision))
        return datasets.Dataset.from_list(hub_rows(repo, config, split))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    hub = load_problems(task, split, source="hub")
    local = load_problems(task, split, source="local")
    assert hub.problems == local.problems
    assert hub.sha256 == local.sha256
    assert set(asked) == {(hub.repo, hub.revision)}
    assert re.fullmatch(r"[0-9a-f]{40}", hub.revision or "")
    assert hub.file_sha256 is None
    assert local.revision is None


@needs_data
def test_hub_rows_that_were_lost_are_refused(monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda repo, config, split, revision: hub_rows(
        repo, config, split)[1:])  # fmt: skip
    with pytest.raises(InputError, match="499 rows, expected 500 for math math500"):
        load_problems("math", "math500", source="hub")


def test_hub_revision_must_be_a_commit_and_is_passed_on(monkeypatch):
    with pytest.raises(InputError, match="revision 'main' is no commit"):
        load_problems("aime24", "test", source="hub", options={"revision": "main"})
    seen = []

    def load_dataset(repo, config, split, revision):
        seen.append(revision)
        raise ConnectionError("offline\nand more")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(InputError, match=r"cannot be read \(offline\); set HARNESS_DATA"):
        load_problems("aime24", "test", source="hub", options={"revision": "0" * 40})
    assert seen == ["0" * 40]


# --- bad input ----------------------------------------------------------------------------------


def aime_rows() -> list[dict]:
    exams = [("I", n) for n in range(1, 16)] + [("II", n) for n in range(1, 16)]
    return [
        {"id": f"2024-{e}-{n}", "problem": f"Find {e} {n}.", "answer": str(n)} for e, n in exams
    ]


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write rows as the local aime24 file and point the loader at it."""
    monkeypatch.setenv("HARNESS_DATA", str(tmp_path))
    path = tmp_path / "aime" / "aime2024.jsonl"
    path.parent.mkdir()

    def write_rows(rows) -> Path:
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
        return path

    return write_rows


def load_aime(**arguments):
    return load_problems("aime24", "test", source="local", **arguments)


def test_a_file_of_the_same_form_loads_and_is_noted(write):
    write(aime_rows())
    loaded = load_aime(offset=14, limit=2)
    assert [p.id for p in loaded.problems] == ["2024-I-15", "2024-II-1"]
    assert "file differs from the one that was checked" in loaded.notes[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"limit": 31}, "limit 31, but it has 30 problems"),
        ({"offset": 30}, "offset 30, but it has 30 problems"),
        ({"offset": 29, "limit": 2}, r"offset 29 \+ limit 2"),
        ({"limit": 0}, "select nothing"),
        ({"offset": -1}, "select nothing"),
        ({"sha256": "0" * 64}, "aime2024.jsonl: sha256 .* expected 0000"),
        ({"options": {"revison": "x"}}, "unknown option 'revison'. Did you mean 'revision'"),
    ],
)
def test_bad_selection_is_refused(write, arguments, message):
    write(aime_rows())
    with pytest.raises(InputError, match=message):
        load_aime(**arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "aime2024.jsonl: 29 rows, expected 30 for aime24 test"),
        (lambda rows: [], "0 rows, expected 30"),
        (lambda rows: [*rows[:-1], rows[0]], "row 30: .*repeated problem"),
        (lambda rows: [{"id": r["id"], "problem": "?"} for r in rows], "no column 'answer'"),
        (lambda rows: [r | {"answer": "x+1"} for r in rows], "row 1: answer 'x.1' is not an int"),
        (lambda rows: [*rows[:-1], ["list"]], "line 30: list, expected an object"),
    ],
)
def test_bad_rows_are_refused(write, change, message):
    write(change(aime_rows()))
    with pytest.raises(InputError, match=message):
        load_aime()


def test_broken_lines_missing_files_and_the_right_hash(write, monkeypatch, tmp_path):
    path = write(aime_rows())
    good = load_aime()
    assert load_aime(sha256=good.file_sha256).problems == good.problems
    path.write_text(path.read_text().replace('{"id"', '{"id', 1))
    with pytest.raises(InputError, match="line 1: not JSON"):
        load_aime()
    path.unlink()
    with pytest.raises(InputError, match=r"aime2024.jsonl is missing; set HARNESS_DATA"):
        load_aime()
    monkeypatch.setenv("HARNESS_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(InputError, match=r"HARNESS_DATA: .*nowhere' is not a folder"):
        load_aime()


def test_an_edited_solution_of_a_mended_row_is_refused(monkeypatch):
    """A mend replaces one known key; it must not overwrite a key that somebody else mended."""
    task = TASKS["math"]
    assert task.parse is not None
    row = {"problem": "p", "solution": r"\boxed{5}", "level": "Level 1", "type": "Algebra"}
    mend = MENDS["test/algebra/1730"]
    monkeypatch.setitem(
        math_task._MEND_BY_KEY,
        content_key("p", r"\boxed{5}"),
        mend,
    )
    with pytest.raises(InputError, match="last box '5', expected '3'"):
        task.parse([row], "test")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gsm8", "test"), "unknown name 'gsm8'. Did you mean 'gsm8k'"),
        (("math", "tests"), "unknown split 'tests'. Did you mean 'test'"),
        (("aime25", "train"), "unknown split 'train'"),
    ],
)
def test_unknown_names_get_a_suggestion(arguments, message):
    with pytest.raises(InputError, match=message):
        load_problems(*arguments)
