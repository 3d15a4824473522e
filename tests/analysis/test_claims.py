"""Claims and stability, on run directories with made-up numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from qkexp.analysis.claims import FAIL, NOT_RUN, NOT_SHOWN, PASS, check, verify_sweep
from qkexp.analysis.measures import grad_growth, onset
from qkexp.analysis.stability import TOO_FEW, stability
from qkexp.compose import compose_sweep, options
from qkexp.config import UserError
from qkexp.naming import run_name
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import NAMES
from qkexp.record.load import load_sweep
from qkexp.record.run import RunWriter

STEPS = 200


def make(
    root: Path,
    variant: str,
    lr: float,
    seed: int,
    *,
    val: float | None = 0.2,
    loss: np.ndarray | None = None,
    grad: np.ndarray | None = None,
    status: str = "completed",
    **metrics: np.ndarray,
) -> None:
    """A run of two layers; ``metrics`` are (steps, layers)."""
    cfg = compose_sweep([f"attention={variant}", f"optim.lr={lr}", f"seed={seed}"], single=True).runs[0][1]
    record = RunWriter(root / run_name(cfg), cfg, {})
    loss = np.full(STEPS, 0.5) if loss is None else loss
    grad = np.ones(STEPS) if grad is None else grad
    for step in range(STEPS):
        record.row({"step": step, "loss": float(loss[step]), "grad_norm": float(grad[step])})
        values = torch.ones(len(NAMES), 2, 1)
        for name, series in metrics.items():
            values[NAMES.index(name), :, 0] = torch.tensor(series[step])
        record.frame(Frame(step, "train", ("a", "b"), (Group((0, 1), values),)))
    final = {"loss": float(loss[-20:].mean()), "val_loss": val, "val_accuracy": 0.5}
    record.finish(
        {
            "status": status,
            "reason": "",
            "step": STEPS,
            "steps": STEPS,
            "constant_loss": 2.3,
            "final": final,
            "best": {},
        }
    )


def grow(at: int, to: float, start: float = 1.0) -> np.ndarray:
    return np.where(np.arange(STEPS) < at, start, to)


def two(first: np.ndarray, last: np.ndarray) -> np.ndarray:
    return np.stack([first, last], axis=1)


@pytest.fixture
def grid(tmp_path: Path) -> Path:
    for seed in (0, 1, 2):
        make(tmp_path, "none", 0.01, seed, val=0.2 + 0.1 * seed)
        make(tmp_path, "none", 0.1, seed, val=[1.5, None, 0.3][seed], status="diverged")
        make(tmp_path, "rmsnorm", 0.01, seed, val=0.25)
        make(tmp_path, "rmsnorm", 0.1, seed, val=0.5)
    return tmp_path


def test_stable_is_the_median_over_seeds_against_the_best_of_the_sweep(grid: Path) -> None:
    table = stability(load_sweep(grid)).set_index(["variant", "lr"])
    # best median 0.25, so the limit is 0.25 + 0.2 * (2.3 - 0.25) = 0.66
    assert table.stable.to_dict() == {
        ("none", 0.01): True, ("none", 0.1): False, ("rmsnorm", 0.01): True, ("rmsnorm", 0.1): True,
    }  # fmt: skip
    assert table.median_val_loss["none", 0.1] == 1.5, "a run that ended early counts as infinite"
    assert table.median_val_loss["none", 0.01] == pytest.approx(0.3)


def test_two_seeds_are_too_few_for_a_verdict_which_does_not_fail(tmp_path: Path) -> None:
    for seed in (0, 1):
        make(tmp_path, "none", 0.1, seed, val=5.0)
    sweep = load_sweep(tmp_path)
    assert stability(sweep).stable.tolist() == [None]
    result = check(sweep, {"claim": "c", "metric": "stable", "is": "== true"})
    assert result.verdict == TOO_FEW


def test_group_claims_compare_medians_at_the_same_rate(grid: Path) -> None:
    sweep = load_sweep(grid)
    twice = {"claim": "c", "where": {"variant": "none", "optim.lr": 0.1}, "metric": "final_val_loss", "seeds": "median",
             "than": "qk_norm", "is": ">= 2"}  # fmt: skip
    assert check(sweep, twice).value == pytest.approx(3.0)
    assert check(sweep, {**twice, "is": ">= 3.1"}).verdict == FAIL
    near = {
        "claim": "c",
        "where": {"optim.lr": 0.01},
        "metric": "final_val_loss",
        "seeds": "median",
        "minus": "best",
        "is": "<= 0.04",
    }
    result = check(sweep, near)
    assert (result.verdict, result.value) == (FAIL, pytest.approx(0.05))


def test_every_seed_must_hold_and_the_value_told_is_the_worst(tmp_path: Path) -> None:
    for seed, end in enumerate((0.3, 0.9, 0.4)):
        make(tmp_path, "l2", 0.1, seed, loss=np.full(STEPS, end))
    spec = {"claim": "c", "where": {"variant": "qk_norm"}, "metric": "final_loss", "is": "< 0.6"}
    result = check(load_sweep(tmp_path), spec)
    assert (result.verdict, result.value, result.count) == (FAIL, pytest.approx(0.9), 3)
    assert check(load_sweep(tmp_path), {**spec, "is": "< 1"}).verdict == PASS


def test_qk_norm_means_every_variant_with_a_norm_and_no_other(tmp_path: Path, variants: tuple[str, ...]) -> None:
    for name in variants:
        make(tmp_path, name, 0.1, 0)
    sweep = load_sweep(tmp_path)
    count = check(sweep, {"claim": "c", "where": {"variant": "qk_norm"}, "metric": "final_loss", "is": "< 1"}).count
    assert count == len(variants) - 2


def test_layers_are_reduced_over_all_unless_one_is_named(tmp_path: Path) -> None:
    make(tmp_path, "none", 0.1, 0, max_abs_logit=two(grow(50, 900.0), grow(90, 30.0)))
    sweep = load_sweep(tmp_path)
    spec = {"claim": "c", "metric": "max_abs_logit", "reduce": "max", "is": "> 0"}
    assert check(sweep, spec).value == 900.0
    assert check(sweep, {**spec, "layer": "last"}).value == 30.0
    assert check(sweep, {**spec, "layer": "first", "over": {"layer": "last"}}).value == pytest.approx(30.0)


def test_order_claim_counts_steps_between_onsets_after_the_given_step(tmp_path: Path) -> None:
    peak = two(grow(120, 0.95, 0.2), grow(199, 0.95, 0.2))
    peak[10, 0] = 0.99  # before step 100: does not count
    make(tmp_path, "none", 0.1, 0, attn_max_mean=peak, grad=grow(150, 200.0))
    spec: dict[str, Any] = {"claim": "c", "metric": "attn_max_mean", "layer": "first", "above": 0.9,
                            "before": {"metric": "grad_growth", "above": 5.0}, "after": 100, "is": "> 0"}  # fmt: skip
    assert check(load_sweep(tmp_path), spec).value == 30.0, "one step of 200 lifts a mean of 20 by ten"
    never = {**spec, "before": {"metric": "grad_growth", "above": 500.0}}
    assert check(load_sweep(tmp_path), never).verdict == FAIL, "an order needs both events"


def test_collapsed_share_counts_from_the_layers_first_time(tmp_path: Path) -> None:
    frac = two(np.full(STEPS, 0.5), np.full(STEPS, 0.5))
    frac[100:150, 1] = 0.01
    make(tmp_path, "none", 0.1, 0, entropy_frac=frac)
    assert check(
        load_sweep(tmp_path), {"claim": "c", "metric": "collapsed_share", "is": ">= 0.25"}
    ).value == pytest.approx(0.5)


def test_growth_of_the_gradient_starts_its_minimum_at_step_100() -> None:
    grad = np.ones(STEPS)
    grad[:50] = 0.001
    assert grad_growth(grad).max() == pytest.approx(1.0)
    grad[150:] = 7.0
    assert grad_growth(grad)[-1] == pytest.approx(7.0)
    assert onset(grad_growth(grad), 5.0, 100) == 150 + 13


def test_claim_without_a_run_is_not_run_and_one_with_an_unfinished_run_fails(tmp_path: Path) -> None:
    make(tmp_path, "none", 0.1, 0)
    spec = {"claim": "c", "where": {"variant": "l2"}, "metric": "final_loss", "is": "< 1"}
    assert check(load_sweep(tmp_path), spec).verdict == NOT_RUN
    make(tmp_path, "l2", 0.1, 0, status="failed")
    assert check(load_sweep(tmp_path), spec).verdict == FAIL


def test_declared_claim_does_not_fail_and_prints_what_was_measured(tmp_path: Path) -> None:
    make(tmp_path, "none", 0.1, 0)
    spec = {"claim": "c", "metric": "final_loss", "is": "> 9", "at_this_size": "not_shown"}
    result = check(load_sweep(tmp_path), spec)
    assert (result.verdict, result.value) == (NOT_SHOWN, pytest.approx(0.5))


def test_verify_writes_every_claim_to_json_also_with_infinite_values(tmp_path: Path) -> None:
    make(tmp_path, "none", 0.1, 0, val=None)
    claims = [{"claim": "c", "metric": "final_val_loss", "is": "< 1"}]
    (tmp_path / "expect.yaml").write_text(yaml.safe_dump({"claims": claims}))
    assert [r.verdict for r in verify_sweep(tmp_path)] == [FAIL]
    (stored,) = json.loads((tmp_path / "claims.json").read_text())["claims"]
    assert stored["value"] == "inf"


@pytest.mark.parametrize("broken", [{"is": "about 3"}, {"metrik": "loss"}, {"metric": "nosuch"}])
def test_claim_that_is_not_understood_is_an_error_and_not_a_pass(tmp_path: Path, broken: dict[str, str]) -> None:
    make(tmp_path, "none", 0.1, 0)
    with pytest.raises(UserError):
        check(load_sweep(tmp_path), {"claim": "c", "metric": "loss", "is": "< 1", **broken})


def test_a_bound_in_scientific_notation_is_a_number(tmp_path: Path) -> None:
    make(tmp_path, "none", 0.1, 0)  # a loss of 0.5
    sweep = load_sweep(tmp_path)
    verdicts = [check(sweep, {"claim": "c", "metric": "loss", "is": bound}).verdict for bound in ("< 1e-1", "< 1e1")]
    assert verdicts == [FAIL, PASS]


def test_claims_of_every_experiment_are_understood() -> None:
    for name in options("experiment"):
        composed = compose_sweep([f"experiment={name}", "seed=0"])
        if composed.rates is not None:
            continue  # a search has brackets, not claims
        expect = composed.expect
        assert expect is not None
        for spec in expect["claims"]:
            from qkexp.analysis.claims import KEYS, _condition

            assert set(spec) <= KEYS
            _condition(spec)


def of_figure(**keys: Any) -> dict[str, Any]:
    return {"claim": "a line", "figure": "lr_sensitivity", "metric": "val_loss", "is": "<= 0.35", **keys}


def test_a_claim_about_a_figure_is_judged_on_the_rows_that_it_plots(grid: Path) -> None:
    sweep = load_sweep(grid)
    where = {"kind": "median", "variant": "none", "lr": 0.01}
    assert (check(sweep, of_figure(where=where)).verdict, check(sweep, of_figure(where=where)).value) == (
        PASS,
        pytest.approx(0.3),
    )
    runs = check(sweep, of_figure(where={"kind": "run", "variant": "none", "lr": 0.01}))
    assert (runs.verdict, runs.value, runs.count) == (FAIL, pytest.approx(0.4), 3)
    assert (
        check(sweep, of_figure(where={"kind": "run", "variant": "none", "lr": 0.01}, reduce="median")).verdict == PASS
    )


def test_rows_of_a_figure_are_named_by_what_tells_them_apart(grid: Path) -> None:
    sweep = load_sweep(grid)
    found = check(sweep, of_figure(where={"kind": "run", "variant": "none", "lr": 0.01}, **{"is": "< 0"}))
    assert found.detail == "3 of 3 do not: seed=0, seed=1, seed=2"
    one = of_figure(where={"kind": "median", "variant": "none", "lr": 0.01})
    assert check(sweep, one | {"is": "< 0"}).detail == "1 of 1 do not"
    assert check(sweep, one | {"is": "> 0"}).detail == ""


def test_a_number_that_a_figure_does_not_have_bears_nothing_out(grid: Path) -> None:
    sweep = load_sweep(grid)  # a median has no seed
    assert check(sweep, of_figure(where={"kind": "median"}, metric="seed", **{"is": ">= 0"})).verdict == FAIL
    assert check(sweep, of_figure(where={"variant": "l2"})).verdict == FAIL


def test_what_a_figure_of_few_seeds_lacks_is_not_run_and_fails_nothing(tmp_path: Path) -> None:
    make(tmp_path, "none", 0.01, 0)
    assert check(load_sweep(tmp_path), of_figure(where={"variant": "none"})).verdict == NOT_RUN  # one rate: no figure
    make(tmp_path, "none", 0.1, 0)
    assert check(load_sweep(tmp_path), of_figure(where={"variant": "l2"})).verdict == NOT_RUN


@pytest.mark.parametrize(
    "wrong", [{"figure": "nosuch"}, {"metric": "nosuch"}, {"reduce": "p95"}, {"where": {"lrr": 1}}]
)
def test_a_claim_about_what_a_figure_has_not_is_refused(grid: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="accepted:"):
        check(load_sweep(grid), of_figure(**wrong))
