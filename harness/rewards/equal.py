"""When two final answers are surely equal or surely different, and an answer's class in a vote.

The rules here decide only where math-verify's verdict is known beforehand: integers, short decimals
and fractions of integers. Everything else is left to math-verify itself (``worker``).
"""

from __future__ import annotations

import re
from fractions import Fraction
from functools import lru_cache

_MAX_DIGITS = 30  # of an integer, a numerator or a denominator
_MAX_WHOLE, _MAX_PLACES = 8, 6  # of a decimal: math-verify keeps 15 digits and rounds to 6 places
_LONGEST_NORMALISED = 400

_thousands = re.compile(r"-?[1-9]\d{0,2}(?:(?:,\\!|\{,\}|,)\d{3})+(?:\.\d+)?")
_separator = re.compile(r",\\!|\{,\}|,")
_integer = re.compile(r"-?\d+")
_decimal = re.compile(r"(-?)(\d*)\.(\d+)")
_ratio = re.compile(r"(-?(?:0|[1-9]\d*))/([1-9]\d*)")
_frac = re.compile(r"(-?)\\[dt]?frac(?:\{(-?\d+)\}\{(-?\d+)\}|(\d)(\d))")
_thin_separator = re.compile(r"(?<=\d),\\!\s*(?=\d{3}(?!\d))")
_mixed = re.compile(r"(-?\d+)\s+(\d+)/(\d+)")
_mixed_frac = re.compile(r"(-?)([1-9]\d*)\s?\\[dt]?frac\{([1-9]\d*)\}\{([1-9]\d*)\}")
_assignment = re.compile(r"[A-Za-z](?:_\{?\w+\}?)?\s*=(?!=)\s*([^=<>]+)")
_whole_text = re.compile(r"\\(?:text|mbox)\{([^{}]*)\}")


def tidy(answer: str) -> str:
    """An answer without what surely does not change its meaning.

    Outer white space, dollar signs and display delimiters, a closing full stop, the separator in
    ``5,\\!525``; the Unicode minus becomes a hyphen. A mixed number
    ``3 1/2`` is put as ``3\\frac{1}{2}``, because math-verify misreads the former.
    """
    text = _thin_separator.sub("", answer.strip().replace("−", "-"))
    previous = None
    while text != previous:
        previous = text
        if text.endswith(".") and not text.endswith(("..", "\\.")):
            text = text[:-1].rstrip()
        if len(text) > 1 and text[0] == text[-1] == "$":
            text = text.strip("$").strip()
        elif (text.startswith("\\(") and text.endswith("\\)")) or (
            text.startswith("\\[") and text.endswith("\\]")
        ):
            text = text[2:-2].strip()
    if mixed := _mixed.fullmatch(text):
        text = "{}\\frac{{{}}}{{{}}}".format(*mixed.groups())
    return text


def read_number(text: str) -> Fraction | None:
    """The value of a plain integer, decimal or fraction; None where reading it is not certain."""
    if text.startswith(("$", "\\$")):
        text = text.removeprefix("\\").removeprefix("$").lstrip()
    if _thousands.fullmatch(text):
        text = _separator.sub("", text)
    if len(text) > 2 * _MAX_DIGITS + 16:
        return None
    if _integer.fullmatch(text):
        return Fraction(int(text)) if len(text) <= _MAX_DIGITS else None
    if decimal := _decimal.fullmatch(text):
        return _read_decimal(*decimal.groups())
    if ratio := _ratio.fullmatch(text):
        return _divide(ratio[1], ratio[2])
    if frac := _frac.fullmatch(text):
        sign, top, bottom, digit, other = frac.groups()
        value = _divide(top or digit, bottom or other)
        return -value if sign and value is not None else value
    return None


def _read_decimal(sign: str, whole: str, places: str) -> Fraction | None:
    if len(whole.lstrip("0")) > _MAX_WHOLE or len(places) > _MAX_PLACES:
        return None
    if not whole and sign:
        return None
    value = Fraction(int(whole + places or "0"), 10 ** len(places))
    return -value if sign else value


def _divide(top: str, bottom: str) -> Fraction | None:
    if max(len(top), len(bottom)) > _MAX_DIGITS or int(bottom) == 0:
        return None
    return Fraction(int(top), int(bottom))


def surely_equal(gold: str, answer: str) -> bool | None:
    """math-verify's verdict on two tidied answers where it is certain, else None.

    Two values that differ by no more than 1e-5 are left to math-verify: it compares decimals
    rounded to six places, so that 0.333333 counts as 1/3.
    """
    left, right = read_number(gold), read_number(answer)
    if left is None or right is None:
        return None
    if left == right:
        return True
    if abs(left - right) > Fraction(1, 100_000):
        return False
    exact = "." not in gold and "." not in answer
    return False if exact else None


@lru_cache(maxsize=100_000)
def canonical(answer: str) -> str:
    """The answer's class in a majority vote: equal text for answers that plainly mean the same.

    Numbers become reduced fractions (``0.50``, ``1/2``, ``\\frac12`` all give ``1/2``); other
    answers lose spacing, sizing commands, units and the left side of ``x = ...``, as math-verify
    itself drops them. It does no algebra: ``x+1`` and ``1+x`` are two classes.
    """
    text = tidy(answer)
    if (number := read_number(text)) is not None:
        return str(number)
    if len(text) <= _LONGEST_NORMALISED:
        text = tidy(_normalise(text))
    if assignment := _assignment.fullmatch(text):
        text = assignment[1].strip()
    if (number := read_number(text)) is not None:
        return str(number)
    if mixed := _mixed_frac.fullmatch(text):
        sign, whole, top, bottom = mixed.groups()
        value = int(whole) + Fraction(int(top), int(bottom))
        return str(-value if sign else value)
    if words := _whole_text.fullmatch(text):
        text = words[1]
    return "".join(text.split())


def _normalise(text: str) -> str:
    # Imported late: it loads sympy, which plain numbers do not need.
    from latex2sympy2_extended.math_normalization import NormalizationConfig, normalize_latex

    config = NormalizationConfig(
        basic_latex=True, units=True, malformed_operators=True, nits=True, boxed="none"
    )
    try:
        return normalize_latex(text, config)
    except Exception:  # a malformed answer keeps its own text as its class
        return text
