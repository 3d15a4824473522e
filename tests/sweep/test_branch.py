"""Branches: a run that goes on from a step with something changed, and with nothing else changed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from qkexp import cli, load_run, load_sweep
from qkexp.compose import compose_sweep
from qkexp.config import ConfigError, RunConfig, UserError, identity
from qkexp.record.load import Run
from qkexp.sweep.arms import CHANGEABLE
from qkexp.sweep.branch import KEPT, begin, not_begun, plan_branches, with_earlier
from qkexp.sweep.job import execute
from qkexp.sweep.plan import Plan
from qkexp.sweep.replay import ReplayError, Source, first_difference, state_at
from qkexp.sweep.share import Shared, adopt
from qkexp.sweep.status import state_of
from qkexp.train import checkpoint
from qkexp.train import data as datasets
from qkexp.train.batches import TrainingBatches
from qkexp.train.loop import train as real_train

STEPS, AT = 30, 15
SMALL = ["model.width=16", "model.depth=2", "model.heads=2", "train.batch_size=16", f"train.steps={STEPS}"]
RECIPE = ["attention.init=match", "optim.lr=0.05", "optim.warmup=5", "train.clip_norm=1.0", "tracker=none"]


def config(*overrides: str) -> RunConfig:
    return compose_sweep([*SMALL, *RECIPE, *overrides], single=True).runs[0][1]


def trained(directory: Path, *overrides: str) -> Run:
    assert execute(config(*overrides), directory, {}) == 0
    return load_run(directory)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A finished run by its overrides; each is trained once, and handed out as a copy."""
    known: dict[tuple[str, ...], Path] = {}

    def make(target: Path, *overrides: str) -> Path:
        if overrides not in known:
            known[overrides] = tmp_path_factory.mktemp("parent") / "run"
            trained(known[overrides], *overrides)
        shutil.copytree(known[overrides], target)
        return target

    return make


def planned(parent: Run, step: int, *overrides: str) -> Plan:
    return plan_branches(parent, step, overrides)[0]


def begun(parent: Run, step: int, *overrides: str, unchecked: bool = False) -> tuple[Plan, Source]:
    """Branches that are ready to be trained."""
    plan = planned(parent, step, *overrides)
    source = state_at(parent, step, plan.directory / KEPT, unchecked=unchecked)
    plan.make_directory()
    begin(plan, not_begun(plan, plan.runs), parent, source, lambda: None)
    with_earlier(plan).write()
    return plan, source


def branched(parent: Run, step: int, *overrides: str) -> dict[str, Run]:
    """Branches that were trained, by their arms."""
    plan, _ = begun(parent, step, *overrides)
    for run in plan.runs:
        assert execute(run.config, plan.directory / run.name, {}) == 0
    runs = [load_run(plan.directory / run.name) for run in plan.runs]
    return {run.arm or "": run for run in runs}


def rows(run: Run) -> tuple[pd.DataFrame, pd.DataFrame]:
    times = ["step_seconds", "probe_seconds", "eval_seconds"]
    return run.scalars.drop(columns=times), run.attention


def assert_same_rows(one: Run, other: Run) -> None:
    for a, b in zip(rows(one), rows(other), strict=True):
        pd.testing.assert_frame_equal(a, b, check_exact=True)


