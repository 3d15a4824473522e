"""The plan of a sweep: every run with its frozen configuration, and which of them are missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qkexp.compose import Sweep
from qkexp.config import RunConfig, UserError, as_dict, identity, run_name
from qkexp.record.load import read_json
from qkexp.record.run import write_json, write_text
from qkexp.sweep.provenance import code
from qkexp.sweep.status import FINISHED, State, state_of


@dataclass(frozen=True)
class Planned:
    """A run of a plan."""

    name: str
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
            runs.setdefault(identity(config), Planned(run_name(config), overrides, config))
        return cls(sweep.directory, list(runs.values()), sweep)

    def states(self) -> list[State]:
        return [state_of(self.directory / run.name, run.steps) for run in self.runs]

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
            made = (read_json(self.directory / run.name / "provenance.json") or {}).get("code")
            finished = (self.directory / run.name / "outcome.json").exists()
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
        runs = [
            {"name": r.name, "identity": identity(r.config), "overrides": r.overrides, "config": as_dict(r.config)}
            for r in self.runs
        ]
        path = self.directory / "plan.json"
        plan = {
            "sweep": self.sweep.name,
            "experiment": self.sweep.experiment,
            "figures": self.sweep.figures,
            "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "code": code(),
            "runs": runs,
        }
        write_json(path, plan)
        if self.sweep.expect is not None:
            write_text(self.directory / "expect.yaml", yaml.safe_dump(self.sweep.expect, sort_keys=False))
        return path

    def _refuse_poorer(self, run: Planned) -> None:
        """A finished run must have recorded at least what is asked for now."""
        path = self.directory / run.name / "config.yaml"
        had = yaml.safe_load(path.read_text())
        asked = as_dict(run.config)
        for key, less in RECORDED.items():
            group, name = key.split(".")
            before = had.get(group, {}).get(name, BEFORE_THE_KEY.get(key))
            if less(before, asked[group][name]):
                raise UserError(
                    f"{run.name}: finished with {key}={before}, which recorded less than "
                    f"{key}={asked[group][name]}; add --again to train it again"
                )


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
