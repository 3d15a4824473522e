"""Verdicts: what went wrong in a run, if anything did, by one table of rules over its evidence.

The first rule that holds gives the verdict; :data:`RULES` is the whole of it, and docs/diagnosis.md shows it. A verdict
says what was seen and in which order. What it hung on ("caused") is said only where arms were compared
(:mod:`qkexp.analysis.arms`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qkexp.analysis.arms import Comparison, arms_of, branches_of, compare, other_arm
from qkexp.analysis.evidence import Evidence, gather
from qkexp.analysis.onsets import BY_LINK, LINKS, Onset, order
from qkexp.record.load import Run, Sweep
from qkexp.train.events import COLLAPSED_FRAC

ATTENTION = "attention"
HARMLESS = "harmless_collapse"
OUTPUT_LOGITS = "output_logits"
STEP_TOO_LARGE = "step_too_large"
DATA_FAULT = "data_fault"
HEALTHY = "healthy"
INCONCLUSIVE = "inconclusive"
VERDICTS = (ATTENTION, HARMLESS, OUTPUT_LOGITS, STEP_TOO_LARGE, DATA_FAULT, HEALTHY, INCONCLUSIVE)

HIGH = 0.25  # of chance: a final loss over it may be held up by something
DRIFTED = 5.0  # times chance, of |output logit|: what such a logit costs where it is wrong
GREW = 4.0  # growth of |output logit| since the first step
MOVED = 25.0  # growth of raw ‖q‖ or ‖k‖, which no norm holds back
LARGE = 0.05  # ‖Δθ‖ / ‖θ‖ of a step


@dataclass(frozen=True)
class Rule:
    """One line of the table: the verdict, when it is given in words, and the same as code."""

    verdict: str
    when: str
    holds: Callable[[Evidence], bool]


def _too_short(e: Evidence) -> bool:
    ended = e.harm is not None and e.harm.kind == "nonfinite"
    return e.steps < 2 * e.healthy and not ended


def _attention(e: Evidence) -> bool:
    """Attention broke by the time the harm had begun.

    A run that is behind one that differs in nothing but attention needs no order: it has nothing else to be behind for.
    """
    return e.harm is not None and _attention_by(e, e.steps if e.harm.kind == "behind" else e.harm.late)


def _unstable(e: Evidence) -> bool:
    """Harm of the run's own: one that only learned more slowly than another arm is not unstable."""
    return e.harm is not None and e.harm.kind != "behind"


def _attention_by(e: Evidence, step: int) -> bool:
    logit, entropy = e.onsets.get("logit"), e.onsets.get("entropy")
    if logit is None or entropy is None or logit.early is None or entropy.early is None:
        return False
    broke = e.collapse is not None or logit.reached == len(logit.grid)
    return broke and max(logit.early, entropy.early) <= step


def _fault(e: Evidence) -> bool:
    if e.jump is None or _attention_by(e, e.jump.step):
        return False
    return not (_unstable(e) and e.harm is not None and e.harm.late < e.jump.step)


RULES: tuple[Rule, ...] = (
    Rule(
        INCONCLUSIVE,
        "fewer steps were recorded than twice the healthy stretch, and the run did not end itself",
        _too_short,
    ),
    Rule(
        DATA_FAULT,
        "a jump: out of a calm, one batch's loss was worse than chance (or not finite), before attention broke and "
        "before any other harm",
        _fault,
    ),
    Rule(
        ATTENTION,
        "harm, and attention broke by the time it had begun (or at any time, where the harm is to be behind another "
        "arm): max |logit| had grown and entropy had fallen, and a layer collapsed or max |logit| grew 30-fold",
        _attention,
    ),
    Rule(
        OUTPUT_LOGITS,
        f"harm, attention intact; output logits grew {GREW:g}-fold since the first step, and over {DRIFTED:g} times "
        f"chance, while the body of the network stayed: raw ‖q‖ and ‖k‖ grew less than {MOVED:g}-fold",
        lambda e: _unstable(e) and e.output > DRIFTED * e.chance and e.drift >= GREW and e.body < MOVED,
    ),
    Rule(
        STEP_TOO_LARGE,
        f"harm, attention intact; a step changes over {LARGE:.0%} of the weights, or raw ‖q‖ or ‖k‖ grew so much",
        lambda e: _unstable(e) and (e.update > LARGE or e.body >= MOVED),
    ),
    Rule(INCONCLUSIVE, "harm, and none of the above", _unstable),
    Rule(
        INCONCLUSIVE,
        f"a layer stays collapsed, the loss ends over {HIGH:g} of chance, and there is no other arm to say whether it "
        "could be lower",
        lambda e: bool(e.collapse and e.collapse.lasting) and e.other is None and not e.final_loss < HIGH * e.chance,
    ),
    Rule(HARMLESS, "a layer stays collapsed, and nothing is harmed", lambda e: bool(e.collapse and e.collapse.lasting)),
    Rule(HEALTHY, "no harm; to be behind another arm while attention is intact is none", lambda e: True),
)


