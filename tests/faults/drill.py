"""Everything that may happen to runs and sweeps, done to real ones; each is then resumed and compared row for row.

    make test-faults            (python tests/faults/drill.py --seed 1)

Its last line counts: faults injected; runs lost (planned, but not ended with the rows of an undisturbed run);
rows lost beyond one flush (a run's lock told of a step that was not on disk after the fault); runs trained
twice (after they had finished, or by two processes at once). Exit code 1 unless the last three are 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
os.environ |= {"QKEXP_FLUSH": "0.1", "OMP_NUM_THREADS": "1"}
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])

import pandas as pd  # noqa: E402

import qkexp.sweep.launch as launch  # noqa: E402
from qkexp import load_run  # noqa: E402
from qkexp.compose import compose_sweep  # noqa: E402
from qkexp.record.files import read_json  # noqa: E402
from qkexp.sweep.plan import Plan, Planned  # noqa: E402
from qkexp.sweep.status import FINISHED  # noqa: E402
from qkexp.sweep.warm import PRELOAD  # noqa: E402

STEPS = 240
SMALL = ["tracker=none", "model.width=16", "model.depth=2", "model.heads=2", "train.batch_size=16"]
SMALL += [f"train.steps={STEPS}", "train.checkpoint_every=40", "optim.warmup=5"]
TIMES = ["step_seconds", "probe_seconds", "eval_seconds"]
ENDED = re.compile(r"(completed|diverged) after \d+ steps")


class Drill:
    """Counts, and what every fault needs: a reference, a launch, a comparison."""

    def __init__(self, folder: Path, seed: int):
        self.folder, self.draw = folder, random.Random(seed)
        self.injected = self.beyond = 0
        self.lost: list[str] = []
        self.twice: list[str] = []
        self._references: dict[int, Path] = {}

    # ------------------------------------------------ launching

    def plan(self, name: str, *overrides: str) -> Plan:
        return Plan.of(compose_sweep([*self.places(name), *overrides]))

    def places(self, name: str) -> list[str]:
        # a folder of its own: sweeps of one folder share what they have finished, and then no fault would strike
        return [*SMALL, f"output_dir={self.folder / name}", f"sweep_name={name}"]

    def pool(self, directory: Path, run: Planned, during: Callable[[], None] | None = None) -> int:
        """Train one run in a warm pool, while something happens to it."""
        thread = threading.Thread(target=during) if during else None
        if thread:
            thread.start()
        code = launch.LocalLauncher(workers=1).launch(directory, [run])
        if thread:
            thread.join()
        return code

    def command(self, name: str, *args: str, faults: dict[int, tuple[str, int]] | None = None) -> subprocess.Popen[str]:
        """The command line on a sweep, in a session of its own."""
        return subprocess.Popen(
            [sys.executable, str(HERE / "faulty.py"), "sweep", *self.places(name), "hydra.launcher.workers=2", *args],
            env={**os.environ, "QKEXP_FAULTS": json.dumps(faults or {})},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )

    def finish(self, name: str, *args: str) -> None:
        """The same command until it has nothing more to do; it may take no more than three."""
        for _ in range(3):
            if self.command(name, *args).wait(300) == 0:
                return

    # ------------------------------------------------ judging

    def reference(self, run: Planned) -> Path:
        """The directory of an undisturbed run."""
        seed = run.config.seed
        if seed not in self._references:
            directory = self.folder / "reference"
            directory.mkdir(exist_ok=True)
            assert self.pool(directory, run) == 0
            self._references[seed] = directory / run.name
        return self._references[seed]

    def on_disk(self, directory: Path) -> None:
        """After a fault: every step that the lock told of is on disk."""
        told = (read_json(directory / "lock") or {}).get("step", 0)
        rows = len(load_run(directory).scalars) if (directory / "config.yaml").exists() else 0
        self.beyond += max(0, told - rows)

    def judge(self, directory: Path, run: Planned, ends: int = 1) -> None:
        """The run has ended once, with the rows of an undisturbed one."""
        reference = load_run(self.reference(run))
        where = f"{directory.parent.name}/{directory.name}"
        outcome = read_json(directory / "outcome.json") or {}
        if outcome.get("status") not in FINISHED:
            self.lose(where, f"{outcome.get('status')}, {outcome.get('reason')}")
        elif not same(load_run(directory), reference):
            self.lose(where, "its rows are not those of an undisturbed run")
        log = (directory / "log.txt").read_text() if (directory / "log.txt").exists() else ""
        found = [m.end() for m in ENDED.finditer(log)]
        if len(found) > ends or (found and ends == 1 and "training " in log[found[0] :]):
            self.twice.append(where)
            print(f"  trained twice: {where}", flush=True)

    def lose(self, where: str, why: str) -> None:
        self.lost.append(where)
        print(f"  lost: {where}: {why}", flush=True)

    def judge_sweep(self, plan: Plan) -> None:
        for run in plan.runs:
            self.judge(plan.directory / run.name, run)

    def after(self, low: float, high: float) -> float:
        return self.draw.uniform(low, high)


def same(run: Any, reference: Any) -> bool:
    try:
        pd.testing.assert_frame_equal(
            run.scalars.drop(columns=TIMES), reference.scalars.drop(columns=TIMES), check_exact=True
        )
        pd.testing.assert_frame_equal(run.attention, reference.attention, check_exact=True, check_categorical=False)
    except AssertionError:
        return False
    return True


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def holder(directory: Path) -> int | None:
    return (read_json(directory / "lock") or {}).get("pid")


# ---------------------------------------------------------------- faults


def kills_of_single_runs(drill: Drill, count: int = 30) -> None:
    """kill -9 at random moments of a run, its start and its end among them."""
    run = drill.plan("kills", "seed=0").runs[0]
    took = (read_json(drill.reference(run) / "outcome.json") or {})["wall_seconds"]
    for number in range(count):
        directory = drill.folder / "kills" / str(number)
        directory.mkdir(parents=True)
        wait = drill.after(0.0, took)

        def kill(folder: Path = directory / run.name, wait: float = wait) -> None:
            if wait_for(lambda: holder(folder), 30):
                time.sleep(wait)
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(holder(folder), signal.SIGKILL)  # type: ignore[arg-type]
                    drill.injected += 1

        while not drill.pool(directory, run, kill):  # it had ended before: once more, earlier
            shutil.rmtree(directory / run.name)
            kill.__defaults__ = (directory / run.name, drill.after(0.0, 0.5 * took))
        drill.on_disk(directory / run.name)
        drill.pool(directory, run)
        drill.judge(directory / run.name, run)


def terms_of_single_runs(drill: Drill, count: int = 6) -> None:
    """SIGTERM at random moments: the run saves, says interrupted, and goes on."""
    run = drill.plan("terms", "seed=0").runs[0]
    for number in range(count):
        directory = drill.folder / "terms" / str(number)
        directory.mkdir(parents=True)

        def term(folder: Path = directory / run.name, wait: float = drill.after(0.1, 0.6)) -> None:
            if wait_for(lambda: list((folder / "parts").glob("scalars-*")), 30):
                time.sleep(wait)
                with contextlib.suppress(ProcessLookupError, TypeError):
                    os.kill(holder(folder), signal.SIGTERM)  # type: ignore[arg-type]

        code = drill.pool(directory, run, term)
        drill.injected += code == launch.INTERRUPTED
        drill.on_disk(directory / run.name)
        drill.pool(directory, run)
        drill.judge(directory / run.name, run)


def kills_of_whole_sweeps(drill: Drill, count: int = 10) -> None:
    """kill -9 of the launch alone, or of everything at once as when the power fails; the same command goes on."""
    args = ["seed=" + ",".join(map(str, range(12)))]
    plan = drill.plan("sweeps", *args)
    for number in range(count):
        process = drill.command("sweeps", *args)
        wait_for(lambda: list(plan.directory.glob("*/lock")), 15)
        time.sleep(drill.after(0.0, 0.8))
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL) if number % 2 else process.kill()
            drill.injected += 1
        process.wait()
        for run in plan.runs if number % 2 else ():
            drill.on_disk(plan.directory / run.name)
    drill.finish("sweeps", *args)
    drill.judge_sweep(plan)


def six_jobs(drill: Drill) -> None:
    """One raises, one exits, one diverges, one is killed, one is named twice, one is fine; also those that vanish,
    hang or end in a fault of memory. Then the same command again."""
    args = ["seed=0,1,2,3,4,5,6,7", "optim.lr=1e-3,0.001", "train.timeout=30"]
    faults = {
        1: ("raise", 50),
        2: ("exit", 50),
        3: ("kill", 50),
        4: ("segfault", 50),
        5: ("vanish", 50),
        6: ("hang", 50),
    }
    process = drill.command("six", *args, faults={**faults, 7: ("diverge", 0)})
    code = process.wait(300)
    drill.injected += len(faults)
    plan = drill.plan("six", *args)
    failed = [run.config.seed for run in plan.runs if outcome(plan, run).get("status") == "failed"]
    if code != 1 or failed != list(faults):
        drill.lose("six", f"exit code {code}, failed: seeds {failed}")
    diverges = next(run for run in plan.runs if run.config.seed == 7)
    if outcome(plan, diverges).get("status") != "diverged":
        drill.lose("six", f"seed 7 has not diverged: {outcome(plan, diverges)}")
    drill.finish("six", *args)
    for run in plan.runs:
        if run is not diverges:  # which ended as it should, with rows of its own
            drill.judge(plan.directory / run.name, run)


def two_launches(drill: Drill, count: int = 3) -> None:
    """Two launches of one sweep at once share the runs; one of them dies on the way."""
    args = ["seed=0,1,2,3,4,5"]
    for number in range(count):
        name = f"two{number}"
        plan = drill.plan(name, *args)
        both = [drill.command(name, *args) for _ in range(2)]
        if number:
            wait_for(lambda plan=plan: len(list(plan.directory.glob("*/lock"))) > 2)
            time.sleep(drill.after(0.0, 0.5))
            os.killpg(both[0].pid, signal.SIGKILL)
        drill.injected += 1
        for process in both:
            process.wait(300)
        drill.finish(name, *args)
        drill.judge_sweep(plan)


def damage(drill: Drill, rounds: int = 2) -> None:
    """A checkpoint, a part of a table, an outcome, a plan and a lock that are torn, emptied or overwritten."""
    for number in range(rounds):
        for what in ("checkpoint", "scalars", "attention", "outcome", "plan", "lock"):
            name = f"damaged-{what}{number}"
            plan = drill.plan(name, "seed=0")
            run = plan.runs[0]
            folder = plan.directory / run.name
            plan.write()
            stop = threading.Thread(target=lambda f=folder: kill_at(f, 100))
            stop.start()
            launch.LocalLauncher(workers=1).launch(plan.directory, [run])
            stop.join()
            files = {
                "checkpoint": sorted((folder / "checkpoints").glob("*.pt"))[-1:],
                "scalars": drill.draw.sample(sorted(folder.glob("parts/scalars-*")), 1),
                "attention": drill.draw.sample(sorted(folder.glob("parts/attention-*")), 1),
                "outcome": [folder / "outcome.json"],
                "plan": [plan.directory / "plan.json"],
                "lock": [folder / "lock"],
            }[what]
            for path in files:
                old = path.read_bytes() if path.exists() else b""
                path.write_bytes(drill.draw.choice([b"", old[: len(old) // 2], os.urandom(200)]))
            drill.injected += 1
            drill.finish(name, "seed=0")
            drill.judge_sweep(plan)
    name = "damaged-end"  # the outcome of a run that had finished: it is made anew from the last checkpoint
    plan = drill.plan(name, "seed=0")
    drill.finish(name, "seed=0")
    (plan.directory / plan.runs[0].name / "outcome.json").write_text("{")
    drill.injected += 1
    drill.finish(name, "seed=0")
    drill.judge(plan.directory / plan.runs[0].name, plan.runs[0], ends=2)


def kill_at(folder: Path, step: int) -> None:
    if wait_for(lambda: (read_json(folder / "lock") or {}).get("step", 0) >= step, 30):
        with contextlib.suppress(ProcessLookupError, TypeError):
            os.kill(holder(folder), signal.SIGKILL)  # type: ignore[arg-type]


def clock_set_back(drill: Drill) -> None:
    """Two hours back in the middle of a run, while a second launch looks on."""
    args = ["seed=0,1"]
    plan = drill.plan("clock", *args)
    both = [drill.command("clock", *args, faults={0: ("clock_back", 60), 1: ("clock_back", 60)}) for _ in range(2)]
    drill.injected += 2
    for process in both:
        process.wait(300)
    drill.judge_sweep(plan)


def holder_elsewhere(drill: Drill) -> None:
    """A lock of another machine: respected while its heartbeat goes on, taken over once it stands still."""
    plan = drill.plan("elsewhere", "seed=0")
    folder = plan.directory / plan.runs[0].name
    folder.mkdir(parents=True)
    lock = {"host": f"not-{socket.gethostname()}", "pid": 1, "token": "t", "heartbeat": time.time() - 7200}
    gone = threading.Event()

    def beat() -> None:
        while not gone.wait(0.5):
            part = folder / ".beat"
            part.write_text(json.dumps({**lock, "n": time.monotonic()}))
            part.replace(folder / "lock")

    thread = threading.Thread(target=beat)
    thread.start()
    process = drill.command("elsewhere", "seed=0")
    time.sleep(20)
    if (folder / "config.yaml").exists():
        drill.twice.append("elsewhere: the lock of a living process was taken")
    gone.set()
    thread.join()
    drill.injected += 2
    process.wait(300)
    drill.judge_sweep(plan)


def full_disk(drill: Drill) -> None:
    """A small file system that fills up while a run writes; space is made, and the run goes on."""
    with tmpfs(drill.folder / "disk") as (disk, grow):
        if disk is None:
            print("  no leave to mount a small file system here: skipped", flush=True)
            return
        run = drill.plan("disk", "seed=0").runs[0]
        left = shutil.disk_usage(disk).free
        (disk / "ballast").write_bytes(b"0" * (left - 150_000))
        code = drill.pool(disk, run)
        drill.injected += 1
        reason = (read_json(disk / run.name / "outcome.json") or {}).get("reason", "")
        print(f"  exit code {code}: {reason}", flush=True)
        grow()
        drill.pool(disk, run)
        drill.judge(disk / run.name, run)


@contextlib.contextmanager
def tmpfs(path: Path) -> Iterator[tuple[Path | None, Callable[[], None]]]:
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(path)], capture_output=True)
    if mounted.returncode:
        yield None, lambda: None
        return
    try:
        yield path, lambda: subprocess.run(["mount", "-o", "remount,size=64m", str(path)], check=True) and None
    finally:
        subprocess.run(["umount", str(path)], check=True)


def outcome(plan: Plan, run: Planned) -> dict[str, Any]:
    return read_json(plan.directory / run.name / "outcome.json") or {}


FAULTS = [
    kills_of_single_runs,
    terms_of_single_runs,
    kills_of_whole_sweeps,
    six_jobs,
    two_launches,
    damage,
    clock_set_back,
    holder_elsewhere,
    full_disk,
]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of " + ", ".join(f.__name__ for f in FAULTS) + "; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments")
    args = parser.parse_args()
    PRELOAD.append("faulty")
    with tempfile.TemporaryDirectory(prefix="qkexp-faults-") as folder:
        drill = Drill(Path(folder), args.seed)
        for fault in FAULTS:
            if not args.names or fault.__name__ in args.names:
                start, before = time.monotonic(), drill.injected
                fault(drill)
                took, count = time.monotonic() - start, drill.injected - before
                print(f"{fault.__name__.replace('_', ' ')}: {count} faults, {took:.0f} s", flush=True)
    print(
        f"faults injected: {drill.injected}, runs lost: {len(drill.lost)}, "
        f"rows lost beyond one flush: {drill.beyond}, runs trained twice: {len(drill.twice)}"
    )
    return int(bool(drill.lost or drill.beyond or drill.twice))


if __name__ == "__main__":
    sys.exit(main())
