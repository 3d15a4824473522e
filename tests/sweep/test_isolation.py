"""A run that goes wrong in any way takes nothing with it, says so, and starts again."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qkexp import load_run
from qkexp.record.files import read_json
from qkexp.sweep.status import state_of

TIMES = ["step_seconds", "probe_seconds", "eval_seconds"]
FAULTS = {
    1: ("raise", 5),
    2: ("exit", 5),
    3: ("segfault", 5),
    4: ("kill", 5),
    5: ("hang", 5),
    6: ("vanish", 5),
    7: ("diverge", 0),
}
SEEDS = "seed=0,1,2,3,4,5,6,7,8"


def by_seed(directory: Path) -> dict[int, Path]:
    return {load_run(p.parent).seed: p.parent for p in directory.glob("*/config.yaml")}


def rows(directory: Path) -> pd.DataFrame:
    return load_run(directory).scalars.drop(columns=TIMES)


def test_every_kind_of_end_leaves_the_others_alone_and_is_listed_with_log_and_reason(
    tmp_path: Path, command: Any
) -> None:
    args = ["sweep", SEEDS, "optim.lr=3e-3,0.003", "train.steps=60", "train.timeout=20"]  # each run is named twice
    code, printed = command.run(*args, faults=FAULTS)
    assert code == 1, printed
    runs = by_seed(tmp_path / "sweep")
    assert len(runs) == 9
    assert {state_of(runs[seed]).status for seed in (0, 8)} <= {"completed", "diverged"}
    assert state_of(runs[7]).status == "diverged"
    assert "nonfinite" in state_of(runs[7]).reason
    reasons = {
        1: "KeyError: '[/no] such thing'",
        2: "called sys.exit(3)",
        3: "killed by SIGSEGV",
        4: "killed by SIGKILL",
        5: "train.timeout=20",
        6: "exit code 0 and without an outcome",
    }
    flat = " ".join(printed.split())
    for seed, reason in reasons.items():
        state = state_of(runs[seed])
        assert (state.status, state.steps) == ("failed", 60)
        assert reason in state.reason
        assert runs[seed].name in printed
        assert state.reason[:20] in flat
        log = (runs[seed] / "log.txt").read_text()
        assert seed in (4, 6) or "faulty.py" in log, "where it was when it ended"
        assert seed in (1, 2) or reason in log
        assert not (runs[seed] / "lock").exists()
    assert "6 failed" in printed

    before = {seed: (d / "outcome.json").stat().st_mtime_ns for seed, d in runs.items()}
    code, printed = command.run(*args)  # the same command again, and nothing goes wrong
    assert code == 0, printed
    assert "9 runs, 3 finished before, 6 to train" in printed
    after = {seed: (d / "outcome.json").stat().st_mtime_ns for seed, d in runs.items()}
    assert {seed for seed in runs if after[seed] == before[seed]} == {0, 7, 8}, "what had finished is not touched"
    for seed in set(range(9)) - {7}:
        assert rows(runs[seed]).step.tolist() == list(range(60))


def test_a_run_in_a_sweep_has_the_bits_of_the_run_alone(tmp_path: Path, command: Any) -> None:
    """Whatever ran before it in the same pool: random state, flags and threads are its own."""
    args = ["attention=softcap", "train.steps=20", "hydra.launcher.threads=1"]
    assert command.run("sweep", "seed=0,1,2", *args, "hydra.launcher.workers=1")[0] == 0
    assert command.run("train", "seed=2", *args, "--again")[0] == 0
    (alone,) = (tmp_path / "single").glob("*-seed2-*")
    pd.testing.assert_frame_equal(rows(alone), rows(tmp_path / "sweep" / alone.name), check_exact=True)


def test_fail_fast_stops_at_the_first_crash(tmp_path: Path, command: Any) -> None:
    args = ["seed=1,2,3,4", "train.steps=5000", "hydra.launcher.workers=2"]
    code, printed = command.run("sweep", "--fail-fast", *args, faults={1: ("raise", 5)})
    assert code == 1, printed
    states = {seed: state_of(d).status for seed, d in by_seed(tmp_path / "sweep").items()}
    assert states[1] == "failed"
    assert states.get(2) == "interrupted"
    assert not {3, 4} & {s for s, status in states.items() if status != "interrupted"}


def test_two_launches_split_the_runs_and_a_killed_launch_leaves_its_share_to_the_other(
    tmp_path: Path, command: Any, wait_for: Any
) -> None:
    args = ["sweep", "seed=0,1,2,3,4,5", "train.steps=300", "train.checkpoint_every=50", "hydra.launcher.workers=1"]
    first, second = command.start(*args), command.start(*args)
    wait_for(lambda: len(list(tmp_path.glob("sweep/*/lock"))) == 2)
    first.kill()
    printed, _ = second.communicate(timeout=180)
    assert second.returncode == 0, printed
    for directory in by_seed(tmp_path / "sweep").values():
        log = (directory / "log.txt").read_text()
        assert log.count(" after 300 steps: ") == 1, "finished once"
        assert log.count("from step 0") == 1, "one that was cut off goes on"
        assert rows(directory).step.tolist() == list(range(300))


def test_ctrl_c_saves_every_run_and_the_same_command_goes_on(tmp_path: Path, command: Any, wait_for: Any) -> None:
    args = ["sweep", "seed=0,1", "train.steps=400", "hydra.launcher.workers=2"]
    process = command.start(*args)
    wait_for(lambda: len(list(tmp_path.glob("sweep/*/parts/scalars-*"))) >= 4)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 75
    stopped = {seed: read_json(d / "outcome.json") for seed, d in by_seed(tmp_path / "sweep").items()}
    assert {o["status"] for o in stopped.values() if o} == {"interrupted"}
    code, printed = command.run(*args)
    assert code == 0, printed
    for seed, directory in by_seed(tmp_path / "sweep").items():
        resumed = load_run(directory).events
        assert resumed[resumed.kind == "resumed"].step.tolist() == [stopped[seed]["step"]]
        assert rows(directory).step.tolist() == list(range(400))


@pytest.mark.skipif(not Path("/proc").exists(), reason="Linux only")
def test_a_run_is_what_the_system_ends_first_when_memory_runs_out(tmp_path: Path, command: Any, wait_for: Any) -> None:
    process = command.start("train", "train.steps=100000")
    wait_for(lambda: list(tmp_path.glob("single/*/parts/scalars-*")))
    (lock,) = tmp_path.glob("single/*/lock")
    worker = json.loads(lock.read_text())["pid"]
    scores = [int(Path(f"/proc/{pid}/oom_score_adj").read_text()) for pid in (worker, process.pid)]
    assert scores[0] > scores[1]
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 75
    assert not os.path.exists(lock)
