"""Prompt templates by name; what a model is asked is part of an experiment's pinned fields."""

from __future__ import annotations

from dataclasses import dataclass

from harness.errors import InputError, suggest

SLOT = "{question}"
_BOX = "Please reason step by step, and put your final answer within \\boxed{}."


@dataclass(frozen=True)
class Prompt:
    """A template that a question is put into.

    Attributes:
        name: ``custom`` for a template written in a spec.
        template: text with ``{question}`` once; all other braces are literal.
        chat: the filled text is a user's message for the model's chat template, rather than text
            that the model continues.
        system: a system message before it.
        version: grows when the text changes, so that old and new results are told apart.
    """

    name: str
    template: str
    chat: bool = False
    system: str | None = None
    version: int = 1

    def render(self, question: str) -> str:
        """The filled template: the whole prompt, or the user's message of a chat."""
        return self.template.replace(SLOT, question)

    def messages(self, question: str) -> list[dict[str, str]]:
        """The filled template as the messages of a chat, for ``apply_chat_template``."""
        turns = [{"role": "user", "content": self.render(question)}]
        if self.system is not None:
            turns.insert(0, {"role": "system", "content": self.system})
        return turns


PROMPTS: dict[str, Prompt] = {
    # The question already ends in "=" (the embedded arithmetic).
    "equation": Prompt("equation", SLOT),
    "plain": Prompt("plain", f"{SLOT}\n"),
    "qa": Prompt("qa", f"Question: {SLOT}\nAnswer:"),
    "boxed": Prompt("boxed", f"{SLOT}\n{_BOX}\n"),
    # GSM8K's own solutions end in "#### NUMBER" (Cobbe et al. 2021).
    "gsm8k": Prompt(
        "gsm8k",
        f"Question: {SLOT}\nThink step by step, then end with a line '#### ' and the number.\n"
        "Answer:",
    ),
    "chat_boxed": Prompt("chat_boxed", f"{SLOT}\n{_BOX}", chat=True),
}


def prompt_from_spec(name_or_template: str, *, chat: bool = False) -> Prompt:
    """A named prompt, or a template of the spec's own: text that holds ``{question}`` once.

    Args:
        name_or_template: a name in `PROMPTS`, or the template.
        chat: for a template, whether it is a user's message of a chat; a named prompt knows.

    Raises:
        InputError: for an unknown name, a template with ``{question}`` more than once, or ``chat``
            for a named prompt that is none.
    """
    if name_or_template in PROMPTS:
        prompt = PROMPTS[name_or_template]
        if chat and not prompt.chat:
            chats = ", ".join(p.name for p in PROMPTS.values() if p.chat)
            raise InputError(
                f"data.chat_template: true, but data.prompt {prompt.name!r} is text that the model "
                f"continues; name a chat prompt ({chats}) or write a template with {SLOT}"
            )
        return prompt
    slots = name_or_template.count(SLOT)
    if slots == 1:
        return Prompt("custom", name_or_template, chat=chat)
    if slots > 1:
        raise InputError(
            f"data.prompt: template {name_or_template[:60]!r} holds {SLOT} {slots} times; "
            "it must hold it once"
        )
    raise InputError(
        f"data.prompt: {name_or_template[:60]!r} is no known name and no template with {SLOT}."
        f"{suggest(name_or_template, PROMPTS)}"
    )
