"""From prompts to graded completions: what is sampled is judged, charged and recorded."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from harness.cost.flops import Generation, Lengths
from harness.errors import CellError
from harness.identity import stream_seed
from harness.loop import Loop
from harness.rewards.learned import learned_record
from harness.rewards.maths import Verdict
from harness.rewards.noise import NoisyJudge
from harness.rewards.steps import steps_record
from harness.samplers.sampler import Drawn
from harness.types import Rollout, group_range, group_sum


def collect(loop: Loop, record: dict[str, Any]) -> Rollout | None:
    """Sample and grade until the batch is full; groups that the arm drops are charged too."""
    sampling, arm = loop.controls.sampling, loop.arm
    size = arm.group_size(sampling.completions_per_prompt)
    wanted = sampling.prompts_per_step * sampling.completions_per_prompt // size
    kept: list[Rollout] = []
    seen: list[Rollout] = []
    judgements: list[Verdict] = []
    stream: dict[str, str] = {}
    drawn_before = loop.progress.cursor
    rounds = getattr(arm.sampling, "max_rounds", 1) if arm.sampling.resamples else 1
    for round_ in range(rounds):
        missing = wanted - sum(len(r) for r in kept) // size
        if missing <= 0 or (round_ > 0 and loop.finished):
            break
        rollout, verdicts = _draw(loop, missing, size, round_, stream)
        judgements += verdicts
        seen.append(rollout)
        keep = arm.sampling.keep(rollout.correct, rollout.group)
        if keep.any():
            kept.append(rollout.select(keep.nonzero().squeeze(1)))
    everything = join(seen)
    used = sum(len(r) for r in kept)
    dropped = len(everything) - used
    record |= sampling_record(everything) | {
        "prompts": {
            "drawn": loop.progress.cursor - drawn_before,
            "cursor": loop.progress.cursor,
            "stream": stream,
        },
        "outcomes": dict(Counter(v.outcome.value for v in judgements)),
        "dropped": {"groups": dropped // size, "completions": dropped},
        "used": used,
        "completions_per_prompt": size,
    }
    record |= learned_record(judgements) | noise_record(loop, judgements, everything)
    return join(kept) if kept else None


def noise_record(loop: Loop, verdicts: list[Verdict], x: Rollout) -> dict[str, Any]:
    """How what the arm was told differs from the true verdicts; nothing where there is no noise."""
    judge = loop.judge
    if not isinstance(judge, NoisyJudge):
        return {}
    return judge.record(verdicts, x.score, x.bonus, x.correct)


def _draw(
    loop: Loop, count: int, size: int, round_: int, stream: dict[str, str]
) -> tuple[Rollout, list[Verdict]]:
    """One sampling round: ``count`` prompts of the stream, ``size`` completions each."""
    progress = loop.progress
    indices = loop.prompts.take(progress.cursor, count)
    prompts = [loop.prompts.prompts.prompts[i] for i in indices]
    draw_seed = stream_seed(loop.controls.seed, "sampling", progress.step, round_)
    with loop.ledger.timing("sample"):
        episodes = loop.prompts.prompts.episodes(indices)
        drawn = loop.sampler.draw(prompts, size, loop.decoding, draw_seed, episodes)
    return judged(loop, indices, size, drawn, round_, stream)


def judged(
    loop: Loop, indices: list[int], size: int, drawn: Drawn, round_: int, stream: dict[str, str]
) -> tuple[Rollout, list[Verdict]]:
    """Completions of the next problems of the stream, graded and charged.

    Args:
        loop: the run.
        indices: of the problems, at the cursor and after it; ``size`` completions of each.
        size: completions per prompt.
        drawn: the completions.
        round_: the sampling round of the step.
        stream: gets the hashes of the stream at the multiples passed.
    """
    progress, problems = loop.progress, loop.prompts.prompts
    rows = [i for i in indices for _ in range(size)]
    grade_seed = stream_seed(loop.controls.seed, "grade", progress.step, round_)
    with loop.ledger.timing("grade"):
        verdicts, score, bonus, correct = loop.judge(rows, drawn, grade_seed)
        steps = _judge_steps(loop, rows, drawn, grade_seed)
    if loop.dense is not None:
        score = loop.dense.outcome * score + steps["paid"].sum(1).to(score)
    if not bool(torch.isfinite(score).all()):
        row = int((~torch.isfinite(score)).nonzero()[0])
        raise CellError(f"the reward of problem {problems.problems[rows[row]].id!r} is not finite")
    stream |= progress.stream.add([problems.problems[i].id for i in indices])
    prompt_lengths = [len(problems.prompts[i]) for i in rows]
    lengths = drawn.present.sum(1).tolist()
    given = 0 if drawn.given is None else int(drawn.given.sum())
    drawing = Generation.of(
        prompt_lengths, lengths, shared_by=size, searched=drawn.searched, given=given
    )
    loop.ledger.charge_generation("policy", drawing)
    if "reward_model" in loop.ledger.shapes:
        read = Lengths.of(p + c for p, c in zip(prompt_lengths, lengths, strict=True))
        loop.ledger.charge_score("reward_model", read, read.tokens)  # its head runs everywhere
    loop.ledger.charge(
        prompts=len(indices),
        completions=len(rows),
        reward_calls=len(rows),
        prompt_tokens=sum(prompt_lengths) // size + given,
        completion_tokens=sum(lengths) - given,
    )
    device = drawn.mask.device
    group = torch.arange(len(indices), device=device).repeat_interleave(size) + progress.cursor
    progress.cursor += len(indices)
    rollout = Rollout(
        prompt_ids=drawn.prompt_ids,
        prompt_mask=drawn.prompt_mask,
        completion_ids=drawn.completion_ids,
        mask=drawn.mask,
        given=drawn.given,
        group=group,
        score=score.to(device),
        bonus=bonus.to(device),
        correct=correct.to(device),
        finished=drawn.finished,
        behaviour_logprobs=drawn.logprobs,
        truth=_truth(loop, verdicts, device),
        top_ids=drawn.top_ids,
        top_logprobs=drawn.top_logprobs,
        mixed_ids=drawn.mixed_ids,
        mixed_weights=drawn.mixed_weights,
        **steps,
    )
    return rollout, verdicts


def _truth(loop: Loop, verdicts: list[Verdict], device: torch.device) -> Tensor | None:
    judge = loop.judge
    if not isinstance(judge, NoisyJudge) or judge.gain is None:
        return None
    return torch.tensor([v.correct for v in verdicts], device=device)


def _judge_steps(loop: Loop, rows: list[int], drawn: Drawn, seed: int) -> dict[str, Tensor]:
    """The rollout's fields on worked steps; none where nobody rewards steps."""
    if loop.step_judge is None:
        return {}
    steps = loop.step_judge(rows, drawn, seed)
    loop.ledger.charge(steps_graded=int(steps.ends.sum()))
    paid = {} if loop.dense is None else {"paid": loop.dense.steps * steps.scores}
    return {"step_ends": steps.ends, "step_scores": steps.scores} | paid


