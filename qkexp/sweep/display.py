"""Progress of a sweep on the terminal, read from its run directories."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from qkexp.sweep.plan import Planned
from qkexp.sweep.status import ENDED, STYLE, State, duration, signature, state_of

REFRESH_SECONDS = 1.0


class Display:
    """A bar over all steps and a line for each run that is alive; without a terminal, a line for each that ended."""

    def __init__(self, console: Console, directory: Path, runs: Sequence[Planned]):
        self.console, self.directory, self.runs = console, directory, list(runs)
        self._before = {run.name: signature(directory / run.name) for run in self.runs}
        self._looked = 0.0
        self._told: set[str] = set()
        self._states = {run.name: State(run.name, "missing", 0, run.steps) for run in self.runs}
        self._live: Live | None = None
        self.bar = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
        )
        self.task = self.bar.add_task(f"0/{len(self.runs)} runs", total=sum(r.steps for r in self.runs))

    def tick(self) -> None:
        """Look at the directories, at most once a second; a run that has ended is not looked at again."""
        if time.monotonic() - self._looked < REFRESH_SECONDS:
            return
        self._looked = time.monotonic()
        for run in self.runs:
            if self._states[run.name].status not in ENDED:
                self._states[run.name] = self._state(run)
        states = list(self._states.values())
        ended = [s for s in states if s.status in ENDED]
        done = sum(s.steps if s.status in ENDED else s.step for s in states)
        self.bar.update(self.task, completed=done, description=f"{len(ended)}/{len(states)} runs")
        if self._live is not None:
            self._live.update(Group(self.bar, _alive(states)))
        else:
            self._tell(ended)

    def _state(self, run: Planned) -> State:
        directory = self.directory / run.name
        if self._before[run.name] == signature(directory) != (0, 0):
            return State(run.name, "missing", 0, run.steps)  # of an attempt before this launch
        return state_of(directory, run.steps)

    def _tell(self, ended: Sequence[State]) -> None:
        for s in ended:
            if s.name not in self._told:
                self._told.add(s.name)
                took = "" if s.seconds is None else f" in {s.seconds:.1f} s"
                line = f"[{len(self._told)}/{len(self.runs)}] {s.name}: {s.status}{took}, {s.reason}"
                self.console.print(line, markup=False)  # reasons hold brackets of their own


def _alive(states: Sequence[State]) -> Table:
    table = Table.grid(padding=(0, 2))
    for s in states:
        if s.status == "running":
            left = "" if s.left is None else f"{duration(s.left)} left"
            table.add_row(f"  {s.name}", f"[{STYLE['running']}]{s.step}/{s.steps}[/]", left)
    return table


@contextmanager
def progress(console: Console, directory: Path, runs: Sequence[Planned]) -> Iterator[Callable[[], None]]:
    """Show the progress of runs; yields the function to call several times a second."""
    display = Display(console, directory, runs)
    if not console.is_terminal:
        yield display.tick
        display._looked = 0.0
        display.tick()
        return
    with Live(display.bar, console=console, refresh_per_second=4, transient=True) as live:
        display._live = live
        yield display.tick
