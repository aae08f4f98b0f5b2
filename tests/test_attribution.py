"""Attribution on games whose answer is known, and on stored runs; and the ladder's tables."""

from __future__ import annotations

import csv
import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from harness.axes import Axis, subsets
from harness.report import write_report
from harness.report.attribution import attribute, effects, shapley
from harness.report.content import compose, facts
from harness.report.load import load_experiment
from harness.report.notices import notices, summary
from harness.report.scores import AVG, final_scores
from harness.report.table_ladder import (
    in_words,
    ladder_rungs,
    ladder_sentences,
    ladder_tables,
)
from harness.report.tables import Table, by_arm

sys.path.insert(0, str(Path(__file__).parent))
import report_fixture

PLAYERS = ("a", "b", "c", "d")
Game = dict[frozenset[str], np.ndarray]


def game(value: Callable[[frozenset[str]], Any], players: tuple[str, ...] = PLAYERS) -> Game:
    return {s: np.asarray(value(s), dtype=float) for s in subsets(players)}


def random_game(seed: int = 0) -> Game:
    rng = np.random.default_rng(seed)
    return {s: rng.normal(size=(2, 3, 5)) for s in subsets(PLAYERS)}


# -- games whose Shapley values are known ---------------------------------------------------------


def test_in_an_additive_game_each_gets_what_it_adds():
    worth = {"a": 1.0, "b": -0.25, "c": 0.0, "d": 7.0}
    v = game(lambda s: 3.0 + sum(worth[p] for p in s))
    assert {p: float(x) for p, x in shapley(v, PLAYERS).items()} == pytest.approx(worth, abs=1e-12)
    found = effects(v, PLAYERS)
    assert {p: float(found[frozenset(p)]) for p in PLAYERS} == pytest.approx(worth, abs=1e-12)
    assert all(abs(x) < 1e-12 for s, x in found.items() if len(s) > 1)


@pytest.mark.parametrize("needed", ["ab", "abc", "abcd"])
def test_a_pure_interaction_is_shared_by_those_it_needs(needed: str):
    """The unanimity game: nothing unless all of ``needed`` are there. The others get nothing."""
    v = game(lambda s: float(set(needed) <= s))
    found = {p: float(x) for p, x in shapley(v, PLAYERS).items()}
    expected = {p: 1 / len(needed) if p in needed else 0.0 for p in PLAYERS}
    assert found == pytest.approx(expected, abs=1e-12)


def test_the_glove_game():
    """Shapley's own: one left glove, two right ones; a pair is worth 1. Values 2/3, 1/6, 1/6."""
    v = game(lambda s: float("l" in s and len(s) > 1), ("l", "r", "q"))
    found = {p: float(x) for p, x in shapley(v, ("l", "r", "q")).items()}
    assert found == pytest.approx({"l": 2 / 3, "r": 1 / 6, "q": 1 / 6}, abs=1e-12)


def test_symmetric_players_get_the_same_and_a_dummy_nothing():
    v = game(lambda s: len(s & {"a", "b", "c"}) ** 2 + np.sin(len(s & {"a", "b", "c"})))
    found = {p: float(x) for p, x in shapley(v, PLAYERS).items()}
    assert found["a"] == pytest.approx(found["b"], abs=1e-12)
    assert found["a"] == pytest.approx(found["c"], abs=1e-12)
    assert found["d"] == pytest.approx(0.0, abs=1e-12)


def test_the_values_are_the_mean_step_over_all_orders():
    v = random_game()
    expected = {p: np.zeros((2, 3, 5)) for p in PLAYERS}
    for order in permutations(PLAYERS):
        for place, player in enumerate(order):
            before = frozenset(order[:place])
            expected[player] += (v[before | {player}] - v[before]) / 24
    for player, found in shapley(v, PLAYERS).items():
        np.testing.assert_allclose(found, expected[player], atol=1e-14)


@pytest.mark.parametrize("seed", range(5))
def test_the_values_sum_to_the_difference_of_the_ends(seed: int):
    v = random_game(seed)
    total = sum(shapley(v, PLAYERS).values(), start=np.zeros((2, 3, 5)))
    np.testing.assert_allclose(total, v[frozenset(PLAYERS)] - v[frozenset()], rtol=0, atol=1e-12)


def test_values_are_linear_in_the_game():
    one, two = random_game(1), random_game(2)
    both = {s: 2 * one[s] - 3 * two[s] for s in one}
    for player, found in shapley(both, PLAYERS).items():
        expected = 2 * shapley(one, PLAYERS)[player] - 3 * shapley(two, PLAYERS)[player]
        np.testing.assert_allclose(found, expected, atol=1e-13)


