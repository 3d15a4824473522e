"""Command-line overrides -> checked configurations, through Hydra's compose API.

Every fault of the user's input ends in a :class:`UserError` that names the key, before anything is
written: ``@hydra.main`` would make directories first and accept keys outside the schema.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from qkexp.checks import accepted, check, check_launcher, check_value
from qkexp.config import DATA_SETS, BisectConfig, ConfigError, ExperimentConfig, Key, RunConfig, UserError, keys

ROOT_CONFIG = "train"


def config_dir() -> Path:
    """The folder of configs: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "configs", package / "configs"):
        if (folder / f"{ROOT_CONFIG}.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no configs beside or inside {package}: reinstall qkexp")


def options(group: str) -> list[str]:
    """Names that a config group offers."""
    return sorted(p.stem for p in (config_dir() / group).glob("*.yaml"))


@dataclass(frozen=True)
class Sweep:
    """A composed grid: what the runs have in common, and each run's overrides and configuration."""

    name: str
    experiment: str | None
    output_dir: Path
    launcher_name: str
    launcher: dict[str, Any]
    expect: dict[str, Any] | None
    figures: list[str] | None
    rates: list[float] | None  # of a search for the critical rate; the runs are then those it may come to ask for
    runs: list[tuple[list[str], RunConfig]]
    optional_data: bool = False  # without its data set there is nothing to reproduce, and nothing wrong

    @property
    def directory(self) -> Path:
        return self.output_dir / self.name


def compose_sweep(overrides: Sequence[str], *, single: bool = False) -> Sweep:
    """Expand overrides (Hydra's multirun syntax, and the experiment's own axes) into checked runs.

    Args:
        overrides: as typed. ``seed=0,1,2`` is an axis; an override of an experiment's axis replaces it.
        single: one run is wanted (``qkexp train``): an axis is refused.

    Raises:
        UserError: an override that is not understood, a key outside the schema, a refused value.
    """
    with _hydra():
        parsed = _parse(overrides)
        first = _compose([o for o in overrides if not _parse([o])[0].is_sweep_override()])
        rates = None if single else _rates(first, parsed)
        if single:
            swept = [o.key_or_group for o in parsed if o.is_sweep_override()]
            if swept:
                raise UserError(
                    f"{swept[0]}: several values are a sweep; use `qkexp sweep`, or quote the value: "
                    f"'{swept[0]}=\"a,b\"'"
                )
            tasks = [tuple(overrides)]
        else:
            tasks = [task for grid in _grids(first, overrides, parsed, rates) for task in _expand(grid)]
        compose_run = _Composer()
        runs = [(list(task), compose_run(task)) for task in tasks]
    default_name = "single" if single else "sweep"
    return Sweep(
        name=_sweep_name(first.sweep_name or first.experiment or default_name),
        experiment=first.experiment,
        output_dir=Path(first.output_dir).expanduser().absolute(),
        launcher_name=first.hydra.runtime.choices["hydra/launcher"],
        launcher=check_launcher(OmegaConf.to_container(first.hydra.launcher)),  # type: ignore[arg-type]
        expect=OmegaConf.to_container(first.expect) if first.expect is not None else None,  # type: ignore[arg-type]
        figures=list(first.figures) if first.figures is not None else None,
        rates=rates,
        runs=runs,
        optional_data=first.optional_data and not any(o.key_or_group.split(".")[0] == "data" for o in parsed),
    )


def compose_changes(base: RunConfig, overrides: Sequence[str]) -> list[tuple[list[str], RunConfig]]:
    """Overrides (Hydra's multirun syntax) on the configuration of a run -> checked configurations.

    A group's file changes the keys that it sets, and no other.

    Raises:
        UserError: an override that is not understood, a key outside the schema, a refused value.
    """
    found = []
    with _hydra():
        _parse(overrides)
        for task in _expand(overrides):
            cfg = OmegaConf.structured(base)
            try:
                for override in _parse(task):
                    name, value = override.key_or_group, cast(Any, override.value())
                    if name in {k.name.split(".")[0] for k in keys() if "." in k.name}:
                        value = _group_file(name, str(value))
                    elif name not in _run_keys():
                        raise UserError(f"{override.input_line}: {name} is not a key of a run that exists")
                    OmegaConf.update(cfg, name, value, merge=True)
                found.append((list(task), _finished(OmegaConf.to_object(cfg))))
            except OmegaConfBaseException as error:
                raise _explain(error, _parse(task)) from None
    return found


