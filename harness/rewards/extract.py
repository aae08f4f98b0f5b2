"""Find the final answer that a completion states.

Order in ``auto``: the last non-empty ``\\boxed{}`` (or ``\\fbox{}``), the last ``#### X`` line, the
last "answer is X" or "answer: X", and only for a completion that ended by itself the last formula
or number. Every scan is linear in the completion's length, so no completion can stall the caller.
"""

from __future__ import annotations

import re
from typing import Literal

AnswerFormat = Literal["auto", "boxed", "gsm8k", "last_number", "marker"]
ANSWER_FORMATS: tuple[AnswerFormat, ...] = ("auto", "boxed", "gsm8k", "last_number", "marker")

_NUMBER = (
    r"[-−+]?(?:\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})+(?!\d)|\d+)?(?:\.\d+)?"
    r"(?<=\d)(?:\s?/\s?\d+(?![\d.]))?(?:\s?\\?%)?"
)
_MATH = r"\$\$[^$]{1,400}\$\$|\$[^$\n]{1,400}\$|\\\([^\n]{1,400}?\\\)|\\\[.{1,400}?\\\]"
_FRACTION = r"-?\\[dtc]?frac\s?\{-?\d+\}\s?\{-?\d+\}"
_AND = r"[\s$]*(?:,?\s*(?:\b(?:and|or)\b|\\text\{\s*(?:and|or)\s*\})|,|;)[\s$]*(?:\w\s*=\s*)?"

_brace = re.compile(r"\\.|[{}]", re.DOTALL)
_box = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_bare_box = re.compile(r"[^\s${}]+")
_between_boxes = re.compile(_AND)
_hashes = re.compile(r"####[ \t]*([^\n#]*)(\n?)")
_answer_is = re.compile(
    r"\banswer\b(?:[^\n.:=]{0,60}?\b(?:is|would be|equals)\b(?!\s+not\b)[*\s]*:?|[*\s]*[:=])[*\s]*",
    re.IGNORECASE,
)
_sentence_end = re.compile(r"\.(?=\s|\*|$)|\n|(?<=\w)!(?=\s|$)")
_leading_math = re.compile(rf"(?:{_MATH})", re.DOTALL)
_more_math = re.compile(rf"\s*(?:,?\s*\b(?:and|or)\b|,)\s*({_MATH})", re.DOTALL)
_currency = re.compile(rf"\\?[$€£¥]\s?({_NUMBER})(?=[\s.,;:!?)*]|$)")
_leading_number = re.compile(
    rf"([-−]?\d+ \d+/\d+|{_NUMBER})(?=[\s.,;:!?)*]|$)(?!\s*[-+*/^=<>×÷\\(]|,\s*-?\d|:\s*\d)"
)
_number_list = re.compile(r"\s*(?:,?\s*\b(?:and|or)\b|,)\s*[-−\\$\d]")
_prose = re.compile(r"(?<![\\a-zA-Z{])[A-Za-z]{2,}")
_text_group = re.compile(r"\\(?:text|mbox|mathrm|textbf|textit|operatorname)\s*\{[^{}]*\}")
_formula_or_number = re.compile(
    rf"{_MATH}|{_FRACTION}|(?<![\w.,])(?:[-−]?\d+ \d+/\d+|{_NUMBER})", re.DOTALL
)
_delimiters = re.compile(r"^(?:\$\$?|\\\(|\\\[)\s*(.*?)\s*(?:\$\$?|\\\)|\\\])$", re.DOTALL)


def final_answer(
    completion: str,
    *,
    finished: bool = True,
    form: AnswerFormat = "auto",
    marker: str = "A",
) -> str | None:
    """The text of the final answer, or None where the completion states none.

    Args:
        completion: the model's text, without the prompt.
        finished: False for a completion cut at the length limit. Then only an answer that is
            complete before the cut counts (a closed box, a whole line, something after the
            answer), and never a mere last number.
        form: which statements count; see the module's text for ``auto``.
        marker: for ``marker``, the text whose last occurrence precedes the answer.
    """
    if form == "marker":
        return _after_marker(completion, marker, finished)
    if form in ("auto", "boxed"):
        stated, found = _boxed(completion, finished)
        if stated or form == "boxed":
            return found
    if form in ("auto", "gsm8k"):
        stated, found = _hashed(completion, finished)
        if stated or form == "gsm8k":
            return found
    if form == "auto":
        stated, found = _worded(completion, finished)
        if stated:
            return found
    return _last_formula_or_number(completion) if finished else None


