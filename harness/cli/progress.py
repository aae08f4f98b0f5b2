"""The live view of a running matrix, with the time left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from harness.cli.show import console, duration, say
from harness.job import Cell
from harness.matrix import Matrix
from harness.schedule import Ended

REDRAW_SECONDS = 1.0
PLAIN_SECONDS = 30.0


class View:
    """Bars on a terminal; lines elsewhere."""

    def __init__(self, matrix: Matrix, width: int) -> None:
        self.matrix, self.width = matrix, width
        self.start = self.drawn = time.monotonic()
        self.share_at_start = self._total_share([])
        self.live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> View:
        if self.live:
            self.live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.live:
            self.live.stop()

    def ended(self, end: Ended[Cell], matrix: Matrix, error: str | None) -> None:
        """A cell is over: one line that stays."""
        folder = matrix.folder(end.job)
        name = f"{end.job.arm}/{end.job.name}"
        if folder.done:
            status = folder.json("done.json")["status"]
            mark = "done" if status == "done" else status
            say(f"{mark:9} {name}  {duration(end.seconds)}")
        else:
            say(f"FAILED    {name}: {error}")

    def tick(self, running: Sequence[Cell], matrix: Matrix) -> None:
        now = time.monotonic()
        if now - self.drawn < (REDRAW_SECONDS if self.live else PLAIN_SECONDS):
            return
        self.drawn = now
        if self.live:
            self.live.update(self._picture(running), refresh=True)
        else:
            done, total = self._counts()
            names = ", ".join(
                f"{c.arm}/{c.name} {matrix.share_done(matrix.folder(c)):.0%}" for c in running
            )
            say(f"{done}/{total} cells, {self._left(running)}; running {names}")

    def _picture(self, running: Sequence[Cell]) -> Group:
        done, total = self._counts()
        share = self._total_share(running)
        table = Table.grid(padding=(0, 1))
        table.add_row(
            f"{done}/{total} cells", ProgressBar(1.0, share, width=40), self._left(running)
        )
        for cell in running:
            part = self.matrix.share_done(self.matrix.folder(cell))
            table.add_row(
                f"{cell.arm}/{cell.name}", ProgressBar(1.0, part, width=40), f"{part:.0%}"
            )
        return Group(Text(""), table)

    def _counts(self) -> tuple[int, int]:
        expected = self.matrix.expected()
        return sum(self.matrix.store.cell(*names).done for names in expected), len(expected)

    def _weight(self, arm: str, name: str) -> float:
        tuning = self.matrix.spec.tuning
        if arm == "base":
            return 0.1  # an evaluation alone
        return tuning.budget_fraction if tuning and name.startswith("trial") else 1.0

    def _total_share(self, running: Sequence[Cell]) -> float:
        """Work done, as a share of all work, in shares of the budget."""
        parts = {(c.arm, c.name): self.matrix.share_done(self.matrix.folder(c)) for c in running}
        done = total = 0.0
        for names in self.matrix.expected():
            weight = self._weight(*names)
            total += weight
            folder = self.matrix.store.cell(*names)
            done += weight * (1.0 if folder.done else parts.get(names, 0.0))
        return done / total if total else 1.0

    def _left(self, running: Sequence[Cell]) -> str:
        share = self._total_share(running)
        gained = share - self.share_at_start
        passed = time.monotonic() - self.start
        if gained <= 0.005:
            return "time left: not known yet"
        return f"about {duration(passed * (1 - share) / gained)} left"
