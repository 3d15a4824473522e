"""Sweeps as users run them: real processes, killed, crashed and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from qkexp import load_run, load_sweep
from qkexp.compose import compose_sweep
from qkexp.config import UserError
from qkexp.record.run import write_json
from qkexp.sweep.plan import Plan
from qkexp.sweep.status import alive, state_of

MICRO = ["tracker=none", "optim.warmup=5", "train.batch_size=16", "model.width=16", "model.depth=2", "model.heads=2"]


def qkexp(*args: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "qkexp", *args], capture_output=True, text=True, timeout=timeout)


def start(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "qkexp", *args], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def wait_for(condition, seconds: float = 90.0) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def trained(directory: Path) -> dict[str, int]:
    return {p.parent.name: p.stat().st_mtime_ns for p in directory.glob("*/outcome.json")}


def test_sweep_trains_what_is_missing_survives_a_crash_and_names_it(tmp_path: Path) -> None:
    # the second image size asks for more memory than there is: that run crashes, the others do not care
    args = [
        "sweep",
        f"output_dir={tmp_path}",
        "sweep_name=s",
        *MICRO,
        "train.steps=20",
        "data=synthetic",
        "model.patch=8",
    ]
    broken = "data.image_size=16,400000"
    done = qkexp(*args, broken, "seed=0,1")
    assert done.returncode == 1, done.stdout + done.stderr
    states = {s["status"] for s in json.loads(qkexp("status", "--json", str(tmp_path / "s")).stdout)}
    assert states == {"diverged", "failed"}, "20 steps are too few to leave chance, and that is a result"
    failed = [d for d in (tmp_path / "s").iterdir() if d.is_dir() and state_of(d).status == "failed"]
    assert len(failed) == 2
    for directory in failed:
        assert "memory" in state_of(directory).reason.lower() or "alloc" in state_of(directory).reason.lower()
        assert "Traceback" in (directory / "log.txt").read_text()
        assert directory.name in done.stdout
    before = trained(tmp_path / "s")
    again = qkexp(*args, "data.image_size=16", "seed=0,1,2")
    assert again.returncode == 0, again.stdout + again.stderr
    assert "3 runs, 2 finished before, 1 to train" in again.stdout
    after = trained(tmp_path / "s")
    assert all(after[name] == stamp for name, stamp in before.items()), "a finished run is not touched"
    assert len(load_sweep(tmp_path / "s").all) == 3


def test_killed_run_leaves_tables_that_load(tmp_path: Path) -> None:
    process = start("train", f"output_dir={tmp_path}", *MICRO, "train.steps=100000")
    parts = lambda: list(tmp_path.glob("single/*/parts/scalars-*.parquet"))  # noqa: E731
    try:
        wait_for(lambda: len(parts()) >= 2)
        directory = parts()[0].parent.parent
        worker = json.loads((directory / "lock").read_text())["pid"]
        os.kill(worker, signal.SIGKILL)
        process.wait(30)
    finally:
        process.kill()
    assert process.returncode == 1
    run = load_run(directory)
    assert len(run.scalars) > 0
    assert run.scalars.step.tolist() == list(range(len(run.scalars)))
    # a kill may come between the two tables of a flush: then attention is ahead, never behind
    assert len(run.attention) >= len(run.scalars) * 2 * 2
    assert set(run.scalars.step) <= set(run.attention.step)
    assert run.outcome is not None
    assert run.outcome["reason"] == "killed by SIGKILL"


def test_killed_sweep_goes_on_with_what_is_missing_and_leaves_no_orphan(tmp_path: Path) -> None:
    args = ["sweep", f"output_dir={tmp_path}", *MICRO, "train.steps=400", "seed=0,1,2,3,4,5"]
    process = start(*args)
    directory = tmp_path / "sweep"
    try:
        wait_for(lambda: len(trained(directory)) >= 1)
        workers = [json.loads(p.read_text())["pid"] for p in directory.glob("*/lock")]
        process.kill()
        process.wait(10)
    finally:
        process.kill()
    wait_for(lambda: not any(alive({"host": os.uname().nodename, "pid": pid}) for pid in workers), 20)
    before = {
        k: v for k, v in trained(directory).items() if state_of(directory / k).status in ("completed", "diverged")
    }
    assert 1 <= len(before) < 6
    done = qkexp(*args)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"6 runs, {len(before)} finished before" in done.stdout
    after = trained(directory)
    assert len(after) == 6
    assert all(after[name] == stamp for name, stamp in before.items())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_terminated_train_saves_says_interrupted_and_exits_75(tmp_path: Path, number: signal.Signals) -> None:
    process = start("train", f"output_dir={tmp_path}", *MICRO, "train.steps=100000")
    try:
        wait_for(lambda: list(tmp_path.glob("single/*/parts/scalars-*.parquet")))
        process.send_signal(number)
        assert process.wait(30) == 75
    finally:
        process.kill()
    (directory,) = (tmp_path / "single").iterdir()
    run = load_run(directory)
    assert run.status == "interrupted"
    assert run.outcome is not None
    assert len(run.scalars) == run.outcome["step"] > 0
    assert not (directory / "lock").exists()


def test_finished_train_prints_its_outcome_and_trains_nothing(tmp_path: Path) -> None:
    args = ["train", f"output_dir={tmp_path}", *MICRO, "train.steps=10"]
    assert qkexp(*args).returncode == 0
    before = trained(tmp_path / "single")
    again = qkexp(*args)
    assert again.returncode == 0
    assert "final loss" in again.stdout or "at_chance" in again.stdout
    assert trained(tmp_path / "single") == before
    assert qkexp(*args, "--again").returncode == 0
    assert trained(tmp_path / "single") != before


def test_two_launches_of_one_run_train_it_once(tmp_path: Path) -> None:
    args = ["train", f"output_dir={tmp_path}", *MICRO, "train.steps=300"]
    both = [start(*args), start(*args)]
    for process in both:
        assert process.wait(120) == 0
    (directory,) = (tmp_path / "single").iterdir()
    assert load_run(directory).scalars.step.tolist() == list(range(300))
    assert (directory / "log.txt").read_text().count("training none") == 1


def test_run_named_twice_is_planned_once(tmp_path: Path) -> None:
    plan = Plan.of(compose_sweep(["optim.lr=1e-3,0.001,2e-3", f"output_dir={tmp_path}"]))
    assert len(plan.runs) == 2
    assert plan.write().exists()
    frozen = json.loads((tmp_path / "sweep" / "plan.json").read_text())["runs"]
    assert [r["config"]["optim"]["lr"] for r in frozen] == [1e-3, 2e-3]


def test_finished_run_that_recorded_less_is_refused_by_name(tmp_path: Path) -> None:
    sparse = Plan.of(compose_sweep(["probe.every=10", f"output_dir={tmp_path}"], single=True))
    dense = Plan.of(compose_sweep([f"output_dir={tmp_path}"], single=True))
    directory = sparse.directory / sparse.runs[0].name
    directory.mkdir(parents=True)
    import yaml

    from qkexp.config import as_dict

    (directory / "config.yaml").write_text(yaml.safe_dump(as_dict(sparse.runs[0].config)))
    write_json(directory / "outcome.json", {"status": "completed"})
    assert dense.runs[0].name == sparse.runs[0].name, "how much is probed is no part of the identity"
    assert sparse.missing() == []
    with pytest.raises(UserError, match=rf"{directory.name}.*probe\.every=10.*--again"):
        dense.missing()
    assert len(dense.missing(again=True)) == 1


@pytest.mark.parametrize(
    ("had", "asked", "key"),
    [
        ("probe.queries=8", "probe.queries=16", "probe.queries"),
        ("probe.queries=8", "probe.queries=all", "probe.queries"),
        ("probe.groups=[sink]", "probe.groups=[sink,bound]", "probe.groups"),
        (None, "probe.groups=[bound]", "probe.groups"),
        (None, "probe.queries=4", None),
        ("probe.queries=16", "probe.queries=8", None),
        ("probe.groups=[bound,sink]", "probe.groups=[sink]", None),
    ],
    ids=str,
)
def test_fewer_queries_or_groups_than_asked_are_less(tmp_path: Path, had: str | None, asked: str, key: str) -> None:
    """None: a run from before the key."""
    import yaml

    from qkexp.config import as_dict

    first, second = (
        Plan.of(compose_sweep([*([keys] if keys else []), f"output_dir={tmp_path}"], single=True)).runs[0]
        for keys in (had, asked)
    )
    plan = Plan.of(compose_sweep([asked, f"output_dir={tmp_path}"], single=True))
    directory = plan.directory / second.name
    directory.mkdir(parents=True)
    config = as_dict(first.config)
    if had is None:
        del config["probe"]["queries"], config["probe"]["groups"]
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    write_json(directory / "outcome.json", {"status": "completed"})
    if key is None:
        assert plan.missing() == []
    else:
        with pytest.raises(UserError, match=key):
            plan.missing()


def test_lock_of_a_dead_process_is_stale_and_of_a_living_one_is_not() -> None:
    host = os.uname().nodename
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    assert not alive({"host": host, "pid": dead.pid, "time": time.time()})
    assert alive({"host": host, "pid": os.getpid(), "time": 0})
    assert alive({"host": "elsewhere", "pid": 1, "time": time.time()})
    assert not alive({"host": "elsewhere", "pid": 1, "time": time.time() - 3600})


def test_the_server_that_runs_fork_from_has_imported_nothing_that_starts_threads() -> None:
    code = (
        "import sys, threading, qkexp.sweep.preload\n"
        "print(sorted({'wandb', 'pandas', 'pyarrow', 'sklearn'} & set(sys.modules)), threading.active_count())\n"
        "import wandb; print(wandb.__name__)"  # hidden from timm for a moment only
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[] 1", "wandb"]
