"""Branches of a run: which arms, what they may change, and how their directories begin.

A branch is an ordinary run directory, ``RUN/branches/<arm>-at<STEP>-<hash>``: its tables are its parent's rows
before STEP and then its own, and its first checkpoint is its parent's state at STEP, made fit for what it changes. So a
branch is trained, resumed, read and drawn like any run, and ``RUN/branches`` like any sweep. Identity: what it changes,
its parent's identity and STEP.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from qkexp.compose import Sweep, compose_changes, compose_sweep
from qkexp.config import (
    BranchConfig,
    ConfigError,
    RunConfig,
    UserError,
    flatten,
    head_width,
    identity,
    identity_keys,
    keys,
    to_typed,
)
from qkexp.model.calibrate import can_calibrate, inserts
from qkexp.model.core import choose_backend
from qkexp.naming import branch_name, slug
from qkexp.record.files import read_json, write_json
from qkexp.record.load import Run
from qkexp.record.lock import held, take
from qkexp.record.run import inherit, intact
from qkexp.sweep.plan import Plan, Planned
from qkexp.sweep.replay import Source
from qkexp.train import checkpoint
from qkexp.train import data as datasets
from qkexp.train.surgery import adapt

FOLDER = "branches"
UNCHANGED = "unchanged"
KEPT = "checkpoints"  # in the folder of branches: states that were replayed
NORM = ("attention.norm=rms", "attention.gain=per_head")

# What a branch may change, beside keys that change no number. It shares start, batches and length with its parent.
CHANGEABLE = (
    *(f"attention.{f.name}" for f in dataclasses.fields(RunConfig().attention) if f.name not in ("init", "gate")),
    *(f"optim.{f.name}" for f in dataclasses.fields(RunConfig().optim) if f.name != "name"),
    *("precision.autocast", "train.clip_norm", "train.loss", "train.label_smoothing"),
    *("model.dropout", "model.drop_path"),
    *("data.label_noise", "data.poison", "data.poison_steps", "data.mixup", "data.crop", "data.flip"),
    *("data.randaugment", "data.randaugment_magnitude"),
)
FIXED = ("experiment", "sweep_name", "output_dir")  # no number hangs on them, but a branch lies where it lies


def default_arms(parent: RunConfig) -> tuple[dict[str, list[str]], list[str]]:
    """The arms that are tried without overrides, name -> overrides; and those left out, with the reason."""
    o, left_out = parent.optim, []
    arms: dict[str, list[str]] = {UNCHANGED: []}
    if parent.attention.norm == "none":
        arms["norm"] = list(NORM)
    else:
        left_out.append("norm (the run has one)")
    if o.qk_lr_scale:
        arms["frozen_qk"] = ["optim.qk_lr_scale=0"]
        arms["slow_qk"] = [f"optim.qk_lr_scale={0.1 * o.qk_lr_scale:.6g}"]
    else:
        left_out.append("frozen_qk, slow_qk (Q and K are frozen already)")
    arms["slow"] = [f"optim.lr={0.1 * o.lr:.6g}"]
    return arms, left_out


def plan_branches(run: Run, step: int, overrides: Sequence[str], last: int, threads: int) -> tuple[Plan, list[str]]:
    """The plan of a run's branches at a step, and the usual arms that are left out, with the reason.

    Args:
        overrides: those of a launcher and of keys that change no number hold for every arm; each combination of the
            others is an arm, beside one that changes nothing. Without any: the usual arms.
        last: the latest step that the run can be branched at.
        threads: CPU threads of an arm, unless the launcher is told otherwise: the run's own.

    Raises:
        UserError: a step or an override that makes no sense in a branch.
    """
    parent = run.typed
    last = min(last, parent.train.steps - 1)
    if not 1 <= step <= last:
        raise ConfigError("--at", step, f"a step from 1 to {last}" if last else f"none: {run.name} has no rows yet")
    where = [text for text in overrides if text.startswith("hydra")]
    common = [text for text in overrides if text not in where and not _changes_numbers(text)]
    changes = [text for text in overrides if text not in where and text not in common]
    composed = compose_sweep(where, single=True)
    settings = dict(composed.launcher)
    if composed.launcher_name == "local":
        settings["threads"] = settings["threads"] or threads
    settled = compose_changes(parent, common)
    if len(settled) > 1:
        raise UserError(f"{' '.join(common)}: several values would make arms that differ in no number")
    base = copy.deepcopy(settled[0][1])
    base.branch = BranchConfig(identity(parent), step)
    a = base.attention
    if a.backend == choose_backend(base.device, a.softcap, a.score_dtype, head_width(base.model), a.dropout):
        a.backend = "auto"  # what an arm changes may want another kernel
    usual, left_out = default_arms(parent)
    named = {name: compose_changes(base, texts)[0] for name, texts in usual.items()}
    if changes:
        known = {identity(cfg): name for name, (_, cfg) in named.items()}
        asked = compose_changes(base, changes)
        named, left_out = {UNCHANGED: named[UNCHANGED]}, []
        for texts, cfg in asked:
            check_changes(parent, cfg, step)
            if identity(cfg) == identity(base):
                raise UserError(f"{' '.join(texts)}: nothing that {run.name} does not have already")
            named[known.get(identity(cfg)) or describe(base, cfg)] = texts, cfg
    for _, cfg in named.values():
        check_changes(parent, cfg, step)
    folder = run.directory / FOLDER
    sweep = Sweep(
        name=f"{run.name}-{FOLDER}",
        experiment=None,
        output_dir=folder,
        launcher_name=composed.launcher_name,
        launcher=settings,
        expect=None,
        figures=["branches"],
        rates=None,
        runs=list(named.values()),
    )
    runs = [Planned(branch_name(arm, cfg), identity(cfg), texts, cfg) for arm, (texts, cfg) in named.items()]
    return Plan(folder, runs, sweep), left_out


def _changes_numbers(override: str) -> bool:
    """Whether an override sets what belongs to a run's identity."""
    name = override.partition("=")[0]
    inside = [k.meta["identity"] for k in keys() if k.name == name or k.name.startswith(f"{name}.")]
    return any(inside) or not inside


