"""Verdicts, on made-up runs whose cause is known, and the verb on a real one."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qkexp.analysis.arms import arms_of, branches_of, compare, other_arm
from qkexp.analysis.diagnose import (
    ATTENTION,
    DATA_FAULT,
    HARMLESS,
    HEALTHY,
    INCONCLUSIVE,
    OUTPUT_LOGITS,
    STEP_TOO_LARGE,
    Diagnosis,
    as_dict,
    diagnose,
)
from qkexp.cli import main
from qkexp.compose import compose_sweep
from qkexp.naming import run_name
from qkexp.probe.frame import Frame, Group
from qkexp.probe.metrics import NAMES
from qkexp.record.load import Run, load_run, load_sweep
from qkexp.record.run import RunWriter
from qkexp.train.outcome import judge

STEPS, CHANCE = 300, math.log(10)
AT = np.arange(STEPS)
FALLING = 0.2 + 2.1 * np.exp(-AT / 30)  # nats: a run that learns


def growing(start: int, length: int, top: float, base: float) -> np.ndarray:
    return base * (top / base) ** np.clip((AT - start) / length, 0.0, 1.0)


def make(
    root: Path,
    *overrides: str,
    loss: np.ndarray = FALLING,
    entropy: np.ndarray | None = None,
    logit: np.ndarray | None = None,
    output: np.ndarray | None = None,
    update: float = 0.01,
    steps: int = STEPS,
    every: int = 1,
    nonfinite: str | None = None,
    ended: bool = True,
    subsampled: bool = False,
    name: str | None = None,
) -> Run:
    """A run of two layers and two heads; ``entropy`` and ``logit`` are those of layer 1, head 0; the rest is calm.

    Its max |z| is q · k · cos · scale with q growing as it must, k = 2, cos = 0.5, scale 1. ``update`` is ‖Δθ‖ / ‖θ‖.
    """
    cfg = compose_sweep([f"train.steps={STEPS}", *overrides], single=True).runs[0][1]
    record = RunWriter(root / (name or run_name(cfg)), cfg, {})
    record.note(parameter_groups={"decayed": {"parameters": 60}, "not_decayed": {"parameters": 40}})
    entropy = np.full(STEPS, 0.8) if entropy is None else entropy
    logit = np.full(STEPS, 4.0) if logit is None else logit
    output = np.full(STEPS, 3.0) if output is None else output
    for step in range(steps):
        figures = dict.fromkeys(("grad_norm", "grad_norm_qk", "grad_norm_vo", "grad_norm_mlp", "grad_norm_rest"), 1.0)
        # ‖Δθ‖ = lr · rms · √100
        figures |= {"lr": 0.1, "update_rms": update, "param_norm": 1.0, "out_logit_absmax": float(output[step])}
        record.row({"step": step, "loss": float(loss[step]), **figures})
        if every and step % every == 0:
            values = torch.full((len(NAMES), 2, 2), 0.5)
            values[NAMES.index("entropy_frac")] = 0.8
            values[NAMES.index("entropy_mean")] = 0.8 * math.log(17)
            values[NAMES.index("max_abs_logit")] = 4.0
            values[NAMES.index("entropy_frac"), 1] = float(entropy[step])
            values[NAMES.index("entropy_mean"), 1] = float(entropy[step]) * math.log(17)
            values[NAMES.index("max_abs_logit"), 1, 0] = float(logit[step])
            values[NAMES.index("score_scale")] = 1.0
            values[NAMES.index("max_pair_q_norm"), 1, 0] = float(logit[step])
            values[NAMES.index("max_pair_k_norm"), 1, 0] = 2.0
            values[NAMES.index("max_pair_cos"), 1, 0] = 0.5
            record.frame(Frame(step, "train", ("a", "b"), (Group((0, 1), values),), subsampled=subsampled))
    if not ended:
        record.flush()
        return load_run(root / (name or run_name(cfg)))
    status, reason = judge(loss[:steps], CHANCE, nonfinite)
    val = None if nonfinite else float(loss[steps - 20 : steps].mean())
    final = {"loss": float(loss[max(0, steps - 20) : steps].mean()), "val_loss": val, "val_accuracy": 0.5}
    record.finish({"status": status, "reason": reason, "step": steps, "steps": STEPS, "constant_loss": CHANCE,
                   "final": final, "best": {}})  # fmt: skip
    return load_run(root / (name or run_name(cfg)))


BROKEN: dict[str, Any] = {
    "logit": growing(60, 60, 4e4, 4.0),
    "entropy": growing(80, 40, 0.001, 0.8),
    "loss": FALLING + np.clip((AT - 160) / 60, 0.0, 1.0) * 2.0,
}


def test_logits_then_collapse_then_harm_is_attention_and_names_layer_head_and_order(tmp_path: Path) -> None:
    found = diagnose(make(tmp_path, **BROKEN))
    assert found.verdict == ATTENTION
    e = found.evidence
    # 4-, 10- and 30-fold of 4 within 60 steps of a growth by 10^4
    steps = [60 + 60 * math.log(f) / math.log(1e4) for f in (4, 10, 30)]
    assert [c.late for c in e.onsets["logit"].crossings if c] == [math.ceil(s) for s in steps]
    assert (e.onsets["logit"].layer, e.onsets["logit"].head) == (1, 0)
    assert e.collapse is not None
    assert (e.collapse.layer, e.collapse.lasting) == (1, (1,))
    assert {("logit", "loss"), ("entropy", "loss")} <= set(found.order)
    assert ("loss", "entropy") not in found.order
    assert e.growth["shares"] == pytest.approx({"scale": 0.0, "q": 1.0, "k": 0.0, "cos": 0.0})
    assert abs(e.growth["rest"]) < 1e-5, "float32"
    assert found.compared == ()
    assert "caused" not in " ".join(found.words)


def test_a_collapse_that_follows_the_harm_is_not_its_origin(tmp_path: Path) -> None:
    late = {"logit": growing(230, 20, 4e4, 4.0), "entropy": growing(230, 20, 0.001, 0.8)}
    found = diagnose(make(tmp_path, **(BROKEN | late), update=0.3))
    assert found.evidence.collapse is not None
    assert found.verdict == STEP_TOO_LARGE


def test_collapse_while_the_run_trains_is_harmless(tmp_path: Path) -> None:
    calm = {**BROKEN, "loss": FALLING}
    assert diagnose(make(tmp_path, **calm)).verdict == HARMLESS


def test_collapse_beside_a_high_loss_that_never_rose_is_inconclusive_until_another_arm_tells(tmp_path: Path) -> None:
    stuck = {**BROKEN, "loss": 1.2 + 1.1 * np.exp(-AT / 30)}
    run = make(tmp_path, "attention=none", "optim.lr=3e-2", **stuck)
    assert diagnose(run).verdict == INCONCLUSIVE
    make(tmp_path, "attention=rmsnorm", "optim.lr=3e-2")
    found = diagnose(run, load_sweep(tmp_path))
    assert found.verdict == ATTENTION
    assert found.evidence.harm is not None
    assert found.evidence.harm.kind == "behind"
    assert found.compared[0].cause == "attention"
    assert "caused by what queries and keys learn" in found.compared[0].text


def test_low_entropy_alone_is_healthy_from_the_start_and_as_a_dip(tmp_path: Path) -> None:
    sharp = diagnose(make(tmp_path / "a", entropy=np.full(STEPS, 0.03)))
    assert sharp.verdict == HEALTHY
    assert any("sharp from the start" in note for note in sharp.notes)
    dip = 0.8 - 0.79 * np.exp(-(((AT - 120) / 30) ** 2))
    dipped = diagnose(make(tmp_path / "b", entropy=dip, logit=growing(60, 40, 80.0, 4.0)))
    assert dipped.evidence.least_entropy < 0.02
    assert dipped.verdict == HEALTHY
    assert dipped.evidence.dipped == (1,)


def test_output_logits_that_grow_before_the_harm_with_small_steps(tmp_path: Path) -> None:
    found = diagnose(make(tmp_path, loss=BROKEN["loss"], output=growing(100, 60, 900.0, 3.0)))
    assert found.verdict == OUTPUT_LOGITS


def test_output_logits_that_drift_within_the_healthy_stretch_are_seen_against_the_first_step(tmp_path: Path) -> None:
    at_once = growing(0, 5, 300.0, 0.5)
    found = diagnose(make(tmp_path, loss=np.full(STEPS, 3 * CHANCE), output=at_once, update=0.2))
    assert found.verdict == OUTPUT_LOGITS
    assert found.evidence.drift == pytest.approx(600)


def test_output_logits_that_were_large_from_the_first_step_on_have_not_drifted(tmp_path: Path) -> None:
    found = diagnose(make(tmp_path, loss=np.full(STEPS, 3 * CHANCE), output=np.full(STEPS, 300.0), update=0.2))
    assert found.verdict == STEP_TOO_LARGE


def test_a_jump_long_after_the_run_was_harmed_is_no_data_fault(tmp_path: Path) -> None:
    loss = np.where(AT < 40, 20.0, 0.5)  # a drift at the start, which heals
    loss[200] = 5.0
    assert diagnose(make(tmp_path / "a", loss=loss, output=growing(0, 5, 300.0, 0.5))).verdict == OUTPUT_LOGITS
    loss[:40] = FALLING[:40]
    assert diagnose(make(tmp_path / "b", loss=loss)).verdict == DATA_FAULT


def test_large_steps_without_collapse(tmp_path: Path) -> None:
    found = diagnose(make(tmp_path, loss=BROKEN["loss"], update=0.3))
    assert found.verdict == STEP_TOO_LARGE
    assert found.evidence.update == pytest.approx(0.3)


def test_harm_without_any_sign_is_inconclusive(tmp_path: Path) -> None:
    assert diagnose(make(tmp_path, loss=BROKEN["loss"])).verdict == INCONCLUSIVE


@pytest.mark.parametrize("bad", [5.0, 30.0])
def test_one_bad_batch_out_of_a_calm_is_a_data_fault(tmp_path: Path, bad: float) -> None:
    loss = FALLING.copy()
    loss[200] = bad
    found = diagnose(make(tmp_path, loss=loss))
    assert found.verdict == DATA_FAULT
    assert found.evidence.jump is not None
    assert (found.evidence.jump.step, found.evidence.jump.back) == (200, 1)


def test_a_run_that_ends_not_finite_out_of_a_calm_is_a_data_fault_and_out_of_a_broken_attention_is_not(
    tmp_path: Path,
) -> None:
    calm = diagnose(make(tmp_path / "a", steps=150, nonfinite="loss is nan at step 150"))
    assert calm.verdict == DATA_FAULT
    assert calm.evidence.jump is not None
    assert calm.evidence.jump.step == 150
    broken = diagnose(make(tmp_path / "b", **BROKEN, steps=200, nonfinite="grad_norm is inf at step 200"))
    assert broken.verdict == ATTENTION
    assert broken.evidence.onsets["grad_qk"].early == 200, "not finite is over every threshold"


def test_a_high_floor_is_healthy_and_says_what_it_may_be(tmp_path: Path) -> None:
    found = diagnose(make(tmp_path, loss=1.3 + 1.0 * np.exp(-AT / 30)))
    assert found.verdict == HEALTHY
    assert any("noisy labels" in note for note in found.notes)


def test_short_unprobed_unfinished_and_subsampled_runs_get_sensible_words(tmp_path: Path) -> None:
    short = diagnose(make(tmp_path / "a", steps=30, ended=False))
    assert short.verdict == INCONCLUSIVE
    assert any("unfinished" in note for note in short.notes)
    empty = diagnose(make(tmp_path / "b", steps=0, ended=False))
    assert (empty.verdict, empty.notes) == (INCONCLUSIVE, ("nothing was recorded",))
    unprobed = diagnose(make(tmp_path / "c", loss=BROKEN["loss"], every=0))
    assert unprobed.verdict == INCONCLUSIVE
    assert any("not probed" in note for note in unprobed.notes)
    alive = diagnose(make(tmp_path / "d", **BROKEN, ended=False))
    assert alive.verdict == ATTENTION, "of a run that is still alive what it has shown so far"
    part = diagnose(make(tmp_path / "e", subsampled=True))
    assert any("part of each batch" in note for note in part.notes)
    rare = diagnose(make(tmp_path / "f", **BROKEN, every=10))
    assert rare.verdict == ATTENTION
    logit = rare.evidence.onsets["logit"]
    assert logit.crossings[0] is not None
    assert logit.crossings[0].late - logit.crossings[0].early == 9


def test_what_is_written_has_no_nan_and_says_what_was_compared(tmp_path: Path) -> None:
    make(tmp_path / "s", "attention=none", **BROKEN, steps=200, nonfinite="loss is nan at step 200")
    make(tmp_path / "s", "attention=rmsnorm")
    for d in (diagnose(run, load_sweep(tmp_path / "s")) for run in load_sweep(tmp_path / "s").all.values()):
        text = json.dumps(as_dict(d), allow_nan=False)
        assert json.loads(text)["verdict"] == d.verdict


# ---------------------------------------------------------------- arms


def ending(root: Path, name: str, loss: float, *overrides: str) -> tuple[str, Run]:
    return name, make(root, *overrides, loss=np.full(STEPS, loss), name=f"{name}-at100", every=0)


@pytest.mark.parametrize(
    ("ends", "cause"),
    [
        ({"unchanged": 2.0, "norm": 0.1, "frozen_qk": 0.2, "slow": 0.1}, "attention"),
        ({"unchanged": 2.0, "norm": 1.9, "frozen_qk": 0.2}, "attention"),
        ({"unchanged": 2.0, "norm": 1.9, "frozen_qk": 2.1, "slow": 0.1}, "rate"),
        ({"unchanged": 0.2, "norm": 0.1, "frozen_qk": 0.1}, None),
        ({"unchanged": 2.5, "norm": 2.4, "frozen_qk": 2.6}, "elsewhere"),
        ({"unchanged": 2.0, "slow": 0.1}, "rate"),
    ],
)
def test_only_a_comparison_of_arms_says_what_caused_it(
    tmp_path: Path, ends: dict[str, float], cause: str | None
) -> None:
    found = compare([ending(tmp_path, name, loss) for name, loss in ends.items()])
    assert found is not None
    assert found.cause == cause
    assert ("caused by what" in found.text) == (cause == "attention")


def test_nothing_is_compared_without_the_unchanged_arm_or_another(tmp_path: Path) -> None:
    norm, unchanged = ending(tmp_path, "norm", 0.1), ending(tmp_path, "unchanged", 2.0)
    assert compare([norm]) is None
    assert compare([unchanged]) is None
    unfinished = make(tmp_path, steps=100, ended=False, name="x")
    assert compare([unchanged, ("norm", unfinished)]) is None


def test_arms_of_a_sweep_differ_in_one_thing_and_have_the_same_seed(tmp_path: Path) -> None:
    base = ("optim.lr=3e-2", "attention.init=match")
    run = make(tmp_path, "attention=none", *base)
    make(tmp_path, "attention=rmsnorm", *base)
    make(tmp_path, "attention=rmsnorm", *base, "seed=1")
    make(tmp_path, "attention=none", *base, "optim.qk_lr_scale=0")
    make(tmp_path, "attention=none", *base, "optim.qk_lr_scale=0.1")
    make(tmp_path, "attention=none", "attention.init=match", "optim.lr=3e-3")
    make(tmp_path, "attention=rmsnorm", "attention.init=match", "optim.lr=3e-3")
    runs = list(load_sweep(tmp_path).all.values())
    assert sorted(name for name, _ in arms_of(run, runs)) == ["frozen_qk", "norm", "slow", "slow_qk", "unchanged"]
    other = other_arm(run, runs)
    assert other is not None
    assert (other.seed, other.lr) == (0, 0.03)


def test_branches_are_read_by_the_names_of_their_arms(tmp_path: Path) -> None:
    run = make(tmp_path, **BROKEN)
    for name, loss in (("unchanged", 2.2), ("frozen_qk", 0.2), ("slow", 0.3)):
        make(run.directory / "branches", loss=np.full(STEPS, loss), name=f"{name}-at100-abc123")
    assert [name for name, _ in branches_of(run)] == ["frozen_qk", "slow", "unchanged"]
    found = diagnose(run)
    assert [c.cause for c in found.compared] == ["attention"]


# ---------------------------------------------------------------- the verb


def test_the_verb_tells_one_run_and_a_sweep_and_draws_the_timeline(tmp_path: Path, capsys: Any) -> None:
    common = [
        "model=vit_micro",
        "data=digits",
        "train.steps=60",
        "train.batch_size=16",
        "tracker=none",
        f"output_dir={tmp_path}",
    ]
    assert main(["train", *common]) == 0
    run = next((tmp_path / "single").glob("*/config.yaml")).parent
    capsys.readouterr()
    assert main(["diagnose", str(run)]) == 0
    text = capsys.readouterr().out
    assert "max |logit| grows" in text
    assert (run / "figures" / "timeline.csv").is_file()
    (run.parent / "plan.json").write_text('{"runs": []}')  # a run that its folder's plan no longer names
    assert main(["diagnose", str(run)]) == 0
    (run.parent / "plan.json").unlink()
    capsys.readouterr()
    assert main(["diagnose", str(run.parent), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads((run.parent / "diagnosis.json").read_text())
    assert told["runs"][0]["verdict"] in ("healthy", "inconclusive")
    assert main(["diagnose", str(tmp_path / "nowhere")]) == 2


def test_the_timeline_plots_each_link_with_its_onset(tmp_path: Path) -> None:
    from qkexp.analysis.figures import FIGURES

    make(tmp_path, "seed=1")
    run = make(tmp_path, **BROKEN)
    table = FIGURES["timeline"](load_sweep(tmp_path)).table
    onsets = table[(table.kind == "onset") & (table.link == "logit")]
    found: Diagnosis = diagnose(run)
    assert onsets.step.tolist() == [c.late for c in found.evidence.onsets["logit"].crossings if c], (
        "the broken run is shown"
    )
    assert set(onsets.layer) == {1}
    assert set(table[table.kind == "score"].link) >= {"logit", "entropy", "loss", "grad_qk"}
