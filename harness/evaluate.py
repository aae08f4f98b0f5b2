"""Sample held-out problems, grade them, and keep the counts that every metric follows from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from harness.data import PromptSet
from harness.identity import stream_seed
from harness.models import Policy, Reference, scored
from harness.rewards.learned import SCORE_DIGITS, LearnedGrader, ScoredVerdict
from harness.rewards.maths import MathGrader, Verdict
from harness.samplers.sampler import Decoding, Drawn, Sampler
from harness.types import Rollout


@dataclass(frozen=True)
class Protocol:
    """How an evaluation samples; equal for all arms of a seed."""

    samples: int
    temperature: float
    top_p: float
    max_new_tokens: int
    stop: tuple[str, ...]
    seed: int
    greedy: bool


@dataclass(frozen=True)
class Evaluated:
    """The record of one evaluation, and its completions."""

    record: dict[str, Any]
    samples: list[dict[str, Any]]


def evaluate(
    name: str,
    problems: PromptSet,
    protocol: Protocol,
    sampler: Sampler,
    grader: MathGrader | LearnedGrader,
    divergence: Divergence | None,
) -> Evaluated:
    """Draw ``protocol.samples`` completions of each problem, and a greedy one.

    The random numbers depend on the seed and the split alone: every moment and every arm of a seed
    is judged by the same draws.
    """
    decoding = Decoding(
        protocol.temperature, protocol.top_p, protocol.max_new_tokens, protocol.stop
    )
    seed = stream_seed(protocol.seed, "evaluation", name)
    episodes = problems.episodes()
    drawn = sampler.draw(problems.prompts, protocol.samples, decoding, seed, episodes)
    verdicts = _grade(grader, problems, drawn, protocol.samples)
    greedy = None
    if protocol.greedy:
        likeliest = sampler.draw(
            problems.prompts, 1,
            Decoding(1.0, 1.0, protocol.max_new_tokens, protocol.stop, True), 0, episodes,
        )  # fmt: skip
        greedy = [v.correct for v in _grade(grader, problems, likeliest, 1)]
    lengths = drawn.mask.sum(1).tolist()
    rows, samples, read = [], [], drawn.transcripts or drawn.texts
    for i, problem in enumerate(problems.problems):
        at = slice(i * protocol.samples, (i + 1) * protocol.samples)
        rows.append(
            {"id": problem.id, "level": problem.level, "subject": problem.subject}
            | count(verdicts[at])
            | both_scores(verdicts[at])
            | {
                "greedy": greedy[i] if greedy is not None else None,
                "length_mean": sum(lengths[at]) / protocol.samples,
                "truncated": protocol.samples - int(drawn.finished[at].sum()),
            }
        )
        samples += [
            {"problem": problem.id, "question": problem.question, "gold": problem.answer,
             "completion": text, "outcome": verdict.outcome.value, "extracted": verdict.extracted}
            | _scores(verdict)
            for text, verdict in zip(read[at][:4], verdicts[at][:4], strict=True)
        ]  # fmt: skip
    record = {
        "split": name,
        "problems_sha256": problems.sha256,
        "problems": rows,
        "entropy": float(-drawn.logprobs[drawn.mask].double().mean()),
        "kl_to_base": divergence(problems, drawn, protocol, sampler) if divergence else None,
    }
    return Evaluated(record, samples)


def count(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """One problem's counts: correct, by answer class, without an answer, by outcome."""
    classes: dict[tuple[str, bool], int] = {}
    for v in verdicts:
        if v.extracted is not None:
            key = (v.extracted, v.correct)
            classes[key] = classes.get(key, 0) + 1
    ranked = sorted(classes.items(), key=lambda item: (-item[1], item[0]))
    return {
        "n": len(verdicts),
        "correct": sum(v.correct for v in verdicts),
        "answers": [[answer, n, right] for (answer, right), n in ranked],
        "unparsed": sum(v.extracted is None for v in verdicts),
        "outcomes": dict(sorted(Counter(v.outcome.value for v in verdicts).items())),
    }


def both_scores(verdicts: Sequence[Verdict]) -> dict[str, list[float]]:
    """Gold and proxy score of each sample, in order; nothing under a plain verdict."""
    scored = [v for v in verdicts if isinstance(v, ScoredVerdict)]
    if not scored:
        return {}
    return {
        "gold": [v.gold for v in scored],
        "proxy": [round(v.proxy, SCORE_DIGITS) for v in scored],
    }


def _grade(
    grader: MathGrader | LearnedGrader, problems: PromptSet, drawn: Drawn, samples: int
) -> Sequence[Verdict]:
    if isinstance(grader, LearnedGrader):
        return grader.assess([p for p in problems.problems for _ in range(samples)], drawn)
    golds = [p.answer for p in problems.problems for _ in range(samples)]
    return grader.grade(golds, drawn.texts, drawn.finished.tolist())


def _scores(verdict: Verdict) -> dict[str, float]:
    if not isinstance(verdict, ScoredVerdict):
        return {}
    return {"gold_score": verdict.gold, "proxy_score": verdict.proxy}


@dataclass(frozen=True)
class Divergence:
    """Sequence KL of the policy to the base: the sum of k1 over fresh samples of the policy.

    Measured at the training temperature, from at most ``samples`` completions of each problem, by
    the same estimator for every arm.
    """

    policy: Policy
    base: Reference
    samples: int
    micro_batch: int

    def __call__(
        self, problems: PromptSet, drawn: Drawn, protocol: Protocol, sampler: Sampler
    ) -> dict[str, float]:
        take = min(self.samples, protocol.samples)
        if protocol.top_p == 1.0 and protocol.temperature == self.policy.temperature:
            index = torch.arange(len(drawn.mask)).view(len(problems.prompts), protocol.samples)
            rows = index[:, :take].reshape(-1)
        else:  # the evaluation's samples are not the policy's own distribution
            decoding = Decoding(
                self.policy.temperature, 1.0, protocol.max_new_tokens, protocol.stop
            )
            seed = stream_seed(protocol.seed, "divergence")
            drawn = sampler.draw(problems.prompts, take, decoding, seed, problems.episodes())
            rows = torch.arange(len(drawn.mask))
        x = _as_rollout(drawn).select(rows.to(drawn.mask.device))
        mine = scored(self.policy.logprobs, x, self.micro_batch)
        base = scored(self.base.logprobs, x, self.micro_batch)
        k1 = (mine - base).double().sum(1).view(-1, take).mean(1)  # by problem
        return {
            "mean": float(k1.mean()),
            "se": float(k1.std(unbiased=True) / len(k1) ** 0.5) if len(k1) > 1 else 0.0,
            "n": len(k1) * take,
        }


def _as_rollout(drawn: Drawn) -> Rollout:
    zeros: Tensor = torch.zeros(len(drawn.mask), device=drawn.mask.device)
    return Rollout(
        prompt_ids=drawn.prompt_ids,
        prompt_mask=drawn.prompt_mask,
        completion_ids=drawn.completion_ids,
        mask=drawn.mask,
        given=drawn.given,
        group=zeros.long(),
        score=zeros,
        bonus=zeros,
        correct=zeros.bool(),
        finished=drawn.finished,
        behaviour_logprobs=drawn.logprobs,
    )