def files(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("saved", [True, False], ids=["checkpoint", "replayed"])
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_an_arm_that_changes_nothing_has_every_bit_of_its_parent(
    tmp_path: Path, made: Callable[..., Path], precision: str, optimiser: str, saved: bool
) -> None:
    every = f"train.checkpoint_every={AT if saved else 0}"
    parent = load_run(made(tmp_path / "run", f"precision={precision}", f"optim.name={optimiser}", every))
    before = files(parent.directory)
    arms = branched(parent, AT, "optim.qk_lr_scale=0")
    assert_same_rows(parent, arms["unchanged"])
    assert first_difference(parent, arms["unchanged"]) is None
    after = {name: content for name, content in files(parent.directory).items() if not name.startswith("branches/")}
    assert after == before, "the parent's directory is not touched"
    kept = parent.directory / "branches" / KEPT / checkpoint.name(AT)
    assert kept.exists() is not saved, "a state that was replayed is kept, one that is a checkpoint not copied"


def test_arms_share_the_parents_rows_before_the_step_and_its_batches_after_it(
    tmp_path: Path, made: Callable[..., Path]
) -> None:
    parent = load_run(made(tmp_path / "run"))
    arms = branched(parent, AT)
    assert list(arms) == ["unchanged", "norm", "frozen_qk", "slow_qk", "slow"]
    data = datasets.load(parent.typed.data)
    for name, arm in arms.items():
        for own, theirs in zip(rows(arm), rows(parent), strict=True):
            pd.testing.assert_frame_equal(
                own[own.step < AT].reset_index(drop=True)[theirs.columns],
                theirs[theirs.step < AT].reset_index(drop=True),
                check_exact=True,
            )
        assert arm.scalars.step.tolist() == list(range(STEPS))
        assert arm.events.kind.tolist().count("branched") == 1
        assert (arm.scalars.loss[AT:] != parent.scalars.loss[AT:]).any() == (name != "unchanged")
        for step in range(AT, STEPS):
            for mine, other in zip(
                TrainingBatches(data, arm.typed)[step], TrainingBatches(data, parent.typed)[step], strict=True
            ):
                assert torch.equal(mine, other)
    first = {name: arm.scalars.loss[AT] for name, arm in arms.items()}
    assert len({first[n] for n in ("unchanged", "frozen_qk", "slow_qk", "slow")}) == 1, "no update has differed yet"
    assert first["norm"] == pytest.approx(first["unchanged"], abs=0.1)


def test_frozen_q_and_k_keep_their_bits_and_all_else_moves(tmp_path: Path, made: Callable[..., Path]) -> None:
    parent = load_run(made(tmp_path / "run"))
    arm = branched(parent, AT, "optim.qk_lr_scale=0")["frozen_qk"]
    start, end = (checkpoint.load(arm.directory / "checkpoints" / checkpoint.name(s))["model"] for s in (AT, STEPS))
    width = 16
    for name, before in start.items():
        if name.endswith("attn.qkv.weight") or name.endswith("attn.qkv.bias"):
            assert torch.equal(before[: 2 * width], end[name][: 2 * width])
            assert not torch.equal(before[2 * width :], end[name][2 * width :])
        else:
            assert not torch.equal(before, end[name]), name


def test_rates_of_slowed_arms_are_a_tenth_of_the_parents(tmp_path: Path, made: Callable[..., Path]) -> None:
    parent = load_run(made(tmp_path / "run", "optim.qk_lr_scale=0.5"))
    arms = branched(parent, AT)
    np.testing.assert_allclose(arms["slow"].scalars.lr[AT:], 0.1 * parent.scalars.lr[AT:], rtol=1e-12)
    assert arms["slow"].scalars.lr[:AT].tolist() == parent.scalars.lr[:AT].tolist()
    assert arms["slow_qk"].typed.optim.qk_lr_scale == pytest.approx(0.05)
    assert arms["slow_qk"].scalars.lr.tolist() == parent.scalars.lr.tolist()


def test_a_tampered_row_is_found_and_named(tmp_path: Path, made: Callable[..., Path]) -> None:
    for table, column, change in (("scalars", "grad_norm_qk", 1 + 1e-15), ("attention", "entropy_mean", 1.001)):
        directory = made(tmp_path / table)
        path = directory / f"{table}.parquet"
        rows = pq.read_table(path).to_pandas()
        at = rows.index[rows.step == 7][-1]
        was = float(rows.loc[at, column])
        rows.loc[at, column] = was * change if table == "attention" else np.nextafter(was, np.inf)
        rows.to_parquet(path)
        parent = load_run(directory)
        with pytest.raises(ReplayError, match=rf"step 7, {column}") as error:
            state_at(parent, AT, directory / "branches" / KEPT)
        said = error.value.difference
        assert said.found == was
        assert said.recorded == float(rows.loc[at, column])
        assert not (directory / "branches").exists(), "a state that is not the run's is not kept"
        source = state_at(parent, AT, directory / "branches" / KEPT, unchecked=True)
        assert (source.difference, source.base) == (said, 0)
        state_at(parent, 6, directory / "branches" / KEPT)  # before it, all is well


def test_a_checkpoint_of_another_training_is_not_used(tmp_path: Path, made: Callable[..., Path]) -> None:
    """A run that was trained again by other code may have left states behind."""
    directory = made(tmp_path / "run", f"train.checkpoint_every={AT}")
    path = directory / "checkpoints" / checkpoint.name(AT)
    state = checkpoint.load(path)
    state["losses"][3] *= 1.5
    checkpoint.save(path, state)
    assert state_at(load_run(directory), AT, directory / "branches" / KEPT).base == 0


def test_a_replay_starts_from_the_nearest_earlier_state_and_is_kept(tmp_path: Path, made: Callable[..., Path]) -> None:
    directory = made(tmp_path / "run", f"train.checkpoint_every={AT}")
    parent, kept, ticks = load_run(directory), directory / "branches" / KEPT, list[int]()
    assert state_at(parent, 20, kept, tick=ticks.append).base == AT
    assert ticks == list(range(AT + 1, 21))
    again = state_at(parent, 20, kept)
    assert again.base == 20
    assert state_at(parent, 25, kept).base == 20


def test_identities_differ_between_parents_steps_and_changes(tmp_path: Path, made: Callable[..., Path]) -> None:
    one, other = load_run(made(tmp_path / "a")), load_run(made(tmp_path / "b", "seed=1"))
    plans = [planned(one, 13), planned(one, 14), planned(other, 13)]
    marks = [run.identity for plan in plans for run in plan.runs]
    assert len(set(marks)) == 15
    assert not set(marks) & {identity(one.typed), identity(other.typed)}
    for run in plans[0].runs:
        assert (run.config.branch.parent, run.config.branch.step) == (identity(one.typed), 13)
        assert re.fullmatch(r"[a-z_]+-at13-[0-9a-f]{6}", run.name)
    same = planned(one, 13, "optim.qk_lr_scale=0.0", "probe.every=1")
    assert [r.identity for r in same.runs] == [marks[0], marks[2]], "the same change is the same branch"
    assert same.runs[1].name.startswith("frozen_qk-")


def test_runs_that_are_no_branches_keep_their_identity() -> None:
    plain = compose_sweep([], single=True).runs[0][1]
    assert (plain.branch.parent, plain.branch.step) == (None, None)
    assert identity(plain).startswith("cca89e")
    with pytest.raises(UserError, match="qkexp branch"):
        compose_sweep(["branch.step=3"], single=True)


@pytest.mark.parametrize(
    ("overrides", "named", "accepted"),
    [
        (["seed=1"], "seed", "0, as in the run"),
        (["model.seed=1"], "model.seed", "0, as in the run"),
        (["data.seed=1"], "data.seed", "as in the run"),
        (["model.width=32"], "model.width", "16, as in the run"),
        (["model.depth=3"], "model.depth", "2, as in the run"),
        (["data=synthetic"], "data.name", "digits"),
        (["train.steps=40"], "train.steps", "30"),
        (["train.batch_size=8"], "train.batch_size", "16"),
        (["train.accumulate=2"], "train.accumulate", "1"),
        (["optim.name=sgd"], "optim.name", "adamw"),
        (["precision=bf16_pure"], "precision.weights", "fp32"),
        (["attention.init=timm"], "attention.init", "match"),
        (["attention.gate=head"], "attention.gate", "none"),
        (["sweep_name=x"], "sweep_name", "as in the run"),
        (["attention.norm=rms"], "attention.gain", "shared | per_head"),
        (["data.poison=labels", "data.poison_steps=[12,20]"], "data.poison_steps", "before step 15"),
        (["optim.lr=-1"], "optim.lr", "> 0"),
        (["attention=nosuch"], "attention", "rmsnorm"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_overrides_without_a_meaning_in_a_branch_are_refused_by_name(
    tmp_path: Path, made: Callable[..., Path], overrides: list[str], named: str, accepted: str
) -> None:
    parent = load_run(made(tmp_path / "run"))
    with pytest.raises(ConfigError) as error:
        planned(parent, AT, *overrides)
    assert error.value.key == named
    assert accepted in error.value.accepted
    assert not (parent.directory / "branches").exists()


def test_steps_that_cannot_be_branched_at_are_refused_with_those_that_can(
    tmp_path: Path, made: Callable[..., Path]
) -> None:
    parent = load_run(made(tmp_path / "run"))
    for step in (0, -1, STEPS, 1000):
        with pytest.raises(ConfigError, match=f"--at: {step} is not accepted; accepted: a step from 1 to {STEPS - 1}"):
            planned(parent, step)


def test_a_norm_is_neither_put_in_twice_nor_taken_out(tmp_path: Path, made: Callable[..., Path]) -> None:
    parent = load_run(made(tmp_path / "run", "attention=rmsnorm"))
    plan, left_out = plan_branches(parent, AT, [])
    assert [r.name.split("-at")[0] for r in plan.runs] == ["unchanged", "frozen_qk", "slow_qk", "slow"]
    assert left_out == ["norm (the run has one)"]
    with pytest.raises(ConfigError, match=r"attention\.norm: 'none'.*put in, not taken out"):
        planned(parent, AT, "attention=none", "attention.gain=none")
    with pytest.raises(UserError, match="nothing that run does not have"):
        planned(parent, AT, "attention=rmsnorm")


def test_every_key_that_a_branch_may_change_is_an_identity_key() -> None:
    from qkexp.config import keys

    known = {k.name: k.meta["identity"] for k in keys()}
    backend = {"attention.backend"}  # the kernel rounds, and is no identity key
    assert {name for name in CHANGEABLE if not known[name]} == backend


def test_a_run_that_diverged_is_branched_before_its_end(tmp_path: Path) -> None:
    """Poisoned with numbers that are none at step 20: without the poison the same run goes on."""
    parent = trained(tmp_path / "run", "data.poison=nan", "data.poison_steps=[20]")
    assert (parent.status, len(parent.scalars)) == ("diverged", 20)
    arms = branched(parent, AT, "data.poison=none", "data.poison_steps=[]")
    unchanged = arms.pop("unchanged")
    assert (unchanged.status, len(unchanged.scalars)) == ("diverged", 20)
    assert_same_rows(parent, unchanged)
    (cured,) = arms.values()
    assert len(cured.scalars) == STEPS
    assert_same_rows(trained(tmp_path / "clean"), cured)
    with pytest.raises(ConfigError, match="a step from 1 to 20"):
        planned(parent, 21)


def stopped_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is trained now is asked to stop once so many steps are done."""

    def train(cfg: RunConfig, data: Any, record: Any, stop: Any, resume: Any) -> Any:
        return real_train(cfg, data, record, lambda: "asked" if record._steps == step else None, resume)

    monkeypatch.setattr("qkexp.sweep.job.train", train)


@pytest.mark.parametrize("whole", [True, False], ids=["stopped", "running"])
def test_a_run_that_has_not_ended_is_branched_at_any_step_that_it_has_recorded(
    tmp_path: Path, made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    with monkeypatch.context() as patch:
        stopped_at(21, patch)
        assert execute(config(), tmp_path / "run", {}) == 75
    if not whole:  # what a living run looks like: parts, and no outcome
        (tmp_path / "run" / "parts").mkdir()
        for table in ("scalars", "attention"):
            rows, step = pq.read_table(tmp_path / "run" / f"{table}.parquet"), pc.field("step")
            for first, last in ((0, 12), (12, 21)):
                part = rows.filter((step >= first) & (step < last))
                pq.write_table(part, tmp_path / "run" / "parts" / f"{table}-{first:08d}.parquet")
            (tmp_path / "run" / f"{table}.parquet").unlink()
        (tmp_path / "run" / "outcome.json").unlink()
    parent = load_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="a step from 1 to 21"):
        planned(parent, 22)
    arms = branched(parent, AT, "optim.lr=0.01")
    assert_same_rows(load_run(made(tmp_path / "finished")), arms["unchanged"])


def test_an_interrupted_branch_goes_on_as_if_it_had_never_stopped(
    tmp_path: Path, made: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = made(tmp_path / "whole")
    shutil.copytree(directory, tmp_path / "stopped")
    whole = branched(load_run(directory), AT, "attention=rmsnorm", "attention.gain=per_head")["norm"]
    plan, _ = begun(load_run(tmp_path / "stopped"), AT, "attention=rmsnorm", "attention.gain=per_head")
    run = plan.runs[1]

    assert state_of(plan.directory / run.name, STEPS).status == "missing", "begun, but not trained"
    with monkeypatch.context() as patch:
        stopped_at(21, patch)
        assert execute(run.config, plan.directory / run.name, {}) == 75
    assert state_of(plan.directory / run.name).step == 21
    assert not_begun(plan, plan.runs) == [], "it has a state of its own to go on from"
    assert execute(run.config, plan.directory / run.name, {}) == 0
    stopped = load_run(plan.directory / run.name)
    assert_same_rows(whole, stopped)
    assert [k for k in stopped.events.kind if k in ("branched", "resumed")] == ["branched", "resumed"]


def test_a_branch_never_starts_without_its_parents_state(tmp_path: Path, made: Callable[..., Path]) -> None:
    parent = load_run(made(tmp_path / "run"))
    plan, source = begun(parent, AT, "optim.lr=0.01")
    run = plan.runs[1]
    shutil.rmtree(plan.directory / run.name / "checkpoints")
    assert execute(run.config, plan.directory / run.name, {}) == 1
    assert "qkexp branch" in state_of(plan.directory / run.name).reason
    assert [r.name for r in not_begun(plan, plan.runs)] == [run.name]
    begin(plan, [run], parent, source, lambda: None)
    assert execute(run.config, plan.directory / run.name, {}) == 0


def test_branches_are_no_runs_of_their_parents_sweep_and_a_sweep_of_their_own(
    tmp_path: Path, made: Callable[..., Path]
) -> None:
    parent = load_run(made(tmp_path / "sweep" / "run"))
    branched(parent, AT, "optim.lr=0.01")
    branched(parent, AT + 1, "optim.qk_lr_scale=0")
    assert list(load_sweep(tmp_path / "sweep").all) == ["run"]
    branches = load_sweep(parent.directory / "branches")
    table = branches.runs[["branch.step", "status"]]
    assert sorted(table["branch.step"]) == [AT, AT, AT + 1, AT + 1], "later branches join those from before"
    assert [run.arm for run in branches.all.values()] == ["unchanged", "lr-0p01", "unchanged", "frozen_qk"]
    assert set(branches.runs["branch.parent"]) == {identity(parent.typed)}
    (tmp_path / "other").mkdir()
    adopt(Shared("run", parent.directory), tmp_path / "other")
    assert not (tmp_path / "other" / "run" / "branches").exists(), "a shared run is the run alone"


def test_training_the_parent_again_leaves_its_branches_alone(tmp_path: Path, made: Callable[..., Path]) -> None:
    directory = made(tmp_path / "run")
    branched(load_run(directory), AT, "optim.lr=0.01")
    half = directory / "branches" / ".being-written.part"
    half.write_text("half")
    before = files(directory / "branches")
    assert execute(config(), directory, {}, again=True) == 0
    assert files(directory / "branches") == before


def test_a_branch_of_a_branch_starts_at_its_own_steps(tmp_path: Path, made: Callable[..., Path]) -> None:
    parent = load_run(made(tmp_path / "run"))
    middle = branched(parent, AT, "optim.lr=0.01")["lr-0p01"]
    inner = branched(middle, 20, "optim.qk_lr_scale=0")["unchanged"]
    assert_same_rows(middle, inner)
    assert inner.typed.branch.parent == identity(middle.typed)
    with pytest.raises(UserError, match="its first own step is 15"):
        state_at(middle, 5, tmp_path / "kept")


def test_settings_of_precision_clipping_and_averages_take_effect_from_the_step_on(
    tmp_path: Path, made: Callable[..., Path]
) -> None:
    """What PyTorch stores with an optimiser's state must not bring the parent's settings back."""
    parent = load_run(made(tmp_path / "run"))
    for override in (
        "precision=fp32",
        "precision=fp16",
        "optim.betas=[0.5,0.9]",
        "optim.eps=1e-3",
        "train.clip_norm=0.01",
    ):
        plan, _ = begun(parent, AT, override)
        (arm,) = (r for r in plan.runs if not r.name.startswith("unchanged"))
        assert execute(arm.config, plan.directory / arm.name, {}) == 0, override
        run = load_run(plan.directory / arm.name)
        assert (run.scalars.loss[AT + 1 :] != parent.scalars.loss[AT + 1 :]).all(), override
        state = checkpoint.load(run.directory / "checkpoints" / checkpoint.name(STEPS))
        group = state["optimizers"][0]["param_groups"][0]
        assert list(group["betas"]) == list(arm.config.optim.betas)
        assert group["eps"] == arm.config.optim.eps
        assert ("loss_scale" in run.scalars.dropna(axis=1, how="all")) == (override == "precision=fp16")


def test_what_arms_measure_may_differ_from_what_the_run_measured(tmp_path: Path, made: Callable[..., Path]) -> None:
    parent = load_run(made(tmp_path / "run"))
    for asked in (["probe.groups=[sink]", "probe.every=3"], ["probe.images=2"], ["probe=none"]):
        shutil.rmtree(parent.directory / "branches", ignore_errors=True)
        arms = branched(parent, AT, "optim.lr=0.01", *asked)
        assert len(arms) == 2
        assert first_difference(parent, arms["unchanged"]) is None, asked
        assert first_difference(parent, arms["lr-0p01"]) is not None
    assert arms["unchanged"].attention.step.max() == AT - 1, "probe=none holds from the step on"


def test_states_json_tells_how_a_state_was_had(tmp_path: Path, made: Callable[..., Path]) -> None:
    from qkexp.sweep.branch import note_source

    plan, source = begun(load_run(made(tmp_path / "run")), AT, "optim.lr=0.01")
    note_source(plan, source)
    assert json.loads((plan.directory / "states.json").read_text()) == {str(AT): {"replayed_from": 0}}


def test_a_calibrated_norm_leaves_the_logits_of_the_first_step_as_sharp_as_they_were(tmp_path: Path) -> None:
    """Gains are set on the batches of four steps, of which this is the first; a norm born at gain 1 misses by far."""
    parent = trained(tmp_path / "run", "train.steps=60", "train.batch_size=64", "optim.lr=0.03")
    step = 40
    arms = branched(parent, step, "attention.norm=rms", "attention.gain=per_head")
    gap = {name: arm.layers["logit_gap_mean"][step] for name, arm in arms.items()}
    size = {name: arm.layers["max_abs_logit"][step] for name, arm in arms.items()}
    assert (gap["unchanged"] > 2 * parent.layers["logit_gap_mean"][0]).all(), "logits have grown"
    np.testing.assert_allclose(gap["norm"], gap["unchanged"], rtol=0.02)
    assert (size["norm"] < 1.02 * size["unchanged"]).all(), "the longest tokens lose length"
    assert (size["norm"] > 0.3 * size["unchanged"]).all()
    assert arms["norm"].scalars.loss[step] == pytest.approx(parent.scalars.loss[step], abs=0.1)


# ---------------------------------------------------------------- the command


def qkexp(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "qkexp", *args], capture_output=True, text=True, timeout=180)


def test_the_command_trains_its_arms_says_how_they_ended_and_does_nothing_twice(
    tmp_path: Path, made: Callable[..., Path]
) -> None:
    directory = made(tmp_path / "run")
    shown = qkexp("branch", str(directory), "--at", "13", "--plan")
    assert shown.returncode == 0, shown.stderr
    assert "5 to train" in shown.stdout
    assert not (directory / "branches").exists()
    done = qkexp("branch", str(directory), "--at", "13", "optim.qk_lr_scale=0,0.5")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "step 13 was replayed from the start, and every number was the recorded one" in done.stdout
    assert "steps 13 to 29 have every number of the run" in done.stdout.replace("\n", " ")
    states = json.loads(qkexp("status", "--json", str(directory / "branches")).stdout)
    assert [s["name"].split("-at")[0] for s in states] == ["unchanged", "frozen_qk", "qklrscale-0p5"]
    assert all(s["status"] in ("completed", "diverged") for s in states)
    before = {p: p.stat().st_mtime_ns for p in directory.glob("branches/*/outcome.json")}
    assert qkexp("branch", str(directory), "--at", "13", "optim.qk_lr_scale=0").returncode == 0
    assert {p: p.stat().st_mtime_ns for p in directory.glob("branches/*/outcome.json")} == before
    again = qkexp("branch", str(directory), "--at", "13", "optim.qk_lr_scale=0", "--again")
    assert again.returncode == 0, again.stdout + again.stderr
    after = {p: p.stat().st_mtime_ns for p in directory.glob("branches/*/outcome.json")}
    assert [p.parent.name.split("-at")[0] for p in sorted(before) if before[p] != after[p]] == [
        "frozen_qk",
        "unchanged",
    ]


def test_a_replay_that_differs_ends_with_1_and_names_step_column_and_values(
    tmp_path: Path, made: Callable[..., Path]
) -> None:
    directory = made(tmp_path / "run")
    path = directory / "scalars.parquet"
    rows = pq.read_table(path).to_pandas()
    rows.loc[7, "loss"] += 1e-3
    rows.to_parquet(path)
    done = qkexp("branch", str(directory), "--at", "13", "optim.lr=0.01")
    assert done.returncode == 1
    assert "step 7, loss" in done.stderr
    assert repr(float(rows.loss[7])) in done.stderr
    assert "Traceback" not in done.stderr
    assert not (directory / "branches").exists()
    allowed = qkexp("branch", str(directory), "--at", "13", "optim.lr=0.01", "--unchecked")
    assert allowed.returncode == 0, allowed.stdout + allowed.stderr
    noted = json.loads((directory / "branches" / "states.json").read_text())["13"]
    assert (noted["first_difference"]["step"], noted["first_difference"]["column"]) == (7, "loss")


def test_wrong_input_exits_2_and_leaves_nothing(tmp_path: Path, made: Callable[..., Path]) -> None:
    directory = made(tmp_path / "run")
    before = files(directory)
    for args in ([str(tmp_path), "--at", "3"], [str(directory), "--at", "99"], [str(directory), "--at", "3", "seed=1"]):
        assert cli.main(["branch", *args]) == 2
    with pytest.raises(SystemExit) as error:
        cli.main(["branch", str(directory)])
    assert error.value.code == 2
    assert files(directory) == before