def test_effects_are_those_of_the_factorial_by_hand():
    """2 x 2: rows without and with a, columns without and with b."""
    v = {frozenset(): 10.0, frozenset("a"): 14.0, frozenset("b"): 11.0, frozenset("ab"): 21.0}
    found = effects({s: np.array(x) for s, x in v.items()}, ("a", "b"))
    assert float(found[frozenset("a")]) == (4 + 10) / 2
    assert float(found[frozenset("b")]) == (1 + 7) / 2
    assert float(found[frozenset("ab")]) == (10 - 4) / 2  # half of what b adds to a's effect


def test_all_effects_give_the_game_back():
    """Yates: v(S) is the mean plus half of every effect, signed by the levels."""
    v = random_game(3)
    mean = sum(v.values(), start=np.zeros((2, 3, 5))) / len(v)
    found = effects(v, PLAYERS)
    for s, value in v.items():
        signed = sum(
            ((-1) ** len(t - s) * effect / 2 for t, effect in found.items()),
            start=np.zeros((2, 3, 5)),
        )
        np.testing.assert_allclose(mean + signed, value, atol=1e-13)


# -- from stored runs -----------------------------------------------------------------------------

# Named so that nothing can be read from the names: x has neither of the second's parts, w both.
MIXED = {"x": ("ppo", "ppo"), "y": ("grpo", "ppo"), "z": ("ppo", "grpo"), "w": ("grpo", "grpo")}
KL_CHANGED = "kl: KLInReward k1 → KLInLoss k3"
SKILLS = {"x": 0.30, "y": 0.34, "z": 0.36, "w": 0.52}


def mixed_parts(arm: str) -> dict[str, Any]:
    """KL of one arm, aggregation of another, everything else the same."""
    kl, aggregate = MIXED[arm]
    parts = json.loads(json.dumps(report_fixture.PARTS["grpo"]))
    parts["kl"] = json.loads(json.dumps(report_fixture.PARTS[kl]["kl"]))
    parts["aggregate"] = dict(report_fixture.PARTS[aggregate]["aggregate"])
    return parts


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four arms, three seeds; a ladder there and back, and the factorial of the four."""
    folder = tmp_path_factory.mktemp("ladder") / "invented"
    arms = list(MIXED)
    spec = report_fixture.SPEC | {
        "arms": arms, "baseline": "x", "controls": {"base": True}, "tuning": None,
        "ladder": {"forward": ["x", "y", "w"], "reverse": ["w", "z", "x"], "factorial": arms},
    }  # fmt: skip
    parts = {arm: mixed_parts(arm) for arm in arms}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report_fixture, "SPEC", spec | {"tuning": {"budget_fraction": 1}})
        patch.setattr(report_fixture, "PARTS", parts)
        patch.setattr(report_fixture, "SKILL", {"base": 0.27} | SKILLS)
        for place, arm in enumerate(("base", *arms)):
            for seed in report_fixture.SEEDS:
                rng = np.random.default_rng((place, seed))
                report_fixture._write_seed(folder / "runs" / arm / f"seed-{seed}", arm, seed, rng)
    lock = {"spec": spec, "arms": {arm: {"parts": parts[arm]} for arm in arms}}
    (folder / "spec.lock.yaml").write_text(yaml.safe_dump(lock))
    write_report(folder)
    return folder


@pytest.fixture
def results(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "invented"))


def rows(results: Path, name: str) -> list[dict[str, str]]:
    with (results / "tables" / f"{name}.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def mean_score(results: Path, arm: str, seed: int) -> float:
    """Read afresh, without the report's own code."""
    text = (results / "runs" / arm / f"seed-{seed}" / "evals.jsonl").read_text()
    problems = json.loads(text.splitlines()[-1])["problems"]
    return sum(p["correct"] / p["n"] for p in problems) / len(problems)


def test_the_attribution_follows_from_the_stored_counts(written: Path):
    v = {a: np.mean([mean_score(written, a, s) for s in report_fixture.SEEDS]) for a in MIXED}
    kl = ((v["y"] - v["x"]) + (v["w"] - v["z"])) / 2
    aggregate = ((v["z"] - v["x"]) + (v["w"] - v["y"])) / 2
    table = {
        (r["kind"], r["axis"]): r for r in rows(written, "attribution") if r["metric"] == "avg"
    }
    kinds = {kind for kind, _ in table}
    assert kinds == {"total", "Shapley", "main effect", "largest interaction"}
    found = {key: float(r["value"]) for key, r in table.items()}
    shares = {axis: value for (kind, axis), value in found.items() if kind == "Shapley"}
    expected = {KL_CHANGED: kl, "aggregate: TokenMean → SequenceMean": aggregate}
    assert shares == pytest.approx(expected, abs=1e-9)
    assert found["total", "w − x"] == pytest.approx(kl + aggregate, abs=1e-9)
    interaction = (v["w"] - v["y"] - v["z"] + v["x"]) / 2
    assert found["largest interaction", "aggregate × kl"] == pytest.approx(interaction, abs=1e-9)
    by_seed = [float(d) for d in table["total", "w − x"]["value_by_seed"].split()]
    expected = [mean_score(written, "w", s) - mean_score(written, "x", s) for s in (0, 1, 2)]
    assert by_seed == pytest.approx(expected, abs=1e-5)