def check_changes(parent: RunConfig, cfg: RunConfig, step: int) -> None:
    """Refuse what a branch cannot change.

    Raises:
        ConfigError: with the first key, its value and what is accepted.
    """
    old, new = flatten(parent), flatten(cfg)
    counted = identity_keys(parent).keys() | identity_keys(cfg).keys()
    for name in (n for n in new if new[n] != old[n] and not n.startswith("branch.")):
        if name in FIXED or (name in counted and name not in CHANGEABLE):
            raise ConfigError(
                name, new[name], f"{old[name]}, as in the run: a branch shares its start, its batches and its length"
            )
    a = cfg.attention
    if a.norm == "none" and parent.attention.norm != "none":
        raise ConfigError(
            "attention.norm",
            a.norm,
            "rms | l2: a norm can be put in, not taken out (the logits would lose their scale)",
        )
    if inserts(parent.attention, a) and not can_calibrate(a):
        raise ConfigError(
            "attention.gain", a.gain, "shared | per_head, or a learned attention.scale: they hold the logits' scale"
        )
    changed = set(cfg.data.poison_steps) ^ set(parent.data.poison_steps)
    if min(changed, default=step) < step:
        raise ConfigError(
            "data.poison_steps", cfg.data.poison_steps, f"those of the run before step {step}, which is past"
        )


def describe(parent: RunConfig, cfg: RunConfig) -> str:
    """A name for an arm: the identity keys that it changes, with their values."""
    old, new = flatten(parent), flatten(cfg)
    changed = [k.name for k in keys() if k.meta["identity"] and old[k.name] != new[k.name]]
    values = [f"{new[n]:g}" if isinstance(new[n], float) else str(new[n]) for n in changed]
    parts = [f"{n.rpartition('.')[2].replace('_', '')}-{v}" for n, v in zip(changed, values, strict=True)]
    return slug("_".join(parts))[:120]


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