def join(rollouts: list[Rollout]) -> Rollout:
    """Rollouts of different paddings as one."""
    if len(rollouts) == 1:
        return rollouts[0]
    S = max(r.prompt_ids.shape[1] for r in rollouts)
    T = max(r.mask.shape[1] for r in rollouts)
    columns: dict[str, list[Tensor]] = {}
    for r in rollouts:
        for name, value in vars(r).items():
            if value is None:
                continue
            if name in ("prompt_ids", "prompt_mask"):
                value = torch.nn.functional.pad(value, (S - value.shape[1], 0))
            elif value.dim() >= 2:
                tail = (0, 0) * (value.dim() - 2)
                value = torch.nn.functional.pad(value, (*tail, 0, T - value.shape[1]))
            columns.setdefault(name, []).append(value)
    return Rollout(**{name: torch.cat(values) for name, values in columns.items()})


def sampling_record(x: Rollout) -> dict[str, Any]:
    """Facts of all sampled completions, dropped ones included."""
    lengths = x.mask.sum(1)
    groups = len(torch.unique(x.group))
    size = group_sum(torch.ones_like(x.score), x.group)
    flat = (group_range(x.score, x.group) == 0).to(x.score) / size
    steps: dict[str, Any] = {} if x.step_ends is None else {"worked_steps": steps_record(x)}
    if x.mixed_weights is not None:
        fed_back = int(x.mask.sum()) - len(x)
        steps["mixed_share"] = int(x.mixed_weights.any(2).sum()) / max(fed_back, 1)
    return steps | {
        "length_mean": float(lengths.double().mean()),
        "truncated_share": float((~x.finished).double().mean()),
        "entropy": float(-x.behaviour_logprobs[x.mask].double().mean()),
        "zero_variance_share": float(flat.sum()) / groups,
    }
