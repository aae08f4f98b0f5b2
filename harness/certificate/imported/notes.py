"""What a reader should know of library defaults before comparing their runs.

Facts of the libraries' sources and the papers, each tied to what the runs record: a note is given
only where the runs show that it applies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Any

from harness.certificate.compare import equal
from harness.certificate.imported.checks import NOT_KNOWN, believed, differences
from harness.certificate.imported.run import OWN_WORDS, ImportedRun
from harness.errors import counted

FAR = 100  # tokens; how much of a final reward GAE lets through to a token this far before it


@dataclass(frozen=True)
class Note:
    """A remark on runs.

    Attributes:
        runs: those concerned.
        about: ``defaults``, ``algorithm`` or ``pair``.
        text: one or two sentences.
    """

    runs: tuple[str, ...]
    about: str
    text: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self) | {"runs": list(self.runs)}


# Settings that the entry point of a library has if nothing is said, and what follows from them.
DEFAULTS: dict[tuple[str, str], tuple[dict[str, Any], str]] = {
    ("trl", "ppo"): (
        {"kl_place": "reward", "kl_coef": 0.05, "gae_lambda": 0.95, "clip_low": 0.2,
         "value_clip": 0.2, "epochs": 4, "minibatches": 1, "learning_rate": 3e-6,
         "temperature": 0.7},
        "k1 at 0.05 in the reward, lambda 0.95, 4 epochs, rate 3e-6 for policy and critic, and "
        "temperature 0.7",
    ),
    ("trl", "grpo"): (
        {"kl_place": "none", "loss_normaliser": "token_mean", "scale": "group", "clip_low": 0.2,
         "clip_high": 0.2, "group_size": 8, "learning_rate": 1e-6, "epochs": 1,
         "temperature": 1.0},
        "the loss of DAPO (a mean over all tokens) and no KL, with a sample std (ddof 1, eps "
        "1e-4): not DeepSeekMath's GRPO",
    ),
    ("verl", "ppo"): (
        {"kl_place": "none", "gae_lambda": 1.0, "clip_low": 0.2, "clip_high": 0.2,
         "dual_clip": 3.0, "value_clip": 0.5, "learning_rate": 1e-6,
         "critic_learning_rate": 1e-5, "loss_normaliser": "token_mean", "temperature": 1.0},
        "no KL at all, a dual clip at 3, lambda 1, and a critic that learns ten times as fast as "
        "the policy",
    ),
    ("verl", "grpo"): (
        {"kl_place": "none", "clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0,
         "loss_normaliser": "token_mean", "scale": "group", "learning_rate": 1e-6,
         "temperature": 1.0},
        "a mean over all tokens, a dual clip at 3, no KL, a sample std (ddof 1, eps 1e-6): not "
        "DeepSeekMath's GRPO",
    ),
    ("openrlhf", "ppo"): (
        {"kl_place": "reward", "kl_estimator": "k1", "kl_coef": 0.01, "gae_lambda": 1,
         "clip_low": 0.2, "value_clip": 0.5, "learning_rate": 1e-6, "critic_learning_rate": 9e-6,
         "temperature": 1.0},
        "k1 at 0.01 in the reward, rewards clipped to +-10, lambda 1, and a cosine rate",
    ),
    ("openrlhf", "grpo"): (
        {"kl_place": "reward", "kl_estimator": "k1", "kl_coef": 0.01, "clip_low": 0.2,
         "learning_rate": 1e-6, "temperature": 1.0},
        "the KL as k1 in the reward, where it enters the group's mean and std, and not as k3 in "
        "the loss: not DeepSeekMath's GRPO",
    ),
}  # fmt: skip
CONSTANTS = (
    "libraries differ in constants of their code that no file records: TRL and verl whiten with a "
    "sample variance (ddof 1), OpenRLHF with ddof 0; a group's std is taken with ddof 1 and an "
    "epsilon of 1e-4 (TRL), 1e-6 (verl) or 1e-9 (OpenRLHF); OpenRLHF clips rewards"
)


def notes(runs: Sequence[ImportedRun]) -> tuple[Note, ...]:
    """All that applies to these runs, of single runs first."""
    found = [note for run in runs for note in _of_run(run)]
    told: set[tuple[str, str]] = set()
    for first, second in combinations(runs, 2):
        pair = (first.kind, second.kind)
        if first.kind != second.kind and pair not in told and pair[::-1] not in told:
            told.add(pair)
            found += _of_pair(first, second)
    return tuple(found)


def at_defaults(run: ImportedRun) -> bool:
    """Whether all settings of its library's defaults are recorded, and are those."""
    asked, _ = DEFAULTS.get((run.library, run.algorithm or ""), ({}, ""))
    return bool(asked) and all(
        name in run.settings and equal(run.settings[name], value) for name, value in asked.items()
    )