def _after_marker(completion: str, marker: str, finished: bool) -> str | None:
    at = completion.rfind(marker)
    if at < 0:
        return None
    rest = completion[at + len(marker) :].lstrip()
    token = re.match(r"[^\s;]+", rest)
    # A cut completion may have lost digits of an answer that touches its end.
    if token is None or (not finished and token.end() == len(rest)):
        return None
    return token.group()


def _boxed(text: str, finished: bool) -> tuple[bool, str | None]:
    """Whether a box settles the answer, and which answer."""
    boxes, open_box = _boxes(text)
    if open_box and not finished:
        return True, None  # the cut fell inside a new final answer
    if not boxes:
        return False, None
    first, _, answer = boxes.pop()
    # "\boxed{1} and \boxed{2}" is one answer, and no way to offer two.
    while boxes and _between_boxes.fullmatch(text, boxes[-1][1], first):
        first, _, content = boxes.pop()
        answer = f"{content},{answer}"
    return True, answer


def _boxes(text: str) -> tuple[list[tuple[int, int, str]], bool]:
    """Outermost non-empty boxes as (start, end, content), and whether the last one stays open."""
    heads = list(_box.finditer(text))
    if not heads:
        return [], False
    closes = _closing_braces(text)
    boxes: list[tuple[int, int, str]] = []
    covered, open_box = 0, False
    for head in heads:
        if head.start() < covered:
            continue
        if text[head.end() : head.end() + 1] == "{":
            close = closes.get(head.end())
            open_box = close is None
            if close is None:
                continue
            content, covered = text[head.end() + 1 : close], close + 1
        else:
            bare = _bare_box.match(text, head.end())
            open_box = bare is None or bare.end() == len(text)
            if bare is None:
                continue
            content, covered = bare.group().rstrip(".,;"), bare.end()
        content = _unbox(content.strip())
        if content:
            boxes.append((head.start(), covered, content))
    return boxes, open_box


def _unbox(content: str) -> str:
    """The inside of a box that holds nothing but a box."""
    while (head := _box.match(content)) and content.endswith("}"):
        inner = content[head.end() :]
        if not inner.startswith("{") or _closing_braces(inner).get(0) != len(inner) - 1:
            break
        content = inner[1:-1].strip()
    return content


def _closing_braces(text: str) -> dict[int, int]:
    """Position of each closed ``{`` to that of its ``}``; escaped braces do not count."""
    closes: dict[int, int] = {}
    stack: list[int] = []
    for token in _brace.finditer(text):
        if token.group() == "{":
            stack.append(token.start())
        elif token.group() == "}" and stack:
            closes[stack.pop()] = token.start()
    return closes


def _hashed(text: str, finished: bool) -> tuple[bool, str | None]:
    lines = [m for m in _hashes.finditer(text) if m.group(1).strip()]
    if not lines:
        return False, None
    last = lines[-1]
    if not finished and not last.group(2) and last.end() == len(text):
        return True, None
    return True, _stated(last.group(1))


def _worded(text: str, finished: bool) -> tuple[bool, str | None]:
    statements = list(_answer_is.finditer(text))
    if not statements:
        return False, None
    rest = text[statements[-1].end() :]
    end = _sentence_end.search(rest)
    if not rest.strip():
        return not finished, None
    if not finished and end is None:
        return True, None
    return True, _stated(rest)


def _stated(rest: str) -> str | None:
    """The answer at the head of what follows "answer is" or "####"."""
    rest = rest.strip().lstrip("*: ").strip()
    math = _leading_math.match(rest)
    if math and not _is_prose(math.group()):
        parts, at = [_bare(math.group())], math.end()
        while more := _more_math.match(rest, at):
            parts.append(_bare(more.group(1)))
            at = more.end()
        return ",".join(parts)
    number = _currency.match(rest) or _leading_number.match(rest)
    if number and not _number_list.match(rest, number.end()):
        return number.group(1)
    end = _sentence_end.search(rest)
    sentence = (rest[: end.start()] if end else rest).strip().rstrip(".*").strip()
    if _is_prose(sentence) and len(sentence.split()) > 1:
        return _last_formula_or_number(sentence) or sentence or None
    return sentence or None


def _is_prose(text: str) -> bool:
    return _prose.search(_text_group.sub("", text)) is not None


def _bare(math: str) -> str:
    found = _delimiters.match(math)
    return found.group(1) if found else math


def _last_formula_or_number(text: str) -> str | None:
    last = None
    at = 0
    while found := _formula_or_number.search(text, at):
        token = found.group()
        if token[0] in "$\\" and not token.startswith("\\frac") and _is_prose(token):
            at = found.start() + 1  # two currency signs, not a formula
            continue
        last, at = token, found.end()
    return _bare(last) if last else None
