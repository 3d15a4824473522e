"""Figures of a sweep: each as PDF, PNG and a CSV of exactly what is plotted.

A builder takes a sweep and returns a :class:`~qkexp.analysis.figures.style.Drawing`, or raises
:class:`~qkexp.analysis.figures.selection.DoesNotFit`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from qkexp.analysis.figures.anatomy import anatomy
from qkexp.analysis.figures.branches import branches
from qkexp.analysis.figures.cause import cause
from qkexp.analysis.figures.entropy_double_lr import entropy_double_lr
from qkexp.analysis.figures.forced_logits import forced_logits
from qkexp.analysis.figures.heatmaps import heatmaps
from qkexp.analysis.figures.logit_scaling import logit_scaling
from qkexp.analysis.figures.lr_sensitivity import lr_sensitivity
from qkexp.analysis.figures.lr_sensitivity_sizes import lr_sensitivity_sizes
from qkexp.analysis.figures.max_lr import max_lr
from qkexp.analysis.figures.norms_or_cosine import norms_or_cosine
from qkexp.analysis.figures.precision import precision
from qkexp.analysis.figures.score_geometry import score_geometry
from qkexp.analysis.figures.selection import DoesNotFit
from qkexp.analysis.figures.sequence_length import sequence_length
from qkexp.analysis.figures.side_by_side import side_by_side
from qkexp.analysis.figures.spikes import spikes
from qkexp.analysis.figures.style import Drawing, save
from qkexp.analysis.figures.temperature_shock import temperature_shock
from qkexp.analysis.figures.three_places import three_places
from qkexp.analysis.figures.timeline import timeline
from qkexp.analysis.figures.vit22b_order import vit22b_order
from qkexp.analysis.figures.vit22b_panels import vit22b_panels
from qkexp.analysis.figures.vit22b_start import vit22b_start
from qkexp.config import UserError
from qkexp.record.load import Sweep, load_sweep

__all__ = ["FIGURES", "DoesNotFit", "draw"]

FIGURES: dict[str, Callable[[Sweep], Drawing]] = {
    "vit22b_panels": vit22b_panels,
    "lr_sensitivity": lr_sensitivity,
    "heatmaps": heatmaps,
    "score_geometry": score_geometry,
    "vit22b_order": vit22b_order,
    "entropy_double_lr": entropy_double_lr,
    "temperature_shock": temperature_shock,
    "forced_logits": forced_logits,
    "norms_or_cosine": norms_or_cosine,
    "sequence_length": sequence_length,
    "vit22b_start": vit22b_start,
    "side_by_side": side_by_side,
    "max_lr": max_lr,
    "lr_sensitivity_sizes": lr_sensitivity_sizes,
    "logit_scaling": logit_scaling,
    "precision": precision,
    "anatomy": anatomy,
    "three_places": three_places,
    "spikes": spikes,
    "cause": cause,
    "branches": branches,
    "timeline": timeline,
}
log = logging.getLogger("qkexp")


def draw(directory: Path, names: list[str] | None = None) -> list[Path]:
    """Draw figures of a sweep into ``<directory>/figures``.

    Args:
        directory: a sweep's.
        names: figures; None = those that the sweep's plan names, or all where it names none.

    Returns:
        The PNGs. A figure that does not fit the runs is skipped, with a message where it was asked for or none fits.

    Raises:
        UserError: no runs there, or a name in ``names`` that is no figure.
    """
    unknown = [n for n in names or [] if n not in FIGURES]
    if unknown:
        raise UserError(f"{unknown[0]}: no such figure; accepted: {', '.join(FIGURES)}")
    sweep = load_sweep(directory)
    wanted = names if names is not None else sweep.plan.get("figures")
    chosen, drawn, skipped = wanted or list(FIGURES), [], []
    for name in dict.fromkeys(chosen):
        try:
            if name not in FIGURES:
                raise DoesNotFit("no such figure in this version")
            drawing = FIGURES[name](sweep)
        except DoesNotFit as reason:
            skipped.append((name, reason))
            continue
        drawn.append(save(drawing, Path(directory) / "figures", name))
    if wanted or not drawn:  # of all figures that there are, most are made for other experiments
        for name, why in skipped:
            log.warning("figure %s skipped: %s", name, why)
    return drawn
