"""The embedded models' tokenizers: one token for each character or word, and nothing added."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"


def build_tokenizer(characters: str, *, max_length: int) -> PreTrainedTokenizerFast:
    """A character-level tokenizer; ids are 0 pad, 1 bos, 2 eos, then ``characters`` in order.

    Encoding adds no special token. There is no unknown token: a character outside the vocabulary
    is an error, never silently dropped. Batches are padded on the left, as generation needs.
    """
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        truncation_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def build_word_tokenizer(words: Sequence[str], *, max_length: int) -> PreTrainedTokenizerFast:
    """A word-level tokenizer of texts whose words and points are set apart by one space each.

    As ``build_tokenizer`` otherwise: ids are 0 pad, 1 bos, 2 eos, then ``words`` in order.
    """
    vocabulary = {token: i for i, token in enumerate([PAD, BOS, EOS, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=None))  # type: ignore[arg-type]
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        padding_side="left",
        truncation_side="left",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
