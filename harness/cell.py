"""One cell of the matrix: one arm with its settings, one seed, one budget; start to finish."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from harness.arm import Arm
from harness.checkpoint import drop_checkpoint, load_checkpoint, save_checkpoint, save_weights
from harness.cost.memory import PeakMeter
from harness.cost.shape import ModelShape
from harness.data import PromptSet, PromptStream, StreamHash, load_split, prompt_set, splits
from harness.errors import CellError, DivergedError, InputError
from harness.evaluate import Divergence, Evaluated, Protocol, evaluate
from harness.external.arm import ExternalArm, OfflineArm
from harness.footprint import memory_record
from harness.grading import check_reward, make_judge, open_grader, reward_shape
from harness.identity import tree
from harness.job import BASE, PLACEBO, Cell, Context, configured
from harness.learner import Learner
from harness.ledger import Ledger, convention
from harness.loop import Controls, Loop, Progress
from harness.models import (
    Base,
    Policy,
    ValueHead,
    build_critic,
    load_base,
    resolve_device,
    trainable,
)
from harness.pairs import PairData
from harness.record import environment, identity, input_hashes
from harness.reference import build_reference, reference_shape
from harness.reward_model import RewardModel, preferences
from harness.rewards.learned import LearnedGrader
from harness.rewards.maths import MathGrader
from harness.rewards.steps import make_step_judge, step_grader
from harness.samplers import make_sampler
from harness.store import CellFolder, chained, disk_errors, same
from harness.train import train

Grader = MathGrader | LearnedGrader


def run_cell(context: Context, cell: Cell) -> None:
    """Run a cell to its end, from its checkpoint if it has one; errors are stored beside it.

    Raises:
        CellError, InputError: after having been written to ``error.json``.
    """
    folder = CellFolder(context.results / "runs" / cell.arm / cell.name)
    if folder.done:
        return
    with disk_errors(folder.path):
        folder.path.mkdir(parents=True, exist_ok=True)
        with folder.exclusive():
            if not folder.done:  # by the process that held it
                _run_held(context, cell, folder)


def _run_held(context: Context, cell: Cell, folder: CellFolder) -> None:
    """Run a cell whose folder this process holds."""
    folder.clear_error()  # an old one must not pass for the end of this attempt
    run = None
    try:
        with disk_errors(folder.path):
            run = CellRun(context, cell, folder)
            run.run()
    except Exception as error:
        if cell.kind == "trial" and isinstance(error, DivergedError):
            folder.write("done.json", {"status": "diverged", "reason": str(error)})
            drop_checkpoint(folder.path / "checkpoint")
            return
        plain = isinstance(error, (CellError, InputError))
        line = " ".join((str(error) if plain else f"{type(error).__name__}: {error}").split())
        folder.write("error.json", {
            "error": line, "traceback": traceback.format_exc(),
            "where": f"{cell.arm}/{cell.name}", "step": run.step if run else 0,
        })  # fmt: skip
        raise


class CellRun:
    """A cell in progress."""

    def __init__(self, context: Context, cell: Cell, folder: CellFolder) -> None:
        self.context, self.cell, self.folder = context, cell, folder
        self.step = 0
        found = context.arms()
        like = context.imitated(found) if cell.arm == PLACEBO else cell.arm
        is_base = cell.arm == BASE
        self.found = None if is_base else found[str(like)]
        declared = None if self.found is None else self.found.arm
        self.spec, self.arm = context.spec, declared
        if declared is not None:
            self.spec, self.arm = configured(context.spec, declared, dict(cell.settings))
            step_grader(self.spec, self.arm)  # may refuse
            check_reward(self.spec, self.arm)
        runtime = self.spec.runtime
        torch.set_num_threads(runtime.threads)
        self.device = resolve_device(runtime.device)
        self.base = load_base(self.spec.model, self.device)
        self.sets = self._prompt_sets()

    def _prompt_sets(self) -> dict[str, PromptSet]:
        return {
            name: prompt_set(
                name, load_split(f"data.{name}", split).problems, self.spec,
                self.base.tokenizer, self.base.context,
            )
            for name, split in splits(self.spec).items()
        }  # fmt: skip

    def run(self) -> None:
        grading = open_grader(self.spec, self.base, self.sets)
        with grading as grader, PeakMeter(str(self.device)) as meter:
            if self.arm is None:
                self._run_base(grader)
            else:
                self._run_arm(self.arm, grader, meter)

    # -- the control without training ---------------------------------------------------------

    def _run_base(self, grader: Grader) -> None:
        policy = Policy(self.base.model, self.spec.sampling.temperature)
        sampler = make_sampler(self.spec, self.base.model, self.base)
        shapes = {"policy": ModelShape.from_model(self.base.model)}
        self._write_identity(None, shapes)
        self.folder.rewind({})
        chain = ""
        for name in self._tests():
            start = time.perf_counter()
            found = evaluate(
                name, self.sets[name], self.protocol(self.spec.evaluation.samples), sampler,
                grader, self.divergence(policy),
            )  # fmt: skip
            record = {"at": 0.0, "step": 0, "spent": Ledger(shapes).spent(), "purpose": "final"}
            chain = self._store_evaluation(found, record, self.spec.evaluation.samples, chain)
            self._time_evaluation(0.0, start)
        self._finish(Ledger(shapes), 0, "", chain)

    # -- an arm -------------------------------------------------------------------------------

    def _run_arm(self, arm: Arm, grader: Grader, meter: PeakMeter) -> None:
        loop = self.build(arm, grader)
        self._write_identity(arm, loop.ledger.shapes)
        folder = self.folder.path / "checkpoint"
        state = load_checkpoint(folder, loop.learner, loop.reference) or {}
        self._restore(loop, state)
        chains = {"steps": state.get("chain", ""), "evals": state.get("evals_chain", "")}
        done_shares: list[float] = list(state.get("evaluated", []))
        every = self.spec.runtime.checkpoint_every

        def ended(step: dict[str, Any]) -> None:
            record = chained(step, chains["steps"])
            chains["steps"] = record["chain"]
            self.folder.append("steps.jsonl", record)
            self.folder.append("timing.jsonl", {
                "step": record["step"], "seconds": dict(loop.ledger.seconds),
                "total_seconds": loop.ledger.total_seconds,
            })  # fmt: skip
            due = self._due(loop, done_shares)
            if due:
                chains["evals"] = self._evaluate(loop, grader, due, chains["evals"])
                done_shares.extend(due)
            if loop.progress.step % every == 0 or loop.finished:
                self._checkpoint(loop, chains, done_shares)
            self.step += not loop.finished

        self.step = loop.progress.step + (not loop.finished)
        if isinstance(arm, ExternalArm):
            from harness.external.run import train_externally  # trl takes seconds to import

            train_externally(loop, self.base, self.spec, self.folder.path / "trainer", ended)
        elif isinstance(arm, OfflineArm):
            from harness.external.offline_run import train_offline

            folder = self.folder.path / "trainer"
            train_offline(loop, self.base, self.spec, self.pairs(grader), folder, ended)
        else:
            train(loop, ended)
        self.folder.write("memory.json", memory_record(self.spec, loop, meter))
        save_weights(self.folder.path / "checkpoint", loop.learner)
        self._finish(loop.ledger, loop.progress.step, chains["steps"], chains["evals"])
        drop_checkpoint(self.folder.path / "checkpoint")

    def pairs(self, grader: Grader) -> PairData:
        """The preference pairs that the experiment's reward model was fitted to.

        Raises:
            CellError: they cannot be had again as they were.
        """
        assert isinstance(grader, LearnedGrader)
        assert isinstance(grader.model, RewardModel)
        found = preferences(self.spec, self.base, self.sets, grader.gold)
        if found.sha256 != grader.model.card["pairs_sha256"]:
            raise CellError(
                "the preference pairs are not those of the reward model, which was fitted on "
                "another machine or version; remove it from the cache, and start anew"
            )
        return PairData(found.train, found.sha256)

    def build(self, arm: Arm, grader: Grader) -> Loop:
        """Policy, reference and critic as the arm needs them, and the loop around them."""
        spec, seed = self.spec, self.cell.seed
        arm.check(spec.sampling.completions_per_prompt)
        lora = spec.model.lora
        model = trainable(self.base.model, lora, seed)
        if spec.model.gradient_checkpointing:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
            model.train()
        policy = Policy(model, spec.sampling.temperature)
        reference = None
        if arm.kl.needs_reference:
            reference = build_reference(
                self.base, policy, lora=lora is not None, moves=arm.kl.refresh is not None
            )
        separate, shared = arm.separate_critic, arm.shared_head
        critic = build_critic(self.base, separate.init, lora, seed) if separate else None
        hidden = int(self.base.model.config.hidden_size)
        head = ValueHead(policy, hidden, shared.init, seed) if shared else None
        if critic is not None and spec.model.gradient_checkpointing:
            # As the policy, or the arm would be charged for a recomputation that it does not do.
            critic.trunk.gradient_checkpointing_enable()  # type: ignore[operator]
            critic.train()
        learner = Learner(arm, policy, critic, spec.optimizer, head)
        shapes = {"policy": ModelShape.from_model(model)}  # type: ignore[arg-type]
        if reference is not None:
            shapes["reference"] = reference_shape(reference, self.base, shapes["policy"])
        if critic is not None:
            shapes["critic"] = critic_shape(critic, self.base, shapes["policy"])
        scored = arm.reward is None and not isinstance(arm, OfflineArm)
        if isinstance(grader, LearnedGrader) and scored:
            shapes["reward_model"] = reward_shape(grader)
        train_set = self.sets["train"]
        budget = spec.budget.model_copy(update={"limit": self.cell.limit})
        controls = Controls(seed, spec.sampling, spec.optimizer, budget)
        placebo = self.cell.arm == PLACEBO
        judge = make_judge(spec, arm, grader, train_set, placebo=placebo)
        return Loop(
            arm=arm,
            controls=controls,
            learner=learner,
            reference=reference,
            sampler=make_sampler(spec, model, self.base),
            prompts=PromptStream(train_set, seed),
            judge=judge,
            ledger=Ledger(shapes, convention(spec.model)),
            progress=Progress(
                kl_coef=arm.kl.initial_coef, stream=StreamHash(spec.sampling.prompts_per_step)
            ),
            step_judge=make_step_judge(
                spec, arm, train_set.problems, self.base.tokenizer, placebo=placebo
            ),
            dense=spec.reward.dense,
        )

    def _restore(self, loop: Loop, state: Mapping[str, Any]) -> None:
        self.folder.rewind(state.get("sizes", {}))
        if not state:
            return
        p = loop.progress
        p.step, p.cursor, p.kl_coef = state["step"], state["cursor"], state["kl_coef"]
        p.optimizer_steps = state["optimizer_steps"]
        p.policy_steps = state["policy_steps"]
        p.collected_nothing = state["collected_nothing"]
        p.reference_step = state["reference_step"]
        p.stream.restore(state["stream"])
        loop.ledger.restore(state["ledger"])
        loop.sampler.load(loop.learner.policy.model)

    def _checkpoint(self, loop: Loop, chains: Mapping[str, str], shares: list[float]) -> None:
        p = loop.progress
        save_checkpoint(
            self.folder.path / "checkpoint",
            loop.learner,
            {
                "step": p.step, "cursor": p.cursor, "kl_coef": p.kl_coef,
                "optimizer_steps": p.optimizer_steps, "policy_steps": p.policy_steps,
                "collected_nothing": p.collected_nothing, "reference_step": p.reference_step,
                "stream": p.stream.state(), "ledger": loop.ledger.state(),
                "chain": chains["steps"], "evals_chain": chains["evals"],
                "evaluated": shares, "sizes": self.folder.sizes(),
            },
            loop.reference,
        )  # fmt: skip

    # -- evaluation ---------------------------------------------------------------------------

    def _tests(self) -> list[str]:
        return [name for name in self.sets if name.startswith("test.")]

    def protocol(self, samples: int) -> Protocol:
        e, s = self.spec.evaluation, self.spec.sampling
        return Protocol(samples, e.temperature, e.top_p, s.max_new_tokens, s.stop,
                        self.cell.seed, e.greedy)  # fmt: skip

    def divergence(self, policy: Policy) -> Divergence:
        """From the base, whatever the arm's own reference has become."""
        lora = self.spec.model.lora is not None and policy.model is not self.base.model
        base = build_reference(self.base, policy, lora=lora, moves=False)
        return Divergence(policy, base, self.spec.evaluation.curve_samples,
                          self.spec.optimizer.micro_batch)  # fmt: skip

    def _due(self, loop: Loop, done: list[float]) -> list[float]:
        shares = self.spec.budget.evaluate_at if self.cell.kind == "seed" else (1.0,)
        share = 1.0 if loop.finished else loop.share_spent
        return [s for s in shares if s <= share and s not in done]

    def _evaluate(self, loop: Loop, grader: Grader, due: list[float], chain: str) -> str:
        """Evaluate now, for every share of the budget just passed."""
        e = self.spec.evaluation
        names, samples, purpose = self._tests(), e.curve_samples, "curve"
        if self.cell.kind == "trial":
            assert self.spec.tuning is not None
            names, samples, purpose = ["validation"], self.spec.tuning.samples, "tuning"
        elif 1.0 in due:
            samples, purpose = e.samples, "final"
        start = time.perf_counter()
        for name in names:
            found = evaluate(
                name, self.sets[name], self.protocol(samples), loop.sampler, grader,
                self.divergence(loop.learner.policy),
            )  # fmt: skip
            for share in due:
                record = {"at": share, "step": loop.progress.step, "spent": loop.ledger.spent(),
                          "purpose": purpose}  # fmt: skip
                chain = self._store_evaluation(found, record, samples, chain)
        self._time_evaluation(due[-1], start)
        return chain

    def _store_evaluation(
        self, found: Evaluated, record: dict[str, Any], samples: int, chain: str
    ) -> str:
        protocol = asdict(self.protocol(samples))
        record = chained(record | found.record | {"protocol": tree(protocol)}, chain)
        self.folder.append("evals.jsonl", record)
        if record["purpose"] == "final":
            self.folder.append(
                "samples.jsonl", *({"split": record["split"]} | sample for sample in found.samples)
            )
        return record["chain"]

    def _time_evaluation(self, at: float, start: float) -> None:
        seconds = time.perf_counter() - start
        self.folder.append("timing.jsonl", {"evaluation": at, "seconds": seconds})

    # -- records ------------------------------------------------------------------------------

    def _write_identity(self, arm: Arm | None, shapes: Mapping[str, ModelShape]) -> None:
        hashes = input_hashes(self.context, self.base, self.sets)
        record = identity(self.cell, self.spec, self.found, arm, shapes, hashes)
        if self.folder.started:
            if not same(self.folder.json("run.json"), record):
                raise InputError(
                    f"{self.folder.path}/run.json was made by another spec or code version; "
                    "move the results folder away, or run the version that made it"
                )
        else:
            self.folder.write("run.json", record)
        self.folder.write("environment.json", environment(self.spec))

    def _finish(self, ledger: Ledger, steps: int, chain: str, evals_chain: str) -> None:
        done: dict[str, Any] = {
            "status": "done", "steps": steps, "spent": ledger.spent(), "flops": ledger.flops,
            "last_chain": chain, "evals_chain": evals_chain,
        }  # fmt: skip
        if self.cell.kind == "trial":
            done["selected_metric"] = self._selected()
        self.folder.write("done.json", done)

    def _selected(self) -> dict[str, Any]:
        """The validation score that tuning chooses by."""
        assert self.spec.tuning is not None
        name = self.spec.tuning.select
        return {"name": name, "value": selection_score(self.folder.lines("evals.jsonl")[-1], name)}


def selection_score(record: Mapping[str, Any], select: str) -> float:
    """The metric of an evaluation that tuning selects by: mean over problems."""
    problems = record["problems"]
    if select == "greedy":
        return sum(p["greedy"] for p in problems) / len(problems)
    return sum(p["correct"] / p["n"] for p in problems) / len(problems)


def critic_shape(critic: Any, base: Base, policy: ModelShape) -> ModelShape:
    """The critic's shape: the base's trunk with a scalar head, adapted where the policy is."""
    adapters = ModelShape.from_config(
        base.model.config, scalar_head=True, head_bias=True,
        lora_rank=policy.lora_rank, lora_targets=policy.lora_targets,
    )  # fmt: skip
    trained = [p.numel() for p in critic.parameters() if p.requires_grad]
    return dataclasses.replace(
        adapters,
        parameters=sum(p.numel() for p in critic.parameters()),
        trainable=sum(trained),
        trainable_tensors=len(trained),
    )
