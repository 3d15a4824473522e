"""The plan of a sweep: every run with its frozen configuration, and which of them are missing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from qkexp.compose import Sweep
from qkexp.config import RunConfig, UserError, as_dict, identity
from qkexp.naming import run_name
from qkexp.record.files import read_json, write_text
from qkexp.sweep.provenance import code
from qkexp.sweep.share import Shared, adopt, elsewhere
from qkexp.sweep.status import FINISHED, State, state_of

YAML_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the C loader is ten times as fast


@dataclass(frozen=True)
class Planned:
    """A run of a plan."""

    name: str
    identity: str
    overrides: list[str]
    config: RunConfig

    @property
    def steps(self) -> int:
        return self.config.train.steps


@dataclass(frozen=True)
class Plan:
    """Runs of one sweep directory; a run that the grid names twice stands here once."""

    directory: Path
    runs: list[Planned]
    sweep: Sweep

    @classmethod
    def of(cls, sweep: Sweep) -> Plan:
        runs: dict[str, Planned] = {}
        for overrides, config in sweep.runs:
            mark = identity(config)
            runs.setdefault(mark, Planned(run_name(config, mark), mark, overrides, config))
        return cls(sweep.directory, list(runs.values()), sweep)

    def only(self, runs: Iterable[Planned]) -> Plan:
        """The plan of some of its runs."""
        return replace(self, runs=list(runs))

    def states(self) -> list[State]:
        """How every run stands; one that finished in another sweep says so, and counts as finished."""
        found = [state_of(self.directory / run.name, run.steps) for run in self.runs]
        return [self._shared_state(state) if state.name in self.shared else state for state in found]

    @cached_property
    def shared(self) -> dict[str, Shared]:
        """Runs of the plan that are not here but have finished, with the same identity, in a sweep beside it."""
        wanted = {run.name: run for run in self.runs if not (self.directory / run.name).exists()}
        marks = {name: run.identity for name, run in wanted.items()}
        return elsewhere(self.directory, marks, lambda name, had: poorer(had, wanted[name].config) is None)

    def adopt(self, again: bool = False) -> list[Shared]:
        """Take over what has finished in sweeps beside this one; returns it."""
        taken = [] if again else list(self.shared.values())
        for run in taken:
            adopt(run, self.directory)
        return taken

    def _shared_state(self, state: State) -> State:
        there = state_of(self.shared[state.name].directory, state.steps)
        return replace(there, reason=f"in {self.shared[state.name].directory.parent.name}: {there.reason}")

    def missing(self, again: bool = False) -> list[Planned]:
        """Runs to train: those that have not finished, or all of them with ``again``.

        Raises:
            UserError: a finished run recorded less than is now asked.
        """
        if again:
            return self.runs
        todo = []
        for run, state in zip(self.runs, self.states(), strict=True):
            if state.status not in FINISHED:
                todo.append(run)
            else:
                self._refuse_poorer(run)
        return todo

    def foreign(self) -> list[str]:
        """Finished runs made by other code than this; they are kept, and named."""
        now = code()
        found = []
        for run in self.runs:
            made = (read_json(self._home(run) / "provenance.json") or {}).get("code")
            finished = (self._home(run) / "outcome.json").exists()
            if made and finished and (made.get("commit"), made.get("version")) != (now["commit"], now["version"]):
                found.append(run.name)
        return found

    def make_directory(self) -> None:
        """Make the sweep's directory, and keep runs out of version control wherever the user puts them."""
        self.directory.mkdir(parents=True, exist_ok=True)
        marker = self.sweep.output_dir / ".gitignore"
        if not marker.exists():
            marker.write_text("*\n!.gitignore\n")

    def write(self) -> Path:
        """Freeze the plan: editing a YAML file later changes nothing in it."""
        self.make_directory()
        path = self.directory / "plan.json"
        head = {
            "sweep": self.sweep.name,
            "experiment": self.sweep.experiment,
            "figures": self.sweep.figures,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "code": code(),
        }
        runs = [
            {"name": r.name, "identity": r.identity, "overrides": r.overrides, "config": as_dict(r.config)}
            for r in self.runs
        ]
        lines = ",\n".join(json.dumps(run, allow_nan=False) for run in runs)  # a line a run: short, and quick to write
        write_text(path, f'{json.dumps(head, indent=1)[:-2]},\n "runs": [\n{lines}\n]}}\n')
        if self.sweep.expect is not None:
            write_text(self.directory / "expect.yaml", yaml.safe_dump(self.sweep.expect, sort_keys=False))
        return path

    def _home(self, run: Planned) -> Path:
        shared = self.shared.get(run.name)
        return shared.directory if shared else self.directory / run.name

    def _refuse_poorer(self, run: Planned) -> None:
        if run.name in self.shared:
            return
        had = yaml.load((self.directory / run.name / "config.yaml").read_text(), Loader=YAML_LOADER)
        less = poorer(had, run.config)
        if less is not None:
            raise UserError(f"{run.name}: finished with {less}; add --again to train it again")


def poorer(had: dict[str, Any], asked: RunConfig) -> str | None:
    """In what a run of configuration ``had`` recorded less than is asked; None where it recorded enough."""
    wanted = as_dict(asked)
    for key, less in RECORDED.items():
        group, name = key.split(".")
        before = had.get(group, {}).get(name, BEFORE_THE_KEY.get(key))
        if less(before, wanted[group][name]):
            return f"{key}={before}, which recorded less than {key}={wanted[group][name]}"
    return None


def _rarer(had: Any, asked: Any) -> bool:
    """Whether an interval leaves out steps that are asked for; 0 is never."""
    every_had, every_asked = int(had or 0), int(asked or 0)
    return every_asked > 0 and (every_had == 0 or every_asked % every_had != 0)


def _fewer(had: Any, asked: Any) -> bool:
    """Whether a count is smaller; ``all`` is most."""
    if had == "all" or had == asked:
        return False
    return asked == "all" or int(asked) > int(had)


def _without(had: list[str], asked: list[str]) -> bool:
    """Whether a list lacks a member."""
    return not set(asked) <= set(had)


# Keys that say how much a run records, and how to see that it is less; and what runs did that are older than a key.
RECORDED: dict[str, Callable[[Any, Any], bool]] = {
    "probe.every": _rarer,
    "probe.images": _fewer,
    "probe.queries": _fewer,
    "probe.groups": _without,
    "train.eval_every": _rarer,
}
BEFORE_THE_KEY: dict[str, Any] = {"probe.queries": "all", "probe.groups": []}
