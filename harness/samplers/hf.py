"""Sampling with transformers, in process: the reference engine, and the one for a CPU.

A loop of our own, because ``generate`` takes top-k, penalties and more from a model's generation
config, unseen. Each token is the inverse of its distribution at a uniform number fixed for its row
and position, so batching changes nothing and two arms of one seed share their luck.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedTokenizerBase

from harness.samplers.dialogue import Dialogues, Episodes
from harness.samplers.mixer import Mixer
from harness.samplers.sampler import Decoding, Drawn, left_pad, uniforms


class HFSampler:
    """Draws from the very model that is trained, so it never holds stale weights."""

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        eos_token_ids: Sequence[int],
        engine_batch: int,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.eos = torch.tensor(list(eos_token_ids))
        self.engine_batch = engine_batch

    def load(self, model: nn.Module) -> None:
        self.model = model

    @torch.no_grad()
    def draw(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        decoding: Decoding,
        seed: int,
        episodes: Episodes | None = None,
    ) -> Drawn:
        """Draw ``group_size`` completions of each prompt.

        ``episodes``: an environment that answers each turn, and the prompts' problems. The length
        limit is on what is sampled, over all turns together.
        """
        dialogues = episodes and Dialogues(episodes, group_size, self.tokenizer)
        with _cached(self.model):
            return self._draw(prompts, group_size, decoding, seed, dialogues)

    def _draw(
        self,
        prompts: Sequence[Sequence[int]],
        group_size: int,
        decoding: Decoding,
        seed: int,
        dialogues: Dialogues | None,
    ) -> Drawn:
        device = next(self.model.parameters()).device
        pad = int(self.tokenizer.pad_token_id)  # type: ignore[arg-type]
        ids, mask = left_pad(prompts, pad)
        chance = uniforms(len(prompts) * group_size, decoding.max_new_tokens, seed)
        mixer = Mixer.of(self.model, len(chance), decoding, seed)
        parts: list[Decoded] = []
        step = max(1, self.engine_batch // group_size)
        for start in range(0, len(prompts), step):
            rows = slice(start, start + step)
            completions = slice(start * group_size, (start + step) * group_size)
            parts.append(
                _decode(
                    self.model,
                    ids[rows].to(device),
                    mask[rows].to(device),
                    chance[completions].to(device),
                    group_size,
                    decoding,
                    self.eos.to(device),
                    self._stops(decoding),
                    mixer and mixer.part(completions),
                    dialogues,
                    start * group_size,
                )
            )
        found = Decoded(*(torch.cat(values) for values in zip(*parts, strict=True)))
        length = found.lengths
        width = max(int(length.max()), 1)
        present = torch.arange(width, device=device)[None] < length[:, None]
        given = found.given[:, :width] & present
        completion_mask = present & ~given
        completion_ids = found.tokens[:, :width].masked_fill(~present, pad)
        ids_by_row = [
            row[:n] for row, n in zip(completion_ids.tolist(), length.tolist(), strict=True)
        ]
        return Drawn(
            prompt_ids=ids.to(device).repeat_interleave(group_size, 0),
            prompt_mask=mask.to(device).repeat_interleave(group_size, 0),
            completion_ids=completion_ids,
            mask=completion_mask,
            finished=found.finished,
            logprobs=found.logprobs[:, :width].masked_fill(~completion_mask, 0.0),
            **self._spelt(ids_by_row, given, dialogues),
            **_top(found, completion_mask, decoding),
            mixed_ids=mixer and mixer.ids[:, :width],
            mixed_weights=mixer and mixer.weights[:, :width],
        )

    def _spelt(
        self, rows: list[list[int]], given: Tensor, dialogues: Dialogues | None
    ) -> dict[str, Any]:
        """The completions as text and, where they are episodes, their turns."""
        if dialogues is None:
            return {"texts": tuple(self._text(ids) for ids in rows)}
        for row, ids in enumerate(rows):
            dialogues.close(row, ids)
        return {
            "texts": tuple(map(dialogues.answer, range(len(rows)))),
            "transcripts": tuple(map(dialogues.transcript, range(len(rows)))),
            "turns": tuple(dialogues.turns),
            "given": given,
        }

    def _text(self, ids: list[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text if isinstance(text, str) else "".join(text)

    def _stops(self, decoding: Decoding) -> Any:
        if not decoding.stop:
            return None

        def stopped(tails: Tensor) -> Tensor:
            texts = self.tokenizer.batch_decode(tails, skip_special_tokens=True)
            found = [any(s in text for s in decoding.stop) for text in texts]
            return torch.tensor(found, device=tails.device)

        return stopped


@contextmanager
def _cached(model: nn.Module) -> Iterator[None]:
    """Evaluation mode: a model in training mode with gradient checkpointing drops its KV cache,
    and would draw each token from the one before it alone.
    """
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


class Decoded(NamedTuple):
    """What decoding gives, a row for each completion, as long as it may be."""

    tokens: Int[Tensor, "B L"]
    logprobs: Float[Tensor, "B L"]
    given: Bool[Tensor, "B L"]  # True where an environment wrote
    lengths: Int[Tensor, "B"]
    finished: Bool[Tensor, "B"]  # ended by itself
    top_ids: Int[Tensor, "B L K"]
    top_logprobs: Float[Tensor, "B L K"]


def _top(found: Decoded, mask: Tensor, decoding: Decoding) -> dict[str, Any]:
    """The recorded top tokens, where they were asked for."""
    if not decoding.record_top:
        return {}
    width = mask.shape[1]
    return {
        "top_ids": found.top_ids[:, :width].masked_fill(~mask[:, :, None], 0),
        "top_logprobs": found.top_logprobs[:, :width].masked_fill(~mask[:, :, None], 0.0),
    }


STOP_WINDOW = 16  # tokens looked back on for a stop string


def _decode(
    model: nn.Module,
    ids: Tensor,
    mask: Tensor,
    chance: Tensor,
    group_size: int,
    decoding: Decoding,
    eos: Tensor,
    stopped: Any,
    mixer: Mixer | None,
    dialogues: Dialogues | None,
    first_row: int,
) -> Decoded:
    """Completions of each prompt.

    Rows that have ended leave the batch once half of it has, which changes no other row. What an
    environment writes is fed token by token, as is what was sampled.
    """
    rows = len(ids) * group_size
    limit = decoding.max_new_tokens
    width = limit + (dialogues.room if dialogues else 0)
    tokens = torch.zeros((rows, width), dtype=torch.long, device=ids.device)
    logprobs = torch.zeros((rows, width), device=ids.device)
    given = torch.zeros((rows, width), dtype=torch.bool, device=ids.device)
    sampled = torch.zeros(rows, dtype=torch.long, device=ids.device)  # so far
    lengths = torch.full((rows,), width, device=ids.device)
    over = torch.zeros(rows, dtype=torch.bool, device=ids.device)
    finished = torch.zeros(rows, dtype=torch.bool, device=ids.device)
    cache, logits, next_position = _read_prompts(model, ids, mask, group_size)
    mask = mask.long().repeat_interleave(group_size, 0)
    top = min(decoding.record_top, logits.shape[1])
    top_ids = torch.zeros((rows, width, top), dtype=torch.long, device=ids.device)
    top_logprobs = torch.zeros((rows, width, top), device=ids.device)
    alive = torch.arange(rows, device=ids.device)
    for t in range(width):
        told = given[alive, t]
        token, full = _choose(logits, chance[alive, sampled[alive].clamp(max=limit - 1)], decoding)
        token = torch.where(told, tokens[alive, t], token)
        sampled[alive] += ~told
        tokens[alive, t] = token
        logprobs[alive, t] = full.gather(1, token[:, None]).squeeze(1)
        if top:
            top_logprobs[alive, t], top_ids[alive, t] = full.topk(top)
        ended = torch.isin(token, eos)
        if stopped is not None:
            ended |= stopped(tokens[alive, max(0, t + 1 - STOP_WINDOW) : t + 1])
        ended &= ~over[alive] & ~told  # a row that is over keeps its length
        if dialogues is not None:
            ended = _answered(ended, alive, t, tokens, given, dialogues, first_row)
        last = ended | (~over[alive] & ~told & (sampled[alive] == limit))
        lengths[alive[last]] = t + 1
        over[alive[last]] = True
        finished[alive[ended]] = True
        going = ~over[alive]
        if not going.any():
            break
        if mixer is not None:
            mixer.mix(alive[going], t, logits[going])
        if int(going.sum()) * 2 <= len(alive):
            kept = going.nonzero().squeeze(1)
            cache.batch_select_indices(kept)
            alive, token, mask = alive[kept], token[kept], mask[kept]
            next_position = next_position[kept]
        mask = torch.cat([mask, mask.new_ones((len(mask), 1))], 1)
        out = model(
            **(mixer.fed(alive, t, token) if mixer else {"input_ids": token[:, None]}),
            attention_mask=mask,
            position_ids=next_position,
            past_key_values=cache,
            use_cache=True,
        )
        next_position = next_position + 1
        cache, logits = out.past_key_values, out.logits[:, -1]
    return Decoded(tokens, logprobs, given, lengths, finished, top_ids, top_logprobs)


def _read_prompts(
    model: nn.Module, ids: Tensor, mask: Tensor, group_size: int
) -> tuple[Any, Float[Tensor, "B V"], Int[Tensor, "B 1"]]:
    """Each prompt once: its cache, the next token's logits and its position, for every row."""
    position = mask.long().cumsum(1).sub(1).clamp(min=0)
    out: Any = model(
        input_ids=ids,
        attention_mask=mask.long(),
        position_ids=position,
        past_key_values=DynamicCache(),
        use_cache=True,
        logits_to_keep=1,
    )
    cache, logits = out.past_key_values, out.logits[:, -1].repeat_interleave(group_size, 0)
    cache.batch_repeat_interleave(group_size)
    return cache, logits, position[:, -1:].repeat_interleave(group_size, 0) + 1


