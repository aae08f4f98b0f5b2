"""Preference pairs of files and of the hub: what is taken, what is refused, how it is pinned."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny import EOS, tiny_base

from harness.errors import InputError
from harness.preference_data import data_identity, read_pairs
from harness.spec.reward import PreferenceSpec

LETTERS = [f"{a}{b}+1" for a in range(1, 9) for b in range(1, 9)]  # what the tiny model can read


def wanted(dataset: str | Path, pairs: int, heldout: int, **more: Any) -> PreferenceSpec:
    options = {"source": "local", "dataset": str(dataset), "pairs": pairs, "heldout": heldout}
    return PreferenceSpec(**(options | more))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def pair_rows(count: int, *, prompts: int) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{i % prompts}=", "chosen": LETTERS[i], "rejected": f"{LETTERS[i]}-2"}
        for i in range(count)
    ]


def test_a_file_of_pairs_is_read_as_it_stands_and_no_prompt_is_on_both_sides(tmp_path: Path):
    path = write(tmp_path / "mine.jsonl", pair_rows(60, prompts=20))
    base = tiny_base()
    found = read_pairs(wanted(path, 20, 10), base)
    assert (len(found.train), len(found.heldout), found.notes) == (20, 10, ())
    assert not {p.prompt for p in found.train} & {p.prompt for p in found.heldout}
    for pair in (*found.train, *found.heldout):
        assert pair.rejected == f"{pair.chosen}-2"
        assert pair.prompt_ids == tuple(base.tokenizer(pair.prompt)["input_ids"])
        assert pair.chosen_ids == (*base.tokenizer(pair.chosen)["input_ids"], EOS)
        assert pair.rejected_ids[-1] == EOS
    assert read_pairs(wanted(path, 20, 10), base) == found
    other = read_pairs(wanted(path, 20, 10, seed=1), base)
    assert {p.chosen for p in other.heldout} != {p.chosen for p in found.heldout}


def test_labelled_texts_become_pairs_of_a_positive_and_a_negative_each_used_once(tmp_path: Path):
    rows = [{"text": text, "label": int("7" in text)} for text in LETTERS]
    path = write(tmp_path / "labels.jsonl", [*rows, rows[0]])  # one stands twice
    found = read_pairs(wanted(path, 9, 4), tiny_base())
    pairs = (*found.train, *found.heldout)
    assert all("7" in p.chosen and "7" not in p.rejected for p in pairs)
    assert all(p.prompt == "" and p.prompt_ids == () for p in pairs)
    texts = [text for p in pairs for text in (p.chosen, p.rejected)]
    assert len(set(texts)) == len(texts) == 26
    with pytest.raises(InputError, match=r"gives 15 pairs, and pairs 12 \+ heldout 4 are asked"):
        read_pairs(wanted(path, 12, 4), tiny_base())  # 15 texts hold a 7


def test_equal_and_long_pairs_are_left_out_and_counted(tmp_path: Path):
    rows = pair_rows(10, prompts=10)
    rows += [{"prompt": "1=", "chosen": "5", "rejected": "5"}] * 2
    rows += [{"prompt": "1" * 62, "chosen": "15", "rejected": "5"}]  # 62 + 3 > 64
    rows += [{"prompt": "1" * 61, "chosen": "15", "rejected": "5"}]  # just fits
    path = write(tmp_path / "mine.jsonl", rows)
    found = read_pairs(wanted(path, 7, 3), tiny_base())
    assert len(found.train) == 7
    assert found.notes == (
        "left out 2 pairs: two equal completions",
        "left out 1 pair: longer than the context",
    )


def test_the_identity_of_a_file_is_its_bytes(tmp_path: Path):
    path = write(tmp_path / "mine.jsonl", pair_rows(4, prompts=4))
    before = data_identity(wanted(path, 2, 1))
    path.write_text(path.read_text().replace("11+1", "11+2"))
    assert data_identity(wanted(path, 2, 1)) != before
    template = tmp_path / "{split}.jsonl"
    assert data_identity(wanted(template, 2, 1, split="mine")) != before


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("[1]\n", "line 1: not a row"),
        ("{\n", "line 1: not JSON"),
        ('{"good": "1", "bad": "2"}\n', r"rows of \['bad', 'good'\]; give prompt, chosen"),
        ('{"chosen": "1", "rejected": "2"}\n{"chosen": "1"}\n', "row 2: no rejected"),
        ("", "no rows"),
        ('{"chosen": "abc", "rejected": "2"}\n', "tokenizer cannot encode 'abc'"),
    ],
)
def test_bad_files_are_refused_in_one_line(tmp_path: Path, rows: str, said: str):
    path = tmp_path / "bad.jsonl"
    path.write_text(rows)
    with pytest.raises(InputError, match=said) as caught:
        read_pairs(wanted(path, 1, 1), tiny_base())
    assert "\n" not in str(caught.value)


def test_unknown_names_missing_files_and_unpinned_data_sets_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="Did you mean 'hh_rlhf'"):
        data_identity(wanted("hh_rlfh", 1, 1))
    with pytest.raises(InputError, match="does not exist; check dataset and split"):
        data_identity(wanted(tmp_path / "none.jsonl", 1, 1))
    with pytest.raises(InputError, match="pin the hub data set 'a/b' to a commit hash"):
        read_pairs(wanted("a/b", 1, 1, source="hub"), tiny_base())


@pytest.mark.parametrize(
    ("name", "split", "prompted"),
    [("hh_rlhf", "train", True), ("sst2", "test", False), ("rotten_tomatoes", "test", False),
     ("imdb_subset", "train", False)],
)  # fmt: skip
def test_the_real_files_give_pairs(real_data: Path, name: str, split: str, prompted: bool):
    class Bytes:
        """Reads anything."""

        eos_token_id = EOS
        chat_template = None

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [3 + b for b in text.encode()]}

    base = dataclasses.replace(tiny_base(), tokenizer=Bytes(), context=4000)  # type: ignore[arg-type]
    found = read_pairs(wanted(name, 100, 50, split=split), base)
    pairs = (*found.train, *found.heldout)
    assert all(bool(p.prompt) == prompted and p.chosen != p.rejected for p in pairs)
    if prompted:
        assert all(p.prompt.endswith("Assistant:") for p in pairs)


def test_a_hub_data_set_is_read_at_its_revision(monkeypatch: pytest.MonkeyPatch):
    """Whole texts are cut where the two part; the loader is the only thing that is not real."""
    import datasets

    rows = [{"chosen": f"{i}={LETTERS[i]}", "rejected": f"{i}=-{LETTERS[i]}"} for i in range(9)]
    asked: list[Any] = []

    def load(name: str, **options: Any) -> Any:
        asked.append((name, options))
        return datasets.Dataset.from_list(rows)

    monkeypatch.setattr(datasets, "load_dataset", load)
    spec = wanted("a/b", 5, 2, source="hub", revision="c0ffee", split="test")
    found = read_pairs(spec, tiny_base())
    assert asked == [("a/b", {"split": "test", "revision": "c0ffee"})]
    for pair in (*found.train, *found.heldout):
        whole = {"chosen": pair.prompt + pair.chosen, "rejected": pair.prompt + pair.rejected}
        assert whole in rows
        assert pair.rejected.startswith("-")
        assert pair.prompt.endswith("=")


def test_a_hub_that_cannot_be_reached_is_one_line(monkeypatch: pytest.MonkeyPatch):
    import datasets

    def load(name: str, **options: Any) -> Any:
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(datasets, "load_dataset", load)
    spec = wanted("a/b", 5, 2, source="hub", revision="c0ffee")
    with pytest.raises(InputError, match=r"cannot be loaded \(no network\); check name, split"):
        read_pairs(spec, tiny_base())
