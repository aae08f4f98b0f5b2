"""Which axis makes how much of the difference between the two ends of a factorial design.

A game: the axes are the players, and the value of a coalition is the score of the arm that has the
last arm's parts on those axes and the first arm's on all others. Everything is linear in the
scores, so it is computed for each seed and problem, and the intervals are those of any paired
difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import factorial as count_orders

from harness.axes import Factorial, factorial, subsets
from harness.report.load import Experiment
from harness.report.scores import Metric, TestScores
from harness.report.table_design import parts_of
from harness.stats.effects import Difference, Floats, differences

Game = Mapping[frozenset[str], Floats]


def shapley(game: Game, players: Sequence[str]) -> dict[str, Floats]:
    """Each player's Shapley value (1953): its mean contribution over all orders of joining.

    Exact: sum over S without i of |S|! (n - |S| - 1)! / n! (v(S + i) - v(S)). The values sum to
    v(all) - v(none), whatever the game.
    """
    n = len(players)
    found = {}
    for player in players:
        others = [p for p in players if p != player]
        found[player] = sum(
            (
                count_orders(len(s)) * count_orders(n - len(s) - 1) / count_orders(n)
                * (game[s | {player}] - game[s])
                for s in subsets(others)
            ),
            start=0.0 * game[frozenset()],
        )  # fmt: skip
    return found


def effects(game: Game, players: Sequence[str]) -> dict[frozenset[str], Floats]:
    """Every main effect and interaction of the factorial design, by its set of players.

    The contrast of a set T: the mean over arms with an even number of T's players at their first
    level, less the mean over the others. For one player it is the usual main effect; for two, half
    of how much the one's effect changes with the other's level.
    """
    half = 2 ** (len(players) - 1)
    return {
        chosen: sum(
            ((-1) ** len(chosen - s) * game[s] for s in subsets(players)),
            start=0.0 * game[frozenset()],
        )
        / half
        for chosen in subsets(players)
        if chosen
    }


@dataclass(frozen=True)
class Attribution:
    """The difference of a design's two ends, and its axes' parts in it, for every metric.

    Attributes:
        total: last arm minus first.
        shapley: axis -> its Shapley value.
        effects: set of axes -> main effect or interaction.
        seeds: those that all arms of the design finished; everything is over these.
    """

    design: Factorial
    seeds: tuple[int, ...]
    total: Mapping[Metric, Difference]
    shapley: Mapping[str, Mapping[Metric, Difference]]
    effects: Mapping[frozenset[str], Mapping[Metric, Difference]]

    def largest_interaction(self, metric: Metric) -> frozenset[str] | None:
        """The interaction of the largest absolute mean; None for a single axis."""
        several = [chosen for chosen in self.effects if len(chosen) > 1]
        return max(several, key=lambda s: abs(self.effects[s][metric].estimate.mean), default=None)


def attribute(experiment: Experiment, test: TestScores) -> Attribution | None:
    """The attribution on a test set; None without a design, or before each arm has a shared seed.

    Raises:
        ValueError: the arms' parts, as run, are no full factorial.
    """
    arms = experiment.ladder.get("factorial", ())
    if not arms or any(arm not in test.arms for arm in arms):
        return None
    design = factorial({arm: parts_of(experiment, arm) for arm in arms})
    seeds = tuple(s for s in test.arms[arms[0]].seeds if all(s in test.arms[a].seeds for a in arms))
    if not seeds:
        return None
    game = {
        level: test.arms[arm].values[:, [test.arms[arm].seeds.index(s) for s in seeds]]
        for arm, level in design.levels.items()
    }
    none, everything = game[frozenset()], game[frozenset(design.axes)]

    def summarised(values: Floats) -> dict[Metric, Difference]:
        return dict(zip(test.metrics, differences(values, 0.0 * values), strict=True))

    return Attribution(
        design,
        seeds,
        summarised(everything - none),
        {axis: summarised(found) for axis, found in shapley(game, design.axes).items()},
        {chosen: summarised(found) for chosen, found in effects(game, design.axes).items()},
    )