def _answered(
    ended: Bool[Tensor, "N"],
    alive: Int[Tensor, "N"],
    t: int,
    tokens: Int[Tensor, "B L"],
    given: Bool[Tensor, "B L"],
    dialogues: Dialogues,
    first_row: int,
) -> Bool[Tensor, "N"]:
    """The rows whose episode has ended, of those whose turn has; the others get their answer.

    A row at its length limit is answered too, but has nothing left to go on with: it is cut.
    """
    done = ended.clone()
    for at in ended.nonzero().squeeze(1).tolist():
        row = int(alive[at])
        reply = dialogues.reply(first_row + row, tokens[row, : t + 1].tolist())
        if reply is not None:
            done[at] = False
            places = slice(t + 1, t + 1 + len(reply))
            tokens[row, places] = torch.tensor(reply, device=tokens.device)
            given[row, places] = True
    return done


def _choose(logits: Tensor, chance: Tensor, decoding: Decoding) -> tuple[Tensor, Tensor]:
    """A token of each row, and all log-probs at the temperature (before top-p)."""
    if decoding.greedy:
        token = logits.argmax(1)
        return token, logits.float().log_softmax(1)
    full = (logits.float() / decoding.temperature).log_softmax(1)
    probability = full.double().exp()
    if decoding.top_p < 1:
        probability = nucleus(probability, decoding.top_p)
    ladder = probability.cumsum(1)
    target = chance[:, None] * ladder[:, -1:]
    token = torch.searchsorted(ladder, target, right=True).squeeze(1)
    # The last token of non-zero probability bounds what rounding may reach.
    last = (ladder < ladder[:, -1:]).sum(1)
    return torch.minimum(token, last), full


def nucleus(probability: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens that holds ``top_p`` of the mass; the rest set to 0."""
    ordered, index = probability.sort(1, descending=True)
    above = ordered.cumsum(1) - ordered  # mass before each token
    ordered = ordered.masked_fill(above >= top_p, 0.0)
    return torch.zeros_like(probability).scatter(1, index, ordered)