def test_for_every_metric_the_shares_sum_to_the_total(written: Path):
    experiment = load_experiment(written)
    (test,) = final_scores(experiment)
    found = attribute(experiment, test)
    assert found is not None
    for metric, total in found.total.items():
        parts = [found.shapley[axis][metric] for axis in found.design.axes]
        assert abs(sum(p.estimate.mean for p in parts) - total.estimate.mean) < 1e-12
        for seed, whole in enumerate(total.by_seed):
            assert abs(sum(p.by_seed[seed] for p in parts) - whole) < 1e-12
        assert total.estimate.low is not None
        assert total.estimate.low <= total.estimate.mean <= (total.estimate.high or 0)


def test_each_step_is_the_difference_to_the_rung_before(written: Path):
    table = [r for r in rows(written, "ladder") if r["metric"] == "avg"]
    assert [(r["way"], r["arm"]) for r in table] == [
        ("forward", "x"), ("forward", "y"), ("forward", "w"),
        ("reverse", "w"), ("reverse", "z"), ("reverse", "x"),
    ]  # fmt: skip
    for before, rung in pairwise(table):
        if rung["rung"] != "0":
            expected = float(rung["mean"]) - float(before["mean"])
            assert float(rung["step"]) == pytest.approx(expected, abs=1e-9)
            assert float(rung["step_low"]) <= expected <= float(rung["step_high"])
    assert table[0]["step"] == ""
    assert table[1]["changed"] == KL_CHANGED


def test_the_section_stands_only_where_a_ladder_is_declared(written: Path, tmp_path: Path):
    html = (written / "report.html").read_text()
    assert '<section id="the-ladder"' in html
    assert 'id="figure-ladder"' in html
    assert 'id="figure-attribution"' in html
    for name in ("ladder", "attribution"):
        assert {p.suffix for p in (written / "tables").glob(f"{name}.*")} == {".csv", ".md", ".tex"}
        assert {p.suffix for p in (written / "figures").glob(f"{name}.*")} == {".png", ".svg"}
    plain = report_fixture.write_fixture(tmp_path / "plain")
    experiment = load_experiment(plain)
    titles = [s.title for s in compose(experiment, final_scores(experiment), [], [], [])]
    assert "The ladder" not in titles


def test_an_unfinished_arm_is_told_and_nothing_is_attributed(results: Path):
    for seed in report_fixture.SEEDS:
        (results / "runs" / "z" / f"seed-{seed}" / "done.json").unlink()
    experiment = load_experiment(results)
    scores = final_scores(experiment)
    assert attribute(experiment, scores[0]) is None
    (sentence,) = ladder_sentences(experiment, scores)
    assert "no attribution yet: 1 of the 4 arms" in sentence
    assert "(z)" in sentence
    tables = {table.name: table for table in ladder_tables(experiment, scores)}
    assert tables["attribution"].rows == []
    assert [row[5] for row in tables["ladder"].rows].count("–") == 1


def test_only_seeds_that_all_arms_finished_count(results: Path):
    (results / "runs" / "z" / "seed-1" / "done.json").unlink()
    experiment = load_experiment(results)
    (test,) = final_scores(experiment)
    found = attribute(experiment, test)
    assert found is not None
    assert found.seeds == (0, 2)
    expected = np.mean([mean_score(results, "w", s) - mean_score(results, "x", s) for s in (0, 2)])
    assert found.total[AVG].estimate.mean == pytest.approx(expected, abs=1e-12)


def test_arms_that_are_no_factorial_are_told(results: Path):
    for path in (results / "runs" / "z").glob("*/run.json"):
        run = json.loads(path.read_text())
        run["parts"]["clip"]["clip_high"] = 0.28
        path.write_text(json.dumps(run))
    experiment = load_experiment(results)
    (sentence,) = ladder_sentences(experiment, final_scores(experiment))
    assert "no full factorial: z has a clip of neither x nor w" in sentence


def test_what_changed_is_read_from_the_parts_that_ran(results: Path):
    for path in (results / "runs" / "y").glob("*/run.json"):
        run = json.loads(path.read_text())
        run["parts"]["clip"]["clip_high"] = 0.28
        path.write_text(json.dumps(run))
    changed = [r.changed for r in ladder_rungs(load_experiment(results)) if r.way == "forward"]
    assert changed[1] == f"clip_high: 0.2 → 0.28; {KL_CHANGED}"


