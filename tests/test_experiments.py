"""Every experiment, tiny and end to end: it trains, its claims are evaluated and its figures drawn."""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from qkexp.cli import main
from qkexp.compose import compose_sweep, config_dir, options
from qkexp.config import RunConfig
from qkexp.naming import variant
from qkexp.sweep.plan import Plan
from qkexp.train import sources
from qkexp.verbs.figures import draw_figures
from qkexp.verbs.sweep import run_sweep
from qkexp.verbs.terminal import DONE, FAILED
from qkexp.verbs.verify import verify_claims

TINY = ["train.batch_size=8", "tracker=none", "hydra.launcher.workers=2"]
STEPS = {"temperature_shock": 262}  # where something happens at a step of its own
OVERRIDES = {"critical_rate": ["attention=none", "bisect.low=1e-2", "bisect.high=2e-2", "bisect.factor=2"]}
OPTIONS = argparse.Namespace(again=False, fail_fast=True, plan=False)


def few(runs: Sequence[tuple[list[str], RunConfig]]) -> list[tuple[list[str], RunConfig]]:
    """One seed, two variants, the lowest, a middle and the highest rate: enough for every kind of figure."""
    seed = min(cfg.seed for _, cfg in runs)
    names = list(dict.fromkeys(variant(cfg.attention) for _, cfg in runs))[:2]
    rates = sorted({cfg.optim.lr for _, cfg in runs})
    few_rates = {rates[0], rates[len(rates) // 2], rates[-1]}
    return [
        run
        for run in runs
        if run[1].seed == seed and run[1].optim.lr in few_rates and variant(run[1].attention) in names
    ]


def fashion(folder: Path) -> Path:
    """Four idx files of a few grey images."""
    draw = np.random.default_rng(0)
    for name, n in (("train", 64), ("t10k", 20)):
        parts = {
            f"{name}-images-idx3-ubyte": draw.integers(0, 256, (n, 28, 28), np.uint8),
            f"{name}-labels-idx1-ubyte": (np.arange(n) % 10).astype(np.uint8),
        }
        for file, array in parts.items():
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / file).write_bytes(head + array.tobytes())
    return folder


@pytest.mark.parametrize("name", options("experiment"))
def test_a_tiny_instance_trains_and_its_claims_and_figures_are_made(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [f"experiment={name}", f"train.steps={STEPS.get(name, 26)}", f"output_dir={tmp_path}", *TINY]
    if "fashion" in name:
        (tmp_path / "data").mkdir()
        own.append(f"data.root={fashion(tmp_path / 'data')}")
    sweep = compose_sweep([*own, *OVERRIDES.get(name, [])])
    plan = Plan.of(sweep if sweep.rates or not sweep.runs else replace(sweep, runs=few(sweep.runs)))
    assert run_sweep(plan, OPTIONS) == DONE, capsys.readouterr().out
    assert verify_claims(plan.directory) in (DONE, FAILED), "a bound may be missed at this size, but must be understood"
    draw_figures(plan.directory)
    if sweep.expect is not None:
        claims = json.loads((plan.directory / "claims.json").read_text())["claims"]
        assert [c["claim"] for c in claims] == [c["claim"] for c in sweep.expect["claims"]]
    drawn = {path.stem for path in (plan.directory / "figures").glob("*.png")}
    assert drawn, "no figure fits its own experiment"
    assert drawn <= set(sweep.figures or drawn)


@pytest.mark.parametrize("name", options("experiment"))
def test_an_experiment_verifies_on_seeds_that_its_bounds_were_not_chosen_on(name: str) -> None:
    sweep = compose_sweep([f"experiment={name}"])
    if sweep.expect is None or not sweep.runs:
        return
    chosen = sweep.expect["chosen_on"]["seed"]
    assert chosen, "expect.chosen_on names the seeds"
    assert not {cfg.seed for _, cfg in sweep.runs} & set(chosen)


def test_an_experiment_whose_data_may_be_missing_says_so_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    bare = replace(sources.SOURCES["fashion_mnist"], packaged=None)
    monkeypatch.setitem(sources.SOURCES, "fashion_mnist", bare)
    command = ["reproduce", "vit22b_fashion", f"output_dir={tmp_path / 'out'}", "tracker=none"]
    assert main(command) == DONE
    out = capsys.readouterr().out
    assert out.startswith("vit22b_fashion is left out: data.root")
    assert "qkexp data prepare fashion_mnist" in out
    assert out.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert main([*command, f"data.root={tmp_path}"]) == 2, "a folder that the user names is the user's to mend"


def test_every_experiment_file_is_of_its_name() -> None:
    for name in options("experiment"):
        content = yaml.safe_load((config_dir() / "experiment" / f"{name}.yaml").read_text())
        assert content["experiment"] == name
