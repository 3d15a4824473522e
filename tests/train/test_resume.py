"""A run that is stopped anywhere and goes on gives the tables of one that never stopped."""

from __future__ import annotations

import errno
import logging
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from qkexp import load_run
from qkexp.compose import compose_sweep
from qkexp.config import RunConfig
from qkexp.sweep.job import execute
from qkexp.train import checkpoint
from qkexp.train.loop import train as real_train

STEPS = 30
TIMES = ["step_seconds", "probe_seconds", "eval_seconds"]
SMALL = ["model.width=16", "model.depth=2", "model.heads=2", "train.batch_size=16", f"train.steps={STEPS}"]


def config(*overrides: str) -> RunConfig:
    return compose_sweep([*SMALL, "optim.lr=0.05", "optim.warmup=5", *overrides], single=True).runs[0][1]


def run(cfg: RunConfig, directory: Path, monkeypatch: pytest.MonkeyPatch, stop_after: int | None = None) -> int:
    """One attempt, asked to stop once so many steps are done."""

    def train(cfg: RunConfig, data: Any, record: Any, stop: Any, resume: Any) -> Any:
        return real_train(cfg, data, record, lambda: "asked" if record._steps == stop_after else None, resume)

    monkeypatch.setattr("qkexp.sweep.job.train", train)
    return execute(cfg, directory, {})


def tables(directory: Path) -> tuple[pd.DataFrame, pd.DataFrame, list[dict[str, Any]]]:
    found = load_run(directory)
    events = found.events[found.events.kind != "resumed"].to_dict("records") if len(found.events) else []
    return found.scalars.drop(columns=TIMES), found.attention, events


def assert_same(one: Path, other: Path) -> None:
    for a, b in zip(tables(one)[:2], tables(other)[:2], strict=True):
        pd.testing.assert_frame_equal(a, b, check_exact=True)
    assert tables(one)[2] == tables(other)[2]


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_twenty_interruptions_leave_the_tables_of_an_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str, optimiser: str
) -> None:
    cfg = config(f"precision={precision}", f"optim.name={optimiser}", "train.eval_every=7")
    assert run(cfg, tmp_path / "whole", monkeypatch) == 0
    points = np.random.default_rng(1).choice(np.arange(1, STEPS), 20, replace=False)
    for at in sorted(points):  # the same run, stopped twenty times
        assert run(cfg, tmp_path / "stopped", monkeypatch, stop_after=int(at)) == 75
        assert load_run(tmp_path / "stopped").outcome["step"] == at
    assert run(cfg, tmp_path / "stopped", monkeypatch) == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")
    resumed = load_run(tmp_path / "stopped").events
    assert (resumed.kind == "resumed").sum() == 20
    whole, stopped = (load_run(tmp_path / name).outcome for name in ("whole", "stopped"))
    assert {k: v for k, v in whole.items() if k != "wall_seconds"} == {
        k: v for k, v in stopped.items() if k != "wall_seconds"
    }


@pytest.mark.parametrize("precision", ["bf16_pure", "fp16"])
def test_every_other_precision_goes_on_with_its_bits_scale_and_dropout_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    cfg = config(f"precision={precision}", "model.dropout=0.1", "model.drop_path=0.1", "model.block_norm=parallel")
    assert run(cfg, tmp_path / "whole", monkeypatch) == 0
    for at in (3, 17, 29):
        assert run(cfg, tmp_path / "stopped", monkeypatch, stop_after=at) == 75
    assert run(cfg, tmp_path / "stopped", monkeypatch) == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_augmented_and_mixed_batches_go_on_where_they_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config("data.crop=pad", "data.flip=true", "data.mixup=0.3", "train.accumulate=2", "data.label_noise=0.1")
    assert run(cfg, tmp_path / "whole", monkeypatch) == 0
    for at in (3, 24):
        assert run(cfg, tmp_path / "stopped", monkeypatch, stop_after=at) == 75
    assert run(cfg, tmp_path / "stopped", monkeypatch) == 0
    assert_same(tmp_path / "whole", tmp_path / "stopped")


