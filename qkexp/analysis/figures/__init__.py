"""Figures of a sweep: each as PDF, PNG and a CSV of exactly what is plotted.

A builder takes a sweep and returns a :class:`~qkexp.analysis.figures.style.Drawing`, or raises
:class:`~qkexp.analysis.figures.selection.DoesNotFit`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from qkexp.analysis.figures.heatmaps import heatmaps
from qkexp.analysis.figures.lr_sensitivity import lr_sensitivity
from qkexp.analysis.figures.selection import DoesNotFit
from qkexp.analysis.figures.style import Drawing, save
from qkexp.analysis.figures.timeline import timeline
from qkexp.analysis.figures.vit22b_panels import vit22b_panels
from qkexp.config import UserError
from qkexp.record.load import Sweep, load_sweep

__all__ = ["FIGURES", "DoesNotFit", "draw"]

FIGURES: dict[str, Callable[[Sweep], Drawing]] = {
    "vit22b_panels": vit22b_panels,
    "lr_sensitivity": lr_sensitivity,
    "heatmaps": heatmaps,
    "timeline": timeline,
}
log = logging.getLogger("qkexp")


def draw(directory: Path, names: list[str] | None = None) -> list[Path]:
    """Draw figures of a sweep into ``<directory>/figures``.

    Args:
        directory: a sweep's.
        names: figures; None = those that the sweep's plan names, or all where it names none.

    Returns:
        The PNGs. A figure that does not fit the runs is skipped with a message.

    Raises:
        UserError: no runs there, or a name in ``names`` that is no figure.
    """
    unknown = [n for n in names or [] if n not in FIGURES]
    if unknown:
        raise UserError(f"{unknown[0]}: no such figure; accepted: {', '.join(FIGURES)}")
    sweep = load_sweep(directory)
    chosen = names if names is not None else sweep.plan.get("figures") or list(FIGURES)
    drawn = []
    for name in dict.fromkeys(chosen):
        try:
            if name not in FIGURES:
                raise DoesNotFit("no such figure in this version")
            drawing = FIGURES[name](sweep)
        except DoesNotFit as reason:
            log.warning("figure %s skipped: %s", name, reason)
            continue
        drawn.append(save(drawing, Path(directory) / "figures", name))
    return drawn
