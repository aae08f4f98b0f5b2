"""Loss and gradient of every shipped arm on one batch: stored, and written out again in numpy.

``Rule`` states each arm from its paper, apart from the code; the loops below are token by token.
"""

from __future__ import annotations

import importlib.util
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.arm import parts
from harness.arms import ARMS

ROOT = Path(__file__).parent.parent


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("golden_script", ROOT / "scripts/golden.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SCRIPT = load_script()
STORED = json.loads((ROOT / "tests/golden/arms.json").read_text())


@pytest.mark.parametrize("name", ARMS)
def test_the_shipped_arms_figures_have_not_moved(name):
    stored = dict(STORED[name])
    assert stored.pop("parts") == json.loads(json.dumps(parts(ARMS[name]))), (
        "the arm was changed: raise its part's version and run scripts/golden.py"
    )
    assert SCRIPT.measure(ARMS[name]) == pytest.approx(stored, rel=1e-9)
    assert set(STORED) == set(ARMS)


@dataclass(frozen=True)
class Rule:
    """An arm, as its paper has it.

    ``kl``: (place, coefficient, estimator). ``mean``: gae, group, others, none, or steps, which
    have a std of their own. ``std``: (over what, ddof, eps). ``clip``: low and high bound of the
    ratio, or a rule and its numbers.
    """

    score: str = "graded"
    kl: tuple[str, float, str] | None = None
    mean: str = "group"
    lambdas: tuple[float | str, float] = (1.0, 1.0)
    value_clip: float = 0.2
    std: tuple[str, int, float] | None = None
    ratio: str = "token"
    clip: tuple[Any, ...] = (0.8, 1.2)
    dual: float | None = None
    average: str = "completions"
    imitate: float = 0.0


PPO = Rule(kl=("reward", 0.05, "k1"), mean="gae", std=("tokens", 1, 1e-8), average="tokens")
GRPO = Rule(kl=("loss", 0.04, "k3"), std=("group", 0, 1e-6))
DAPO = replace(GRPO, kl=None, clip=(0.8, 1.28), average="tokens", score="signed")
DR_GRPO = Rule(average="limit")
CPPO = replace(GRPO, kl=None, average="tokens", clip=("prefix", 0.15, "top", "adaptive"))
RULES = {
    "ppo": PPO,
    "ppo_ungrouped": PPO,
    "ppo_shared_head": PPO,  # another model, the same arithmetic
    "vc_ppo": replace(PPO, score="signed", lambdas=(0.95, 1.0)),
    "vapo": replace(
        PPO, score="signed", kl=None, lambdas=("adaptive", 1.0), clip=(0.8, 1.28), imitate=0.1
    ),
    "reinforce_pp": Rule(
        kl=("reward", 0.01, "k1"), mean="none", std=("tokens", 0, 1e-8), average="tokens"
    ),
    "reinforce_pp_baseline": Rule(
        kl=("loss", 0.01, "k2"), std=("tokens", 0, 1e-8), average="tokens"
    ),
    "rloo": Rule(
        kl=("reward", 0.03, "k1"), mean="others", ratio="none", clip=("open",), average="limit"
    ),
    "grpo": GRPO,
    "grpo_clip_higher": replace(GRPO, clip=(0.8, 1.28)),
    "grpo_iterative": GRPO,  # which policy the reference is, the batch does not tell
    "grpo_process": replace(GRPO, mean="steps", std=None),
    "n_grpo": GRPO,  # what it changes is what was fed
    "grpo_filtered": GRPO,  # no group of the batch agrees
    "dr_grpo": DR_GRPO,
    "lite_ppo": Rule(std=("batch", 0, 1e-6), average="tokens"),
    "dapo": replace(DAPO, score="signed, overlong"),
    "dapo_overlong_filter": replace(DAPO, average="tokens of the finished"),
    "gspo": Rule(std=("group", 0, 1e-6), ratio="completion", clip=(1 - 3e-4, 1 + 4e-4)),
    "cispo": Rule(score="overlong", std=("group", 0, 1e-6), clip=("weight", 5.0), average="tokens"),
    "dppo_tv": replace(DR_GRPO, clip=("mask", 0.15, "tv")),
    "dppo_kl": replace(DR_GRPO, clip=("mask", 0.05, "kl")),
    "dppo_topk_tv": replace(DR_GRPO, clip=("mask", 0.15, "top")),
    "cppo": CPPO,
    "cppo_fixed": replace(CPPO, clip=("prefix", 0.15, "top", 0.015)),
    "cppo_binary": replace(CPPO, clip=("prefix", 0.2, "tv", "adaptive")),
    "trl_grpo": Rule(std=("group", 1, 1e-4), average="tokens"),
    "verl_grpo": Rule(std=("group", 1, 1e-6), average="tokens", dual=3.0),
    "verl_ppo": replace(PPO, kl=None, dual=3.0, value_clip=0.5),
    "openrlhf_ppo": replace(
        PPO, kl=("reward", 0.01, "k1"), std=("tokens", 0, 1e-8), value_clip=0.5
    ),
}


def softmax(rows):
    e = np.exp(rows - rows.max(1, keepdims=True))
    return e / e.sum(1, keepdims=True)


class ByHand:
    """The fixed batch as numpy arrays, with losses and gradients written out token by token."""

    def __init__(self, name: str) -> None:
        self.rule = RULES[name]
        x = SCRIPT.fixed_experience(ARMS[name])
        self.mask, self.ids = x.mask.numpy(), x.completion_ids.numpy()
        self.old, self.graded = x.old_logprobs.numpy(), x.score.numpy()
        self.ref = None if x.ref_logprobs is None else x.ref_logprobs.numpy()
        self.values = None if x.values is None else x.values.numpy()
        self.steps = None if x.step_ends is None else (x.step_ends.numpy(), x.step_scores.numpy())
        self.tops = None if x.top_ids is None else (x.top_ids.numpy(), x.top_logprobs.numpy())
        self.table = SCRIPT.policy_table().numpy()
        self.p = softmax(self.table)
        self.lengths = self.mask.sum(1)
        self.tokens = [(i, t) for i in range(8) for t in range(self.lengths[i])]

    def score(self):
        score = self.graded
        if self.rule.score.startswith("signed"):
            score = np.where(score > 0, 1.0, -1.0)
        if "overlong" in self.rule.score:  # limit 6, cache 1.2: 0 up to 4.8, -1 at 6
            score = score + np.clip((4.8 - self.lengths) / 1.2, -1, 0)
        return score

    def rewards(self):
        """Per token: the score on the last, less the penalty where it stands in the reward."""
        found = dict.fromkeys(self.tokens, 0.0)
        for i, score in enumerate(self.score()):
            found[i, self.lengths[i] - 1] += score
        if self.rule.kl is not None and self.rule.kl[0] == "reward":
            assert self.ref is not None
            for at in self.tokens:
                found[at] -= self.rule.kl[1] * (self.old[at] - self.ref[at])
        return found

    def gae(self, which: int):
        """Sums of temporal differences, at the policy's lambda (0) or the critic's (1)."""
        assert self.values is not None
        rewards, found = self.rewards(), {}
        for i, n in enumerate(self.lengths):
            lam = self.rule.lambdas[which]
            lam = min(max(1 - 1 / (0.05 * n), 0), 1) if lam == "adaptive" else lam
            for t in range(n):
                v = [*self.values[i, :n], 0.0]
                found[i, t] = sum(
                    lam ** (s - t) * (rewards[i, s] + v[s + 1] - v[s]) for s in range(t, n)
                )
        return found

    def of_steps(self):
        """Per token: the steps that end there or later, normalised by all of the group's."""
        assert self.steps is not None
        ends, scores = self.steps
        found = {}
        for i, n in enumerate(self.lengths):
            rows = range(i // 4 * 4, i // 4 * 4 + 4)
            pool = np.array([scores[r, s] for r, s in self.tokens if r in rows and ends[r, s]])
            z = (scores[i] - pool.mean()) / (pool.std() + 1e-6)
            for t in range(n):
                found[i, t] = sum(z[s] for s in range(t, n) if ends[i, s])
        return found

    def advantages(self):
        if self.rule.mean == "steps":
            return self.of_steps()
        rewards, raw = self.rewards(), {}
        total = np.array([sum(rewards[i, t] for t in range(n)) for i, n in enumerate(self.lengths)])
        groups = (slice(0, 4), slice(4, 8))
        if self.rule.mean == "gae":
            raw = self.gae(0)
        for i, t in self.tokens:
            rows = groups[i // 4]
            if self.rule.mean == "group":
                raw[i, t] = total[i] - total[rows].mean()
            elif self.rule.mean == "others":
                raw[i, t] = total[i] - (total[rows].sum() - total[i]) / 3
            elif self.rule.mean == "none":
                raw[i, t] = sum(rewards[i, s] for s in range(t, self.lengths[i]))
        if self.rule.std is None:
            return raw
        over, ddof, eps = self.rule.std
        if over == "tokens":
            every = np.array(list(raw.values()))
            spread = math.sqrt(every.var(ddof=ddof) + eps)
            return {at: (a - every.mean()) / spread for at, a in raw.items()}
        sets = {"group": lambda i: total[groups[i // 4]], "batch": lambda i: total}[over]
        return {(i, t): a / (sets(i).std(ddof=ddof) + eps) for (i, t), a in raw.items()}

    def weights(self):
        used = {
            "tokens of the finished": [at for at in self.tokens if self.lengths[at[0]] < 6],
        }.get(self.rule.average, self.tokens)
        share = {
            "completions": lambda i: 1 / 8 / self.lengths[i],
            "limit": lambda i: 1 / 8 / 6,
        }.get(self.rule.average, lambda i: 1 / len(used))
        return {(i, t): share(i) if (i, t) in set(used) else 0.0 for i, t in self.tokens}

    def now(self, i, t):
        return math.log(self.p[self.before(i, t), self.ids[i, t]])

    def before(self, i, t):
        return self.ids[i, t - 1] if t else 0

    def divergence(self, i, t):
        kind = self.rule.clip[2]
        mu, pi = math.exp(self.old[i, t]), math.exp(self.now(i, t))
        if kind == "kl":
            return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))
        if kind == "tv":
            return abs(mu - pi)
        assert self.tops is not None  # the sampled token is the first of the two recorded
        other = self.p[self.before(i, t), self.tops[0][i, t, 1]]
        mus, pis = [mu, math.exp(self.tops[1][i, t, 1])], [pi, other]
        mus, pis = [*mus, max(1 - sum(mus), 0)], [*pis, max(1 - sum(pis), 0)]
        return sum(abs(a - b) for a, b in zip(mus, pis, strict=True)) / 2

    def blocked(self, i, t):
        """Whether a divergence rule stops this token, if it moves away."""
        name, delta = self.rule.clip[:2]
        if name == "mask":
            return self.divergence(i, t) > delta
        n = self.lengths[i]
        D = [self.divergence(i, s) for s in range(n)]
        budget = self.rule.clip[3]
        if budget == "adaptive":
            budget = min(max(np.percentile(D, 90), 0.02), 0.04)
        w = [1 - 0.2 * s / (n - 1) if n > 1 else 1.0 for s in range(n)]
        spent = sum(w[s] * D[s] for s in range(t))
        return w[t] * D[t] > min(delta, delta + budget * sum(w[:t]) - spent)

    def token(self, i, t, a):
        """Objective, its slope in this token's log-prob for each u of the completion, and cut."""
        u = math.exp(self.now(i, t) - self.old[i, t])
        if self.rule.ratio == "none":
            return a, a, False
        if self.rule.ratio == "completion":
            n = self.lengths[i]
            u = math.exp(sum(self.now(i, s) - self.old[i, s] for s in range(n)) / n)
        if self.rule.clip[0] == "weight":
            weight = min(u, self.rule.clip[1])
            return weight * a * self.now(i, t), weight * a, weight != u
        if self.rule.clip[0] in ("mask", "prefix"):
            stop = a * (u - 1) > 0 and self.blocked(i, t)
            return (0.0, 0.0, True) if stop else (u * a, u * a, False)
        low, high = self.rule.clip
        if (a > 0 and u > high) or (a < 0 and u < low):
            return min(max(u, low), high) * a, 0.0, True
        if self.rule.dual is not None and a < 0 and u > self.rule.dual:
            return self.rule.dual * a, 0.0, True
        return u * a, u * a, False

    def figures(self):
        rule, weights, advantages = self.rule, self.weights(), self.advantages()
        surrogate = extra = 0.0
        clipped, gradient = 0, np.zeros_like(self.table)
        right = [at for at in self.tokens if self.graded[at[0]] > 0]
        for i, t in self.tokens:
            w, logprob = weights[i, t], self.now(i, t)
            value, slope, cut = self.token(i, t, advantages[i, t])
            clipped += cut and w > 0 and advantages[i, t] != 0
            surrogate -= w * value
            slope *= -w  # a completion's ratio passes 1/T of each of its T tokens' slopes to each
            if rule.kl is not None and rule.kl[0] == "loss":
                assert self.ref is not None
                d, coef = logprob - self.ref[i, t], rule.kl[1] * w
                k2 = rule.kl[2] == "k2"
                extra += coef * (d * d / 2 if k2 else math.exp(-d) - 1 + d)
                slope += coef * (d if k2 else 1 - math.exp(-d))
            if rule.imitate and (i, t) in right:
                extra -= rule.imitate * logprob / len(right)
                slope -= rule.imitate / len(right)
            gradient[self.before(i, t)] -= slope * self.p[self.before(i, t)]
            gradient[self.before(i, t), self.ids[i, t]] += slope
        found = {
            "loss": surrogate + extra,
            "surrogate": surrogate,
            "gradient_norm": np.linalg.norm(gradient),
            "clipped": clipped,
        }
        return found | (self.critic() if rule.mean == "gae" else {})

    def critic(self):
        assert self.values is not None
        table, targets = SCRIPT.wave(5, speed=1.1, height=0.5).numpy(), self.gae(1)
        loss, gradient, c = 0.0, np.zeros(5), self.rule.value_clip
        for i, t in self.tokens:
            v, old = table[self.before(i, t)], self.values[i, t]
            target = targets[i, t] + old
            near = min(max(v, old - c), old + c)
            far_error, near_error = (v - target) ** 2, (near - target) ** 2
            loss += max(far_error, near_error) / 2 / len(self.tokens)
            if far_error >= near_error:
                gradient[self.before(i, t)] += (v - target) / len(self.tokens)
        return {"value_loss": loss, "critic_gradient_norm": np.linalg.norm(gradient)}


@pytest.mark.parametrize("name", ARMS)
def test_the_figures_are_those_of_the_papers_formulas(name):
    stored = {key: value for key, value in STORED[name].items() if key != "parts"}
    assert ByHand(name).figures() == pytest.approx(stored, rel=1e-9)


def test_the_fixed_batch_reaches_every_branch():
    assert STORED["grpo"]["clipped"] > STORED["grpo_clip_higher"]["clipped"] > 0
    for name in ("gspo", "dppo_topk_tv", "cppo", "cppo_fixed", "vapo"):
        assert STORED[name]["clipped"] > 0, name