def _of_run(run: ImportedRun) -> Iterator[Note]:
    have, own = run.settings, (run.name,)
    if at_defaults(run):
        _, means = DEFAULTS[run.library, run.algorithm or ""]
        yield Note(own, "defaults", f"runs {run.library}'s defaults for {run.algorithm}: {means}")
    reach = run.number("gae_lambda")
    if have.get("advantage") == "GAE" and reach is not None and reach < 1:
        text = (
            f"lambda {reach}: a reward at the end weighs {reach**FAR:.2g} {FAR} tokens before it. "
            "In DeepSeek-R1's supplement PPO falls behind GRPO at 0.95 and comes close at 1 (one "
            "curve, no seeds told): with long completions, take 1 beside a group baseline"
        )
        yield Note(own, "algorithm", text)
    if have.get("advantage") == "group mean" and have.get("group_size") == 1:
        text = "one completion per prompt: a group of one has no baseline; raise the group size"
        yield Note(own, "algorithm", text)
    if believed(run, "loss_normaliser") == "token_mean_micro":
        text = (
            "the loss is a mean over each micro-batch's tokens: its weights depend on the "
            "micro-batch size, which is no part of an algorithm"
        )
        yield Note(own, "algorithm", text)
    if have.get("engine_correction"):
        text = (
            "the loss is weighted by truncated ratios between engine and trainer: a run without "
            "them optimises something else"
        )
        yield Note(own, "algorithm", text)


def _of_pair(first: ImportedRun, second: ImportedRun) -> Iterator[Note]:
    pair = (first.name, second.name)
    names = f"{first.kind} and {second.kind}"
    own = OWN_WORDS if first.library != second.library else ()
    apart = [
        name for name, told in differences((first, second)).items()
        if told["kind"] == "control" and NOT_KNOWN not in told["values"].values()
        and name not in own
    ]  # fmt: skip
    if apart:
        by_default = at_defaults(first) and at_defaults(second)
        yield Note(pair, "pair", f"{names}{' at their defaults' if by_default else ''} are not a "
                   f"controlled pair: they differ in {counted(len(apart), 'control')} "
                   f"({', '.join(apart)})")  # fmt: skip
    places = [run.settings.get("kl_place") for run in (first, second)]
    if None not in places and places[0] != places[1]:
        yield Note(pair, "pair", f"KL: {places[0]} in {first.name}, {places[1]} in {second.name}. "
                   "In the reward it moves baseline and std and is estimated once, in the loss it "
                   "has a gradient of its own")  # fmt: skip
    means = [believed(run, "loss_normaliser") for run in (first, second)]
    if NOT_KNOWN not in means and means[0] != means[1]:
        yield Note(pair, "pair", f"the loss is normalised by {means[0]} in {first.name} and by "
                   f"{means[1]} in {second.name}, which weighs long completions otherwise: no part "
                   "of PPO against GRPO")  # fmt: skip
    heat = [run.settings.get("temperature") for run in (first, second)]
    if None not in heat and heat[0] != heat[1]:
        yield Note(pair, "pair", f"temperatures {heat[0]} and {heat[1]}: ratios and KL are of "
                   "other distributions, and exploration differs")  # fmt: skip
    if first.library != second.library:
        yield Note(pair, "pair", CONSTANTS)
