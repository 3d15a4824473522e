"""Plans: which runs a grid means, what is done already, here or in another sweep, and how long the rest takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from qkexp import cli, load_sweep
from qkexp.compose import compose_sweep
from qkexp.config import ConfigError, UserError, as_dict, identity
from qkexp.naming import variant
from qkexp.record.files import read_json, write_json
from qkexp.sweep.plan import Plan, Planned


def plan(tmp_path: Path, *overrides: str) -> Plan:
    return Plan.of(compose_sweep([f"output_dir={tmp_path}", *overrides]))


def named(made: Plan) -> list[tuple[str, float, int]]:
    return [(variant(r.config.attention), r.config.optim.lr, r.config.seed) for r in made.runs]


def finish(made: Plan, run: Planned, status: str = "completed", **outcome: Any) -> Path:
    """Write a run directory as if the run had ended."""
    directory = made.directory / run.name
    directory.mkdir(parents=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(as_dict(run.config)))
    write_json(directory / "outcome.json", {"status": status, "reason": "", "step": 400, "steps": 400, **outcome})
    for name in ("scalars.parquet", "attention.parquet", "events.jsonl", "log.txt"):
        (directory / name).write_text(f"{name} of {made.directory.name}\n")
    return directory


# ---------------------------------------------------------------- which runs


def test_an_axis_of_capped_variants_only_makes_no_meaningless_duplicates(tmp_path: Path) -> None:
    made = plan(
        tmp_path,
        'runs=[{attention: "none,rmsnorm"},{attention: softcap, attention.softcap: "10,50"}]',
        "optim.lr=1e-3,1e-2",
    )
    assert named(made) == [(name, lr, 0) for name in ("none", "rmsnorm", "softcap10", "softcap") for lr in (1e-3, 1e-2)]


def test_a_list_of_runs_is_a_sweep_of_just_these(tmp_path: Path) -> None:
    made = plan(tmp_path, "runs=[{attention: none, optim.lr: 1e-2},{attention: l2, optim.lr: 0.1, seed: 4}]")
    assert named(made) == [("none", 1e-2, 0), ("l2", 0.1, 4)]


def test_the_command_line_goes_over_a_key_of_an_entry(tmp_path: Path) -> None:
    assert named(plan(tmp_path, 'runs=[{attention: none, optim.lr: "1e-3,1e-2"}]', "optim.lr=5e-2", "seed=1")) == [
        ("none", 5e-2, 1)
    ]


def test_an_entry_goes_over_an_axis_of_the_experiment(tmp_path: Path) -> None:
    made = plan(tmp_path, "experiment=lr_grid", "runs=[{attention: l2, optim.lr: 0.5},{attention: none}]", "seed=1")
    assert named(made) == [("l2", 0.5, 1), *(("none", lr, 1) for lr in (3e-3, 1e-2, 3e-2, 1e-1))]


@pytest.mark.parametrize("value", ["[]", "3", "[1]", "{attention: none}"])
def test_runs_that_are_no_list_of_grids_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="runs"):
        compose_sweep([f"runs={value}"])


def test_a_wrong_key_or_value_in_an_entry_is_named() -> None:
    with pytest.raises(UserError, match=r"optim\.lrr"):
        compose_sweep(["runs=[{optim.lrr: 1}]"])
    with pytest.raises(ConfigError, match=r"optim\.lr: 'abc'"):
        compose_sweep(["runs=[{optim.lr: abc}]"])


def test_a_run_named_twice_in_other_words_is_planned_once(tmp_path: Path) -> None:
    made = plan(tmp_path, "attention=softcap,none", "attention.softcap=50", "optim.lr=1e-3,0.001")
    assert len(made.runs) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["attention=none,l2", "optim.lr=1e-3,1e-2", "seed=0,1"],
        ["experiment=vit22b", "train.steps=10,20"],
        ["model.seed=5", "seed=0,1", "optim.betas=[0.9,0.95]", "train.clip_norm=null,1.0"],
        ["train.steps=100", "optim.warmup=${train.steps}", "optim.schedule=linear,cosine"],
        ["data=synthetic,digits", "model.patch=8", "optim=sgd,adamw"],
    ],
    ids=lambda o: o[0],
)
def test_runs_composed_together_are_those_composed_one_by_one(overrides: list[str]) -> None:
    """The short cut (values set on what Hydra composed) gives what Hydra gives."""
    together = compose_sweep(overrides)
    assert len(together.runs) > 1
    for task, config in together.runs:
        fixed = [t for t in task if not t.startswith("experiment=")]
        base = [t for t in task if t.startswith("experiment=")]
        assert as_dict(compose_sweep([*base, *fixed], single=True).runs[0][1]) == as_dict(config)


def test_a_thousand_runs_are_composed_and_looked_up_in_seconds(tmp_path: Path) -> None:
    start = time.process_time()
    made = plan(tmp_path, "attention=none,l2,rmsnorm,softcap,layernorm", "optim.lr=1e-3,1e-2", "seed=range(0,100)")
    made.write()
    assert len(made.missing()) == len({r.identity for r in made.runs}) == 1000
    assert time.process_time() - start < 6.0
    assert len((read_json(made.directory / "plan.json") or {})["runs"]) == 1000


# ---------------------------------------------------------------- runs of other sweeps


def test_a_run_that_finished_in_another_sweep_is_shared_whole_and_trained_once(tmp_path: Path) -> None:
    one, two = (plan(tmp_path, f"sweep_name={name}", "seed=0,1") for name in ("one", "two"))
    source = finish(one, one.runs[0])
    (source / "mirror.json").write_text("{}")
    assert [r.config.seed for r in two.missing()] == [1]
    assert "in one" in two.states()[0].reason
    assert not two.directory.exists(), "asking changes nothing"
    two.make_directory()
    assert [run.directory for run in two.adopt()] == [source]
    target = two.directory / source.name
    assert {p.name for p in target.iterdir()} == {p.name for p in source.iterdir()} - {"mirror.json"}
    assert load_sweep(two.directory)[source.name].status == "completed"
    assert [r.config.seed for r in plan(tmp_path, "sweep_name=two", "seed=0,1").missing()] == [1]
    with (target / "log.txt").open("a") as log:
        log.write("of this sweep alone")
    assert "alone" not in (source / "log.txt").read_text()
    for path in source.iterdir():
        path.unlink()
    assert (target / "scalars.parquet").read_text().startswith("scalars"), "either sweep may be deleted"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: write_json(d / "outcome.json", {"status": "failed"}),
        lambda d: (d / "outcome.json").write_text("{"),
        lambda d: (d / "scalars.parquet").unlink(),
        lambda d: (d / "config.yaml").write_text((d / "config.yaml").read_text().replace("steps: 400", "steps: 401")),
        lambda d: (d / "config.yaml").write_text((d / "config.yaml").read_text().replace("every: 1", "every: 10")),
    ],
    ids=["failed", "torn outcome", "no table", "another identity", "recorded less"],
)
def test_what_is_not_the_same_finished_run_is_not_shared(tmp_path: Path, spoil: Callable[[Path], Any]) -> None:
    one, two = (plan(tmp_path, f"sweep_name={name}") for name in ("one", "two"))
    spoil(finish(one, one.runs[0]))
    assert len(two.missing()) == 1


def test_a_run_that_was_begun_here_is_not_replaced_by_another_sweeps(tmp_path: Path) -> None:
    one, two = (plan(tmp_path, f"sweep_name={name}") for name in ("one", "two"))
    finish(one, one.runs[0])
    finish(two, two.runs[0], status="interrupted")
    assert len(two.missing()) == 1
    assert two.adopt() == []


def test_again_shares_nothing(tmp_path: Path) -> None:
    one, two = (plan(tmp_path, f"sweep_name={name}") for name in ("one", "two"))
    finish(one, one.runs[0])
    assert len(two.missing(again=True)) == 1
    assert two.adopt(again=True) == []


# ---------------------------------------------------------------- --plan


def test_plan_estimates_from_runs_that_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(tmp_path, "seed=0,1,2,3,4")
    finish(made, made.runs[0], wall_seconds=400.0)
    args = ["sweep", "--plan", f"output_dir={tmp_path}", "seed=0,1,2,3,4", "hydra.launcher.workers=2"]
    assert cli.main(args) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "5 runs: 1 completed, 4 missing; 4 to train" in printed
    assert "about 13 min with 2 at once, at the pace of the finished runs" in printed


def test_plan_without_a_finished_run_tries_a_few_steps_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sweep", "--plan", f"output_dir={tmp_path}", "seed=0,1", "optim.lr=1e-3,0.001"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "2 runs (4 named by the grid)" in printed
    assert "at the pace of a few steps" in printed
    assert list(tmp_path.iterdir()) == []


def test_plan_json_holds_what_it_held(tmp_path: Path) -> None:
    made = plan(tmp_path, "seed=0,1")
    frozen = json.loads(made.write().read_text())
    assert {"sweep", "experiment", "figures", "written", "code", "runs"} == set(frozen)
    assert [r["identity"] for r in frozen["runs"]] == [identity(r.config) for r in made.runs]
    assert frozen["runs"][1]["config"] == as_dict(made.runs[1].config)
