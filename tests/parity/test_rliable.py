"""Interquartile mean, probability of improvement and profiles against rliable and by hand."""

from __future__ import annotations

import importlib.util
import sys
import types

import numpy as np
import pytest

from harness.errors import InputError
from harness.stats.effects import (
    iqm,
    mcnemar_p,
    performance_profile,
    probability_of_improvement,
    stratified_interval,
)

metrics = pytest.importorskip("rliable.metrics")
SHAPES = [(5, 1), (5, 3), (8, 4), (10, 7)]
THRESHOLDS = np.linspace(0, 1, 21)


@pytest.fixture
def library(monkeypatch):
    """``rliable.library``, which needs ``arch.bootstrap`` and no more of arch.

    The release of arch that rliable pins does not import as a whole under pandas 3; its bootstrap
    does, once the package is entered without its ``__init__``.
    """
    spec = importlib.util.find_spec("arch")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("arch is not installed")
    bare = types.ModuleType("arch")
    bare.__path__ = list(spec.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "arch", bare)
    return importlib.import_module("rliable.library")


def scores(shape: tuple[int, int], seed: int = 0) -> np.ndarray:
    """In twentieths, so that ties happen and thresholds are hit exactly."""
    return np.random.default_rng((seed, *shape)).integers(0, 21, size=shape) / 20


def test_iqm_golden(golden):
    v = golden("iqm_eight_runs")
    found = np.array(v["inputs"]["scores"])
    assert iqm(found) == pytest.approx(v["expected"]["iqm"], abs=v["tolerance"])
    assert iqm(found.reshape(4, 2)) == pytest.approx(v["expected"]["iqm"], abs=v["tolerance"])


@pytest.mark.parametrize("shape", SHAPES)
def test_iqm_is_rliables(shape):
    assert iqm(scores(shape)) == pytest.approx(metrics.aggregate_iqm(scores(shape)), abs=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
def test_probability_of_improvement_is_rliables(shape):
    ours, theirs = scores(shape), scores((6, shape[1]), seed=1)
    found = probability_of_improvement(ours, theirs)
    assert found == pytest.approx(metrics.probability_of_improvement(ours, theirs), abs=1e-12)
    assert found + probability_of_improvement(theirs, ours) == pytest.approx(1)


def test_probability_of_improvement_by_hand():
    # 0.5 beats 0.4 and ties 0.5; 0.3 loses to both: (1 + 0.5 + 0 + 0) / 4
    ours, theirs = np.array([[0.5], [0.3]]), np.array([[0.4], [0.5]])
    assert probability_of_improvement(ours, theirs) == 0.375
    with pytest.raises(InputError, match="same tasks"):
        probability_of_improvement(np.zeros((5, 2)), np.zeros((5, 3)))


@pytest.mark.parametrize("shape", SHAPES)
def test_profiles_are_rliables(library, shape):
    expected = library.score_distributions(scores(shape), THRESHOLDS)
    assert performance_profile(scores(shape), THRESHOLDS) == pytest.approx(expected, abs=1e-12)


def test_intervals_are_rliables_but_for_the_draws(library):
    found, draws = scores((8, 4)), 4000
    _, theirs = library.get_interval_estimates(
        {"arm": found}, lambda x: np.array([metrics.aggregate_iqm(x)]), reps=draws,
        random_state=np.random.RandomState(0),
    )  # fmt: skip
    low, high = stratified_interval(found, iqm, draws)
    assert [float(low), float(high)] == pytest.approx(theirs["arm"].ravel().tolist(), abs=0.02)


def test_a_profile_has_an_interval_at_every_threshold():
    low, high = stratified_interval(
        scores((5, 3)), lambda x: performance_profile(x, THRESHOLDS), resamples=300
    )
    profile = performance_profile(scores((5, 3)), THRESHOLDS)
    assert low.shape == THRESHOLDS.shape
    assert (low <= profile).all()
    assert (profile <= high).all()
    assert (high - low).max() > 0.2


def test_runs_are_redrawn_within_their_task():
    """Tasks without spread have an interval without width, however far apart they are."""
    low, high = stratified_interval(np.tile([0.1, 0.5, 0.9], (5, 1)), iqm, 100)
    assert low == high == pytest.approx(0.5)


def test_mcnemar_by_hand():
    # They disagree on 8 problems, 7 of them for us: 2 (C(8,0) + C(8,1)) / 2^8 = 18/256
    ours = [True] * 10 + [True] * 7 + [False] * 1 + [False] * 5
    theirs = [True] * 10 + [False] * 7 + [True] * 1 + [False] * 5
    assert mcnemar_p(ours, theirs) == pytest.approx(18 / 256)
    assert mcnemar_p(theirs, ours) == mcnemar_p(ours, theirs)
    assert mcnemar_p(ours, ours) == 1.0
    with pytest.raises(InputError, match="same problems"):
        mcnemar_p(ours, theirs[1:])
