"""Commands on an experiment's learned reward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from harness.cli.contexts import contexts
from harness.cli.experiment_commands import AsJson, Experiment, Overrides, Plugins
from harness.cli.show import print_json, print_table, say, short

CURVE_PROMPTS = 64  # validation prompts that a best-of-n curve is drawn on
SPARE = 4  # completions drawn for each one that the largest n takes


def register(app: typer.Typer) -> None:
    app.command()(reward_model)


def reward_model(
    experiment: Experiment,
    best_of: Annotated[
        int, typer.Option(min=0, help="Also both rewards of the base's best of 1, 2, 4, ... N.")
    ] = 0,
    set_: Overrides = None,
    plugin: Plugins = None,
    json: AsJson = False,
) -> None:
    """Build the reward model of an experiment, or find it, and print how good it is."""
    from harness.cli.reward_card import best_of_curve, ensure_card

    context = contexts(experiment, set_, plugin, None)[0]  # cases of a sweep share it
    found = ensure_card(context.spec, None if json else say)
    curve = best_of_curve(found, best_of, CURVE_PROMPTS, SPARE) if best_of else []
    if json:
        print_json({"folder": str(found.folder), **found.model.card,
                    **({"best_of": curve} if best_of else {})})  # fmt: skip
        return
    _print(found.model.card, str(found.folder))
    if curve:
        say("")
        print_table(
            f"the base's best of n by the reward model, {CURVE_PROMPTS} validation prompts at most",
            ["n", "KL to the base at most", "proxy", "gold"],
            [(row["n"], f"{row['kl']:.2f}", f"{row['proxy']:+.3f}", f"{row['gold']:+.3f}")
             for row in curve],
        )  # fmt: skip


def _print(card: Mapping[str, Any], folder: str) -> None:
    cost, low_high = card["cost"], card["accuracy_interval"]
    wanted = card["recipe"]["preferences"]
    origin = "drawn from the base" if wanted["source"] == "sampled" else wanted["dataset"]
    print_table(folder, ["", ""], [
        ("gold reward", card["gold"]["gold"]),
        ("pairs", f"{cost['pairs']} to train on, {cost['heldout_pairs']} held out; {origin}"),
        ("labels against the gold reward", f"{cost['against_gold']:.1%}"),
        ("accuracy on held-out labels", _interval(card["accuracy"], low_high)),
        ("what the gold reward would reach", f"{card['label_ceiling']:.1%}"),
        ("preferences as the gold reward has them", f"{card['gold_accuracy']:.1%}"),
        ("rank correlation with the gold reward", f"{card['gold_spearman']:.3f}"),
        ("expected calibration error", f"{card['ece']:.3f}"),
        ("loss", f"{card['losses'][0][1]:.3f} to {card['losses'][-1][1]:.3f}, "
                 f"{card['losses'][-1][0]} steps" if card["losses"] else "not logged: few steps"),
        ("completions drawn", f"{cost['completions']} ({cost['completion_tokens']} tokens)"),
        ("labels", cost["labels"]),
        ("FLOPs of drawing", short(cost["flops"])),
        ("FLOPs of training", short(cost["training_flops"])),
        ("weights", card["model_sha256"][:16]),
        *(("note", note) for note in card["notes"]),
    ])  # fmt: skip
    say("")
    print_table(
        "calibration on held-out pairs",
        ["sure of its favourite", "pairs", "mean", "labels agree"],
        [(f"{b['from']:.0%} to {b['to']:.0%}", b["n"], f"{b['predicted']:.1%}",
          f"{b['observed']:.1%}") for b in card["calibration"]],
    )  # fmt: skip


def _interval(value: float, ends: tuple[float, float]) -> str:
    return f"{value:.1%} [{ends[0]:.1%}, {ends[1]:.1%}]"
