"""Branches of a run: their plan, and how their directories begin.

A branch is an ordinary run directory, ``RUN/branches/<arm>-at<STEP>-<hash>``: its tables are its parent's rows
before STEP and then its own, and its first checkpoint is its parent's state at STEP, made fit for what it changes. So a
branch is trained, resumed, read and drawn like any run, and ``RUN/branches`` like any sweep. Identity: what it changes,
its parent's identity and STEP.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from qkexp.compose import Sweep, compose_changes, compose_sweep
from qkexp.config import (
    BranchConfig,
    ConfigError,
    RunConfig,
    UserError,
    head_width,
    identity,
    keys,
    to_typed,
)
from qkexp.model.core import choose_backend
from qkexp.naming import branch_name
from qkexp.record.files import read_json, write_json
from qkexp.record.load import Run
from qkexp.record.lock import held, take
from qkexp.record.run import inherit, intact
from qkexp.sweep.arms import check_changes, default_arms, describe
from qkexp.sweep.plan import Plan, Planned
from qkexp.sweep.replay import Source, recorded, threads
from qkexp.train import checkpoint
from qkexp.train import data as datasets
from qkexp.train.surgery import adapt

FOLDER = "branches"
KEPT = "checkpoints"  # in the folder of branches: states that were replayed


def plan_branches(run: Run, step: int, overrides: Sequence[str]) -> tuple[Plan, list[str]]:
    """The plan of a run's branches at a step, and the usual arms that are left out, with the reason.

    Args:
        overrides: those of a launcher and of keys that change no number hold for every arm; each combination of the
            others is an arm, beside one that changes nothing. Without any: the usual arms.

    Raises:
        UserError: a step or an override that makes no sense in a branch.
    """
    last = min(recorded(run), run.typed.train.steps - 1)
    if not 1 <= step <= last:
        raise ConfigError("--at", step, f"a step from 1 to {last}" if last else f"none: {run.name} has no rows yet")
    where = [text for text in overrides if text.startswith("hydra")]
    common = [text for text in overrides if text not in where and not _changes_numbers(text)]
    changes = [text for text in overrides if text not in where and text not in common]
    arms, left_out = _arms(run, _base(run, step, common), changes)
    composed = compose_sweep(where, single=True)
    settings = dict(composed.launcher)
    if composed.launcher_name == "local":
        settings["threads"] = settings["threads"] or threads(run)  # else sums would round otherwise
    folder = run.directory.absolute() / FOLDER
    sweep = Sweep(
        name=f"{run.name}-{FOLDER}",
        experiment=None,
        output_dir=folder,
        launcher_name=composed.launcher_name,
        launcher=settings,
        expect=None,
        figures=["branches"],
        rates=None,
        runs=[(planned.overrides, planned.config) for planned in arms],
    )
    return Plan(folder, arms, sweep), left_out


def _base(run: Run, step: int, common: Sequence[str]) -> RunConfig:
    """The configuration of an arm that changes nothing."""
    settled = compose_changes(run.typed, common)
    if len(settled) > 1:
        raise UserError(f"{' '.join(common)}: several values would make arms that differ in no number")
    base = settled[0][1]
    check_changes(run.typed, base, step)
    base.branch = BranchConfig(identity(run.typed), step)
    a = base.attention
    if a.backend == choose_backend(base.device, a.softcap, a.score_dtype, head_width(base.model), a.dropout):
        a.backend = "auto"  # what an arm changes may want another kernel
    return base


def _arms(run: Run, base: RunConfig, changes: Sequence[str]) -> tuple[list[Planned], list[str]]:
    """The arms, the one that changes nothing first; and the usual ones that are left out."""
    usual, left_out = default_arms(run.typed)
    composed = [(name, *compose_changes(base, texts)[0]) for name, texts in usual.items()]
    if changes:
        known = {identity(cfg): name for name, _, cfg in composed}
        asked = compose_changes(base, changes)
        for texts, cfg in asked:
            check_changes(run.typed, cfg, base.branch.step or 0)
            if identity(cfg) == identity(base):
                raise UserError(f"{' '.join(texts)}: nothing that {run.name} does not have already")
        named = [(known.get(identity(cfg)) or describe(base, cfg), texts, cfg) for texts, cfg in asked]
        composed, left_out = [composed[0], *named], []
    arms = {identity(cfg): Planned(branch_name(name, cfg), identity(cfg), texts, cfg) for name, texts, cfg in composed}
    return list(arms.values()), left_out


def _changes_numbers(override: str) -> bool:
    """Whether an override sets what belongs to a run's identity."""
    name = override.partition("=")[0]
    inside = [k.meta["identity"] for k in keys() if k.name == name or k.name.startswith(f"{name}.")]
    return any(inside) or not inside


def with_earlier(plan: Plan) -> Plan:
    """The plan, with the branches that were planned before: one folder holds all branches of a run."""
    before = (read_json(plan.directory / "plan.json") or {}).get("runs", [])
    new = {run.name: run for run in plan.runs}
    earlier = [
        Planned(r["name"], r["identity"], r["overrides"], to_typed(r["config"])) for r in before if r["name"] not in new
    ]
    return plan.only([*earlier, *plan.runs])


def not_begun(plan: Plan, runs: Sequence[Planned]) -> list[Planned]:
    """Those whose directories hold no state of their own to go on from, and that nobody trains."""
    found = []
    for run in runs:
        directory = plan.directory / run.name
        if held(directory):
            continue
        state = checkpoint.latest(directory / "checkpoints", at_most=intact(directory))
        if state is None or state["step"] < (run.config.branch.step or 0):
            found.append(run)
    return found


def begin(plan: Plan, runs: Sequence[Planned], parent: Run, source: Source, tick: Callable[[], None]) -> None:
    """Give each branch its parent's rows and events, and its state, fit for what the branch changes."""
    data = datasets.load(parent.typed.data)
    for run in runs:
        directory = plan.directory / run.name
        directory.mkdir(parents=True, exist_ok=True)
        lock = take(directory, run.steps)
        if lock is None:
            continue  # another launch was faster
        try:
            step = source.state["step"]
            inherit(directory, parent.directory, step)
            state = adapt(source.state, parent.typed, run.config, data)
            checkpoint.save(directory / "checkpoints" / checkpoint.name(step), state)  # last: with it, all is there
        finally:
            lock.release()
        tick()


def note_source(plan: Plan, source: Source) -> None:
    """Write into ``states.json`` how the state at a step was had."""
    path = plan.directory / "states.json"
    how: dict[str, Any] = {"replayed_from": source.base}
    if source.difference is not None:
        how["first_difference"] = dataclasses.asdict(source.difference)
    write_json(path, {**(read_json(path) or {}), str(source.state["step"]): how})
