"""Launchers for other machines: jobs of submitit (Slurm, or processes here) and tasks of Ray.

A job is not one run. It is one more launch of the same sweep: a local pool that takes runs which nobody has
taken, until none is left. The locks in the run directories share the work out, so fast nodes do more, a
preempted job's runs are taken by others, and directories, status and resume are those of every other sweep.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from qkexp.config import UserError
from qkexp.record.lock import held
from qkexp.sweep.job import CRASHED, DONE, INTERRUPTED
from qkexp.sweep.launch import CODES, GRACE_SECONDS, TICK_SECONDS, LocalLauncher, cores, signatures, worst
from qkexp.sweep.plan import Planned
from qkexp.sweep.status import state_of

MOST_JOBS = 64  # where the user sets no number of workers


@dataclass
class Share:
    """What a job does. It travels to the job by pickle, with the frozen configurations in it."""

    directory: Path
    runs: list[Planned]
    before: Mapping[str, tuple[int, int]]
    again: bool
    fail_fast: bool
    pool: dict[str, Any]

    def __call__(self) -> int:
        self._launcher = LocalLauncher(**self.pool)
        self._launcher.patient = False  # others' runs are watched where the sweep was started
        return self._launcher.launch(
            self.directory, self.runs, again=self.again, fail_fast=self.fail_fast, before=self.before
        )

    def checkpoint(self) -> Any:
        """submitit asks, when time is nearly up or the job is preempted: the runs save, the job is queued again."""
        from submitit.helpers import DelayedSubmission

        self._launcher.stop()
        return DelayedSubmission(replace(self))


class Job(Protocol):
    """A job somewhere, as :class:`Remote` needs it."""

    def done(self) -> bool: ...
    def problem(self) -> str | None: ...
    def cancel(self) -> None: ...


class Remote(ABC):
    """Submits jobs, watches them, and cancels them when the user or a crash says so."""

    where = "elsewhere"

    def __init__(self, workers: int | None, threads: int | None, gpus: float | None):
        self.threads, self.gpus = threads or 1, gpus
        self.a_job = int(1 / gpus + 1e-6) if gpus else 1  # runs at once in a job
        self.asked = workers
        self.workers = workers or 1
        self.problems: list[str] = []

    @abstractmethod
    def submit(self, shares: Sequence[Share]) -> Sequence[Job]:
        """Hand a job for each share to whatever runs them."""

    def jobs(self, runs: int) -> int:
        """How many jobs for so many runs."""
        return min(self.asked or MOST_JOBS, runs)

    def launch(
        self,
        directory: Path,
        runs: Sequence[Planned],
        *,
        again: bool = False,
        fail_fast: bool = False,
        tick: Callable[[], None] = lambda: None,
    ) -> int:
        """See :class:`qkexp.sweep.launch.Launcher`."""
        self.workers = self.jobs(len(runs))
        count = math.ceil(self.workers / self.a_job)
        pool = {"workers": self.a_job, "threads": self.threads, "gpus": self.gpus}
        before = signatures(directory, runs)
        shares = []
        for number in range(count):  # each begins elsewhere in the list, so that they do not all ask for the same run
            at = number * len(runs) // count
            shares.append(Share(directory, [*runs[at:], *runs[:at]], before, again, fail_fast, pool))
        jobs = self.submit(shares)
        try:
            while not all(job.done() for job in jobs):
                if fail_fast and self._code(directory, runs) == CRASHED:
                    break
                tick()
                time.sleep(TICK_SECONDS)
        except KeyboardInterrupt:
            self._cancel(jobs, directory, runs)
            return INTERRUPTED
        self._cancel(jobs, directory, runs)
        self.problems = list({text: None for job in jobs if (text := job.problem())})
        return self._code(directory, runs)

    def _code(self, directory: Path, runs: Sequence[Planned]) -> int:
        code = DONE
        for run in runs:
            code = worst(code, CODES.get(state_of(directory / run.name).status, INTERRUPTED))
        return code

    def _cancel(self, jobs: Sequence[Job], directory: Path, runs: Sequence[Planned]) -> None:
        """Cancel the jobs that are left, and wait until their runs have saved."""
        left = [job for job in jobs if not job.done()]
        for job in left:
            job.cancel()
        end = time.monotonic() + GRACE_SECONDS
        while left and time.monotonic() < end:
            if all(job.done() for job in left) and not any(held(directory / run.name) for run in runs):
                break
            time.sleep(TICK_SECONDS)


# ---------------------------------------------------------------- submitit


@dataclass
class SubmititJob:
    job: Any

    def done(self) -> bool:
        return self.job.done()

    def problem(self) -> str | None:
        if not self.job.done() or (error := self.job.exception()) is None:
            return None
        return f"{last_line(error)} (log: {self.job.paths.stderr})"

    def cancel(self) -> None:
        self.job.cancel(check=False)


class SubmititLocal(Remote):
    """Processes of this machine through submitit: what a Slurm sweep does, without Slurm."""

    where = "submitit_local"
    cluster = "local"

    def __init__(
        self,
        workers: int | None = None,
        threads: int | None = None,
        gpus: float | None = None,
        timeout_min: int = 1440,
        **parameters: Any,
    ):
        super().__init__(workers, threads, gpus)
        self.parameters = {"timeout_min": timeout_min, **parameters}
        self.submitit = library("submitit", self.where, "slurm")

    def jobs(self, runs: int) -> int:
        return min(self.asked or max(1, cores() // self.threads), runs)

    def submit(self, shares: Sequence[Share]) -> Sequence[Job]:
        executor = self.submitit.AutoExecutor(folder=shares[0].directory / "jobs" / "%j", cluster=self.cluster)
        executor.update_parameters(
            name=f"qkexp-{shares[0].directory.name}",
            cpus_per_task=self.threads * self.a_job,
            gpus_per_node=math.ceil(self.gpus or 0),
            **self.parameters,
        )
        with executor.batch():
            jobs = [executor.submit(share) for share in shares]
        return [SubmititJob(job) for job in jobs]


class SubmititSlurm(SubmititLocal):
    """A Slurm array; preempted and timed-out jobs are queued again and their runs go on."""

    where = "submitit_slurm"
    cluster = "slurm"

    def __init__(
        self,
        partition: str | None = None,
        account: str | None = None,
        qos: str | None = None,
        mem_gb: float | None = None,
        array_parallelism: int | None = None,
        additional_parameters: dict[str, Any] | None = None,
        setup: list[str] | None = None,
        **common: Any,
    ):
        super().__init__(**common)
        named = {
            "mem_gb": mem_gb,
            "slurm_partition": partition,
            "slurm_account": account,
            "slurm_qos": qos,
            "slurm_array_parallelism": array_parallelism,
            "slurm_additional_parameters": additional_parameters,
            "slurm_setup": setup,
        }
        self.parameters |= {key: value for key, value in named.items() if value is not None}

    def jobs(self, runs: int) -> int:
        return Remote.jobs(self, runs)


# ---------------------------------------------------------------- Ray


@dataclass
class RayJob:
    ray: Any
    reference: Any

    def done(self) -> bool:
        return bool(self.ray.wait([self.reference], timeout=0)[0])

    def problem(self) -> str | None:
        try:
            self.ray.get(self.reference, timeout=0)
        except Exception as error:
            return last_line(error)
        return None

    def cancel(self) -> None:
        self.ray.cancel(self.reference, recursive=True)


class Ray(Remote):
    """Tasks of a Ray cluster: an existing one at ``address`` (or RAY_ADDRESS), else one on this machine."""

    where = "ray"

    def __init__(
        self,
        workers: int | None = None,
        threads: int | None = None,
        gpus: float | None = None,
        address: str | None = None,
    ):
        super().__init__(workers, threads, gpus)
        self.address = address
        self.ray = library("ray", self.where, "ray")
        self.a_job = 1  # Ray itself puts several tasks on a GPU

    def submit(self, shares: Sequence[Share]) -> Sequence[Job]:
        if not self.ray.is_initialized():
            self.ray.init(address=self.address, log_to_driver=False, include_dashboard=False)
        task = self.ray.remote(num_cpus=self.threads, num_gpus=self.gpus or 0, max_retries=3)(Share.__call__)
        return [RayJob(self.ray, task.remote(replace(s, pool={**s.pool, "gpus": None}))) for s in shares]


def last_line(error: BaseException) -> str:
    """What an error that may hold a whole remote traceback says in the end; its type where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def library(name: str, launcher: str, extra: str) -> Any:
    """An optional package.

    Raises:
        UserError: it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(name)
    except ImportError:
        raise UserError(
            f"hydra/launcher: {launcher} needs {name}, which is not installed; pip install 'qkexp[{extra}]'"
        ) from None


REMOTE: dict[str, Callable[..., Remote]] = {
    "submitit_local": SubmititLocal,
    "submitit_slurm": SubmititSlurm,
    "ray": Ray,
}
