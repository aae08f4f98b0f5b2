"""The process that runs math-verify: one request a line in, one reply a line out.

Run as ``python -m harness.rewards.worker SECONDS MEGABYTES``. The kernel ends the process when one
request has used SECONDS of processor time, so a loaded machine cannot turn a slow request into a
time-out and no C loop can outlast it.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from functools import lru_cache
from itertools import product
from typing import Any

_DOLLAR_OR_BREAK = str.maketrans({"\n": " ", "\r": " "})


def as_formula(answer: str) -> str:
    """The answer as one inline formula; dollar signs inside it, which mean nothing, are dropped."""
    return f"${answer.replace(chr(92) + '$', '').replace('$', '').translate(_DOLLAR_OR_BREAK)}$"


@lru_cache(maxsize=4096)
def parse_answer(answer: str) -> list[Any]:
    """What math-verify reads in a final answer: parsed values, then the text as a fallback."""
    from math_verify import parse

    # No time-outs by signal.alarm: they fail off the main thread and hide in a plain False.
    return parse(as_formula(answer), parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def compare(gold: str, answer: str) -> tuple[bool, bool]:
    """math-verify's verdict: whether ``answer`` means ``gold``, and whether as a value.

    Not symmetric. What math-verify cannot parse it compares as text; then the second is False.

    Raises:
        MemoryError: where memory ran out, which math-verify would report as "not equal".
    """
    from math_verify import verify

    for left, right in product(parse_answer(gold), parse_answer(answer)):
        try:
            if verify([left], [right], timeout_seconds=None, raise_on_error=True):
                return True, not isinstance(left, str)
        except MemoryError:
            raise
        except Exception:  # math-verify's own rule: a pair that cannot be compared is not equal
            continue
    return False, False


def _limit_memory(megabytes: int) -> None:
    # The parent ends the process at `megabytes` resident; this stops one huge request before.
    limit = (2 * megabytes + 1024) << 20
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Serve requests until the parent closes the pipe."""
    seconds, megabytes = float(sys.argv[1]), int(sys.argv[2])
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a stray print must not corrupt the replies
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C ends
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})
    for warm in ("1", "\\frac{1}{2}", "x+1"):
        compare(warm, warm)  # the first calls build tables and grammars: not on a request's time
    _limit_memory(megabytes)
    print(json.dumps("ready"), file=replies, flush=True)
    for line in sys.stdin:
        gold, answer = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        reply: dict[str, Any]
        try:
            equal, as_value = compare(gold, answer)
            reply = {"equal": equal, "as_value": as_value}
        except MemoryError:
            os._exit(71)
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