@dataclass(frozen=True)
class Diagnosis:
    """A verdict on one run, with its evidence in words and numbers."""

    verdict: str
    rule: str
    evidence: Evidence
    words: tuple[str, ...]
    notes: tuple[str, ...]
    order: tuple[tuple[str, str], ...]  # pairs of links, first and then, that hold over the whole grid
    compared: tuple[Comparison, ...]

    @property
    def name(self) -> str:
        return self.evidence.run.name


def diagnose(run: Run, sweep: Sweep | None = None) -> Diagnosis:
    """Diagnose one run; other runs of its sweep, and its branches, are compared with it."""
    runs = list(sweep.all.values()) if sweep is not None else []
    evidence = gather(run, other_arm(run, runs))
    rule = next(r for r in RULES if r.holds(evidence))
    branches = branches_of(run)
    if branches and not any(name == "unchanged" for name, _ in branches):
        branches = [("unchanged", run), *branches]
    compared = [c for arms in (branches, arms_of(run, runs)) if (c := compare(arms)) is not None]
    return Diagnosis(
        rule.verdict,
        rule.when,
        evidence,
        tuple(_words(evidence, rule.verdict)),
        tuple(_notes(evidence, rule.verdict)),
        tuple(order(list(evidence.onsets.values()))),
        tuple(compared if rule.verdict not in (HEALTHY, HARMLESS) else [c for c in compared if c.cause]),
    )


# ---------------------------------------------------------------- in words


def _words(e: Evidence, verdict: str) -> list[str]:
    """The evidence, one sentence each, in the order of the chain."""
    said = [_grown(e), _collapsed(e), _growth(e)]
    if e.jump is not None:
        j = e.jump
        at = "not finite" if math.isinf(j.loss) else f"{j.loss:.3g}"
        after = (
            ""
            if math.isinf(j.loss)
            else f"; half of it was gone by step {j.step + j.back}"
            if j.back
            else "; it stayed"
        )
        said.append(f"at step {j.step} the loss was {at} on one batch, after {j.before:.3g}{after}")
    if e.harm is not None:
        when = f"step {e.harm.early}" if e.harm.early == e.harm.late else f"steps {e.harm.early}–{e.harm.late}"
        said.append(f"{e.harm.text}; it began at {when}")
    if verdict in (OUTPUT_LOGITS, STEP_TOO_LARGE) or (e.harm and math.isfinite(e.update)):
        said.append(
            f"a step changed {e.update:.2g} of the weights, raw ‖q‖ or ‖k‖ grew {e.body:.3g}-fold, and the largest "
            f"output logit was {e.output:.3g}"
        )
    if e.harm is None and math.isfinite(e.final_loss):
        said.append(f"the loss ended at {e.final_loss:.3g} (lowest {e.lowest_loss:.3g}, chance {e.chance:.3g})")
    return [text for text in said if text]


def _grown(e: Evidence) -> str:
    grown = e.onsets.get("logit")
    if grown is None or not grown.reached:
        return f"max |logit| stayed near its healthy size (peak {e.peak_logit:.3g})" if e.probed else ""
    where = f"layer {grown.layer}, head {grown.head}"
    return f"max |logit| grew from {interval(grown)} on, in {where} (peak {e.peak_logit:.3g})"


def _collapsed(e: Evidence) -> str:
    if e.collapse is None:
        return (
            f"no layer collapsed (least entropy {e.least_entropy:.2g} of ln n)"
            if math.isfinite(e.least_entropy)
            else ""
        )
    c = e.collapse
    last = f"layers {', '.join(map(str, c.lasting))} stayed so" if c.lasting else "all came back"
    return f"layer {c.layer} collapsed at step {c.step} (entropy under {COLLAPSED_FRAC:g} of ln n); {last}"