@pytest.mark.parametrize(
    ("axis", "words"),
    [
        (Axis("advantage.gae_lambda", 0.95, 1.0), "gae_lambda: 0.95 → 1"),
        (Axis("sampling.group_size", 1, None), "group_size: 1 → 4"),
        (Axis("scale", {"part": "Whiten", "eps": 1e-8}, None), "scale: Whiten → none"),
        (
            Axis("scale", {"part": "Whiten", "ddof": 1}, {"part": "GroupStd", "ddof": 1}),
            "scale: Whiten → GroupStd",
        ),
        (Axis("shaping", [], [{"part": "SignedScore"}]), "shaping: none → SignedScore"),
    ],
)
def test_a_change_in_words(axis: Axis, words: str):
    assert in_words(axis, report_fixture.SPEC) == words


# -- what is said of many arms --------------------------------------------------------------------


def test_of_a_long_ladder_curves_and_sentences_name_the_ends(written: Path):
    experiment = load_experiment(written)
    assert experiment.drawn == experiment.shown  # four can be told apart
    more = tuple(f"extra_{n}" for n in range(5))
    long = replace(experiment, arms=(*experiment.arms, *more))
    assert long.drawn == ("base", "x", "w")
    assert dict(facts(long).items)["Arms"] == "x, w and 7 more"
    text = summary(long, final_scores(experiment))
    assert re.findall(r"\b([xyzw]) \d", text) == ["x", "w"]
    assert "2 more arms, between the ends of the ladder, are in the tables." in text


def test_a_table_of_many_arms_has_a_row_for_each():
    columns = ("test set", "metric", "one", "two", "three")
    cells = ("t Avg 1 2 3", "t Greedy 4 5 6", "u Avg 7 8 9")
    table = Table("final", "Final", "", columns, [row.split() for row in cells], labels=2)
    turned = by_arm(table, columns[2:], lambda row: row[1])
    assert turned.columns == ("test set", "arm", "Avg", "Greedy")
    assert [list(row) for row in turned.rows] == [
        ["t", "one", "1", "4"], ["t", "two", "2", "5"], ["t", "three", "3", "6"],
        ["u", "one", "7", "–"], ["u", "two", "8", "–"], ["u", "three", "9", "–"],
    ]  # fmt: skip


def test_what_holds_for_several_arms_is_told_once(results: Path):
    for arm, share in (("x", 0.85), ("y", 0.95)):
        for path in (results / "runs" / arm).glob("seed-*/steps.jsonl"):
            steps = [json.loads(line) for line in path.read_text().splitlines()]
            lines = [json.dumps(s | {"zero_variance_share": share}) + "\n" for s in steps]
            path.write_text("".join(lines))
    experiment = load_experiment(results)
    flat = [n for n in notices(experiment, final_scores(experiment)) if "equal scores" in n]
    assert [n.partition(" of sampled groups")[0] for n in flat] == ["x: 85 %; y: 95 %"]


def test_groups_of_one_are_no_flat_groups(results: Path):
    """Their scores agree because there is but one."""
    for arm, size in (("x", 1), ("y", 8)):
        for path in (results / "runs" / arm).glob("seed-*/steps.jsonl"):
            steps = [json.loads(line) for line in path.read_text().splitlines()]
            more = {"zero_variance_share": 1.0, "completions_per_prompt": size}
            path.write_text("".join(json.dumps(s | more) + "\n" for s in steps))
    experiment = load_experiment(results)
    flat = [n for n in notices(experiment, final_scores(experiment)) if "equal scores" in n]
    assert [n.partition(":")[0] for n in flat] == ["y"]


def test_of_many_arms_the_extremes_are_told(results: Path):
    """Twelve copies of two arms, one flatter than the other."""
    for arm, share in (("x", 0.85), ("y", 0.95)):
        for path in (results / "runs" / arm).glob("seed-*/steps.jsonl"):
            steps = [json.loads(line) for line in path.read_text().splitlines()]
            lines = [json.dumps(s | {"zero_variance_share": share}) + "\n" for s in steps]
            path.write_text("".join(lines))
    experiment = load_experiment(results)
    arms = [f"{arm}{n}" for n in range(6) for arm in "xy"]
    cells = [
        replace(cell, arm=arm) for arm in arms for cell in experiment.cells if cell.arm == arm[0]
    ]
    many = replace(experiment, arms=tuple(arms), cells=tuple(cells))
    flat = [n for n in notices(many, []) if "equal scores" in n]
    assert len(flat) == 1
    assert flat[0].startswith("12 arms: from 85 % (x0) to 95 % (y0) of sampled groups had equal")
