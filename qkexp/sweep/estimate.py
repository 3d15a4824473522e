"""How long runs will take: at the pace of runs that finished, else of a few steps tried in memory."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from qkexp.compose import Sweep
from qkexp.config import RunConfig, as_dict, to_typed
from qkexp.sweep.launch import LocalLauncher
from qkexp.sweep.launchers import make_launcher
from qkexp.sweep.plan import Planned
from qkexp.sweep.status import State, duration, step_seconds
from qkexp.sweep.warm import context

TRY_SECONDS = 2.0  # of steps, once the first is done
PATIENCE_SECONDS = 30.0  # until the first step is done


def estimate(todo: Sequence[Planned], states: Sequence[State], sweep: Sweep) -> str:
    """A sentence about the time that ``todo`` will take."""
    pace, how = step_seconds(states), "at the pace of the finished runs"
    if pace is None:
        pace, how = try_steps(todo[0].config), f"at the pace of a few steps of {todo[0].name} on this machine"
    if pace is None:
        return f"time: unknown; a step of {todo[0].name} takes more than {PATIENCE_SECONDS:.0f} s on this machine"
    workers = sweep.launcher["workers"]
    launcher = make_launcher(sweep.launcher_name, sweep.launcher)
    if workers is None and isinstance(launcher, LocalLauncher):
        workers = launcher.workers
    steps = sum(run.steps - (run.config.branch.step or 0) for run in todo)
    seconds = pace * steps / min(workers or len(todo), len(todo))
    return f"about {duration(seconds)} with {min(workers or len(todo), len(todo))} at once, {how}"


def try_steps(cfg: RunConfig) -> float | None:
    """Seconds of a step of a run, tried in a process of its own that writes nothing; None: too slow to try."""
    forked = context()
    here, there = forked.Pipe(duplex=False)
    process = forked.Process(target=_try, args=(as_dict(cfg), there), daemon=True)
    process.start()
    there.close()
    try:
        return here.recv() if here.poll(PATIENCE_SECONDS + TRY_SECONDS) else None
    except EOFError:  # it died
        return None
    finally:
        process.kill()
        process.join()


def _try(config: dict[str, Any], result: Connection) -> None:
    import torch

    from qkexp.sweep.job import prepare_cpu
    from qkexp.train import data
    from qkexp.train.loop import train
    from qkexp.train.precision import resolve

    torch.set_num_threads(1)
    prepare_cpu()
    cfg = to_typed(config)
    resolve(cfg)
    ends: list[float] = []  # of steps; the first warms up

    def stop() -> str | None:
        ends.append(time.monotonic())
        return "enough" if len(ends) > 1 and ends[-1] - ends[0] > TRY_SECONDS else None

    train(cfg, data.load(cfg.data), Forget(), stop)
    result.send((ends[-1] - ends[0]) / (len(ends) - 1) if len(ends) > 1 else None)


class Forget:
    """A recorder that keeps nothing."""

    def row(self, row: dict[str, float]) -> None: ...
    def frame(self, frame: Any) -> None: ...
    def event(self, event: Any) -> None: ...
    def note(self, **facts: Any) -> None: ...
    def checkpoint(self, step: int, state: dict[str, Any]) -> None: ...
    def flush_due(self) -> bool:
        return False

    def flush(self) -> list[Any]:
        return []
