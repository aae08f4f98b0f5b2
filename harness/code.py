"""Which code made a result: a hash of the sources that move numbers, and the git commit."""

from __future__ import annotations

import hashlib
import subprocess
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent
# What only reads finished runs, shows them or starts them cannot change a number in them.
READERS = ("report", "cli", "certificate", "plan", "schedule.py", "experiment.py", "doctor.py",
           "grade_file.py", "status.py", "metrics.py", "lock.py")  # fmt: skip


@cache
def code_sha256() -> str:
    """Hash of every source file that takes part in training, grading or evaluation."""
    digest = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        if relative.parts[0].removesuffix(".py") in {r.removesuffix(".py") for r in READERS}:
            continue
        digest.update(relative.as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@cache
def git_commit() -> str | None:
    """The commit of the checkout, with ``+changes`` where it is dirty; None outside git."""
    try:

        def git(*arguments: str) -> str:
            return subprocess.run(
                ["git", "-C", str(PACKAGE), *arguments],
                capture_output=True, text=True, check=True, timeout=10,
            ).stdout.strip()  # fmt: skip

        dirty = git("status", "--porcelain", "--", str(PACKAGE))
        return git("rev-parse", "HEAD") + ("+changes" if dirty else "")
    except (OSError, subprocess.SubprocessError):
        return None