def _growth(e: Evidence) -> str:
    shares = e.growth.get("shares")
    if not shares:
        return ""
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if abs(share) >= 0.005)
    g = e.growth
    return (f"the largest logit of layer {g['layer']}, head {g['head']} grew {math.exp(g['total']):.3g}-fold from step "
            f"{g['from_step']} to {g['to_step']}, of its logarithm: {parts}")  # fmt: skip


def _notes(e: Evidence, verdict: str) -> list[str]:
    """What limits the verdict."""
    said = []
    if not e.steps:
        return ["nothing was recorded"]
    if e.run.status not in ("completed", "diverged"):
        said.append(f"the run is {e.run.status}: this is what {e.steps} steps show")
    if not e.probed:
        said.append("attention was not probed: nothing can be said of it")
    elif e.subsampled:
        said.append("only a part of each batch was probed: its maxima are those of that part")
    if e.sharp:
        said.append(
            f"attention was sharp from the start ({e.start_entropy:.2g} of ln n): low entropy alone is no fault"
        )
    if e.dipped:
        said.append(f"entropy dipped and came back in layers {', '.join(map(str, e.dipped))}: no fault either")
    if verdict == HEALTHY and e.final_loss > HIGH * e.chance:
        said.append(
            "the loss is still high: hard data, noisy labels, a small model or a short run; a run does not show which"
        )
    if verdict == HARMLESS and e.other is None:
        said.append("without another arm: the loss might be lower still with one")
    return said


def interval(onset: Onset) -> str:
    """An onset in words: its interval of steps, or how far up the grid it came."""
    if onset.early is None:
        return "never"
    if onset.late is None:
        return f"step {onset.early} ({onset.reached} of {len(onset.grid)} thresholds)"
    return f"step {onset.early}" if onset.early == onset.late else f"steps {onset.early}–{onset.late}"


# ---------------------------------------------------------------- as data


def as_dict(d: Diagnosis) -> dict[str, Any]:
    """What diagnosis.json holds of a run; what was not measured is null."""
    e = d.evidence
    return _plain({
        "run": d.name, "verdict": d.verdict, "rule": d.rule, "status": e.run.status, "steps": e.steps,
        "evidence": d.words, "notes": d.notes,
        "healthy_steps": e.healthy, "probed_steps": e.probed, "chance_loss": e.chance,
        "final_loss": e.final_loss, "lowest_loss": e.lowest_loss,
        "least_entropy_frac": e.least_entropy, "peak_abs_logit": e.peak_logit,
        "update_ratio": e.update, "raw_qk_growth": e.body, "out_logit_absmax": e.output,
        "out_logit_growth": e.drift,
        "onsets": {name: _onset(o) for name, o in e.onsets.items()},
        "order": [{"first": a, "then": b} for a, b in d.order],
        "growth": e.growth,
        "collapse": vars(e.collapse) if e.collapse else None,
        "harm": vars(e.harm) if e.harm else None,
        "jump": vars(e.jump) if e.jump else None,
        "other_arm": e.other.name if e.other else None,
        "against_other_arm": {name: _onset(o) for name, o in e.parted.items()},
        "compared": [vars(c) for c in d.compared],
    })  # fmt: skip


def _onset(o: Onset) -> dict[str, Any]:
    return {
        "what": BY_LINK[o.link].words,
        "thresholds": o.grid,
        "crossed": [None if c is None else [c.early, c.late] for c in o.crossings],
        "early": o.early,
        "late": o.late,
        "layer": o.layer if o.layer >= 0 else None,
        "head": o.head if o.head >= 0 else None,
    }


def _plain(value: Any) -> Any:
    """Numbers as JSON knows them: NaN and infinity are null."""
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, (float, np.floating)):
        return float(value) if math.isfinite(value) else None
    return int(value) if isinstance(value, np.integer) else value


def rules_table() -> list[tuple[str, str]]:
    """(when, verdict) of each rule, for docs/diagnosis.md."""
    return [(rule.when, rule.verdict) for rule in RULES]


def links_table() -> list[tuple[str, str, str, str]]:
    """(link, column, score, thresholds) of each link, for docs/diagnosis.md."""
    formulas = {
        "growth": "now / healthy",
        "to_one": "(now − healthy) / (1 − healthy)",
        "fall": "healthy / now",
        "rise": "(now − lowest) / (chance − lowest)",
    }
    return [(x.words, f"`{x.column}`", formulas[x.kind], ", ".join(f"{t:g}" for t in x.grid)) for x in LINKS]