def test_rows_after_the_last_checkpoint_are_trained_again_and_not_kept_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What kill -9 leaves: parts beyond the newest checkpoint, no outcome, a stale lock."""
    cfg = config("train.checkpoint_every=10")
    assert run(cfg, tmp_path / "whole", monkeypatch) == 0
    assert run(cfg, tmp_path / "killed", monkeypatch, stop_after=25) == 75
    (tmp_path / "killed" / "outcome.json").unlink()
    (tmp_path / "killed" / "checkpoints" / "step-00000025.pt").unlink()
    assert run(cfg, tmp_path / "killed", monkeypatch) == 0
    assert_same(tmp_path / "whole", tmp_path / "killed")


def test_a_torn_checkpoint_is_said_and_the_one_before_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config("train.checkpoint_every=10")
    assert run(cfg, tmp_path / "whole", monkeypatch) == 0
    assert run(cfg, tmp_path / "torn", monkeypatch, stop_after=25) == 75
    torn = tmp_path / "torn" / "checkpoints" / "step-00000025.pt"
    torn.write_bytes(torn.read_bytes()[: torn.stat().st_size // 2])
    with caplog.at_level(logging.WARNING, "qkexp"):
        assert run(cfg, tmp_path / "torn", monkeypatch) == 0
    assert "step-00000025.pt cannot be used" in caplog.text
    events = load_run(tmp_path / "torn").events
    assert events[events.kind == "resumed"].step.tolist() == [20]
    assert_same(tmp_path / "whole", tmp_path / "torn")


def test_a_checkpoint_with_weights_that_are_not_finite_is_never_resumed_from(tmp_path: Path) -> None:
    for step, value in ((1, 1.0), (2, float("nan"))):
        checkpoint.save(tmp_path / checkpoint.name(step), {"step": step, "model": {"w": torch.tensor([value])}})
    state = checkpoint.latest(tmp_path)
    assert state is not None
    assert state["step"] == 1
    assert checkpoint.latest(tmp_path, at_most=0) is None, "rows of its steps are not there"


def test_another_length_of_the_schedule_is_refused_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config()
    assert run(cfg, tmp_path / "run", monkeypatch, stop_after=10) == 75
    longer = config("train.steps=40")
    shutil.copytree(tmp_path / "run", tmp_path / "longer")
    assert run(longer, tmp_path / "longer", monkeypatch) != 0
    assert "train.steps" in load_run(tmp_path / "longer").outcome["reason"]
    assert len(load_run(tmp_path / "longer").scalars) == 10, "what was recorded stays"


def test_a_full_disk_is_one_clear_message_and_the_run_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = config("train.checkpoint_every=10")
    assert run(cfg, tmp_path / "whole", monkeypatch) == 0
    save, calls = checkpoint.save, []

    def full(path: Path, state: dict[str, Any]) -> None:
        calls.append(path)
        if len(calls) == 2:
            path.with_name(f".{path.name}.part").write_bytes(b"half")
            raise RuntimeError("writing failed") from OSError(errno.ENOSPC, "No space left on device")
        save(path, state)

    monkeypatch.setattr(checkpoint, "save", full)
    with caplog.at_level(logging.ERROR, "qkexp"):
        assert run(cfg, tmp_path / "full", monkeypatch) == 1
    assert "no space left on the device of" in caplog.text
    assert "Traceback" not in caplog.text
    assert not list((tmp_path / "full").rglob(".*.part"))
    assert len(load_run(tmp_path / "full").scalars) >= 10
    monkeypatch.setattr(checkpoint, "save", save)
    assert run(cfg, tmp_path / "full", monkeypatch) == 0
    assert_same(tmp_path / "whole", tmp_path / "full")


def test_a_kill_while_tables_are_merged_doubles_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At that moment the whole table and its parts stand side by side."""
    cfg = config("train.checkpoint_every=10")
    assert run(cfg, tmp_path / "whole", monkeypatch) == 0
    assert run(cfg, tmp_path / "killed", monkeypatch, stop_after=25) == 75
    (tmp_path / "killed" / "parts").mkdir()
    for table in ("scalars", "attention"):
        shutil.copy(
            tmp_path / "killed" / f"{table}.parquet", tmp_path / "killed" / "parts" / f"{table}-00000003.parquet"
        )
    (tmp_path / "killed" / "outcome.json").unlink()
    assert run(cfg, tmp_path / "killed", monkeypatch) == 0
    assert_same(tmp_path / "whole", tmp_path / "killed")
