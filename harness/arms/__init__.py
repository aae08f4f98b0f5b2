"""The arms that ship, in a dict one can read; and how any other is found."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.arm import Arm
from harness.arms.cispo import CISPO
from harness.arms.cppo import CPPO, CPPO_BINARY, CPPO_FIXED
from harness.arms.dapo import DAPO, DAPO_FILTERED
from harness.arms.dpo import DPO
from harness.arms.dppo import DPPO_KL, DPPO_TOPK_TV, DPPO_TV
from harness.arms.dr_grpo import DR_GRPO
from harness.arms.external import TRL_GRPO_TRAINER, TRL_RLOO_TRAINER
from harness.arms.filtered import GRPO_FILTERED, LITE_PPO
from harness.arms.gold import DAPO_SCORE, GRPO_GOLD, PPO_GOLD
from harness.arms.grpo import GRPO, GRPO_CLIP_HIGHER
from harness.arms.gspo import GSPO
from harness.arms.iterative import GRPO_ITERATIVE
from harness.arms.ladder import RUNGS
from harness.arms.n_grpo import N_GRPO
from harness.arms.ppo import PPO, PPO_UNGROUPED
from harness.arms.presets import OPENRLHF_PPO, TRL_GRPO, VERL_GRPO, VERL_PPO
from harness.arms.process import GRPO_PROCESS
from harness.arms.reinforce import REINFORCE_PP, REINFORCE_PP_BASELINE
from harness.arms.rloo import RLOO
from harness.arms.shared_head import PPO_SHARED_HEAD
from harness.arms.vapo import VAPO, VC_PPO
from harness.errors import InputError
from harness.plugins import find, load_file

ARMS: dict[str, Arm] = {
    arm.name: arm
    for arm in (
        PPO,
        PPO_UNGROUPED,
        PPO_SHARED_HEAD,
        VC_PPO,
        VAPO,
        REINFORCE_PP,
        REINFORCE_PP_BASELINE,
        RLOO,
        GRPO,
        GRPO_CLIP_HIGHER,
        GRPO_FILTERED,
        N_GRPO,
        GRPO_PROCESS,
        GRPO_ITERATIVE,
        DR_GRPO,
        LITE_PPO,
        DAPO,
        DAPO_FILTERED,
        GSPO,
        CISPO,
        DPPO_TV,
        DPPO_KL,
        DPPO_TOPK_TV,
        CPPO,
        CPPO_FIXED,
        CPPO_BINARY,
        TRL_GRPO,
        VERL_GRPO,
        VERL_PPO,
        OPENRLHF_PPO,
    )
}

EXTERNAL: dict[str, Arm] = {arm.name: arm for arm in (TRL_GRPO_TRAINER, TRL_RLOO_TRAINER)}
OFFLINE: dict[str, Arm] = {DPO.name: DPO}
GOLD: dict[str, Arm] = {arm.name: arm for arm in (DAPO_SCORE, PPO_GOLD, GRPO_GOLD)}
BUILT_IN = ARMS | RUNGS | EXTERNAL | OFFLINE | GOLD
ENTRY_POINTS = "harness.arms"
CONTROLS = ("base", "placebo")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class FoundArm:
    """An arm and where it comes from."""

    arm: Arm
    origin: str


def find_arms(names: Sequence[str], plugin_files: Sequence[Path] = ()) -> dict[str, FoundArm]:
    """The arms of these names: built in, from plugin files, entry points, or ``module:NAME``.

    Raises:
        InputError: an unknown name, a plugin that fails to import or holds no arm, two arms of
            one name.
    """
    known = {name: FoundArm(arm, "built-in") for name, arm in BUILT_IN.items()}
    for path in plugin_files:
        for name, found in _arms_of_file(path).items():
            if name in known:
                raise InputError(
                    f"plugin {path}: an arm named {name!r} exists already "
                    f"({known[name].origin}); choose another name"
                )
            known[name] = found
    found_arms: dict[str, FoundArm] = {}
    for name in names:
        value, origin = find(name, known, ENTRY_POINTS)
        found = value if isinstance(value, FoundArm) else FoundArm(value, origin)
        if not isinstance(found.arm, Arm):
            raise InputError(f"arm {name!r} is a {type(value).__name__}, not a harness.arm.Arm")
        if BUILT_IN.get(found.arm.name, found.arm) is not found.arm:
            raise InputError(
                f"arm {name!r} ({found.origin}) calls itself {found.arm.name!r}, which is a "
                "built-in arm; give it another name"
            )
        if found.arm.name in CONTROLS or not NAME.fullmatch(found.arm.name):
            raise InputError(
                f"arm {name!r} ({found.origin}) calls itself {found.arm.name!r}, which "
                + ("is a control" if found.arm.name in CONTROLS else "cannot name a folder")
                + "; choose another name: letters, digits, _ . -"
            )
        if found.arm.name in found_arms:
            raise InputError(f"arms: {found.arm.name!r} is named twice")
        found_arms[found.arm.name] = found
    return found_arms


def list_arms(plugin_files: Sequence[Path] = ()) -> dict[str, FoundArm]:
    """Every arm that a spec could name without ``module:NAME``."""
    names = [*BUILT_IN]
    for path in plugin_files:
        names += [*_arms_of_file(path)]
    names += [p.name for p in importlib.metadata.entry_points(group=ENTRY_POINTS)]
    return find_arms(names, plugin_files)


def _arms_of_file(path: Path) -> dict[str, FoundArm]:
    """The arms that a plugin file defines itself: not those that it imports to build on."""
    module = load_file(path)
    arms = {
        value.name: FoundArm(value, f"plugin {path}")
        for value in vars(module).values()
        if isinstance(value, Arm) and BUILT_IN.get(value.name) is not value
    }
    if not arms:
        raise InputError(f"plugin {path} defines no Arm; see docs/arms.md for a worked example")
    return arms
