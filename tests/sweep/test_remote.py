"""The same sweep through every launcher: the same directories, tables, status and resume."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from qkexp import load_run
from qkexp.compose import compose_sweep
from qkexp.config import ConfigError, UserError
from qkexp.sweep import remote
from qkexp.sweep.launch import LocalLauncher
from qkexp.sweep.launchers import make_launcher
from qkexp.sweep.status import state_of

TIMES = ["step_seconds", "probe_seconds", "eval_seconds"]
ARGS = ["attention=none,l2", "seed=0,1", "train.steps=30", "hydra.launcher.workers=2"]


def tables(directory: Path) -> dict[str, Any]:
    runs = {p.parent.name: load_run(p.parent) for p in sorted(directory.glob("*/config.yaml"))}
    return {name: (run.scalars.drop(columns=TIMES), run.attention, run.events) for name, run in runs.items()}


@pytest.mark.parametrize(("launcher", "package"), [("submitit_local", "submitit"), ("ray", "ray")])
def test_every_launcher_gives_the_tables_of_the_local_one(
    launcher: str, package: str, tmp_path: Path, command: Any
) -> None:
    pytest.importorskip(package)
    code, printed = command.run("sweep", "sweep_name=here", *ARGS)
    assert code == 0, printed
    args = ["sweep", "sweep_name=there", f"hydra/launcher={launcher}", *ARGS]
    (tmp_path / "here").rename(tmp_path.parent / f"here-{launcher}")  # else its runs would be shared
    code, printed = command.run(*args)
    assert code == 0, printed
    here, there = tables(tmp_path.parent / f"here-{launcher}"), tables(tmp_path / "there")
    assert len(here) == 4
    assert here.keys() == there.keys()
    for name in here:
        for one, other in zip(here[name], there[name], strict=True):
            pd.testing.assert_frame_equal(one, other, check_exact=True, check_categorical=False)
    code, printed = command.run(*args)
    assert code == 0
    assert "4 finished before, 0 to train" in printed
    shutil.rmtree(tmp_path.parent / f"here-{launcher}")


def test_ctrl_c_in_a_sweep_of_jobs_saves_their_runs_and_leaves_no_job(
    tmp_path: Path, command: Any, wait_for: Any
) -> None:
    pytest.importorskip("submitit")
    args = ["sweep", "hydra/launcher=submitit_local", "seed=0,1", "train.steps=100000", "hydra.launcher.workers=2"]
    process = command.start(*args)
    wait_for(lambda: len(list(tmp_path.glob("sweep/*/parts/scalars-*"))) >= 2)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=90)
    assert process.returncode == 75
    runs = [p.parent for p in tmp_path.glob("sweep/*/config.yaml")]
    assert {state_of(run).status for run in runs} == {"interrupted"}
    assert all(list((run / "checkpoints").iterdir()) for run in runs)
    assert not list(tmp_path.glob("sweep/*/lock"))


def test_a_package_that_is_missing_is_named_with_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr("importlib.import_module", absent)
    with pytest.raises(UserError, match=r"ray.*qkexp\[ray\]"):
        make_launcher("ray", {})
    with pytest.raises(UserError, match=r"submitit.*qkexp\[slurm\]"):
        make_launcher("submitit_slurm", {})


@pytest.mark.parametrize("name", ["local", "submitit_local", "submitit_slurm", "ray"])
def test_every_key_of_a_launchers_file_is_one_that_it_takes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "library", lambda *_: None)
    sweep = compose_sweep([f"hydra/launcher={name}", "hydra.launcher.workers=3"])
    assert sweep.launcher_name == name
    assert make_launcher(name, sweep.launcher).workers == 3


@pytest.mark.parametrize(
    ("override", "accepted"),
    [
        ("hydra.launcher.workers=0", ">= 1"),
        ("hydra.launcher.workers=two", "whole number"),
        ("hydra.launcher.gpus=0", "> 0"),
        ("hydra.launcher.gpus=2", "< 1.001"),
    ],
)
def test_a_wrong_value_of_a_launchers_key_is_named(override: str, accepted: str) -> None:
    with pytest.raises(ConfigError, match=r"hydra\.launcher\.") as error:
        compose_sweep([override])
    assert accepted in error.value.accepted


def test_small_runs_share_a_gpu_as_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qkexp.sweep.launch.gpu_count", lambda: 2)
    runs = [type("Run", (), {"config": compose_sweep([], single=True).runs[0][1]})()]
    for gpus, workers, slots in ((None, None, [0, 1]), (0.5, None, [0, 0, 1, 1]), (0.5, 3, [0, 0, 1])):
        launcher = LocalLauncher(workers=workers, gpus=gpus)
        assert sorted(launcher._slots(runs)) == slots  # type: ignore[arg-type]
        assert launcher.workers == len(slots)
    runs[0].config.device = "cpu"
    assert set(LocalLauncher(workers=2)._slots(runs)) == {None}  # type: ignore[arg-type]


def test_a_slurm_array_is_asked_for_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What reaches submitit; sbatch itself is not here."""
    pytest.importorskip("submitit")
    from submitit.slurm import slurm

    seen: dict[str, Any] = {}
    monkeypatch.setattr(slurm.SlurmExecutor, "affinity", classmethod(lambda cls: 2))
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(slurm.SlurmExecutor, "_internal_update_parameters", lambda self, **kw: seen.update(kw))
    launcher = make_launcher(
        "submitit_slurm",
        {
            "workers": 8,
            "gpus": 0.25,
            "timeout_min": 60,
            "partition": "gpu",
            "additional_parameters": {"constraint": "a"},
        },
    )
    executor = launcher.submitit.AutoExecutor(folder=tmp_path, cluster="slurm")  # type: ignore[attr-defined]
    executor.update_parameters(cpus_per_task=4, gpus_per_node=1, **launcher.parameters)  # type: ignore[attr-defined]
    text = json.dumps(seen)
    for part in ("gpu", "60", "constraint"):
        assert part in text
    assert launcher.jobs(100) == 8
    assert launcher.a_job == 4, "four runs share the GPU of one job"  # type: ignore[attr-defined]
