"""Preference pairs that others labelled: files of the data folder, a user's own, the hub's."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import InputError, counted, suggest
from harness.identity import stream_seed
from harness.models import Base
from harness.spec.reward import PreferenceSpec
from harness.tasks.loading import data_root

WHERE = "reward.learned.model.preferences"
LOCAL: dict[str, str] = {  # below the data folder; {split} is the spec's
    "hh_rlhf": "hh_rlhf/pairs_{split}.jsonl",
    "rotten_tomatoes": "rotten_tomatoes/{split}.jsonl",
    "sst2": "sst2/{split}.jsonl",
    "imdb_subset": "imdb_subset/{split}.jsonl",
}
SPARE = 4  # pairs read for each one asked for: some are left out, or share a prompt
Texts = tuple[str, str, str]  # prompt, chosen, rejected


@dataclass(frozen=True)
class Encoded:
    """A pair as text and as token ids; completions end with the end-of-sequence token."""

    prompt: str
    chosen: str
    rejected: str
    prompt_ids: tuple[int, ...]
    chosen_ids: tuple[int, ...]
    rejected_ids: tuple[int, ...]


def data_identity(spec: PreferenceSpec) -> dict[str, Any]:
    """What the data are pinned by beside their name, split and revision.

    Raises:
        InputError: the local file is not there, or a hub data set has no pinned revision.
    """
    if spec.source == "local":
        content = local_file(spec).read_bytes()
        return {"file_sha256": hashlib.sha256(content).hexdigest()}
    if spec.source == "hub" and spec.revision is None:
        raise InputError(
            f"{WHERE}.revision: pin the hub data set {spec.dataset!r} to a commit hash, or its "
            "pairs may change"
        )
    return {}


@dataclass(frozen=True)
class Labelled:
    """Pairs of a data set to train on and to measure on, and what was left out of it, in words."""

    train: tuple[Encoded, ...]
    heldout: tuple[Encoded, ...]
    notes: tuple[str, ...]


def read_pairs(spec: PreferenceSpec, base: Base) -> Labelled:
    """``pairs`` and ``heldout`` pairs of a data set, drawn from all of it; no prompt is in both.

    A data set of labelled texts gives pairs of a positive and a negative one without a prompt,
    each text once.

    Raises:
        InputError: it cannot be read or has too few pairs, or the tokenizer cannot encode a text.
    """
    data_identity(spec)  # refuses what is not pinned
    rows = _local(spec) if spec.source == "local" else _hub(spec, base)
    pairs, notes = _encode(rows, spec, base)
    by_prompt: dict[Any, list[Encoded]] = {}
    for at, pair in enumerate(pairs):
        by_prompt.setdefault(pair.prompt or at, []).append(pair)
    sides: tuple[list[Encoded], list[Encoded]] = ([], [])
    for group in by_prompt.values():  # whole prompts, so that none is on both sides
        sides[len(sides[0]) >= spec.heldout].extend(group)
    heldout, train = tuple(sides[0][: spec.heldout]), tuple(sides[1][: spec.pairs])
    if len(heldout) < spec.heldout or len(train) < spec.pairs:
        why = f" ({'; '.join(notes)})" if notes else ""
        raise InputError(
            f"{WHERE}: {spec.dataset!r} gives {counted(len(heldout) + len(train), 'pair')}{why}, "
            f"and pairs {spec.pairs} + heldout {spec.heldout} are asked for; lower them"
        )
    return Labelled(train, heldout, notes)


def local_file(spec: PreferenceSpec) -> Path:
    """The file of a data set known by name, or a JSON-lines file of the user's own."""
    name = str(spec.dataset)
    if name.endswith(".jsonl"):
        path = Path(name.replace("{split}", spec.split)).expanduser()
    elif name in LOCAL:
        root = data_root()
        if root is None:
            raise InputError(f"{WHERE}.dataset {name!r}: no data folder; set HARNESS_DATA")
        path = root / LOCAL[name].format(split=spec.split)
    else:
        raise InputError(
            f"{WHERE}.dataset: no local data set {name!r}.{suggest(name, LOCAL)} Or give the path "
            "of a .jsonl file of prompt, chosen, rejected"
        )
    if not path.is_file():
        raise InputError(f"{WHERE}: {path} does not exist; check dataset and split")
    return path


