"""Command-line overrides -> checked configurations, through Hydra's compose API.

Every fault of the user's input ends in a :class:`UserError` that names the key, before anything is
written: ``@hydra.main`` would make directories first and accept keys outside the schema.
"""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from qkexp.config import (
    DATA_SETS,
    ConfigError,
    ExperimentConfig,
    Key,
    RunConfig,
    UserError,
    accepted,
    check,
    keys,
    to_typed,
)

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
    runs: list[tuple[list[str], RunConfig]]

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
        first = _compose([o for o in overrides if not _parse([o])[0].is_sweep_override()], parsed)
        axes = _experiment_axes(first, parsed)
        if single:
            swept = [o.key_or_group for o in parsed if o.is_sweep_override()]
            if swept:
                raise UserError(
                    f"{swept[0]}: several values are a sweep; use `qkexp sweep`, or quote the value: "
                    f"'{swept[0]}=\"a,b\"'"
                )
            axes = []
        tasks = [list(t) for t in _expand(axes + list(overrides))]
        composed = [(task, _compose(task, _parse(task))) for task in tasks]
    runs = [(task, _typed(cfg, task)) for task, cfg in composed]
    default_name = "single" if single else "sweep"
    launcher: Any = OmegaConf.to_container(first.hydra.launcher)
    for name, value in launcher.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"hydra.launcher.{name}", value, "a whole number >= 1, or null")
    return Sweep(
        name=_sweep_name(first.sweep_name or first.experiment or default_name),
        experiment=first.experiment,
        output_dir=Path(first.output_dir).expanduser().absolute(),
        launcher_name=first.hydra.runtime.choices["hydra/launcher"],
        launcher=launcher,
        expect=OmegaConf.to_container(first.expect) if first.expect is not None else None,  # type: ignore[arg-type]
        figures=list(first.figures) if first.figures is not None else None,
        runs=runs,
    )


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
    parser = OverridesParser.create()
    parsed = []
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            raise UserError(
                f"{text!r} is not an override ({str(error).splitlines()[0]}); "
                "write KEY=VALUE; quote values that hold = , or brackets: 'KEY=\"a=b,c\"'"
            ) from None
        _check_key(override, text)
        parsed.append(override)
    return parsed


def _check_key(override: Override, text: str) -> None:
    name = override.key_or_group
    if override.is_add() or override.is_force_add() or override.is_delete():
        raise UserError(f"{text}: keys can be changed, not added or deleted{_near(name)}")
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


def _leaf_keys() -> dict[str, Key]:
    return {k.name: k for k in keys()}


def _groups() -> list[str]:
    root = config_dir()
    return sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_dir() and any(p.glob("*.yaml")))


def _compose(task: Sequence[str], parsed: Sequence[Override]) -> DictConfig:
    for override in parsed:
        group, choice = override.key_or_group, override.value()
        if group in _groups() and not override.is_sweep_override() and str(choice) not in options(group):
            raise ConfigError(group, choice, " | ".join(options(group)))
    try:
        return compose(ROOT_CONFIG, list(task), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, parsed) from None


def _explain(error: Exception, parsed: Sequence[Override]) -> UserError:
    """Hydra's error -> ours: which override is at fault, and what its key accepts."""
    text = f"{error} {error.__cause__ or ''}"
    found = re.search(r"full_key: (\S+)", text)
    name = found.group(1) if found else next((o.key_or_group for o in parsed if o.key_or_group in text), "")
    given = next((o.value() for o in reversed(parsed) if o.key_or_group == name), None)  # the last one counts
    leaf = _leaf_keys().get(name)
    if leaf is not None:
        return ConfigError(name, given, accepted(leaf))
    return UserError(" ".join(str(error).split()))


def _typed(cfg: DictConfig, task: Sequence[str]) -> RunConfig:
    plain = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(plain, dict)
    names = {k.name.split(".")[0] for k in keys()}
    try:
        typed = to_typed({k: v for k, v in plain.items() if k in names})
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        given = next((text for text in task if "${" in text), "a configuration file")
        raise UserError(f"{given}: {' '.join(str(error).split())}") from None
    check(typed)
    data, own = typed.data, DATA_SETS[typed.data.name]
    if data.name != "synthetic":  # one identity for a size that is given and one that is implied
        data.image_size = None if data.image_size == own.size else data.image_size
        data.classes = data.samples = None
    data.root = str(Path(data.root).expanduser().absolute()) if data.root is not None else None
    return typed


def _experiment_axes(cfg: DictConfig, parsed: Sequence[Override]) -> list[str]:
    params = OmegaConf.select(cfg, "hydra.sweeper.params") or {}
    given = {o.key_or_group for o in parsed}
    return [f"{k}={v}" for k, v in params.items() if k not in given]


def _expand(overrides: Sequence[str]) -> Iterator[tuple[str, ...]]:
    axes = []
    for text in overrides:
        override = OverridesParser.create().parse_override(text)
        if override.is_sweep_override():
            key = override.get_key_element()
            axes.append([f"{key}={value}" for value in override.sweep_string_iterator()])
        else:
            axes.append([text])
    # an experiment's own choice must be composed before the axes that override it
    yield from itertools.product(*axes)