def _group_file(group: str, name: str) -> DictConfig:
    """What a file of a group sets, with the files that it builds on."""
    if name not in options(group):
        raise ConfigError(group, name, " | ".join(options(group)))
    own = OmegaConf.load(config_dir() / group / f"{name}.yaml")
    assert isinstance(own, DictConfig)
    below = [_group_file(group, other) for other in own.pop("defaults", []) if other != "_self_"]
    merged = OmegaConf.merge(*below, own)
    assert isinstance(merged, DictConfig)
    return merged


# ---------------------------------------------------------------- which runs


def _grids(
    first: DictConfig, overrides: Sequence[str], parsed: Sequence[Override], rates: list[float] | None
) -> Iterator[list[str]]:
    """Grids as overrides with several values: the axes, crossed with each entry of ``runs``.

    What stands on the command line replaces an axis of the same key, in an entry too.
    """
    given = {o.key_or_group for o in parsed}
    axes = dict(OmegaConf.select(first, "hydra.sweeper.params") or {})
    if rates is not None:
        axes["optim.lr"] = ",".join(f"{rate:.4g}" for rate in rates)
    entries: Any = [{}] if first.runs is None else first.runs
    entries = OmegaConf.to_container(entries) if OmegaConf.is_config(entries) else entries
    none = entries == [] and "runs" not in given  # an experiment that calculates, and trains nothing
    if not none and not (isinstance(entries, list) and entries and all(isinstance(e, dict) for e in entries)):
        raise ConfigError("runs", entries, "a list of {KEY: VALUES}, or null")
    for entry in entries:
        own = {**{k: v for k, v in axes.items() if k not in entry}, **entry}
        grid = [f"{k}={_written(v)}" for k, v in own.items() if k not in given]
        # an experiment's own choice must be composed before the axes that override it
        yield [*grid, *overrides]


def _written(value: Any) -> str:
    """A value of a YAML file as an override writes it; a text may hold several (``1e-3,1e-2``)."""
    return value if isinstance(value, str) else json.dumps(value)


def _rates(first: DictConfig, parsed: Sequence[Override]) -> list[float] | None:
    """Rates of a search, evenly spaced on a logarithmic scale, none further from the next than ``bisect.factor``."""
    b = first.bisect
    for k in keys(BisectConfig, "bisect."):
        check_value(k, b[k.name.removeprefix("bisect.")])
    if b.low is None and b.high is None:
        return None
    if b.low is None or b.high is None or not b.high > b.low:
        raise ConfigError("bisect.high", b.high, f"a rate above bisect.low={b.low}")
    if any(o.key_or_group == "optim.lr" for o in parsed):
        raise UserError("optim.lr: its values are those of the search, from bisect.low to bisect.high; leave it out")
    count = math.ceil(math.log(b.high / b.low) / math.log(b.factor) - 1e-9)
    return [float(f"{b.low * (b.high / b.low) ** (i / count):.4g}") for i in range(count + 1)]


def _sweep_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name.startswith("."):
        raise ConfigError("sweep_name", name, "a folder name made of letters, digits, _ - and .")
    return name


@contextmanager
def _hydra() -> Iterator[None]:
    ConfigStore.instance().store(name="schema", node=ExperimentConfig)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(config_dir()), version_base="1.3"):
        yield


def _parse(overrides: Sequence[str]) -> list[Override]:
    return [_parsed(text) for text in overrides]


@cache
def _parsed(text: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise UserError(
            f"{text!r} is not an override ({str(error).splitlines()[0]}); "
            "write KEY=VALUE; quote values that hold = , or brackets: 'KEY=\"a=b,c\"'"
        ) from None
    _check_key(override, text)
    return override


def _check_key(override: Override, text: str) -> None:
    name = override.key_or_group
    if override.is_add() or override.is_force_add() or override.is_delete():
        raise UserError(f"{text}: keys can be changed, not added or deleted{_near(name)}")
    if name.startswith("branch."):
        raise UserError(f"{text}: `qkexp branch RUN --at STEP` sets {name}")
    if name in _groups() or name in _leaf_keys() or name.startswith("hydra.launcher."):
        return  # a launcher has keys of its own; composing refuses those that it does not have
    raise UserError(f"{name}: no such key (given: {text}){_near(name)}")


def _near(name: str) -> str:
    known = [*_leaf_keys(), *_groups()]
    tails = {k.rsplit(".", 1)[-1]: k for k in known}
    close = difflib.get_close_matches(name, known, 3, 0.6)
    close += [tails[t] for t in difflib.get_close_matches(name.rsplit(".", 1)[-1], tails, 2, 0.7)]
    listed = list(dict.fromkeys(close)) or sorted({k.split(".")[0] for k in known})
    return f"; {'close' if close else 'accepted'}: {', '.join(listed)}"


@cache
def _leaf_keys() -> dict[str, Key]:
    return {k.name: k for k in keys(ExperimentConfig) if k.name not in ("expect", "figures")}


@cache
def _groups() -> list[str]:
    root = config_dir()
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_dir() and any(p.glob("*.yaml")))