def _local(spec: PreferenceSpec) -> list[Texts]:
    path = local_file(spec)
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise InputError(f"{path} line {number}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise InputError(f"{path} line {number}: not a row of named values")
        rows.append(row)
    return _texts(rows, spec, str(path))


def _texts(rows: Sequence[Mapping[str, Any]], spec: PreferenceSpec, where: str) -> list[Texts]:
    """Rows of pairs as they are; rows of labelled texts as pairs of a positive and a negative."""
    if not rows:
        raise InputError(f"{where}: no rows")
    if {"chosen", "rejected"} <= rows[0].keys():
        wanted = ("chosen", "rejected")
    elif {"text", "label"} <= rows[0].keys():
        wanted = ("text", "label")
    else:
        raise InputError(
            f"{where}: rows of {sorted(rows[0])}; give prompt, chosen and rejected, or text and "
            "label (1 positive, 0 negative)"
        )
    for number, row in enumerate(rows, 1):
        missing = [name for name in wanted if row.get(name) is None]
        if missing:
            raise InputError(f"{where} row {number}: no {missing[0]}; mend the row")
    if wanted == ("chosen", "rejected"):
        return [(str(r.get("prompt") or ""), str(r["chosen"]), str(r["rejected"])) for r in rows]
    chance = random.Random(stream_seed(spec.seed, "preferences", "matching"))
    sides = {
        label: sorted({str(r["text"]) for r in rows if int(r["label"]) == label})
        for label in (0, 1)
    }
    for texts in sides.values():
        chance.shuffle(texts)
    return [("", good, bad) for good, bad in zip(sides[1], sides[0], strict=False)]


def _hub(spec: PreferenceSpec, base: Base) -> list[Texts]:
    import datasets
    from trl.data_utils import maybe_extract_prompt

    where = f"{WHERE}.dataset {spec.dataset!r}"
    try:
        table = datasets.load_dataset(str(spec.dataset), split=spec.split, revision=spec.revision)
    except Exception as error:  # offline, no such data set, split or revision: many classes
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InputError(
            f"{where}: cannot be loaded ({line}); check name, split, revision and network, or "
            "save it as a .jsonl file and use source: local"
        ) from error
    rows = [_plain(maybe_extract_prompt(dict(row)), base, where) for row in table]
    return _texts(rows, spec, where)


def _plain(row: Mapping[str, Any], base: Base, where: str) -> dict[str, Any]:
    """A row whose conversations are texts: the prompt by the model's template, the last turns."""
    found = dict(row)
    if isinstance(row.get("prompt"), list):
        if base.tokenizer.chat_template is None:
            raise InputError(f"{where}: rows are conversations, and the model has no chat template")
        found["prompt"] = base.tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, tokenize=False
        )
    for name in ("chosen", "rejected"):
        if isinstance(row.get(name), list):
            found[name] = "".join(str(turn["content"]) for turn in row[name])
    return found


def _encode(
    rows: Sequence[Texts], spec: PreferenceSpec, base: Base
) -> tuple[list[Encoded], tuple[str, ...]]:
    """Those that say nothing or do not fit are left out."""
    order = list(rows)
    random.Random(stream_seed(spec.seed, "preferences", "rows")).shuffle(order)
    end = int(base.tokenizer.eos_token_id)  # type: ignore[arg-type]
    kept: list[Encoded] = []
    same = long = 0
    for prompt, chosen, rejected in order:
        if len(kept) >= SPARE * (spec.pairs + spec.heldout):
            break
        start = _ids(base, prompt, first=True)
        ends = [(*_ids(base, text, first=not start), end) for text in (chosen, rejected)]
        if ends[0] == ends[1]:
            same += 1
        elif len(start) + max(map(len, ends)) > base.context:
            long += 1
        else:
            kept.append(Encoded(prompt, chosen, rejected, start, ends[0], ends[1]))
    left_out = {"two equal completions": same, "longer than the context": long}
    return kept, tuple(
        f"left out {counted(count, 'pair')}: {why}" for why, count in left_out.items() if count
    )


def _ids(base: Base, text: str, *, first: bool) -> tuple[int, ...]:
    """Token ids; what a tokenizer puts before a text only where it stands first."""
    if not text:
        return ()
    try:
        found: Any = base.tokenizer(text, add_special_tokens=first)["input_ids"]
    except Exception as error:  # tokenizers raises bare Exception, as for an unknown word
        raise InputError(
            f"{WHERE}.dataset: the model's tokenizer cannot encode {text[:60]!r} ({error}); use "
            "another data set or model"
        ) from error
    return tuple(int(i) for i in found)