def _compose(task: Sequence[str]) -> DictConfig:
    parsed = _parse(task)
    for override in parsed:
        group = override.key_or_group
        if group in _groups() and not override.is_sweep_override() and str(override.value()) not in options(group):
            raise ConfigError(group, override.value(), " | ".join(options(group)))
    try:
        return compose(ROOT_CONFIG, list(task), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, parsed) from None


class _Composer:
    """Overrides -> one checked run, for thousands of runs.

    Hydra composes what a choice of groups gives, once (a tenth of a second each); the values that follow are
    then set on it, in order, as Hydra itself does.
    """

    def __init__(self) -> None:
        self._composed: dict[tuple[tuple[str, ...], tuple[str, ...]], tuple[DictConfig, list[str]]] = {}

    def __call__(self, task: Sequence[str]) -> RunConfig:
        parsed = _parse(task)
        choices = tuple(t for t, o in zip(task, parsed, strict=True) if o.key_or_group in _groups())
        values = [(t, o) for t, o in zip(task, parsed, strict=True) if o.key_or_group in _run_keys()]
        key = choices, tuple(o.key_or_group for _, o in values)  # runs of one key set the same values
        if key not in self._composed:
            self._composed[key] = _structured(_compose(choices)), []
        cfg, done = self._composed[key]
        same = next((i for i, (t, _) in enumerate(values) if done[i : i + 1] != [t]), len(values))
        del done[same:]
        try:
            for text, override in values[same:]:
                OmegaConf.update(cfg, override.key_or_group, override.value(), merge=True)
                done.append(text)
            return _finished(OmegaConf.to_object(cfg))
        except OmegaConfBaseException as error:
            raise _explain(error, parsed) from None


@cache
def _run_keys() -> set[str]:
    return {k.name for k in keys()} - set(_groups())


def _structured(cfg: DictConfig) -> DictConfig:
    plain = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(plain, dict)
    names = {f.name for f in dataclasses.fields(RunConfig)}
    merged = OmegaConf.merge(OmegaConf.structured(RunConfig), {k: v for k, v in plain.items() if k in names})
    assert isinstance(merged, DictConfig)
    return merged


def _explain(error: Exception, parsed: Sequence[Override]) -> UserError:
    """Hydra's error -> ours: which override is at fault, and what its key accepts."""
    text = f"{error} {error.__cause__ or ''}"
    interpolated = next((o.input_line for o in parsed if "${" in (o.input_line or "")), None)
    if isinstance(error, InterpolationResolutionError):  # one that leads nowhere
        return UserError(f"{interpolated or 'a configuration file'}: {' '.join(str(error).split())}")
    found = re.search(r"full_key: (\S+)", text)
    name = found.group(1) if found else next((o.key_or_group for o in parsed if o.key_or_group in text), "")
    given = next((o.value() for o in reversed(parsed) if o.key_or_group == name), None)  # the last one counts
    leaf = _leaf_keys().get(name)
    if leaf is not None:
        return ConfigError(name, given, accepted(leaf))
    return UserError(" ".join(str(error).split()))


def _finished(typed: Any) -> RunConfig:
    assert isinstance(typed, RunConfig)
    check(typed)
    data, own = typed.data, DATA_SETS[typed.data.name]
    if data.name != "synthetic":  # one identity for a size that is given and one that is implied
        data.image_size = None if data.image_size == own.size else data.image_size
        data.classes = data.samples = None
    data.root = str(Path(data.root).expanduser().absolute()) if data.root is not None else None
    return typed


def _expand(overrides: Sequence[str]) -> Iterator[tuple[str, ...]]:
    axes = []
    for text in overrides:
        override = _parsed(text)
        if override.is_sweep_override():
            key = override.get_key_element()
            axes.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            axes.append([text])
    yield from itertools.product(*axes)
